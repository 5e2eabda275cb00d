"""Programs with memory in the vault are killed, several at a time, at random moments: nothing may be left.

After each batch: the vault holds nothing of the dead, mpsd has the descriptors that it had before the
first, and the GPU has its memory back. Two programs live through all of it, one proxied and one not, and
compare what they hold all the time.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from faultinject.history import clock
from faultinject.leftovers import open_descriptors
from faultinject.proxy.library import MPSD_RUN, Libraries, read_stats
from faultinject.proxy.pairs import settled
from faultinject.rig import Rig
from faultinject.verdict import Finding, Verdict, findings, invalid, merge, unknown, valid
from faultinject.worker import Worker
from mpsd.errors import DeadlineError, MpsdError

AT_ONCE = 8
UP_S = 60.0
CLEAR_S = 15.0
LATEST_S = 0.4
"""A program is killed at most so long after it was up; a third of them are not given that time."""

MEMORY_BOUND = 64 << 20
"""What NVML may see above the memory before: the driver keeps some of what it freed."""

DESCRIPTORS_BOUND = 2
"""Connections of this harness itself that may be open while the descriptors are counted."""

SETTINGS = {"lease.linger_limit_s": "10.0"}
"""Launches that a killed program had queued are dropped by the driver after 2 s: they are no endless work."""

POLL_S, KILL_POLL_S = 0.02, 0.002


@dataclass(slots=True)
class Batch:
    """One batch of deaths. `vaulted`: how many of them had memory in the vault when they were killed.

    `clear_s` is the time from the last death until nothing of them was left; None: it never was. `early`:
    those that ended before they were killed, each with what it said of it.
    """

    deaths: int
    vaulted: int
    clear_s: float | None
    left: str = ""
    early: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Deaths:
    """All batches, and what became of those that were to live. `failure`: the harness itself failed."""

    wanted: int
    batches: list[Batch] = field(default_factory=list)
    survivors: dict[str, dict[str, Any]] = field(default_factory=dict)
    held_at_end: int | None = None
    descriptors: tuple[int, int] | None = None
    memory: tuple[int, int] | None = None
    failure: str = ""
    faults: list[str] = field(default_factory=list)
    """What mpsd recorded as faults meanwhile: a death is none."""

    @property
    def killed(self) -> int:
        return sum(b.deaths for b in self.batches)

    def data(self) -> dict[str, Any]:
        return asdict(self)


def judge(seen: Mapping[str, Any]) -> list[Finding]:
    """What must hold of the stored facts (Deaths.data())."""
    laws: Sequence[Callable[[Mapping[str, Any]], tuple[Verdict, str]]] = (
        _all_died,
        _were_vaulted,
        _nothing_left,
        _no_faults,
        _victims_unharmed,
        _survivors_unharmed,
    )
    return findings(laws, seen)


def _all_died(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    if seen["failure"]:
        return unknown(seen["failure"])
    killed = sum(b["deaths"] for b in seen["batches"])
    return valid() if killed >= seen["wanted"] else unknown(f"only {killed} of {seen['wanted']} were killed")


def _were_vaulted(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    killed = sum(b["deaths"] for b in seen["batches"])
    vaulted = sum(b["vaulted"] for b in seen["batches"])
    if not vaulted:
        return invalid("none of them had memory in the vault")
    # Some are killed while they start: that is wanted, but proves little of the vault.
    return (
        valid() if 2 * vaulted >= killed else unknown(f"only {vaulted} of {killed} had memory in the vault")
    )


def _nothing_left(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    left = [f"batch {i}: {b['left']}" for i, b in enumerate(seen["batches"], 1) if b["clear_s"] is None]
    if seen["held_at_end"]:
        left.append(f"{seen['held_at_end']} pieces in the vault at the end")
    return invalid("; ".join(left[:5])) if left else valid()


def _no_faults(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    if "faults" not in seen:
        return unknown("it was not looked at")
    found = seen["faults"]
    return invalid("; ".join(found[:3])) if found else valid()


def _victims_unharmed(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    """Until its own kill came, each was a neighbour of those that were killed before it."""
    if any("early" not in b for b in seen["batches"]):
        return unknown("it was not looked at")
    early = [f"batch {i}: {said}" for i, b in enumerate(seen["batches"], 1) for said in b["early"]]
    if not early:
        return valid()
    more = f"; and {len(early) - 3} more" if len(early) > 3 else ""
    return invalid("; ".join(early[:3]) + more)


def _survivors_unharmed(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    bad = [
        f"{name}: {tally}"
        for name, tally in seen["survivors"].items()
        if not tally.get("done") or tally.get("wrong") or not tally.get("steps")
    ]
    if bad:
        return invalid("; ".join(bad))
    return valid() if seen["survivors"] else unknown("nobody was there to survive")


def verdict(findings: Sequence[Finding]) -> Verdict:
    return merge(f.verdict for f in findings)


class Slaughter:
    """One run of it on a rig whose daemon has the vault on."""

    def __init__(self, rig: Rig, libraries: Libraries, seed: int, tell: Callable[[str], None]) -> None:
        self.rig, self.libraries, self.tell = rig, libraries, tell
        self.random = random.Random(seed)
        self.started = 0
        self.before = (0, 0)
        self.open_before: Counter[str] = Counter()

    def spawn(self, name: str, *options: str, proxied: bool = True) -> Worker:
        options = (*options, "--seed", str(self.random.getrandbits(32)))
        service = self.rig.mpsd
        if not proxied:
            environment = self.libraries.plain(service.client_environment())
            return self.rig.spawn(name, "holder", *options, environment=environment)
        environment = self.libraries.proxied(service.environment, service.socket, vault=True)
        return self.rig.spawn(name, "holder", *options, environment=environment, through=MPSD_RUN)

    def run(self, count: int, at_once: int) -> Deaths:
        """Kill `count` programs. What goes wrong in the harness is told, never raised."""
        seen = Deaths(count)
        try:
            settled(self.rig)
            # What they hold stays as it is: descriptors and memory are compared with what was before.
            survivors = [
                self.spawn("survivor-plain", "--still", proxied=False),
                self.spawn("survivor-proxied", "--still"),
            ]
            for survivor in survivors:
                survivor.must("ready", timeout=UP_S)
            # One that comes and goes before anything is counted: what is made once is there then.
            first = self.batch(1)
            if first.early:
                raise DeadlineError(f"the first of all: {first.early[0]}")
            self.before, self.open_before = self.counted(), self.open_files()
            while seen.killed < count:
                seen.batches.append(self.batch(min(at_once, count - seen.killed)))
                self.tell(f"{seen.killed} of {count} killed" + self._trouble(seen.batches[-1]))
            seen.descriptors = (self.before[0], self.counted()[0])
            seen.memory = (self.before[1], self.counted()[1])
            for survivor in survivors:
                seen.survivors[survivor.name] = self._fate(survivor)
            self.until_clear({s.pid for s in survivors}, counted=False)
            seen.held_at_end = len(self.holdings())
            seen.faults = self.faults()
        except MpsdError as error:
            seen.failure = f"{error.code}: {error}"
            with contextlib.suppress(MpsdError):
                seen.faults = self.faults()
        return seen

    def faults(self) -> list[str]:
        """mpsd's records, each with the evidence for it."""
        records = self.rig.mpsd.ask(lambda c: c.faults())
        return [f"fault {r['id']}: " + ", ".join(e["text"] for e in r["evidence"]) for r in records]

    def _trouble(self, batch: Batch) -> str:
        return f"; left: {batch.left}" if batch.clear_s is None else ""

    def _fate(self, survivor: Worker) -> dict[str, Any]:
        survivor.tell("stop")
        # Its end may be seen before its last words are.
        last = survivor.wait("done", "error", timeout=UP_S)
        gone = survivor.wait("gone", timeout=UP_S)
        told = last or gone
        return {"done": last is not None and last.what == "done", **(told.data if told else {})}

    def batch(self, size: int) -> Batch:
        """So many programs, each killed at a moment of its own."""
        victims = [self.spawn(f"victim-{self.started + i}") for i in range(size)]
        self.started += size
        early: list[str] = []
        vaulted = self._kill(victims, early)
        for victim in victims:
            victim.must("gone", timeout=UP_S)
        died = clock()
        clear, left = self.until_clear({v.pid for v in victims}, counted=self.before != (0, 0))
        for victim in victims:
            victim.end()
            self.rig.workers.remove(victim)
        return Batch(size, vaulted, round(clock() - died, 3) if clear else None, left, early)

    def _kill(self, victims: Sequence[Worker], early: list[str]) -> int:
        """Kill each while it starts, or a while after it holds memory; how many had some in the vault.

        Raises DeadlineError, with what mpsd says of the domains, if one does not come up.
        """
        plans = [
            (v, "started" if self.random.random() < 1 / 3 else "ready", self.random.random() * LATEST_S)
            for v in victims
        ]
        vaulted, end = 0, clock() + UP_S
        while plans and clock() < end:
            for plan in plans[:]:
                victim, what, later = plan
                said = victim.heard(what, "error", "gone")
                if said is not None and clock() >= said.t + later:
                    plans.remove(plan)
                    stats = read_stats(victim.pid) if victim.running else None
                    vaulted += bool(stats and stats["vault_taken"])
                    if victim.heard("error", "gone"):
                        early.append(self._ended(victim))
                    victim.signal(signal.SIGKILL)
            time.sleep(KILL_POLL_S)
        if plans:
            victim, what, _ = plans[0]
            raise DeadlineError(
                f"{victim.name} did not say {what}: {self._waiting(victim)}; {self._domains()}"
            )
        return vaulted

    def _ended(self, victim: Worker) -> str:
        """The last words of one that ended before it was killed."""
        error = victim.heard("error")
        words = str(error.data.get("text")) if error else self.rig.error_text(victim)
        return f"{victim.name}: {words or 'ended without a word'}"

    def _waiting(self, victim: Worker) -> str:
        """Where its threads wait in the kernel."""
        found: Counter[str] = Counter()
        try:
            for thread in os.listdir(f"/proc/{victim.pid}/task"):
                with open(f"/proc/{victim.pid}/task/{thread}/wchan") as place:
                    found[place.read() or "?"] += 1
        except OSError:
            return "it is gone"
        return "its threads wait in " + ", ".join(f"{place} ({count})" for place, count in found.items())

    def _domains(self) -> str:
        states = [f"domain {d['id']} is {d['state']}" for d in self.rig.mpsd.status()["domains"]]
        return ", ".join(states) or "there is no domain"

    def holdings(self) -> Sequence[Mapping[str, Any]]:
        held: Sequence[Mapping[str, Any]] = self.rig.mpsd.ask(lambda c: c.vault_list())
        return held

    def counted(self) -> tuple[int, int]:
        """mpsd's open descriptors, and the memory in use on all GPUs in bytes."""
        return open_descriptors(self.rig.mpsd.pid), self.rig.node.gpu_memory_used()

    def open_files(self) -> Counter[str]:
        """What mpsd's descriptors are, without what numbers one of many."""
        found: Counter[str] = Counter()
        directory = f"/proc/{self.rig.mpsd.pid}/fd"
        for name in os.listdir(directory):
            try:
                found[re.sub(r"\d+", "N", os.readlink(f"{directory}/{name}"))] += 1
            except OSError:
                continue
        return found

    def until_clear(self, dead: set[int], *, counted: bool) -> tuple[bool, str]:
        """Wait until nothing is left of these processes; what was at the deadline."""
        end = clock() + CLEAR_S
        while (left := self._left(dead, counted)) and clock() < end:
            time.sleep(POLL_S)
        return not left, left

    def _left(self, dead: set[int], counted: bool) -> str:
        held = [h for h in self.holdings() if h["pid"] in dead]
        if held:
            return f"{len(held)} pieces in the vault"
        status = self.rig.mpsd.status()
        known = dead & {c["pid"] for c in (*status["clients"], *status["dead"])}
        if known:
            return f"mpsd still holds something for processes {sorted(known)}"
        if not counted:
            return ""
        descriptors, memory = self.counted()
        was = self.before[0]
        if descriptors > was + DESCRIPTORS_BOUND:
            grown = self.open_files() - self.open_before
            more = ", ".join(f"{name} +{count}" for name, count in grown.items())
            return (
                f"{descriptors} descriptors are open in mpsd, {was} were before ({more}); {self._domains()}"
            )
        if memory > self.before[1] + MEMORY_BOUND:
            return f"{memory} bytes of GPU memory are in use, {self.before[1]} were before"
        return ""
