"""A history as numbers: the outcome for each client, and how long it took. Nothing is judged here.

Durations are in milliseconds, times in seconds of the shared clock; None where the history does not say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from faultinject.registry.history import Entry, History

REFUSED_IN_FAULT = 807


@dataclass(frozen=True, slots=True)
class SurvivorSeen:
    name: str
    pid: int | None
    ready: bool
    done: bool
    error: int | None
    error_at: float | None
    wrong: int
    steps: int
    longest: tuple[tuple[float, float], ...] = ()

    @property
    def lost(self) -> bool:
        """Return whether it ran and did not end orderly."""
        return self.ready and not self.done


@dataclass(frozen=True, slots=True)
class NewcomerSeen:
    name: str
    spawned: float
    first_kernel: float | None
    refused: tuple[int, ...]
    on_mps: bool | None


@dataclass(frozen=True, slots=True)
class RecordSeen:
    """A fault record in its last revision, and when its first one was seen."""

    seen: float
    data: Mapping[str, Any]

    @property
    def offender(self) -> tuple[int, int | None] | None:
        """Return pid and start time. A process that only the kernel log names has no start time."""
        offender = self.data.get("offender")
        return (offender["pid"], offender["start_ticks"]) if offender else None


@dataclass(frozen=True, slots=True)
class Observation:
    """One run. `offenders` are (pid, start_ticks); `named` pids come from mpsd, or the kernel log."""

    mode: str
    survivors: tuple[SurvivorSeen, ...] = ()
    offenders: tuple[tuple[int, int], ...] = ()
    offender_saw: tuple[int, ...] = ()
    ready_expected: int = 0
    fired_at: float | None = None
    records: tuple[RecordSeen, ...] = ()
    xid_pids: tuple[int, ...] = ()
    evict_asked: float | None = None
    evicted_at: float | None = None
    off_gpu_at: float | None = None
    answers: tuple[Mapping[str, Any], ...] = ()
    newcomers: tuple[NewcomerSeen, ...] = ()
    fresh_ms: float | None = None
    memory_back_ms: float | None = None
    attach_ms: tuple[float, ...] = ()
    guard_on: bool | None = None
    zones: Mapping[str, Any] | None = None
    aim: Mapping[str, Any] | None = None
    continued: Mapping[str, Any] | None = None
    frozen: Mapping[str, Any] | None = None
    free_when_full: int | None = None
    filler: Mapping[str, Any] | None = None
    poisoned: bool = False
    moved: bool = False
    readopted: bool | None = None
    innocent_alive: bool | None = None
    crowd: Mapping[str, Any] | None = None
    counters: Mapping[str, int] | None = None
    leftovers: tuple[str, ...] | None = None
    failure: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        return sum(s.lost for s in self.survivors)

    @property
    def record(self) -> RecordSeen | None:
        return self.records[0] if self.records else None

    @property
    def hits(self) -> Sequence[Mapping[str, Any]]:
        """Return the details of the records that are guard hits."""
        found: Sequence[Mapping[str, Any] | None] = [r.data.get("hit") for r in self.records]
        return [hit for hit in found if hit]

    @property
    def hit(self) -> Mapping[str, Any] | None:
        return self.hits[0] if self.hits else None

    @property
    def wrongly_named(self) -> list[tuple[int, int | None]]:
        """Return the processes that records name as offenders and that are none."""
        pids = {pid for pid, _ in self.offenders}
        named = [r.offender for r in self.records if r.offender is not None]
        return [n for n in named if n not in self.offenders and not (n[1] is None and n[0] in pids)]

    @property
    def named(self) -> str | None:
        """Return right, wrong or unknown; None without any sign that could name a client."""
        if self.mode == "stock":
            return _named_by_log(self.xid_pids, {p for p, _ in self.offenders}, self._innocents())
        named = [r.offender for r in self.records if r.offender is not None]
        if self.wrongly_named:
            return "wrong"
        return "right" if named else ("unknown" if self.records else None)

    def _innocents(self) -> set[int]:
        return {s.pid for s in self.survivors if s.pid is not None}

    @property
    def confidence(self) -> str | None:
        named = [r for r in self.records if r.offender is not None] or list(self.records)
        return str(named[0].data["confidence"]) if named else None

    @property
    def fault_class(self) -> str | None:
        return str(self.record.data["class"]) if self.record else None

    @property
    def record_ms(self) -> float | None:
        """From the driver's event to the record, by mpsd's timestamps."""
        value = self.record.data.get("record_ms") if self.record else None
        return None if value is None else float(value)

    @property
    def fire_to_record_ms(self) -> float | None:
        """From the fault to the arrival of its record at the harness."""
        if self.record is None or self.fired_at is None:
            return None
        return _ms(self.record.seen - self.fired_at)

    @property
    def evict_ms(self) -> float | None:
        """From the request until SIGKILL was sent, as mpsd answered.

        The server had released the client by then, where mpsd could ask it. gone_ms also holds the time that
        the kernel takes to end the process.
        """
        times = [a["result"].get("evict_ms") for a in self.answers if a.get("ok") and a.get("op") == "kill"]
        if self.hit and self.hit.get("outcome") == "evicted":
            # No request: mpsd counts from the hit.
            times.append(self.hit.get("outcome_ms"))
        return next((float(ms) for ms in times if ms is not None), None)

    @property
    def _evict_since(self) -> float | None:
        """Return when the eviction was requested, or when the offender hit a guard zone."""
        return self.fired_at if self.evict_asked is None and self.hit else self.evict_asked

    @property
    def gone_ms(self) -> float | None:
        """From the request, or the hit, to the end of the offender's process, as the harness saw it."""
        since = self._evict_since
        if since is None or self.evicted_at is None or self.evicted_at < since:
            return None
        return _ms(self.evicted_at - since)

    @property
    def off_gpu_ms(self) -> float | None:
        """From the request, or the hit, until the offender's own error, or its end, as the harness saw it."""
        since = self._evict_since
        if since is None or self.off_gpu_at is None or self.off_gpu_at < since:
            return None
        return _ms(self.off_gpu_at - since)

    @property
    def stall_ms(self) -> float | None:
        """Return the longest step of a survivor that lived, counted from the fault (or the request) on."""
        since = self.fired_at if self.evict_asked is None else self.evict_asked
        if since is None:
            return None
        alive = [s for s in self.survivors if s.done]
        parts = [end - max(start, since) for s in alive for start, end in s.longest if end > since]
        return _ms(max(parts)) if parts else None

    @property
    def lost_after_ms(self) -> float | None:
        """From the fault to the first error of a survivor."""
        times = [s.error_at for s in self.survivors if s.error_at is not None]
        return _ms(min(times) - self.fired_at) if times and self.fired_at is not None else None

    @property
    def new_client_ms(self) -> float | None:
        """From the spawn of the first newcomer to the end of its first kernel."""
        first = self.newcomers[0] if self.newcomers else None
        if first is None or first.first_kernel is None:
            return None
        return _ms(first.first_kernel - first.spawned)


def _named_by_log(pids: Sequence[int], offenders: set[int], innocents: set[int]) -> str | None:
    if not pids:
        return None
    if set(pids) & innocents:
        return "wrong"
    return "right" if set(pids) & offenders else "unknown"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def observe(history: History) -> Observation:
    """Read a whole history. Raises KeyError or TypeError for one that the rig did not write."""
    begin = history.first("begin")
    if begin is None:
        return Observation(mode="", failure="the history has no beginning")
    names = _names(history)
    fired = history.first("fire")
    asked = next((e for e in history.all("asked") if e.data["op"] == "kill"), None)
    end, failed = history.last("end"), history.first("failed")
    offenders = [n for n in names if n.startswith("offender")]
    return Observation(
        mode=begin.data["mode"],
        survivors=tuple(_survivor(history, n) for n in names if n.startswith("survivor")),
        offenders=tuple(_identities(history, offenders)),
        offender_saw=tuple(e.data["code"] for n in offenders for e in history.all("outcome", n)),
        ready_expected=int(begin.data["survivors"]),
        fired_at=fired.t if fired else None,
        records=_records(history),
        xid_pids=tuple(e.data["pid"] for e in history.all("xid") if e.data["pid"] is not None),
        evict_asked=asked.t if asked else None,
        evicted_at=_exit_time(history, offenders),
        off_gpu_at=_context_end_time(history, offenders),
        answers=tuple(e.data for e in history.all("answered")),
        newcomers=tuple(_newcomer(history, n) for n in names if n.startswith("newcomer")),
        fresh_ms=_value(history.first("fresh"), "ms"),
        memory_back_ms=_value(history.first("memory_back"), "ms"),
        attach_ms=tuple(e.data["ms"] for e in history.all("attached") if e.data["ms"] is not None),
        guard_on=_value(history.first("guard"), "on"),
        zones=_value(history.last("zones"), "zones"),
        aim=fired.data.get("aim") if fired else None,
        continued=_data(history.first("lived")),
        frozen=_data(history.first("frozen")),
        free_when_full=_value(history.first("left"), "bytes"),
        filler=_data(history.first("done", "filler") or history.first("error", "filler")),
        poisoned=history.first("poisoned") is not None,
        moved=history.first("moved") is not None,
        readopted=_value(history.first("readopted"), "all"),
        innocent_alive=_value(history.first("innocent"), "alive"),
        crowd=_data(history.first("done", "crowd")),
        counters=_value(history.last("counters"), "counters"),
        leftovers=tuple(end.data["leftovers"]) if end else None,
        failure=str(failed.data["text"]) if failed else "",
        notes={k: v for e in history.all("note") for k, v in e.data.items()},
    )


def _names(history: History) -> list[str]:
    return list(dict.fromkeys(e.who for e in history.all("spawned")))


def _value(entry: Entry | None, key: str) -> Any:
    return entry.data[key] if entry else None


def _data(entry: Entry | None) -> Mapping[str, Any] | None:
    return entry.data if entry else None


def _survivor(history: History, name: str) -> SurvivorSeen:
    ready, error = history.first("ready", name), history.first("error", name)
    done = history.first("done", name)
    last = done or error
    tally = last.data if last else {}
    wrong = max(int(tally.get("wrong", 0)), len(history.all("wrong", name)))
    return SurvivorSeen(
        name=name,
        pid=ready.data["pid"] if ready else None,
        ready=ready is not None,
        done=done is not None,
        error=error.data["code"] if error else None,
        error_at=error.t if error else None,
        wrong=wrong,
        steps=int(tally.get("steps", 0)),
        longest=tuple((a, b) for a, b in tally.get("longest", ())),
    )


def _newcomer(history: History, name: str) -> NewcomerSeen:
    spawned, first = history.all("spawned", name)[0], history.first("first_kernel", name)
    return NewcomerSeen(
        name=name,
        spawned=spawned.t,
        first_kernel=first.t if first else None,
        refused=tuple(e.data["code"] for e in history.all("refused", name)),
        on_mps=first.data["on_mps"] if first else None,
    )


def _identities(history: History, names: Sequence[str]) -> list[tuple[int, int]]:
    ready = [history.first("ready", n) for n in names]
    return [(e.data["pid"], e.data["start_ticks"]) for e in ready if e]


def _context_end_time(history: History, names: Sequence[str]) -> float | None:
    """Return when the last of these programs saw its context end, or ended."""
    ends = []
    for name in names:
        seen = [e.t for e in (history.first("outcome", name), history.first("gone", name)) if e]
        ends += [min(seen)] if seen else []
    return max(ends, default=None)


def _exit_time(history: History, names: Sequence[str]) -> float | None:
    finishing = history.first("finishing")
    exits = [history.first("gone", n) for n in names]
    # A program that the rig ended does not count.
    return max((e.t for e in exits if e and (finishing is None or e.t < finishing.t)), default=None)


def _records(history: History) -> tuple[RecordSeen, ...]:
    """Return the latest revision of each record, dated by its first sighting, oldest first."""
    first: dict[int, float] = {}
    latest: dict[int, Mapping[str, Any]] = {}
    for entry in history.all("record"):
        record = entry.data["record"]
        first.setdefault(record["id"], entry.t)
        if record["revision"] >= latest.get(record["id"], record)["revision"]:
            latest[record["id"]] = record
    return tuple(RecordSeen(first[i], latest[i]) for i in sorted(latest, key=first.__getitem__))
