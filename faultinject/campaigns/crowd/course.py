"""A crowd of light clients, and traps in the domain of the fail-over participants among them.

The offender starts before the crowd is filled up, so it is in the domain to which the participants moved
last. The bystander is in another domain: its longest step is the GPU's stall. Clients that a trap ended are
replaced before the next one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from faultinject.campaigns.failover.rounds import QUIET_S, Rounds
from faultinject.registry.history import clock
from faultinject.rig.libraries import Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import DeadlineError, MpsdError
from mpsd.base.protection import ProtectionLevel

STANDBY_CONTEXTS = 12
"""The standby contexts that a GPU has at most by default. The clients beyond have the level guard."""
BATCH = 16
"""Clients that start at once."""
PROTECTED_S = 60.0
"""Clients that start again together wait for each other: for contexts in one server, and for validation."""
REPORT_S = 10.0
WORDS = "64"
PAUSE_MS = {"nvidia": "50", "simulated": "1000"}
"""Between two steps of a client. On the simulated GPU the processors do all the work."""
FAILOVER, GUARD = ProtectionLevel.FAILOVER.value, ProtectionLevel.GUARD.value


@dataclass(slots=True)
class Trap:
    """One trap beside the crowd.

    stall: of the GPU [ms]. failover, guard, other: what status called the clients right before. standby:
    standby contexts that were ready. domains: in which the clients were. lost: clients, with those that
    status had called protected by fail-over among them (`lost_protected`). wrong: clients with wrong results.
    moved: clients that failed over. reasons: why clients had no fail-over, with how many had it.
    """

    stall: float
    failover: int
    guard: int
    other: int
    standby: int
    domains: int
    lost: int
    lost_protected: int
    wrong: int
    moved: int
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Row:
    """The traps beside this many clients. refused: starts that a full server refused, and were repeated."""

    clients: int
    traps: list[Trap] = field(default_factory=list)
    refused: int = 0
    problem: str = ""


class Crowd(Rounds):
    """Servers of failover.rounds in any number. Every wait ends at the deadline `end` (of clock())."""

    def __init__(self, rig: Rig, libraries: Libraries, tell: Callable[[str], None], end: float) -> None:
        super().__init__(rig, libraries, tell)
        self._end = end
        self._started = 0
        self._refusal = ""

    def start(self) -> None:
        self._start_bystander()

    def row(self, clients: int, traps: int) -> Row:
        """Run the traps beside this many clients. What did not happen in time is the problem of the row."""
        row = Row(clients)
        try:
            for number in range(traps):
                row.traps.append(self._trap(row, f"offender-{clients}-{number}"))
                self._tell(f"{clients} clients, trap {number + 1}/{traps}: {row.traps[-1]}")
        except (DeadlineError, MpsdError) as error:
            refusal = f"; the last refused start: {self._refusal}" if row.refused else ""
            row.problem = f"{error}{refusal}"
            self._tell(f"{clients} clients: {row.problem}")
        return row

    def _left(self, most: float) -> float:
        """Return the seconds that are left, at most so many. Raises DeadlineError for none."""
        left = self._end - clock()
        if left <= 0:
            raise DeadlineError("the deadline of the campaign has passed")
        return min(most, left)

    def _trap(self, row: Row, name: str) -> Trap:
        """Raises DeadlineError."""
        offender = self._rig.spawn(name, "offender", "trap")
        try:
            offender.require("ready", timeout=self._left(30.0))
            self._fill(row)
            self._await_levels(row.clients)
            levels, reasons, standby, domains = self._protection()
            self._reset_reports()
            self._bystander.stall()
            at = offender.tell("go")
            offender.wait("outcome", "gone", timeout=self._left(10.0))
            time.sleep(QUIET_S)
            seen = self._seen_failovers
            self._await_settled()
            records = self._failovers_since(seen + 1)
            lost, wrong = self._survey()
            stall, _ = self._bystander.stall(at)
        finally:
            offender.end()
        called = list(levels.values())
        moved = {c["pid"] for record in records for c in record["clients"] if c["outcome"] == "moved"}
        return Trap(
            stall=stall,
            failover=called.count(FAILOVER),
            guard=called.count(GUARD),
            other=row.clients - called.count(FAILOVER) - called.count(GUARD),
            standby=standby,
            domains=domains,
            lost=len(lost),
            lost_protected=sum(levels.get(worker.pid) == FAILOVER for worker in lost),
            wrong=wrong,
            moved=len(moved),
            reasons=reasons,
        )

    def _fill(self, row: Row) -> None:
        """Start clients, a batch at once, until there are as many as the row says. Raises DeadlineError."""
        while missing := row.clients - len(self._servers):
            batch = [self._start_client() for _ in range(min(BATCH, missing))]
            for worker in batch:
                message = worker.wait("ready", "error", timeout=self._left(30.0))
                if message is not None and message.what == "ready":
                    self._servers.append(worker)
                    continue
                row.refused += 1
                self._refusal = self._describe_lost(worker)
                if not self._servers and row.refused > BATCH:
                    raise DeadlineError("no client starts")
                worker.end()

    def _start_client(self) -> Worker:
        self._left(0.0)
        self._started += 1
        pause_ms = PAUSE_MS[self._rig.node.name]
        options = ["--seed", str(self._started), "--words", WORDS, "--pause-ms", pause_ms]
        options += self._libraries.server_options
        return self._spawn_proxied(f"client-{self._started}", "server", *options)

    def _protection(self) -> tuple[dict[int, str], dict[str, int], int, int]:
        """Return the level of each client by pid, the count of each reason why it is not fail-over, ready
        standby contexts, and domains with clients."""
        status = self._rig.mpsd.status()
        pids = {worker.pid for worker in self._servers}
        rows = [client for client in status["clients"] if client["pid"] in pids]
        levels = {client["pid"]: str(client["protected"]["level"]) for client in rows}
        reasons = Counter({c["pid"]: str(c["protected"]["why"]) for c in rows}.values())
        del reasons[""]
        programs: list[Mapping[str, Any]] = [p for slot in status["slots"] for p in slot["programs"]]
        ready = sum(p["standing"] == "ready" for p in programs)
        targets = {d["id"] for d in status["domains"] if d["role"] == "spare"}
        return levels, dict(reasons), ready, len({client["domain"] for client in rows} - targets)

    def _await_levels(self, clients: int) -> None:
        """Wait until as many clients have fail-over as there are standby contexts, and the others guard."""
        end, wanted = clock() + self._left(PROTECTED_S), min(clients, STANDBY_CONTEXTS)
        while clock() < end:
            levels = list(self._protection()[0].values())
            if levels.count(FAILOVER) == wanted and levels.count(GUARD) == clients - wanted:
                return
            time.sleep(QUIET_S)

    def _reset_reports(self) -> None:
        self._ask_reports()

    def _ask_reports(self) -> list[tuple[Worker, Mapping[str, Any] | None]]:
        """Ask all clients at once; None for one that has ended or does not answer."""
        seen = {worker.name: worker.count("report") for worker in self._servers}
        for worker in self._servers:
            worker.tell("report")
        end = clock() + self._left(REPORT_S)
        found = []
        for worker in self._servers:
            message = worker.wait("report", timeout=max(0.1, end - clock()), after=seen[worker.name])
            found.append((worker, message.data if message else None))
        return found

    def _survey(self) -> tuple[list[Worker], int]:
        """Return the lost clients, which leave the crowd, and how many have wrong results."""
        first = self._ask_reports()
        # A client may answer before the step in which it meets its error.
        second = self._ask_reports()
        lost = [worker for worker, report in second if report is None]
        wrong = {worker.name for worker, report in (*first, *second) if report and report["wrong"]}
        for worker in lost:
            worker.end()
        self._servers = [worker for worker in self._servers if worker not in lost]
        return lost, len(wrong)

    def end(self) -> str:
        """Stop all clients. Raises DeadlineError for a bystander that does not answer."""
        for worker in self._servers:
            worker.tell("stop")
        self._bystander.end()
        end = clock() + REPORT_S
        for worker in self._servers:
            worker.wait("done", "gone", timeout=max(0.1, end - clock()))
            worker.end()
        return ""
