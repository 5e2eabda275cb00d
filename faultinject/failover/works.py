"""Faults beside programs that know nothing of them: afterwards their results are those of a run without any.

Each does blocks of steps (faultinject/programs/paired.py), and during each block one fault comes. A second
process of the same program, without the proxy and without faults, does the same blocks; a result is a
function of the seed and the number of steps alone, so the digests have to be the same.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from faultinject.failover.outcomes import Fault, Moved
from faultinject.failover.rounds import Offenders, Rounds
from faultinject.proxy.library import MPSD_RUN, Libraries
from faultinject.rig import Rig
from faultinject.worker import Worker
from mpsd.errors import DeadlineError, UnsupportedError


@dataclass(slots=True)
class Calm:
    """What programs compute without faults: a function of the seed and of the steps alone, so one run of a
    program is compared with those of all kinds. `steps` of a block, by work; `digests` by work and number of
    blocks."""

    steps: dict[str, int] = field(default_factory=dict)
    digests: dict[tuple[str, int], list[str]] = field(default_factory=dict)


FIRST_STEPS = 12
SEED = 1
BLOCK_S = 1.0
LONG_BLOCK_S = 4.0
"""An offender that is carried over faults again up to 3 s later, and one that is dead is waited for; and the
programs are to be at work then."""
STEPS_MOST = 8000
LATEST_LEAST_S = 0.01
UP_S, BLOCK_MOST_S = 90.0, 60.0


class WorkRounds(Rounds):
    """As Rounds, with paired programs in place of servers."""

    def __init__(
        self,
        rig: Rig,
        libraries: Libraries,
        tell: Callable[[str], None],
        works: Sequence[str],
        offenders: Offenders | None = None,
        calm: Calm | None = None,
    ) -> None:
        super().__init__(rig, libraries, tell, offenders)
        self._works = tuple(works)
        self._calm = calm or Calm()
        self._blocks = 0
        self._latest_s = BLOCK_S / 2
        self._choose = random.Random(SEED)
        self._digests: dict[str, list[str]] = {work: [] for work in works}

    def start(self) -> None:
        """The programs, begun. Raises DeadlineError, UnsupportedError."""
        self._start_earlier()
        service = self._rig.mpsd
        environment = self._libraries.proxied(service.environment, service.socket, vault=True)
        self._servers = [self._spawn(work, "moved", environment, MPSD_RUN) for work in self._works]
        block_s = LONG_BLOCK_S if self._carried or self._offenders.lasts else BLOCK_S
        for work, worker in zip(self._works, self._servers, strict=True):
            times = self._begin_one(work, worker, self._digests[work])
            step = statistics.median(times) if times else block_s
            steps = max(2, min(STEPS_MOST, round(block_s / max(step, 1e-6))))
            self._calm.steps.setdefault(work, steps)
            self._tell(f"{work}: at work")
        self._stand_by()

    def _spawn(
        self, work: str, name: str, environment: Mapping[str, str], through: Sequence[str] = ()
    ) -> Worker:
        arguments = (work, "--seed", str(SEED), "--at-once")
        return self._rig.spawn(
            f"{work}-{name}", "paired", *arguments, environment=environment, through=through
        )

    def _begin_one(self, work: str, worker: Worker, digests: list[str]) -> list[float]:
        said = worker.must("imported", "lacking", timeout=UP_S)
        if said.what == "lacking":
            raise UnsupportedError(f"{work} cannot run here: {said.data['text']}", remedy="install it")
        worker.tell("begin", steps=FIRST_STEPS)
        begun = worker.must("begun", timeout=UP_S)
        digests.append(begun.data["digest"])
        return list(begun.data["times"])

    def _begin(self, fault: Fault, kind: str, offender: Worker | None) -> float:
        # At another moment of the block each time, while all are at work.
        time.sleep(self._choose.uniform(0.1, 1) * self._latest_s)
        while any(worker.count("block") == self._blocks for worker in self._servers):
            # Steps are shorter than they were when their number was chosen.
            if self._latest_s < LATEST_LEAST_S:
                raise DeadlineError("a program's block of steps was over each time before a fault could come")
            self._latest_s /= 2
            self._reset_reports()
            time.sleep(self._choose.uniform(0.1, 1) * self._latest_s)
        return super()._begin(fault, kind, offender)

    def _reset_reports(self) -> None:
        """All begin their next block, once all have ended the last. Raises DeadlineError."""
        self._hear("block", self._blocks)
        for work, worker in zip(self._works, self._servers, strict=True):
            worker.tell("block", steps=self._calm.steps[work])
        self._blocks += 1
        self._hear("working", self._blocks)

    def _hear(self, what: str, times: int) -> None:
        for worker in self._servers if times else ():
            if worker.wait(what, timeout=BLOCK_MOST_S, after=times - 1) is None:
                raise DeadlineError(self._last_words(worker))

    def _collect(self, fault: Fault, at: float) -> None:
        for worker in self._servers if self._blocks else ():
            said = worker.wait("block", timeout=BLOCK_MOST_S, after=self._blocks - 1)
            if said is None:
                fault.programs.append(Moved(False, 0, 0, None, None))
                fault.problem = fault.problem or self._last_words(worker)
                continue
            times, began = said.data["times"], said.data["began"]
            if not began <= at <= began + sum(times):
                fault.problem = fault.problem or f"{worker.name} was not at work when the fault came"
            longest, usual = (round(f(times) * 1e3, 3) for f in (max, statistics.median_low))
            fault.programs.append(Moved(True, 0, len(times), longest, None, usual=usual))

    def end(self) -> str:
        self._end_earlier()
        for work, worker in zip(self._works, self._servers, strict=True):
            self._finish(worker, self._digests[work])
        self._bystander.end()
        return self._said_of_the_ended()

    def _finish(self, worker: Worker, digests: list[str]) -> None:
        worker.tell("finish")
        digests.append(worker.must("finished", timeout=UP_S).data["digest"])
        worker.tell("stop")
        worker.must("closed", timeout=UP_S)

    def compare(self, faults: Sequence[Fault]) -> dict[str, bool]:
        """With the same blocks without the proxy and without faults: the works of equal digests.

        A program whose results differ has seen something wrong, by the last fault at the latest. Raises
        DeadlineError.
        """
        missing = [work for work in self._works if (work, self._blocks) not in self._calm.digests]
        for work, digests in self._alone(missing).items():
            self._calm.digests[work, self._blocks] = digests
        same = {}
        for number, work in enumerate(self._works):
            same[work] = self._calm.digests[work, self._blocks] == self._digests[work]
            if faults and not same[work] and number < len(faults[-1].programs):
                faults[-1].programs[number].wrong += 1
        return same

    def _alone(self, works: Sequence[str]) -> dict[str, list[str]]:
        """The digests of these, all at once. Raises DeadlineError."""
        environment = self._libraries.plain(self._rig.mpsd.client_environment())
        workers = {work: self._spawn(work, "alone", environment) for work in works}
        found: dict[str, list[str]] = {work: [] for work in works}
        for work, worker in workers.items():
            self._begin_one(work, worker, found[work])
        for block in range(self._blocks):
            for work, worker in workers.items():
                worker.tell("block", steps=self._calm.steps[work])
            for work, worker in workers.items():
                if worker.wait("block", timeout=BLOCK_MOST_S, after=block) is None:
                    raise DeadlineError(f"{work} did not end a block within {BLOCK_MOST_S:.0f} s")
        for work, worker in workers.items():
            self._finish(worker, found[work])
        return found
