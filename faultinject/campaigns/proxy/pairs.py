"""Runs the paired programs: the processes of one program alternate.

Twice without the proxy (their difference is noise), then with the proxy: calls passed through, with the
vault, with a guard over host memory, and with a standby context in either mode. All start one after another,
so that the GPU memory of each shows. Then they are timed round by round while the others wait. All are
clients of the same mpsd. Rounds may be within each proxied process instead (programs/pairing/rounds.py):
those without the proxy do as many steps then, for their results.
"""

from __future__ import annotations

import os
import shutil
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from faultinject.campaigns.proxy.entries import judged, progress
from faultinject.campaigns.proxy.judge import (
    AUTO,
    FAILOVER_MODES,
    GUARDED,
    STANDBY_MODES,
    VALIDATED,
    Side,
    Within,
    are_settled,
    block_time,
)
from faultinject.programs.basics.statistics import read_stats
from faultinject.programs.pairing.rounds import (
    BLOCKS,
    THROUGH,
    Shape,
    round_times,
    shape,
)
from faultinject.registry.history import clock
from faultinject.rig.libraries import FAR_BYTES, MPSD_RUN, Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import DeadlineError, UnsupportedError, UsageError

MODES = ("forward", "vault", GUARDED, *STANDBY_MODES, AUTO)
"""The modes of a program.

forward: every call is passed through. vault: memory in the window and in the vault. guard: and a guard over
the program's own host memory. keep, exact: and a standby context. validate: as exact, with all memory of the
program compared after each operation, which takes many times as long. auto: as mpsd-run starts a program
without a configuration; it runs by itself, because its daemon has no settings.
"""

GUARD_BYTES = 16 << 30

DEFAULT_MODES = ("forward", "vault")

SIDES = ("plain", "again", *MODES)
FIRST_STEPS = 12
BLOCK_S = 0.3
MAX_STEPS = 2000
UP_S, STEP_S = 90.0, 60.0
ROUNDS_SHARE = 0.85
"""Share of the deadline after which no round begins, so that the rest can finish."""
VALIDATED_TIMES, VALIDATED_STEPS = 8, 4
STANDBY_S = READY_S = 20.0
SETTLE_S = {"nvidia": 45.0, "simulated": 3.0}
"""How long a program at the level `auto` works before it is timed, in turn with others. By then mpsd knows
what saving costs it: a program that saving slows by 0.8 % more than its budget has left fail-over."""
MIN_MEMORY = 1 << 20


@dataclass(frozen=True, slots=True)
class Rounds:
    """The number of timed rounds: `least`, then more until the medians are settled, at most `most`.

    `within`: each round is one of blocks past the proxy and through it, within the proxied processes.
    """

    least: int
    most: int
    within: bool = False


@dataclass(slots=True)
class PairedProcess:
    """One process of a group and its data so far."""

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
        """Return the report's data: blocks past the proxy and through it, or why there are none."""
        facts = {"functions": self.functions, "cannot": self.cannot, "beats": self.beats}
        return {**self.within, "cpu": self.cpu, **facts}


class Group:
    """One program in every mode. `modes`: the requested ones."""

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
        self.processes = {
            name: PairedProcess(name, self._spawn(name, seed))
            for name in SIDES
            if name in ("plain", "again", *modes)
        }
        self.facts: dict[str, Any] = {"unit": "", "per_step": 1, "untimed": "", "beat": ""}
        self.missing_package: str | None = None
        self._times: list[float] = []
        self._beats = 0.0
        self._exchanges = False

    def _spawn(self, name: str, seed: int) -> Worker:
        service, libraries = self.rig.mpsd, self.libraries
        arguments = (self.work, "--seed", str(seed))
        if name not in MODES:
            environment = libraries.plain(service.client_environment())
            return self._spawn_alike(name, arguments, environment, ())
        if name == AUTO:
            environment = libraries.joined(service.environment, service.socket)
            return self._spawn_alike(name, arguments, environment, MPSD_RUN)
        environment = libraries.proxied(
            service.environment,
            service.socket,
            vault=name != "forward",
            far_bytes=FAR_BYTES,
            host_guard_bytes=GUARD_BYTES if name == GUARDED else 0,
        )
        environment["MPSD_FAILOVER"] = name if name in STANDBY_MODES else "off"
        return self._spawn_alike(name, arguments, environment, MPSD_RUN)

    def _spawn_alike(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], through: Sequence[str]
    ) -> Worker:
        """The same cores and hash seed for every process of a pair."""
        if self.cores:
            environment = {**environment, "PYTHONHASHSEED": "0"}
            through = ("taskset", "--cpu-list", ",".join(map(str, self.cores)), *through)
        return self.rig.spawn(
            f"{self.work}-{name}", "paired", *arguments, environment=environment, through=through
        )

    def run(self, until: float) -> None:
        """Start all, then run rounds until the deadline. Each program's failures are its own."""
        if self.missing_package is not None:
            return
        for process in self.processes.values():
            self._guard_failure(process, self._begin)
        shape_of_blocks = self._shape() if self.rounds.within else None
        steps = shape_of_blocks.steps_per_round if shape_of_blocks else self._steps()
        names = list(self.processes)
        self._settle(steps, until)
        for number in range(self.rounds.most):
            if number >= self.rounds.least and (self._is_settled() or clock() > until):
                break
            # Each program is the first of a round in turn.
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                if shape_of_blocks and name in MODES:
                    self._guard_failure(self.processes[name], self._round, shape_of_blocks, number)
                else:
                    self._guard_failure(self.processes[name], self._block, steps)
        for process in self.processes.values():
            self._guard_failure(process, self._finish)

    def _settle(self, steps: int, until: float) -> None:
        """Let a program at the level `auto` work until its level is settled, and the others as much."""
        auto = self.processes.get(AUTO)
        if auto is None or auto.failure:
            return
        end = min(until, clock() + SETTLE_S[self.rig.node.name])
        while clock() < end and self._may_leave(auto):
            # All in turn, so that all do the same work whenever that ends.
            for process in self.processes.values():
                self._guard_failure(process, self._block, steps)
        for process in self.processes.values():
            process.blocks.clear()

    def _may_leave(self, process: PairedProcess) -> bool:
        rows = [p for slot in self.rig.mpsd.status()["slots"] for p in slot["programs"]]
        found = next((p for p in rows if p["pid"] == process.worker.pid), None)
        return not process.failure and found is not None and found["left"] is None

    def _is_settled(self) -> bool:
        alive = [m for m in self.processes.values() if not m.failure]
        if self.facts["untimed"]:
            return True
        if self.rounds.within:
            timed = [m for m in alive if m.name in MODES and not m.cannot]
            return all(Within.of(m.within_data()).is_settled() for m in timed)
        others = [m.blocks for m in alive if m.name != "plain"]
        return are_settled(self.processes["plain"].blocks, others)

    def wait_imported(self) -> None:
        """Wait until every program is ready, or has said what is not installed."""
        for process in self.processes.values():
            message = process.worker.wait("imported", "lacking", "gone", timeout=UP_S)
            if message is not None and message.what == "lacking":
                self.missing_package = str(message.data["text"])
                return
            if message is None or message.what == "gone":
                process.failure = self._describe_failure(process, "it did not start")
            else:
                self.facts = {key: message.data[key] for key in ("unit", "per_step", "untimed", "beat")}

    def _guard_failure(self, process: PairedProcess, act: Any, *arguments: Any) -> None:
        if process.failure:
            return
        try:
            act(process, *arguments)
        except DeadlineError as error:
            process.failure = self._describe_failure(process, str(error))

    def _describe_failure(self, process: PairedProcess, what: str) -> str:
        exit_message = process.worker.first_message("gone")
        ended = f"; it ended with status {exit_message.data['status']}" if exit_message else ""
        return f"{what}{ended}; {self.rig.error_text(process.worker)}".rstrip("; ")

    def _begin(self, process: PairedProcess) -> None:
        before = self.rig.node.gpu_memory_used()
        process.worker.tell("begin", steps=self._limit_steps(FIRST_STEPS))
        message = process.worker.require("begun", timeout=_time_limit(process, UP_S))
        if process.name in FAILOVER_MODES:
            self._wait_ready(process)
        if process.name == AUTO:
            self._await_protected(process)
        grown = self.rig.node.gpu_memory_used() - before
        # The simulated GPU does not know the memory of C programs.
        process.memory = grown if grown >= MIN_MEMORY else None
        process.process_memory = self._process_memory(process.worker.pid)
        process.cores = len(os.sched_getaffinity(process.worker.pid))
        process.digests.append(message.data["digest"])
        process.stats = read_stats(process.worker.pid)
        self._times = self._times or message.data["times"]
        self._beats = self._beats or message.data["beats"]
        self._exchanges = message.data["exchanges"]

    def _wait_ready(self, process: PairedProcess) -> None:
        """Wait until the program has a standby context, since that memory counts. Raises DeadlineError."""

        def ready(status: Mapping[str, Any]) -> bool:
            process.failover = _standing(process, status)
            return process.failover is not None and process.failover["standing"] == "ready"

        if self.rig.mpsd.until(ready, READY_S) is None:
            raise DeadlineError(f"it had no standby within {READY_S:.0f} s: {process.failover}")

    def _await_protected(self, process: PairedProcess) -> None:
        """Wait until the program has the level of the node. One that does not get it runs on."""

        def protected(status: Mapping[str, Any]) -> bool:
            process.failover = _protection(process, status)
            level = status["protection"]["level"]
            return process.failover is not None and process.failover["level"] == level

        self.rig.mpsd.until(protected, READY_S)

    def _process_memory(self, pid: int) -> int | None:
        devices = self.rig.node.backend.devices
        found = [
            p.memory_bytes for gpu in devices.gpus() for p in devices.processes(gpu.uuid) if p.pid == pid
        ]
        return next((size for size in found if size), None)

    def _steps(self) -> int:
        """Return the steps of a block: the same for all, so that all compute the same."""
        return max(2, min(self._limit_steps(MAX_STEPS), round(BLOCK_S / max(self._step_s(), 1e-6))))

    def _step_s(self) -> float:
        return statistics.median(self._times) if self._times else BLOCK_S

    def _shape(self) -> Shape:
        return shape(self._step_s(), self._beats, MAX_STEPS, exchanges=self._exchanges)

    def _limit_steps(self, steps: int) -> int:
        """Return the steps of a validated program, which take many times as long and are all alike."""
        return min(steps, VALIDATED_STEPS) if VALIDATED in self.processes else steps

    def _block(self, process: PairedProcess, steps: int) -> None:
        reports_so_far = process.worker.count("block")
        process.worker.tell("block", steps=steps)
        message = process.worker.require("block", timeout=_time_limit(process, STEP_S), after=reports_so_far)
        process.blocks.append(block_time(message.data["times"], message.data["beats"]))

    def _round(self, process: PairedProcess, shape_of_blocks: Shape, number: int) -> None:
        """Run rounds within the process; where that cannot be, as many steps, for the results."""
        if process.cannot:
            self._block(process, shape_of_blocks.steps_per_round)
            return
        reports_so_far = process.worker.count("round", "cannot")
        process.beats = shape_of_blocks.rounds > 0
        process.worker.tell("round", **shape_of_blocks.order_data(number))
        message = process.worker.require("round", "cannot", timeout=STEP_S, after=reports_so_far)
        if message.what == "cannot":
            process.cannot = str(message.data["text"])
            self._block(process, shape_of_blocks.steps_per_round)
            return
        times, cpu = round_times(message.data)
        for name in BLOCKS:
            process.within[name] += times[name]
            process.cpu[name] += cpu[name]
        process.functions = message.data["functions"]
        process.blocks.append(statistics.median(times[THROUGH]))

    def _finish(self, process: PairedProcess) -> None:
        if process.name in MODES:
            # By now the vault has the segments that are added in the background.
            process.stats = read_stats(process.worker.pid) or process.stats
        if process.name in STANDBY_MODES:
            process.failover = _standing(process, self.rig.mpsd.status())
        if process.name == AUTO:
            process.failover = _protection(process, self.rig.mpsd.status())
        process.worker.tell("finish")
        process.digests.append(process.worker.require("finished", timeout=STEP_S).data["digest"])
        process.worker.tell("stop")
        process.worker.require("closed", timeout=STEP_S)

    def end(self) -> None:
        for process in self.processes.values():
            process.worker.end()


def _time_limit(process: PairedProcess, seconds: float) -> float:
    return seconds * VALIDATED_TIMES if process.name == VALIDATED else seconds


def _standing(process: PairedProcess, status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return how the program may fail over, as mpsd sees it; None: not known."""
    rows = [p for slot in status["slots"] for p in slot["programs"]]
    program = next((p for p in rows if p["pid"] == process.worker.pid), None)
    return program and {name: program[name] for name in ("mode", "standing", "reason", "opaque", "unsure")}


def _protection(process: PairedProcess, status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the program's column PROTECTED of status; None if it is not listed."""
    rows = (client["protected"] for client in status["clients"] if client["pid"] == process.worker.pid)
    found: Mapping[str, Any] | None = next(rows, None)
    return found


def process_data(process: PairedProcess, *, by_device: bool) -> dict[str, Any]:
    side = asdict(process.side())
    memory = process.memory if by_device else process.process_memory
    extra = {
        "device_memory": process.memory,
        "process_memory": process.process_memory,
        "cores": process.cores,
    }
    return {**side, "memory": memory, **extra}


def entries(group: Group, modes: Sequence[str], *, bars: bool) -> list[dict[str, Any]]:
    """Return the report's entries of one program, one for each mode."""
    found = []
    for mode in modes:
        entry: dict[str, Any] = {
            "program": group.work,
            "mode": mode,
            "not_run": group.missing_package,
            **group.facts,
        }
        sides = {
            "plain": group.processes["plain"],
            "again": group.processes["again"],
            "proxied": group.processes[mode],
        }
        # By the memory of the whole device where that was known each time; else by the process's own.
        by_device = all(process.memory is not None for process in sides.values())
        entry |= {name: process_data(process, by_device=by_device) for name, process in sides.items()}
        if group.rounds.within:
            entry["within"] = sides["proxied"].within_data()
        found.append(judged(entry, bars=bars))
    return found


def choose_cores(wanted: int) -> list[int]:
    """Return the last cores that this process may use: the first ones serve interrupts. 0 wanted: [].

    Raises UsageError for too few cores, UnsupportedError without taskset (util-linux).
    """
    allowed = sorted(os.sched_getaffinity(0))
    if wanted > len(allowed):
        raise UsageError(f"--cores {wanted}: only {len(allowed)} are to be had", remedy="give fewer, or none")
    if wanted and shutil.which("taskset") is None:
        raise UnsupportedError("--cores needs taskset, which is not here", remedy="apt install util-linux")
    return allowed[len(allowed) - wanted :]


def wait_for_standby(rig: Rig) -> None:
    """Wait for the standby domain: its memory must not count as a program's."""
    if rig.mpsd.until_standby(STANDBY_S) is None:
        rig.note(no_standby=True)


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
    """Run all programs, one after another, each under the deadline. The rig's daemon has the vault on."""
    # An idle client that stays: the cost of a server's first client belongs to no pair.
    rig.spawn("anchor", "idlers", "--clients", "1").require("ready", timeout=UP_S)
    wait_for_standby(rig)
    # All start at once and wait for their turn, so that the time of imports is spent once.
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
    """Run a group; end what has not finished in time, and say so."""
    watchdog = threading.Timer(deadline_s, group.end)
    watchdog.daemon = True
    watchdog.start()
    try:
        group.run(clock() + ROUNDS_SHARE * deadline_s)
    finally:
        watchdog.cancel()
        group.end()
