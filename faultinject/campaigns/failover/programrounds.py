"""Faults beside unmodified programs. Their results must equal those of a run without faults.

Each program does blocks of steps (programs/paired.py), and one fault comes during each block. A second
process of the same program does the same blocks without the proxy and without faults. A result is a function
of the seed and the number of steps alone, so the digests must be equal.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from faultinject.campaigns.failover.outcomes import Fault, ProgramOutcome
from faultinject.campaigns.failover.rounds import Offenders, Rounds
from faultinject.rig.libraries import MPSD_RUN, Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import DeadlineError, UnsupportedError


@dataclass(slots=True)
class Reference:
    """The results of programs without faults, a function of the seed and the steps alone.

    One run of a program is compared with those of all kinds. steps: of a block, by program. digests: by
    program and number of blocks.
    """

    steps: dict[str, int] = field(default_factory=dict)
    digests: dict[tuple[str, int], list[str]] = field(default_factory=dict)


FIRST_STEPS = 12
SEED = 1
BLOCK_S = 1.0
LONG_BLOCK_S = 4.0
"""The length of a block beside offenders with a fault that lasts.

The replay of an offender under the proxy faults up to 3 s later, and mpsd waits for the work of one that has
exited.
"""
MAX_STEPS = 8000
MIN_LATEST_S = 0.01
UP_S, MAX_BLOCK_S = 90.0, 60.0


class ProgramRounds(Rounds):
    """As Rounds, with paired programs instead of servers. `first_steps`: of a program, before its blocks."""

    first_steps = FIRST_STEPS

    def __init__(
        self,
        rig: Rig,
        libraries: Libraries,
        tell: Callable[[str], None],
        works: Sequence[str],
        offenders: Offenders | None = None,
        reference: Reference | None = None,
    ) -> None:
        super().__init__(rig, libraries, tell, offenders)
        self._works = tuple(works)
        self._reference = reference or Reference()
        self._blocks = 0
        self._latest_s = BLOCK_S / 2
        self._choose = random.Random(SEED)
        self._digests: dict[str, list[str]] = {work: [] for work in works}

    def start(self) -> None:
        """Start the programs. Raises DeadlineError, UnsupportedError."""
        self._start_earlier()
        service = self._rig.mpsd
        environment = self._libraries.proxied(service.environment, service.socket, vault=True)
        self._servers = [self._spawn(work, "moved", environment, MPSD_RUN) for work in self._works]
        block_s = LONG_BLOCK_S if self._proxied_offenders or self._offenders.long_fault else BLOCK_S
        for work, worker in zip(self._works, self._servers, strict=True):
            times = self._begin_program(work, worker, self._digests[work])
            step = statistics.median(times) if times else block_s
            steps = max(2, min(MAX_STEPS, round(block_s / max(step, 1e-6))))
            self._reference.steps.setdefault(work, steps)
            self._tell(f"{work}: at work")
        self._start_bystander()

    def _spawn(
        self, work: str, name: str, environment: Mapping[str, str], through: Sequence[str] = ()
    ) -> Worker:
        arguments = (work, "--seed", str(SEED), "--at-once")
        return self._rig.spawn(
            f"{work}-{name}", "paired", *arguments, environment=environment, through=through
        )

    def _begin_program(self, work: str, worker: Worker, digests: list[str]) -> list[float]:
        message = worker.require("imported", "lacking", timeout=UP_S)
        if message.what == "lacking":
            raise UnsupportedError(f"{work} cannot run here: {message.data['text']}", remedy="install it")
        worker.tell("begin", steps=self.first_steps)
        begun = worker.require("begun", timeout=UP_S)
        digests.append(begun.data["digest"])
        return list(begun.data["times"])

    def _trigger(self, fault: Fault, server: int | None, offender: Worker | None) -> float:
        # At another moment of the block each time, while all programs are at work.
        time.sleep(self._choose.uniform(0.1, 1) * self._latest_s)
        while any(worker.count("block") == self._blocks for worker in self._servers):
            # Steps are shorter than when their number was chosen.
            if self._latest_s < MIN_LATEST_S:
                raise DeadlineError("a program's block of steps was over each time before a fault could come")
            self._latest_s /= 2
            self._reset_reports()
            time.sleep(self._choose.uniform(0.1, 1) * self._latest_s)
        return super()._trigger(fault, server, offender)

    def _reset_reports(self) -> None:
        """Let all begin their next block once all have ended the last. Raises DeadlineError."""
        self._await_message("block", self._blocks)
        for work, worker in zip(self._works, self._servers, strict=True):
            worker.tell("block", steps=self._reference.steps[work])
        self._blocks += 1
        self._await_message("working", self._blocks)

    def _await_message(self, what: str, times: int) -> None:
        for worker in self._servers if times else ():
            if worker.wait(what, timeout=MAX_BLOCK_S, after=times - 1) is None:
                raise DeadlineError(self._describe_lost(worker))

    def _collect(self, fault: Fault, at: float) -> None:
        for worker in self._servers if self._blocks else ():
            message = worker.wait("block", timeout=MAX_BLOCK_S, after=self._blocks - 1)
            if message is None:
                fault.programs.append(ProgramOutcome(False, 0, 0, None, None))
                fault.problem = fault.problem or self._describe_lost(worker)
                continue
            times, began = message.data["times"], message.data["began"]
            if not began <= at <= began + sum(times):
                fault.problem = fault.problem or f"{worker.name} had no work when the fault came"
            longest, usual = (round(f(times) * 1e3, 3) for f in (max, statistics.median_low))
            fault.programs.append(ProgramOutcome(True, 0, len(times), longest, None, usual=usual))

    def end(self) -> str:
        self._end_earlier()
        self._end_unproxied()
        for work, worker in zip(self._works, self._servers, strict=True):
            self._finish(worker, self._digests[work])
        self._bystander.end()
        return self._blame_after_end()

    def _finish(self, worker: Worker, digests: list[str]) -> None:
        worker.tell("finish")
        digests.append(worker.require("finished", timeout=UP_S).data["digest"])
        worker.tell("stop")
        worker.require("closed", timeout=UP_S)

    def compare(self, faults: Sequence[Fault]) -> dict[str, bool]:
        """Compare with the same blocks without the proxy and without faults; return which digests are equal.

        A program with other results has seen something wrong, by the last fault at the latest. Raises
        DeadlineError.
        """
        missing = [work for work in self._works if (work, self._blocks) not in self._reference.digests]
        for work, digests in self._digests_without_faults(missing).items():
            self._reference.digests[work, self._blocks] = digests
        same = {}
        for number, work in enumerate(self._works):
            same[work] = self._reference.digests[work, self._blocks] == self._digests[work]
            if faults and not same[work] and number < len(faults[-1].programs):
                faults[-1].programs[number].wrong += 1
        return same

    def _digests_without_faults(self, works: Sequence[str]) -> dict[str, list[str]]:
        """Return the digests of these programs, which run at once. Raises DeadlineError."""
        environment = self._libraries.plain(self._rig.mpsd.client_environment())
        workers = {work: self._spawn(work, "alone", environment) for work in works}
        found: dict[str, list[str]] = {work: [] for work in works}
        for work, worker in workers.items():
            self._begin_program(work, worker, found[work])
        for block in range(self._blocks):
            for work, worker in workers.items():
                worker.tell("block", steps=self._reference.steps[work])
            for work, worker in workers.items():
                if worker.wait("block", timeout=MAX_BLOCK_S, after=block) is None:
                    raise DeadlineError(f"{work} did not end a block within {MAX_BLOCK_S:.0f} s")
        for work, worker in workers.items():
            self._finish(worker, found[work])
        return found
