"""Faults of all kinds beside programs that were started as users start them, without a configuration.

Half of the programs start with mpsd-run, half with the variables of `mpsd-ctl env`. Before each fault the
harness reads the protection of each program from status. After it, each program's results are compared with
those of a run without faults. A program that was lost starts again before the next fault.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from faultinject.campaigns.defaults.outcomes import DefaultFault, Fate, ProgramFate, pause_ms
from faultinject.campaigns.failover.programrounds import SEED, ProgramRounds
from faultinject.campaigns.failover.rounds import PARTS, UP_S
from faultinject.programs.basics.messages import clock
from faultinject.registry import kinds
from faultinject.rig.libraries import MPSD_RUN, Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import DeadlineError, MpsdError

EVAL: Sequence[str] = ("/bin/sh", "-c", 'e=$("$0" -m mpsd.ctl env) && eval "$e" && exec "$@"', sys.executable)
"""The command that starts a program with the variables of `mpsd-ctl env`, and becomes it."""
JOINS: Mapping[str, Sequence[str]] = {"mpsd-run": MPSD_RUN, "mpsd-ctl env": EVAL}

FIRST_STEPS = 6
BLOCK_S = 1.0
MAX_STEPS = 8000
MAX_LIVES = 4
"""Starts of one program. Large programs take long to start, and those without fail-over are often lost."""
MOMENT = (0.1, 0.5)
"""The fault comes in this part of a block."""
PROTECTED_S = 10.0
"""How long a program that had the level of the node may take to get it again."""
OUTCOME_S = 5.0
QUIET_S = 0.3
"""A record is complete, and late Xids have come, this long after a fault."""


@dataclass(slots=True)
class Program:
    """A program of the run. `blocks`: of its present process. `awaited`: it had the level of the node."""

    work: str
    join: str
    worker: Worker
    digests: list[str] = field(default_factory=list)
    blocks: int = 0
    usual_s: float = 0.0
    awaited: bool = True
    lives: int = 1
    lost: bool = False


class DefaultRounds(ProgramRounds):
    """As ProgramRounds, with programs that may be lost. `reference`: the digests by program and block."""

    first_steps = FIRST_STEPS

    def __init__(
        self,
        rig: Rig,
        libraries: Libraries,
        tell: Callable[[str], None],
        works: Sequence[str],
    ) -> None:
        super().__init__(rig, libraries, tell, works)
        self.programs: list[Program] = []
        self.reference: dict[str, list[str]] = {}
        self._steps: dict[str, int] = {}
        self._moment = random.Random(SEED)

    # ---- before the faults

    def record_reference(self, blocks: int) -> None:
        """Run all programs without the proxy and without faults, and keep the digest after each block.

        Raises DeadlineError, UnsupportedError.
        """
        environment = self._libraries.plain(self._rig.mpsd.client_environment())
        workers = {work: self._spawn(work, "alone", environment) for work in self._works}
        for work, worker in workers.items():
            self.reference[work] = []
            times = self._begin_program(work, worker, self.reference[work])
            step_s = statistics.median(times) if times else BLOCK_S
            self._steps[work] = max(2, min(MAX_STEPS, round(BLOCK_S / max(step_s, 1e-6))))
        for block in range(blocks):
            for work, worker in workers.items():
                worker.tell("block", steps=self._steps[work])
                worker.tell("finish")
            for work, worker in workers.items():
                self.reference[work].append(self._digest(worker, block))
        for worker in workers.values():
            worker.tell("stop")
            worker.require("closed", timeout=UP_S)
        self._tell(f"without faults: {blocks} blocks of {len(workers)} programs")

    @staticmethod
    def _digest(worker: Worker, number: int) -> str:
        """Return the digest after this block. Raises DeadlineError."""
        message = worker.require("finished", timeout=UP_S, after=number)
        return str(message.data["digest"])

    def start(self) -> None:
        """Start the programs, and wait until each has the level of the node. Raises DeadlineError."""
        for work, join in self.joins(self._works).items():
            self.programs.append(Program(work, join, self._join(work, join, 1)))
        for program in self.programs:
            self._begin(program)
            self._tell(f"{program.work}: at work ({program.join})")
        self._start_bystander()
        self._await_protected()

    @staticmethod
    def joins(works: Sequence[str]) -> dict[str, str]:
        """Return how each program is started: in turn."""
        return {work: list(JOINS)[number % len(JOINS)] for number, work in enumerate(works)}

    def _environment(self) -> dict[str, str]:
        service = self._rig.mpsd
        return self._libraries.joined(service.environment, service.socket)

    def _join(self, work: str, join: str, life: int) -> Worker:
        return self._spawn(work, f"life-{life}", self._environment(), JOINS[join])

    def _begin(self, program: Program) -> None:
        times = self._begin_program(program.work, program.worker, program.digests)
        program.usual_s = statistics.median(times) if times else 0.0

    # ---- protection

    def levels(self) -> dict[int, Mapping[str, Any]]:
        """Return the column PROTECTED of status, by pid."""
        return _levels(self._rig.mpsd.status())

    def node_level(self) -> tuple[str, str]:
        """Return the level of the node, and why it is not higher."""
        found = self._rig.mpsd.status()["protection"]
        return str(found["level"]), str(found["why"])

    def _await_protected(self) -> None:
        """Wait for programs that had the level of the node. One that does not get it is not awaited again."""
        end, level = clock() + PROTECTED_S, self.node_level()[0]
        while clock() < end:
            levels = self.levels()
            behind = [p for p in self._running() if _level(levels, p) != level]
            for program in self.programs:
                program.awaited = program.awaited or program not in behind
            if not any(program.awaited for program in behind):
                return
            time.sleep(QUIET_S)
        for program in behind:
            program.awaited = False

    def _running(self) -> list[Program]:
        return [program for program in self.programs if program.worker.running]

    # ---- one fault

    def inject(self, kind: str, deadline_s: float) -> DefaultFault:
        """Inject one fault. What did not happen in time is the problem of the fault.

        A program that has not finished its block this long after the fault is lost.
        """
        fault, offender = DefaultFault(kind), None
        try:
            restarted = self._restart_lost()
            offender = None if kind in PARTS else self._start_offender(kind)
            for program in restarted:
                self._begin(program)
            if offender is not None:
                offender.require("ready", timeout=UP_S)
            self._await_protected()
            at = self._fault_in_block(fault, offender)
            self._collect_blocks(fault, at, at + deadline_s)
            self._collect_offender(fault, offender)
            self._collect_records(fault)
            fault.gpu_stall, wrong = self._bystander.stall(at)
            if wrong:
                fault.problem = "the bystander saw wrong results"
        except (DeadlineError, MpsdError) as error:
            fault.problem = str(error)
        finally:
            if offender is not None:
                offender.end()
        self._tell(f"{kind}: {fault.problem or _summary(fault)}")
        return fault

    def _restart_lost(self) -> list[Program]:
        """Start the programs that were lost again, each MAX_LIVES times in all. Return them.

        Raises DeadlineError for one that ended without a fault.
        """
        ended = [program for program in self.programs if not program.worker.running]
        for program in ended:
            if not program.lost:
                raise DeadlineError(f"between two faults {self._describe_lost(program.worker)}")
        lost = [program for program in ended if program.lives < MAX_LIVES]
        for program in lost:
            program.lives += 1
            program.lost = False
            program.worker.end()
            program.worker = self._join(program.work, program.join, program.lives)
            program.digests, program.blocks = [], 0
        return lost

    def _start_offender(self, kind: str) -> Worker:
        """Start a neighbour: for zone kinds under mpsd-run, else without the proxy."""
        name = f"offender-{kind}"
        if kind not in kinds.ZONE:
            return self._rig.spawn(name, "offender", kind)
        return self._rig.spawn(
            name,
            "offender",
            kind,
            "--variant",
            "one",
            environment=self._environment(),
            through=MPSD_RUN,
            device="standin" if self._libraries.driver else None,
        )

    def _fault_in_block(self, fault: DefaultFault, offender: Worker | None) -> float:
        """Let all programs work, read their protection, and let the fault happen. Return when."""
        server = self._server_pid() if fault.kind == "server_death" else None
        self._bystander.stall()
        at_work = self._running()
        for program in at_work:
            program.worker.tell("block", steps=self._steps[program.work])
        for program in at_work:
            if program.worker.wait("working", timeout=UP_S, after=program.blocks) is None:
                raise DeadlineError(self._describe_lost(program.worker))
        time.sleep(self._moment.uniform(*MOMENT) * BLOCK_S)
        status = self._rig.mpsd.status()
        levels, budgets = _levels(status), _budgets(status)
        for program in self.programs:
            seen = levels.get(program.worker.pid, {})
            fate = Fate.KEPT if program in at_work else Fate.NOT_RUNNING
            found = ProgramFate(program.work, seen.get("level", ""), seen.get("why", ""), fate)
            found.held, found.limit, found.cost = budgets.get(program.worker.pid, (None, None, None))
            fault.programs.append(found)
        if offender is not None:
            return offender.tell("go")
        assert server is not None
        return self._kill_server(server)

    def _server_pid(self) -> int:
        """Return the MPS server of the domain in which most programs work. Raises DeadlineError."""
        status = self._rig.mpsd.status()
        pids = {program.worker.pid for program in self._running()}
        active = {d["id"]: d["server_pid"] for d in status["domains"] if d["role"] == "active"}
        homes = [c["domain"] for c in status["clients"] if c["pid"] in pids and c["domain"] in active]
        if not homes:
            raise DeadlineError("no program works in an active domain")
        return int(active[statistics.mode(homes)])

    def _collect_blocks(self, fault: DefaultFault, at: float, end: float) -> None:
        for program, found in zip(self.programs, fault.programs, strict=True):
            if found.fate is Fate.NOT_RUNNING:
                continue
            timeout = max(1.0, end - clock())
            message = program.worker.wait("block", timeout=timeout, after=program.blocks)
            if message is None:
                found.fate = Fate.LOST
                found.error = self._describe_lost(program.worker)
                program.lost = True
                program.worker.end()
                continue
            times, began = message.data["times"], message.data["began"]
            found.idle = not began <= at <= began + sum(times)
            found.pause = pause_ms(times, statistics.median_low(times))
            program.blocks += 1
            found.fate = self._compare(program)
            program.lost = found.fate is not Fate.KEPT

    def _compare(self, program: Program) -> Fate:
        """Compare the results so far with those without faults. A wrong program starts again."""
        program.worker.tell("finish")
        try:
            program.digests.append(self._digest(program.worker, program.blocks - 1))
        except DeadlineError:
            program.worker.end()
            return Fate.LOST
        if program.digests == self.reference[program.work][: program.blocks + 1]:
            return Fate.KEPT
        program.worker.end()
        return Fate.WRONG

    @staticmethod
    def _collect_offender(fault: DefaultFault, offender: Worker | None) -> None:
        outcome = offender.wait("outcome", "gone", timeout=OUTCOME_S) if offender is not None else None
        if outcome is not None and outcome.what == "outcome":
            fault.offender_code = int(outcome.data["code"])

    def _collect_records(self, fault: DefaultFault) -> None:
        """Take what mpsd recorded. Raises DeadlineError for a fail-over that does not end."""
        time.sleep(QUIET_S)
        seen = self._seen_failovers
        self._await_settled()
        records = self._failovers_since(seen + 1)
        fault.moves = len(records)
        moved = {c["pid"] for record in records for c in record["clients"] if c["outcome"] == "moved"}
        new = self._new_faults()
        fault.classes = sorted({str(record["fault_class"]) for record in new})
        named = {record["offender"]["pid"] for record in new if record["offender"]}
        for program, found in zip(self.programs, fault.programs, strict=True):
            if program.worker.pid in named:
                fault.innocent.append(program.work)
            if found.fate is Fate.KEPT and program.worker.pid in moved:
                found.fate = Fate.MOVED

    def end(self) -> str:
        """End the programs; return what mpsd holds against one that ended. Raises DeadlineError."""
        self._servers = [program.worker for program in self._running()]
        for worker in self._servers:
            worker.tell("stop")
        for worker in self._servers:
            worker.require("closed", timeout=UP_S)
        self._bystander.end()
        return self._blame_after_end()


def _levels(status: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    found: dict[int, Mapping[str, Any]] = {}
    for client in status["clients"]:
        # The row of a standby context says the same as that of the program's context.
        found.setdefault(client["pid"], client["protected"])
    return found


def _budgets(status: Mapping[str, Any]) -> dict[int, tuple[int | None, int | None, float | None]]:
    """Return the snapshot buffers, their limit and the share of saving's time, by pid."""
    programs = [program for slot in status["slots"] for program in slot["programs"]]
    return {p["pid"]: (p["snapshot_bytes"], p["snapshot_limit_bytes"], p["saving_share"]) for p in programs}


def _level(levels: Mapping[int, Mapping[str, Any]], program: Program) -> str:
    return str(levels.get(program.worker.pid, {}).get("level", ""))


def _summary(fault: DefaultFault) -> str:
    return ", ".join(f"{p.program} ({p.called or 'not listed'}) {p.fate}" for p in fault.programs)
