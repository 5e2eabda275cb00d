"""Events per second that the daemon sustains: rates rise until one is not sustained.

Simulated GPU: UVM events on the trackers of real clients, through the daemon's loop and core. They are of the
one kind that changes nothing (a failed prefetch), so that a rate can be held. NVIDIA: faults of an own client
on managed memory, which harm no client. The daemon does not request such events, so a tracker here reads
them: this measures driver, queue and decoding, not the daemon's decisions.

Meanwhile a subscriber reads the daemon's event stream. Its delay is measured with events that a request
causes now and then: from the request to the arrival of the event.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import mpsd_client
from faultinject.registry.history import clock
from faultinject.rig.rig import Rig
from mpsd.base.errors import DeadlineError, MpsdError
from mpsd.base.model import ProcessInstance
from mpsd.gpu.base import Tracker

LAG_LIMIT_S = 0.1
"""Events that are read, or reach the subscriber, later than this have piled up."""

PROBE_EVERY_S = 0.05
TICK_S = 0.01
QUIET_S = 0.1
CATCH_UP_S = 20.0
EVENTS_PER_PAGE = 50
MIN_DELIVERED_SHARE = 0.9
"""A source that delivers less than this share of the requested rate is itself the limit."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Rates from `first` on, each `factor` times the one before, held for `hold_s` seconds each."""

    first: float = 500.0
    factor: float = 1.6
    steps: int = 14
    hold_s: float = 2.0
    clients: int = 4


@dataclass(frozen=True, slots=True)
class Step:
    """One rate per second, held.

    `lag_ms`: the worst delay. `late_ms`: from the last offer to the last event read.

    made: events of the source. taken: events that led to a decision (nvidia: read). dropped: counted by a
    full queue. missing: neither (None: not known). unheard: events that the subscriber was told it had
    missed.
    """

    asked: float
    made: float
    taken: float
    dropped: int
    missing: int | None
    unheard: int
    lag_ms: float | None
    late_ms: float

    @property
    def sustained(self) -> bool:
        whole = not (self.dropped or self.missing or self.unheard)
        return whole and self.lag_ms is not None and max(self.lag_ms, self.late_ms) <= LAG_LIMIT_S * 1e3


class Source(Protocol):
    """A source of events. `made` stays None where it is not known before they are read."""

    unit: str

    def offer(self, count: int) -> None:
        """Cause this many events. Raises MpsdError."""
        ...

    def totals(self) -> tuple[int | None, int, int]:
        """Return (made, taken, dropped) so far."""
        ...


class InjectedEvents:
    """UVM events of the simulated GPU on the trackers of these processes, in turn."""

    unit = "events"

    def __init__(self, rig: Rig, pids: Sequence[int]) -> None:
        from mpsd.gpu.simulated.adapters import SimulatedDevices

        devices = rig.node.backend.devices
        assert isinstance(devices, SimulatedDevices)
        self._devices, self._rig, self._pids = devices, rig, list(pids)
        self._made = 0

    def offer(self, count: int) -> None:
        share, more = divmod(count, len(self._pids))
        for place, pid in enumerate(self._pids):
            if own_share := share + (place < more):
                self._devices.inject("events", pid=pid, count=own_share)
        self._pids.append(self._pids.pop(0))
        self._made += count

    def totals(self) -> tuple[int | None, int, int]:
        counters = self._rig.mpsd.status()["counters"]
        return (
            self._made,
            counters.get("uvm_events_without_client", 0),
            counters.get("events_dropped", 0),
        )


class ManagedFaults:
    """A client's faults on managed memory, page by page; the driver says how many events that makes."""

    unit = "pages"

    def __init__(self, rig: Rig, seed: int) -> None:
        from mpsd.gpu.nvidia import uvm_abi
        from mpsd.gpu.nvidia.uvm import UvmAddressSpace

        self._worker = rig.spawn("managed", "managed", "--seed", str(seed))
        ready = self._worker.require("ready", timeout=60.0).data
        process = ProcessInstance(ready["pid"], ready["start_ticks"])
        pidfd = os.pidfd_open(process.pid)
        try:
            spaces = rig.node.backend.uvm.open(process, pidfd)
        finally:
            os.close(pidfd)
        self._spaces = spaces
        self._trackers: list[Tracker] = []
        for space in spaces:
            assert isinstance(space, UvmAddressSpace)
            self._trackers.append(space.track(1 << uvm_abi.EVENT_GPU_FAULT))
        self._read = self._dropped = 0

    def offer(self, count: int) -> None:
        self._worker.tell(f"pages:{count}")
        self.totals()

    def totals(self) -> tuple[int | None, int, int]:
        dropped = 0
        for tracker in self._trackers:
            batch = tracker.drain()
            self._read += len(batch.events)
            dropped += batch.dropped
        return None, self._read, dropped

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
        for space in self._spaces:
            space.close()


class Subscriber:
    """A subscriber of the daemon's events, which causes one now and then and measures its delay.

    A context manager.
    """

    def __init__(self, connect: Callable[[], mpsd_client.Client]) -> None:
        self._connect = connect
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._probing = threading.Event()
        self.lags: list[float] = []
        self.unheard = 0
        self.problem = ""

    def __enter__(self) -> Subscriber:
        self._thread.start()
        if not self._probing.wait(CATCH_UP_S):
            raise DeadlineError("no event came", remedy=self.problem or "see the daemon's log")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(CATCH_UP_S)

    def wait_for_new_event(self) -> None:
        """Wait for one more event that was caused after this call. Raises DeadlineError."""
        seen, end = len(self.lags), clock() + CATCH_UP_S
        while len(self.lags) < seen + 2 and not self.problem:
            if clock() > end:
                raise DeadlineError(f"no event came to the subscriber within {CATCH_UP_S:g} s")
            self._stop.wait(TICK_S)
        if self.problem:
            raise DeadlineError(f"the subscriber ended: {self.problem}")

    def _run(self) -> None:
        try:
            with self._connect() as client:
                events = client.subscribe()
                while not self._stop.wait(PROBE_EVERY_S):
                    asked = clock()
                    client.undrain(reason="bench")
                    while (event := events.next(asked + CATCH_UP_S))["kind"] != "undrain":
                        self._count_missed(event)
                    self.lags.append(clock() - asked)
                    self._probing.set()
        except MpsdError as error:
            self.problem = str(error)

    def _count_missed(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "lost":
            self.unheard += int(event["count"])


def hold_rate(source: Source, subscriber: Subscriber, rate: float, hold_s: float) -> Step:
    """Offer this many per second for that long, then wait until they have been read. Raises MpsdError."""
    made0, taken0, dropped0 = source.totals()
    subscriber.wait_for_new_event()
    lags0, unheard0 = len(subscriber.lags), subscriber.unheard
    began, offered = clock(), 0
    while (elapsed := clock() - began) < hold_s:
        if (due := int(rate * elapsed) - offered) > 0:
            source.offer(due)
            offered += due
        threading.Event().wait(TICK_S)
    spent = clock() - began
    (made, taken, dropped), ended = _wait_for_totals(source)
    late = max(0.0, ended - began - spent)
    subscriber.wait_for_new_event()
    missing = None
    if made is not None and made0 is not None:
        missing = max(0, (made - made0) - (taken - taken0) - (dropped - dropped0))
    lags = subscriber.lags[lags0:]
    return Step(
        round(rate, 1),
        round((offered if made is None or made0 is None else made - made0) / spent, 1),
        round((taken - taken0) / (spent + late), 1),
        dropped - dropped0,
        missing,
        subscriber.unheard - unheard0,
        round(max(lags) * 1e3, 3) if lags else None,
        round(late * 1e3, 3),
    )


def _wait_for_totals(source: Source) -> tuple[tuple[int | None, int, int], float]:
    """Return the totals once they no longer change, and when they last changed. Raises DeadlineError."""
    before, changed = source.totals(), clock()
    end = changed + CATCH_UP_S
    while clock() - changed < QUIET_S:
        threading.Event().wait(TICK_S)
        if (now := source.totals()) != before:
            before, changed = now, clock()
        if clock() > end:
            raise DeadlineError(f"the events were not taken within {CATCH_UP_S:g} s")
    return before, changed


def raise_rate(source: Source, subscriber: Subscriber, plan: Plan, tell: Tell) -> list[Step]:
    """Return steps up to the first one that is not sustained, or that the source cannot deliver."""
    steps: list[Step] = []
    rate = plan.first
    for _ in range(plan.steps):
        step = hold_rate(source, subscriber, rate, plan.hold_s)
        steps.append(step)
        tell(f"{rate:.0f} {source.unit} a second: {_describe_step(step)}")
        if not step.sustained or step.made < MIN_DELIVERED_SHARE * rate:
            break
        rate *= plan.factor
    return steps


def _describe_step(step: Step) -> str:
    lost = f"{step.dropped} dropped, {step.missing or 0} missing, {step.unheard} unheard"
    return f"{step.taken:.0f} taken a second, {lost}, subscriber {step.lag_ms} ms behind at worst"


def sustained(steps: Sequence[Step]) -> float | None:
    """Return the highest rate at which nothing was lost and the subscriber kept up; None: at none."""
    return max((s.taken for s in steps if s.sustained), default=None)


def measure(rig: Rig, seed: int, plan: Plan, tell: Tell) -> dict[str, Any]:
    """Return {"what", "steps", "sustained", "limited_by", "reason"}.

    `sustained` is None if `reason` says why.
    """
    found: dict[str, Any] = {"what": _WHAT[rig.node.name], "steps": [], "sustained": None, "reason": ""}
    closing: Callable[[], None] = lambda: None  # noqa: E731
    try:
        source: Source
        if rig.node.name == "simulated":
            source = InjectedEvents(rig, _clients(rig, plan.clients))
        else:
            source = managed = ManagedFaults(rig, seed)
            closing = managed.close
            # A page makes some fifty events.
            plan = replace(plan, first=plan.first / EVENTS_PER_PAGE)
        with Subscriber(rig.mpsd.client) as subscriber:
            steps = raise_rate(source, subscriber, plan, tell)
        found["steps"] = [asdict(s) | {"sustained": s.sustained} for s in steps]
        found["sustained"] = sustained(steps)
        found["limited_by"] = _limiting_part(steps, plan)
    except MpsdError as error:
        # The other figures are useful without this one.
        found["reason"] = str(error)
    finally:
        closing()
    return found


_WHAT = {
    "simulated": "UVM events on the trackers of clients, decided about by the daemon",
    "nvidia": "serviced GPU faults on managed memory, read from a tracker (not by the daemon)",
}


def _limiting_part(steps: Sequence[Step], plan: Plan) -> str:
    last = steps[-1]
    if not last.sustained:
        lost = last.dropped or last.missing or last.unheard
        if not lost:
            return "events piled up" if last.late_ms > (last.lag_ms or 0) else "the subscriber fell behind"
        return "events were lost"
    return "the source" if last.made < MIN_DELIVERED_SHARE * last.asked else "the highest rate that was tried"


def _clients(rig: Rig, count: int) -> list[int]:
    """Return the pids of this many idle clients, each attached. Raises DeadlineError."""
    idlers = rig.spawn("stream", "idlers", "--clients", str(count))
    pids = {m["pid"] for m in idlers.require("ready", timeout=60.0).data["members"]}

    def attached(status: Mapping[str, Any]) -> bool:
        return pids <= {c["pid"] for c in status["clients"] if c["state"] == "attached"}

    if rig.mpsd.until(attached, 30.0) is None:
        raise DeadlineError("clients were not attached within 30 s", remedy=rig.mpsd.tail())
    return sorted(pids)


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the steps as rows of text, with a head."""
    rows = [
        ["asked a second", "made", "taken", "dropped", "missing", "unheard", "lag ms", "late ms", "sustained"]
    ]
    for step in found["steps"]:
        missing, lag = step["missing"], step["lag_ms"]
        rows.append(
            [
                f"{step['asked']:.0f}",
                f"{step['made']:.0f}",
                f"{step['taken']:.0f}",
                str(step["dropped"]),
                "-" if missing is None else str(missing),
                str(step["unheard"]),
                "-" if lag is None else f"{lag:.1f}",
                f"{step['late_ms']:.1f}",
                "yes" if step["sustained"] else "no",
            ]
        )
    return rows
