"""Runs the paired programs: four processes of one program at a time, that take turns.

Without the proxy twice (their difference is noise), with it passing all calls on, with the vault, with a
guard over host memory too, and ready for a fail-over in either mode. All come up first, one after another,
so that what each takes of the GPU's memory shows; then they are timed round by round while the others wait.
All are clients of the same mpsd. Rounds may be within each proxied process instead (within.py): those without
the proxy do as many steps then, for their results.
"""

from __future__ import annotations

import os
import shutil
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from faultinject.history import clock
from faultinject.proxy.entries import judged, progress
from faultinject.proxy.judge import (
    BLOCKS,
    FAILOVER_MODES,
    GUARDED,
    STANDBY_MODES,
    VALIDATED,
    Side,
    Within,
    are_settled,
    pace,
)
from faultinject.proxy.library import FAR_BYTES, MPSD_RUN, Libraries, read_stats
from faultinject.proxy.within import THROUGH, Shape, of_round, shape
from faultinject.rig import Rig
from faultinject.worker import Worker
from mpsd.errors import DeadlineError, UnsupportedError, UsageError

MODES = ("forward", "vault", GUARDED, *STANDBY_MODES)
"""MPSD_VAULT=0: every call is passed on; memory in the window, brought to the vault; that, and a guard over
the program's own host memory; with a standby too, in that mode of fail-over; and in mode exact with all of
the program's memory looked at after each operation, which takes many times as long."""

GUARD_BYTES = 16 << 30

DEFAULT_MODES = ("forward", "vault")

SIDES = ("plain", "again", *MODES)
FIRST_STEPS = 12
BLOCK_S = 0.3
STEPS_MOST = 2000
UP_S, STEP_S = 90.0, 60.0
ROUNDS_SHARE = 0.85
"""Of the deadline: after that no round is begun, where there were enough, for the rest to come to its end."""
VALIDATED_TIMES, VALIDATED_STEPS = 8, 4
SPARE_S = READY_S = 20.0
LEAST_MEMORY = 1 << 20


@dataclass(frozen=True, slots=True)
class Rounds:
    """How many are timed: `least`, and then more until the medians are settled, `most` at most.

    `within`: each is one of blocks past the proxy and through it, within the proxied processes.
    """

    least: int
    most: int
    within: bool = False


@dataclass(slots=True)
class Member:
    """One process of a group and what it has shown so far."""

    name: str
    worker: Worker
    digests: list[str] = field(default_factory=list)
    memory: int | None = None
    process_memory: int | None = None
    blocks: list[float] = field(default_factory=list)
    within: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in BLOCKS})
    cpu: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in BLOCKS})
    functions: int = 0
    beats: bool = False
    cannot: str = ""
    stats: Mapping[str, Any] | None = None
    failover: Mapping[str, Any] | None = None
    failure: str = ""
    cores: int | None = None

    def side(self) -> Side:
        digest = "-".join(self.digests)
        return Side(digest, self.memory, tuple(self.blocks), self.stats, self.failure, self.failover)

    def within_data(self) -> dict[str, Any]:
        """As the report has it: blocks past the proxy and through it, or why there are none."""
        facts = {"functions": self.functions, "cannot": self.cannot, "beats": self.beats}
        return {**self.within, "cpu": self.cpu, **facts}


class Group:
    """One program in all its ways. `modes` are those of the proxy that are wanted."""

    def __init__(
        self,
        rig: Rig,
        libraries: Libraries,
        work: str,
        seed: int,
        modes: Sequence[str],
        rounds: Rounds,
        cores: Sequence[int] = (),
    ) -> None:
        self.rig, self.libraries, self.work, self.rounds, self.cores = rig, libraries, work, rounds, cores
        self.members = {
            name: Member(name, self._spawn(name, seed))
            for name in SIDES
            if name in ("plain", "again", *modes)
        }
        self.facts: dict[str, Any] = {"unit": "", "per_step": 1, "untimed": "", "beat": ""}
        self.lack: str | None = None
        self._times: list[float] = []
        self._beats = 0.0
        self._exchanges = False

    def _spawn(self, name: str, seed: int) -> Worker:
        service, libraries = self.rig.mpsd, self.libraries
        arguments = (self.work, "--seed", str(seed))
        if name not in MODES:
            environment = libraries.plain(service.client_environment())
            return self._spawn_alike(name, arguments, environment, ())
        environment = libraries.proxied(
            service.environment, service.socket, vault=name != "forward", far_bytes=FAR_BYTES
        )
        environment["MPSD_FAILOVER"] = name if name in FAILOVER_MODES else "off"
        if name == VALIDATED:
            environment |= {"MPSD_FAILOVER": "exact", "MPSD_FAILOVER_VALIDATE": "1"}
        if name == GUARDED:
            environment["MPSD_HOST_GUARD_BYTES"] = str(GUARD_BYTES)
        return self._spawn_alike(name, arguments, environment, MPSD_RUN)

    def _spawn_alike(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], through: Sequence[str]
    ) -> Worker:
        """Which cores and which order of Python's dictionaries a process got is no difference of a pair."""
        if self.cores:
            environment = {**environment, "PYTHONHASHSEED": "0"}
            through = ("taskset", "--cpu-list", ",".join(map(str, self.cores)), *through)
        return self.rig.spawn(
            f"{self.work}-{name}", "paired", *arguments, environment=environment, through=through
        )

    def run(self, until: float) -> None:
        """All of it, once they are imported, rounds until then. Failures of a member are its own."""
        if self.lack is not None:
            return
        for member in self.members.values():
            self._attempt(member, self._begin)
        form = self._shape() if self.rounds.within else None
        steps = form.of_round if form else self._steps()
        names = list(self.members)
        for number in range(self.rounds.most):
            if number >= self.rounds.least and (self._is_settled() or clock() > until):
                break
            # Nobody is always the first of a round.
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                if form and name in MODES:
                    self._attempt(self.members[name], self._round, form, number)
                else:
                    self._attempt(self.members[name], self._block, steps)
        for member in self.members.values():
            self._attempt(member, self._finish)

    def _is_settled(self) -> bool:
        alive = [m for m in self.members.values() if not m.failure]
        if self.facts["untimed"]:
            return True
        if self.rounds.within:
            timed = [m for m in alive if m.name in MODES and not m.cannot]
            return all(Within.of(m.within_data()).is_settled() for m in timed)
        others = [m.blocks for m in alive if m.name != "plain"]
        return are_settled(self.members["plain"].blocks, others)

    def wait_imported(self) -> None:
        """Until every member is there, or has said what is not installed."""
        for member in self.members.values():
            said = member.worker.wait("imported", "lacking", "gone", timeout=UP_S)
            if said is not None and said.what == "lacking":
                self.lack = str(said.data["text"])
                return
            if said is None or said.what == "gone":
                member.failure = self._why(member, "it did not come up")
            else:
                self.facts = {key: said.data[key] for key in ("unit", "per_step", "untimed", "beat")}

    def _attempt(self, member: Member, act: Any, *arguments: Any) -> None:
        if member.failure:
            return
        try:
            act(member, *arguments)
        except DeadlineError as error:
            member.failure = self._why(member, str(error))

    def _why(self, member: Member, what: str) -> str:
        gone = member.worker.heard("gone")
        ended = f"; it ended with status {gone.data['status']}" if gone else ""
        return f"{what}{ended}; {self.rig.error_text(member.worker)}".rstrip("; ")

    def _begin(self, member: Member) -> None:
        before = self.rig.node.gpu_memory_used()
        member.worker.tell("begin", steps=self._most(FIRST_STEPS))
        said = member.worker.must("begun", timeout=_within(member, UP_S))
        if member.name in FAILOVER_MODES:
            self._wait_ready(member)
        grown = self.rig.node.gpu_memory_used() - before
        # The simulated GPU does not know the memory of C programs.
        member.memory = grown if grown >= LEAST_MEMORY else None
        member.process_memory = self._process_memory(member.worker.pid)
        member.cores = len(os.sched_getaffinity(member.worker.pid))
        member.digests.append(said.data["digest"])
        member.stats = read_stats(member.worker.pid)
        self._times = self._times or said.data["times"]
        self._beats = self._beats or said.data["beats"]
        self._exchanges = said.data["exchanges"]

    def _wait_ready(self, member: Member) -> None:
        """Until it has a standby, whose memory counts. Raises DeadlineError."""

        def ready(status: Mapping[str, Any]) -> bool:
            member.failover = _standing(member, status)
            return member.failover is not None and member.failover["standing"] == "ready"

        if self.rig.mpsd.until(ready, READY_S) is None:
            raise DeadlineError(f"it had no standby within {READY_S:.0f} s: {member.failover}")

    def _process_memory(self, pid: int) -> int | None:
        devices = self.rig.node.backend.devices
        found = [
            p.memory_bytes for gpu in devices.gpus() for p in devices.processes(gpu.uuid) if p.pid == pid
        ]
        return next((size for size in found if size), None)

    def _steps(self) -> int:
        """Steps of a block: the same for all, so that all compute the same."""
        return max(2, min(self._most(STEPS_MOST), round(BLOCK_S / max(self._step_s(), 1e-6))))

    def _step_s(self) -> float:
        return statistics.median(self._times) if self._times else BLOCK_S

    def _shape(self) -> Shape:
        return shape(self._step_s(), self._beats, STEPS_MOST, exchanges=self._exchanges)

    def _most(self, steps: int) -> int:
        """The steps of a validated program take many times as long, and each is like the one before."""
        return min(steps, VALIDATED_STEPS) if VALIDATED in self.members else steps

    def _block(self, member: Member, steps: int) -> None:
        heard = member.worker.count("block")
        member.worker.tell("block", steps=steps)
        said = member.worker.must("block", timeout=_within(member, STEP_S), after=heard)
        member.blocks.append(pace(said.data["times"], said.data["beats"]))

    def _round(self, member: Member, form: Shape, number: int) -> None:
        """Where it cannot be, as many steps all the same: the results are compared."""
        if member.cannot:
            self._block(member, form.of_round)
            return
        heard = member.worker.count("round", "cannot")
        member.beats = form.rounds > 0
        member.worker.tell("round", **form.told(number))
        said = member.worker.must("round", "cannot", timeout=STEP_S, after=heard)
        if said.what == "cannot":
            member.cannot = str(said.data["text"])
            self._block(member, form.of_round)
            return
        times, cpu = of_round(said.data)
        for name in BLOCKS:
            member.within[name] += times[name]
            member.cpu[name] += cpu[name]
        member.functions = said.data["functions"]
        member.blocks.append(statistics.median(times[THROUGH]))

    def _finish(self, member: Member) -> None:
        if member.name in MODES:
            # By now the vault has what was brought to it off the program's path.
            member.stats = read_stats(member.worker.pid) or member.stats
        if member.name in STANDBY_MODES:
            member.failover = _standing(member, self.rig.mpsd.status())
        member.worker.tell("finish")
        member.digests.append(member.worker.must("finished", timeout=STEP_S).data["digest"])
        member.worker.tell("stop")
        member.worker.must("closed", timeout=STEP_S)

    def end(self) -> None:
        for member in self.members.values():
            member.worker.end()


def _within(member: Member, seconds: float) -> float:
    return seconds * VALIDATED_TIMES if member.name == VALIDATED else seconds


def _standing(member: Member, status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How the program may fail over, as mpsd sees it; None: it is not known there."""
    rows = [p for slot in status["slots"] for p in slot["programs"]]
    mine = next((p for p in rows if p["pid"] == member.worker.pid), None)
    return mine and {name: mine[name] for name in ("mode", "standing", "reason", "opaque", "unsure")}


def data_of(member: Member, *, by_device: bool) -> dict[str, Any]:
    side = asdict(member.side())
    memory = member.memory if by_device else member.process_memory
    told = {"device_memory": member.memory, "process_memory": member.process_memory, "cores": member.cores}
    return {**side, "memory": memory, **told}


def entries(group: Group, modes: Sequence[str], *, bars: bool) -> list[dict[str, Any]]:
    """The report's entries of one program, one for each mode."""
    found = []
    for mode in modes:
        entry: dict[str, Any] = {"program": group.work, "mode": mode, "not_run": group.lack, **group.facts}
        sides = {
            "plain": group.members["plain"],
            "again": group.members["again"],
            "proxied": group.members[mode],
        }
        # By what the whole device has more of, where that was seen each time; else by the process's own.
        by_device = all(member.memory is not None for member in sides.values())
        entry |= {name: data_of(member, by_device=by_device) for name, member in sides.items()}
        if group.rounds.within:
            entry["within"] = sides["proxied"].within_data()
        found.append(judged(entry, bars=bars))
    return found


def choose_cores(wanted: int) -> list[int]:
    """The last of those this process may use: the first ones serve the machine's interrupts. None wanted: [].

    Raises UsageError where there are not so many, UnsupportedError without taskset (util-linux).
    """
    allowed = sorted(os.sched_getaffinity(0))
    if wanted > len(allowed):
        raise UsageError(f"--cores {wanted}: only {len(allowed)} are to be had", remedy="give fewer, or none")
    if wanted and shutil.which("taskset") is None:
        raise UnsupportedError("--cores needs taskset, which is not here", remedy="apt install util-linux")
    return allowed[len(allowed) - wanted :]


def settled(rig: Rig) -> None:
    """Wait for the spare domain: what it takes of the memory must not be taken for a program's."""
    if rig.mpsd.until_spare(SPARE_S) is None:
        rig.note(no_spare=True)


def run_programs(
    rig: Rig,
    libraries: Libraries,
    works: Sequence[str],
    modes: Sequence[str],
    *,
    seed: int,
    rounds: Rounds,
    cores: Sequence[int],
    deadline_s: float,
    tell: Any,
) -> list[dict[str, Any]]:
    """All programs, one after another, each under the deadline. The rig's daemon has the vault on."""
    settled(rig)
    # Somebody who is always there: what the first client of a server costs is nobody's of a pair.
    rig.spawn("anchor", "idlers", "--clients", "1").must("ready", timeout=UP_S)
    # All start at once and wait for their turn: what a library takes to be imported is spent only once.
    groups = [Group(rig, libraries, work, seed, modes, rounds, cores) for work in works]
    found = []
    try:
        for group in groups:
            group.wait_imported()
        for group in groups:
            began = clock()
            _under_deadline(group, deadline_s)
            for entry in entries(group, modes, bars=rig.node.bars):
                found.append(entry)
                tell(progress(entry, clock() - began))
    finally:
        for group in groups:
            group.end()
    return found


def _under_deadline(group: Group, deadline_s: float) -> None:
    """Run a group; what is not over in time is ended, and says so."""
    watchdog = threading.Timer(deadline_s, group.end)
    watchdog.daemon = True
    watchdog.start()
    try:
        group.run(clock() + ROUNDS_SHARE * deadline_s)
    finally:
        watchdog.cancel()
        group.end()
