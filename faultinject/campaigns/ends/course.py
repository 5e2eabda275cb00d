"""Programs of several sizes that fail over, end, and give their memory back; one that fails over often."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from faultinject.campaigns.failover.rounds import FAULT_S, POLL_S, QUIET_S, UP_S, Rounds
from faultinject.registry.history import clock
from faultinject.rig.leftovers import open_descriptors
from faultinject.rig.libraries import Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import DeadlineError, MpsdError

FAULT = "trap"
LATE_S = 5.0
"""After that memory is not waited for any more."""
SLACK_MIB = 16
"""Memory of the GPU is counted for the whole of it, in parts of the driver's size."""
MIB = 1 << 20


@dataclass(slots=True)
class Ended:
    """Programs that failed over and then ended together.

    mib: the sizes of the programs. moves: fail-overs of each. before: memory in use on the GPU before they
    started [MiB], after one program that had failed over and ended; left: more than that at the end [MiB].
    back_s: from the end of the last program until the memory of before; None: it did not come back.
    """

    mib: list[int]
    moves: int = 0
    before: float = 0.0
    left: float = 0.0
    back_s: float | None = None
    lost: int = 0
    wrong: int = 0
    problem: str = ""


@dataclass(slots=True)
class Sample:
    """One process after so many fail-overs. used: memory in use on the GPU [MiB]. domains: of mpsd then."""

    moves: int
    used: float
    descriptors: int
    threads: int
    daemon_descriptors: int
    domains: int


@dataclass(slots=True)
class Long:
    """One process that failed over again and again."""

    moves: int = 0
    samples: list[Sample] = field(default_factory=list)
    lost: int = 0
    wrong: int = 0
    problem: str = ""


class Ends(Rounds):
    """Servers of failover.rounds that come and go. Every wait ends at the deadline `end` (of clock())."""

    def __init__(self, rig: Rig, libraries: Libraries, tell: Callable[[str], None], end: float) -> None:
        super().__init__(rig, libraries, tell)
        self._end = end
        self._started = 0

    def start(self) -> None:
        self._start_bystander()

    def ended(self, sizes: Sequence[int], moves: int) -> Ended:
        """Start programs of these sizes [MiB], let them fail over, end them, and wait for their memory."""
        row = Ended(list(sizes))
        try:
            self._live([0], 1)
            row.before = self._settled_memory()
            row.moves, row.lost, row.wrong = self._live(sizes, moves)
            row.back_s = self._await_memory(row.before)
            row.left = round(max(0.0, self._used() - row.before), 1)
        except (DeadlineError, MpsdError) as error:
            row.problem = str(error)
            self._stop()
        self._tell(f"{len(row.mib)} programs: {row}")
        return row

    def long(self, moves: int) -> Long:
        """Let one program fail over so many times, and count after each what it holds."""
        row = Long()
        try:
            self._begin([0])
            for number in range(moves):
                self._fail_over(f"long-{number}")
                row.moves = number + 1
                row.samples.append(self._sample(row.moves))
            row.lost, row.wrong = self._stop()
        except (DeadlineError, MpsdError) as error:
            row.problem = str(error)
            self._stop()
        self._tell(f"one program, {row.moves} fail-overs: {row.samples[-1] if row.samples else row.problem}")
        return row

    # ---- parts

    def _live(self, sizes: Sequence[int], moves: int) -> tuple[int, int, int]:
        """Return faults at which all programs failed over, lost programs, and programs with wrong results."""
        self._begin(sizes)
        moved = [self._fail_over(f"{len(sizes)}-{number}") for number in range(moves)]
        return (sum(count == len(sizes) for count in moved), *self._stop())

    def _begin(self, sizes: Sequence[int]) -> None:
        for mib in sizes:
            self._started += 1
            options = ["--seed", str(self._started), *self._libraries.server_options]
            options += ["--ballast-mib", str(mib)]
            self._servers.append(self._spawn_proxied(f"server-{self._started}", "server", *options))
        for server in self._servers:
            server.require("ready", timeout=self._left(UP_S))

    def _left(self, most: float) -> float:
        """Return the seconds that are left, at most so many. Raises DeadlineError for none."""
        left = self._end - clock()
        if left <= 0:
            raise DeadlineError("the deadline of the campaign has passed")
        return min(most, left)

    def _fail_over(self, name: str) -> int:
        """Return how many programs moved. Raises DeadlineError for a fault that moves none, or a lost one."""
        self._left(0.0)
        offender = self._rig.spawn(f"offender-{name}", "offender", FAULT)
        try:
            self._wait_until_ready(self._servers)
            offender.require("ready", timeout=self._left(UP_S))
            record = self._await_record(offender.tell("go"))
            self._await_settled()
            return sum(client["outcome"] == "moved" for client in record["clients"])
        finally:
            offender.end()

    def _stop(self) -> tuple[int, int]:
        """End all programs. Return the lost ones, and those with wrong results."""
        for server in self._servers:
            server.tell("stop")
        done = [server.wait("done", "error", "gone", timeout=FAULT_S) for server in self._servers]
        lost = [m is None or m.what != "done" for m in done]
        wrong = [m is not None and m.what == "done" and m.data["wrong"] > 0 for m in done]
        for server in self._servers:
            _await_exit(server)
        self._servers = []
        return sum(lost), sum(wrong)

    def _used(self) -> float:
        return round(self._rig.node.gpu_memory_used() / MIB, 1)

    def _settled_memory(self) -> float:
        """Return the memory in use once it has not changed for a while.

        The next standby domain is warm by then: its server has memory, too. Raises DeadlineError.
        """
        if self._rig.mpsd.until_standby(self._left(UP_S)) is None:
            raise DeadlineError("mpsd has no standby domain again after a fail-over")
        before, end = self._used(), clock() + LATE_S
        while clock() < end:
            time.sleep(QUIET_S)
            if self._used() == before:
                break
            before = self._used()
        return before

    def _await_memory(self, before: float) -> float | None:
        """Return how long [s] the memory of before took to come back, None if it did not."""
        began = clock()
        while clock() - began < LATE_S:
            if self._used() <= before + SLACK_MIB:
                return round(clock() - began, 3)
            time.sleep(POLL_S)
        return None

    def _sample(self, moves: int) -> Sample:
        (server,) = self._servers
        self._wait_until_ready(self._servers)
        threads = len(os.listdir(f"/proc/{server.pid}/task"))
        own, daemon = open_descriptors(server.pid), open_descriptors(self._rig.mpsd.pid)
        domains = len(self._rig.mpsd.status()["domains"])
        return Sample(moves, self._used(), own, threads, daemon, domains)

    def end(self) -> str:
        """End what is left. Raises DeadlineError for a bystander that does not answer."""
        self._stop()
        self._bystander.end()
        return ""


def _await_exit(server: Worker) -> None:
    server.wait("gone", timeout=FAULT_S)
    server.end()
