"""Faults around a death of mpsd, and bursts of faults, beside programs that are protected by fail-over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from faultinject.campaigns.failover.rounds import FAULT_S, UP_S, Rounds
from faultinject.registry.history import clock
from faultinject.rig.libraries import Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import DeadlineError, MpsdError

KINDS = ("trap", "store")
OFFSET_S = 0.3
"""mpsd is killed at most this long before or after the order to fault."""
RESTARTS_S = (0.2, 1.0)
"""How long mpsd is away, in turn."""
BURST, BURST_APART_S = 5, 0.3
SETTLE_S = 1.0
SEED = 11


@dataclass(slots=True)
class Outcome:
    """One fault, or one burst of them.

    kind: of the faults. killed_s: from the order to fault until mpsd was killed; negative: before; None: it
    was not. away_s: until mpsd was started again. faulted: offenders that met an error or were killed.
    faults: domains that programs left, as mpsd recorded; a suspect leaves another one for its trial domain.
    told: protected programs that met an error and ran on; lost, wrong: the same with those. innocent:
    programs that a record names. pause: the longest step of a program [ms].
    """

    kind: str
    killed_s: float | None = None
    away_s: float | None = None
    faulted: int = 0
    faults: int = 0
    told: int = 0
    lost: int = 0
    wrong: int = 0
    innocent: int = 0
    pause: float | None = None
    problem: str = ""
    errors: list[str] = field(default_factory=list)


class Outages(Rounds):
    """Servers of failover.rounds; a lost one is replaced. `end`: the deadline, of clock()."""

    def __init__(self, rig: Rig, libraries: Libraries, tell: Callable[[str], None], end: float) -> None:
        super().__init__(rig, libraries, tell)
        self._end = end
        self._moments = random.Random(SEED)
        self._replaced = 0

    def outage(self, number: int) -> Outcome:
        """Kill mpsd at a random moment around a fault, and start it again."""
        offset = self._moments.uniform(-OFFSET_S, OFFSET_S)
        outcome = Outcome(KINDS[number % len(KINDS)])
        outcome.killed_s = round(offset, 3)
        outcome.away_s = RESTARTS_S[number // len(KINDS) % len(RESTARTS_S)]
        offenders = [self._rig.spawn(f"offender-{number}", "offender", outcome.kind)]
        return self._run(outcome, offenders, lambda: self._kill_around(offenders[0], outcome))

    def burst(self, number: int) -> Outcome:
        """Let several offenders fault one soon after another, each in the domain that is active by then."""
        outcome = Outcome(KINDS[number % len(KINDS)])
        names = [f"offender-burst-{number}-{place}" for place in range(BURST)]
        offenders = [self._rig.spawn(name, "offender", outcome.kind, "--join-late") for name in names]
        return self._run(outcome, offenders, lambda: self._fault_in_turn(offenders))

    def _run(self, outcome: Outcome, offenders: list[Worker], act: Callable[[], float]) -> Outcome:
        try:
            self._left(0.0)
            self._replace_lost()
            self._wait_until_ready(self._servers)
            for offender in offenders:
                offender.require("ready", timeout=self._left(UP_S))
            self._reset_reports()
            at = act()
            self._collect_outcome(outcome, offenders, at)
        except (DeadlineError, MpsdError) as error:
            outcome.problem = str(error)
        finally:
            for offender in offenders:
                offender.end()
        self._tell(f"{outcome}")
        return outcome

    def _left(self, most: float) -> float:
        """Return the seconds that are left, at most so many. Raises DeadlineError for none."""
        left = self._end - clock()
        if left <= 0:
            raise DeadlineError("the deadline of the campaign has passed")
        return min(most, left)

    def _kill_around(self, offender: Worker, outcome: Outcome) -> float:
        offset, away = outcome.killed_s or 0.0, outcome.away_s or 0.0
        service = self._rig.mpsd
        if offset < 0:
            service.kill()
            killed = clock()
            time.sleep(-offset)
            at = offender.tell("go")
        else:
            at = offender.tell("go")
            time.sleep(offset)
            service.kill()
            killed = clock()
        time.sleep(max(0.0, killed + away - clock()))
        service.launch()
        service.wait_ready()
        return at

    @staticmethod
    def _fault_in_turn(offenders: list[Worker]) -> float:
        at = clock()
        for place, offender in enumerate(offenders):
            time.sleep(max(0.0, at + place * BURST_APART_S - clock()))
            offender.tell("go")
        return at

    def _collect_outcome(self, outcome: Outcome, offenders: list[Worker], at: float) -> None:
        before = self._seen_failovers
        met = [offender.wait("outcome", "gone", timeout=self._left(FAULT_S)) for offender in offenders]
        outcome.faulted = sum(m is not None and (m.what == "gone" or m.data["code"] != 0) for m in met)
        time.sleep(SETTLE_S)
        self._await_settled()
        outcome.faults = len({record["domain"] for record in self._failovers_since(before + 1)})
        self._collect_programs(outcome, at)

    def _collect_programs(self, outcome: Outcome, at: float) -> None:
        """Record what the protected programs saw since that moment, and which of them mpsd names."""
        pids = {server.pid for server in self._servers}
        for server in self._servers:
            report = self._report(server)
            if report is None:
                outcome.lost += 1
                outcome.errors.append(self._describe_lost(server))
                server.end()
                continue
            outcome.wrong += report["wrong"] > 0
            outcome.told += bool(report["told"])
            steps = [(end - start) * 1e3 for start, end in report["longest"] if end > at]
            outcome.pause = round(max([outcome.pause or 0.0, *steps]), 1)
        named = [fault["offender"]["pid"] for fault in self._new_faults() if fault["offender"]]
        outcome.innocent = sum(pid in pids for pid in named)

    def _replace_lost(self) -> None:
        lost = [server for server in self._servers if not server.running]
        for server in lost:
            self._replaced += 1
            options = ("--seed", str(100 + self._replaced), *self._libraries.server_options)
            fresh = self._spawn_proxied(f"server-again-{self._replaced}", "server", *options)
            self._servers[self._servers.index(server)] = fresh
            fresh.require("ready", timeout=self._left(UP_S))
