"""Programs with memory in the vault are killed in batches at random moments: nothing of them may remain.

After each batch the vault holds nothing of exited clients, mpsd has its former number of descriptors, and the
GPU has its memory back. Two programs live through all of it, one with the proxy and one without, and compare
their memory all the time.
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

from faultinject.campaigns.proxy.pairs import wait_for_standby
from faultinject.programs.basics.statistics import read_stats
from faultinject.registry.history import clock
from faultinject.registry.verdicts import (
    Finding,
    Verdict,
    findings,
    invalid,
    merge,
    unknown,
    valid,
)
from faultinject.rig.leftovers import open_descriptors
from faultinject.rig.libraries import MPSD_RUN, Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import DeadlineError, MpsdError

AT_ONCE = 8
UP_S = 60.0
CLEAR_S = 15.0
LATEST_S = 0.4
"""A program is killed at most this long after its start; a third of them before they are ready."""

MEMORY_BOUND = 64 << 20
"""Memory that NVML may show above the memory before: the driver keeps some of the freed memory."""

DESCRIPTORS_BOUND = 2
"""Connections of the harness itself that may be open while descriptors are counted."""

SETTINGS = {"lease.linger_limit_s": "10.0"}
"""The driver drops queued launches of a killed program after 2 s: they are not endless work."""

POLL_S, KILL_POLL_S = 0.02, 0.002


@dataclass(slots=True)
class Batch:
    """One batch of deaths. `vaulted`: how many had memory in the vault when they were killed.

    `clear_s`: from the last death until nothing of them remained; None: never. `early`: those that ended
    before they were killed, each with its last message.
    """

    deaths: int
    vaulted: int
    clear_s: float | None
    left: str = ""
    early: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Deaths:
    """All batches, and the survivors. `failure`: the harness itself failed."""

    wanted: int
    batches: list[Batch] = field(default_factory=list)
    survivors: dict[str, dict[str, Any]] = field(default_factory=dict)
    held_at_end: int | None = None
    descriptors: tuple[int, int] | None = None
    memory: tuple[int, int] | None = None
    failure: str = ""
    faults: list[str] = field(default_factory=list)
    """The faults that mpsd recorded meanwhile: a death is not a fault."""

    @property
    def killed(self) -> int:
        return sum(b.deaths for b in self.batches)

    def data(self) -> dict[str, Any]:
        return asdict(self)


def judge(seen: Mapping[str, Any]) -> list[Finding]:
    """Return what must hold of the stored facts (Deaths.data())."""
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
    # Some are killed while they start, which proves little about the vault.
    return (
        valid() if 2 * vaulted >= killed else unknown(f"only {vaulted} of {killed} had memory in the vault")
    )


def _nothing_left(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    remaining = [f"batch {i}: {b['left']}" for i, b in enumerate(seen["batches"], 1) if b["clear_s"] is None]
    if seen["held_at_end"]:
        remaining.append(f"{seen['held_at_end']} segments in the vault at the end")
    return invalid("; ".join(remaining[:5])) if remaining else valid()


def _no_faults(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    if "faults" not in seen:
        return unknown("not checked")
    found = seen["faults"]
    return invalid("; ".join(found[:3])) if found else valid()


def _victims_unharmed(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    """Until its own kill each was a neighbour of those that were killed before it."""
    if any("early" not in b for b in seen["batches"]):
        return unknown("not checked")
    early = [f"batch {i}: {message}" for i, b in enumerate(seen["batches"], 1) for message in b["early"]]
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
    return valid() if seen["survivors"] else unknown("there was no survivor")


def verdict(findings: Sequence[Finding]) -> Verdict:
    return merge(f.verdict for f in findings)


class Kills:
    """One run on a rig that has a daemon with the vault on."""

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
        """Kill `count` programs. A failure of the harness is in the result, not raised."""
        seen = Deaths(count)
        try:
            wait_for_standby(self.rig)
            # Their memory does not change: descriptors and memory are compared with those before.
            survivors = [
                self.spawn("survivor-plain", "--still", proxied=False),
                self.spawn("survivor-proxied", "--still"),
            ]
            for survivor in survivors:
                survivor.require("ready", timeout=UP_S)
            # One program comes and goes before anything is counted, for what is made once.
            first = self.batch(1)
            if first.early:
                raise DeadlineError(f"the first of all: {first.early[0]}")
            self.before, self.open_before = self.count_resources(), self.open_files()
            while seen.killed < count:
                seen.batches.append(self.batch(min(at_once, count - seen.killed)))
                self.tell(f"{seen.killed} of {count} killed" + self._remaining_text(seen.batches[-1]))
            seen.descriptors = (self.before[0], self.count_resources()[0])
            seen.memory = (self.before[1], self.count_resources()[1])
            for survivor in survivors:
                seen.survivors[survivor.name] = self._final_tally(survivor)
            self.wait_until_clear({s.pid for s in survivors}, compare_totals=False)
            seen.held_at_end = len(self.holdings())
            seen.faults = self.faults()
        except MpsdError as error:
            seen.failure = f"{error.code}: {error}"
            with contextlib.suppress(MpsdError):
                seen.faults = self.faults()
        return seen

    def faults(self) -> list[str]:
        """Return mpsd's records, each with its evidence."""
        records = self.rig.mpsd.ask(lambda c: c.faults())
        return [f"fault {r['id']}: " + ", ".join(e["text"] for e in r["evidence"]) for r in records]

    def _remaining_text(self, batch: Batch) -> str:
        return f"; left: {batch.left}" if batch.clear_s is None else ""

    def _final_tally(self, survivor: Worker) -> dict[str, Any]:
        survivor.tell("stop")
        # Its end may be seen before its last message.
        last = survivor.wait("done", "error", timeout=UP_S)
        exit_message = survivor.wait("gone", timeout=UP_S)
        final = last or exit_message
        return {"done": last is not None and last.what == "done", **(final.data if final else {})}

    def batch(self, size: int) -> Batch:
        """Start this many programs, and kill each at a moment of its own."""
        victims = [self.spawn(f"victim-{self.started + i}") for i in range(size)]
        self.started += size
        early: list[str] = []
        vaulted = self._kill(victims, early)
        for victim in victims:
            victim.require("gone", timeout=UP_S)
        died = clock()
        clear, remaining = self.wait_until_clear(
            {v.pid for v in victims}, compare_totals=self.before != (0, 0)
        )
        for victim in victims:
            victim.end()
            self.rig.workers.remove(victim)
        return Batch(size, vaulted, round(clock() - died, 3) if clear else None, remaining, early)

    def _kill(self, victims: Sequence[Worker], early: list[str]) -> int:
        """Kill each while it starts, or a while after it holds memory; return how many had some in the vault.

        Raises DeadlineError, with mpsd's view of the domains, for a program that does not start.
        """
        plans = [
            (v, "started" if self.random.random() < 1 / 3 else "ready", self.random.random() * LATEST_S)
            for v in victims
        ]
        vaulted, end = 0, clock() + UP_S
        while plans and clock() < end:
            for plan in plans[:]:
                victim, what, later = plan
                message = victim.first_message(what, "error", "gone")
                if message is not None and clock() >= message.t + later:
                    plans.remove(plan)
                    stats = read_stats(victim.pid) if victim.running else None
                    vaulted += bool(stats and stats["vault_taken"])
                    if victim.first_message("error", "gone"):
                        early.append(self._last_message(victim))
                    victim.signal(signal.SIGKILL)
            time.sleep(KILL_POLL_S)
        if plans:
            victim, what, _ = plans[0]
            raise DeadlineError(
                f"{victim.name} did not say {what}: {self._waiting(victim)}; {self._domains()}"
            )
        return vaulted

    def _last_message(self, victim: Worker) -> str:
        """Return the last message of a program that ended before it was killed."""
        error = victim.first_message("error")
        text = str(error.data.get("text")) if error else self.rig.error_text(victim)
        return f"{victim.name}: {text or 'ended without a message'}"

    def _waiting(self, victim: Worker) -> str:
        """Return where its threads wait in the kernel."""
        found: Counter[str] = Counter()
        try:
            for thread in os.listdir(f"/proc/{victim.pid}/task"):
                with open(f"/proc/{victim.pid}/task/{thread}/wchan") as place:
                    found[place.read() or "?"] += 1
        except OSError:
            return "it has ended"
        return "its threads wait in " + ", ".join(f"{place} ({count})" for place, count in found.items())

    def _domains(self) -> str:
        states = [f"domain {d['id']} is {d['state']}" for d in self.rig.mpsd.status()["domains"]]
        return ", ".join(states) or "there is no domain"

    def holdings(self) -> Sequence[Mapping[str, Any]]:
        held: Sequence[Mapping[str, Any]] = self.rig.mpsd.ask(lambda c: c.vault_list())
        return held

    def count_resources(self) -> tuple[int, int]:
        """Return mpsd's open descriptors, and the used memory of all GPUs in bytes."""
        return open_descriptors(self.rig.mpsd.pid), self.rig.node.gpu_memory_used()

    def open_files(self) -> Counter[str]:
        """Count mpsd's descriptors by target, with numbers removed."""
        found: Counter[str] = Counter()
        directory = f"/proc/{self.rig.mpsd.pid}/fd"
        for name in os.listdir(directory):
            try:
                found[re.sub(r"\d+", "N", os.readlink(f"{directory}/{name}"))] += 1
            except OSError:
                continue
        return found

    def wait_until_clear(self, pids: set[int], *, compare_totals: bool) -> tuple[bool, str]:
        """Wait until nothing remains of these processes; return what remained at the deadline."""
        end = clock() + CLEAR_S
        while (remaining := self._describe_remaining(pids, compare_totals)) and clock() < end:
            time.sleep(POLL_S)
        return not remaining, remaining

    def _describe_remaining(self, pids: set[int], compare_totals: bool) -> str:
        held = [h for h in self.holdings() if h["pid"] in pids]
        if held:
            return f"{len(held)} segments in the vault"
        status = self.rig.mpsd.status()
        known = pids & {c["pid"] for c in (*status["clients"], *status["dead"])}
        if known:
            return f"mpsd still holds resources of processes {sorted(known)}"
        if not compare_totals:
            return ""
        descriptors, memory = self.count_resources()
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
