"""Faults one after another beside the same servers under mpsd-run: their cost, and what mpsd recorded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faultinject.campaigns.failover import records
from faultinject.campaigns.failover.outcomes import Fault, ProgramOutcome, program_outcome
from faultinject.registry.history import clock
from faultinject.registry.kinds import ENGINE, ENGINE_DELAY_MS, HANG
from faultinject.rig.bystander import Bystander
from faultinject.rig.leftovers import descriptor_kinds, open_descriptors
from faultinject.rig.libraries import MPSD_RUN, Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import DeadlineError, MpsdError

SETTINGS = {
    "protect": '"failover"',
    "failover.per_minute": "1000",
    **{f"guard.{name}": "false" for name in ("low", "file", "heap", "stack")},
}
"""Without guards, so that memory faults reach every client. The number of moves is not limited."""

STANDBY_ON_DEMAND = {"domains.spare": "false"}
"""No standby domain for a slot without participants: the channels of one more server prolong the GPU's stall
(evidence/mechanisms-failover.md)."""

SERVERS = 3
UP_S, READY_S, FAULT_S, MOVED_S, ENDED_S = 60.0, 15.0, 20.0, 15.0, 15.0
READY_SIMULATED_S = 40.0
"""READY_S on the simulated GPU: tests share few processors."""
POLL_S = 0.01
# Each request costs mpsd a millisecond, so none is made while programs wait for its messages.
QUIET_S = 0.25
EXIT_DURING_WORK = ("sigkill_running", "--variant", "endless")
LINGER_MS = 2000.0
"""How long mpsd waits for the end of an exited client's work before it calls the work endless."""
NOT_RECORDED = f"no fail-over was recorded within {MOVED_S:.0f} s"
UNPROXIED_PAUSE_MS = "20"
"""Between two steps: light work."""
UNPROXIED_LOST_S = 5.0
PARTS = ("server_death", "drain")


@dataclass(frozen=True, slots=True)
class Offenders:
    """How the offenders run.

    proxied: under mpsd-run too; while mpsd cannot attribute the fault they fail over as well. earlier: kind
    and number of the offenders that start before all others and wait. known: their kernels are known by then.
    long_fault: their fault harms no client before mpsd has waited for its end. beside_unproxied: another
    client without the proxy is in the domain at each fault. It takes no part in the fail-over and is lost.
    """

    proxied: bool = False
    earlier: Sequence[tuple[str, int]] = ()
    known: bool = False
    long_fault: bool = False
    beside_unproxied: bool = False


class Rounds:
    """Servers in one domain, with a rig that has an mpsd."""

    def __init__(
        self,
        rig: Rig,
        libraries: Libraries,
        tell: Callable[[str], None],
        offenders: Offenders | None = None,
    ) -> None:
        self._offenders = offenders or Offenders()
        self._rig, self._libraries, self._tell = rig, libraries, tell
        self._proxied_offenders = self._offenders.proxied
        self._earlier: dict[tuple[str, int], Worker] = {}
        self._servers: list[Worker] = []
        self._unproxied: Worker | None = None
        self._unproxied_started = 0
        self._reports: dict[str, int] = {}
        self._seen_failovers = self._seen_faults = 0

    def start(self) -> None:
        """Start the servers. Raises DeadlineError."""
        self._start_earlier()
        for number in range(SERVERS):
            options = ("--seed", str(number), *self._libraries.server_options)
            self._servers.append(self._spawn_proxied(f"server-{number}", "server", *options))
        for server in self._servers:
            server.require("ready", timeout=UP_S)
        self._start_bystander()

    def _start_earlier(self) -> None:
        """Raises DeadlineError."""
        self._earlier = {which: self._take_offender(*which) for which in self._offenders.earlier}
        for offender in self._earlier.values():
            offender.require("ready", timeout=UP_S)

    def _end_earlier(self) -> None:
        """End the offenders that caused no fault."""
        for offender in self._earlier.values():
            offender.end()
        self._earlier.clear()

    def _spawn_proxied(self, name: str, module: str, *arguments: str) -> Worker:
        """Start a program under mpsd-run. On the simulated GPU its driver is the stand-in."""
        service = self._rig.mpsd
        return self._rig.spawn(
            name,
            module,
            *arguments,
            environment=self._libraries.proxied(service.environment, service.socket, vault=True),
            through=MPSD_RUN,
            device="standin" if self._libraries.driver else None,
        )

    def _start_bystander(self) -> None:
        self._bystander = Bystander(self._rig)
        self._bystander.ready()

    def run(self, kind: str, faults: int, deadline_s: float) -> list[Fault]:
        """Inject this many faults of one kind, as far as the deadline allows."""
        end, found = clock() + deadline_s, []
        for number in range(faults):
            if clock() > end:
                found.append(Fault(kind, f"the deadline passed after {number} of {faults}"))
                break
            found.append(self._inject_one(kind, number))
            done = "no effect" if found[-1].nothing else "done"
            self._tell(f"{kind} {number + 1}/{faults}: {found[-1].problem or done}")
            if found[-1].problem:
                break
        return found

    def _inject_one(self, kind: str, number: int) -> Fault:
        fault, offender = Fault(kind), None
        if kind in ENGINE and self._rig.node.name == "nvidia":
            fault.delay = ENGINE_DELAY_MS
        if kind in HANG:
            fault.delay = LINGER_MS
        try:
            self._start_unproxied()
            # It starts while the others get their standby contexts.
            offender = None if kind in PARTS else self._take_offender(kind, number)
            self._wait_until_ready(self._servers)
            self._count_descriptors(fault)
            if offender is not None:
                offender.require("ready", timeout=UP_S)
            if offender is not None and self._proxied_offenders:
                self._wait_until_ready([*self._servers, offender, *self._earlier.values()])
            self._reset_reports()
            self._bystander.stall()
            server = self._find_server() if kind == "server_death" else None
            at = self._trigger(fault, server, offender)
            fault.record = self._poll_record(at)
            if fault.record is None:
                fault.nothing = self._check_wait_succeeded(fault, offender)
            else:
                fault.word = records.since(at, fault.record["time"])
            if offender is not None and self._proxied_offenders and not fault.nothing:
                self._await_end(fault, offender)
            self._collect(fault, at)
            self._check_unproxied(fault)
            if fault.record is not None:
                if self._proxied_offenders:
                    # A program that had no standby context when the offender faulted again moves when it has
                    # one.
                    self._wait_until_ready(self._servers)
                self._await_settled()
                new_records = self._failovers_since(fault.record["id"])
                fault.record, fault.later = new_records[0], new_records[1:]
                self._mark_suspects(fault, new_records)
                self._add_moves(fault, new_records)
            fault.bystander, wrong = self._bystander.stall(at)
            if wrong:
                fault.problem = "the bystander saw wrong results"
        except (DeadlineError, MpsdError) as error:
            fault.problem = str(error)
            if not fault.programs:
                self._collect(fault, clock())
        fault.faults = self._new_faults()
        if fault.named is not None:
            fault.named = _is_named(fault.faults, offender)
        return fault

    def _await_end(self, fault: Fault, offender: Worker) -> None:
        """Wait until the replay of an offender under the proxy has faulted again.

        Raises DeadlineError.
        """
        fault.named, fault.carried = False, offender.pid
        # Its end may be seen before its last message.
        ended = offender.wait("outcome", timeout=MOVED_S)
        if ended is None and offender.running:
            raise DeadlineError(f"the offender continues, {MOVED_S:.0f} s after its fault")
        fault.offender_code = ended.data.get("code") if ended else None

    def _count_descriptors(self, fault: Fault) -> None:
        try:
            most = max((descriptor_kinds(server.pid) for server in self._servers), key=_count)
            fault.descriptors = [open_descriptors(self._rig.mpsd.pid), _count(most)]
            fault.kinds = most
            fault.threads = max(len(os.listdir(f"/proc/{server.pid}/task")) for server in self._servers)
        except OSError:
            # One of them has ended; other checks see what that means.
            return

    def _mark_suspects(self, fault: Fault, records: Sequence[Mapping[str, Any]]) -> None:
        """Mark every program that was a suspect in one of these records."""
        outcomes = [outcome for record in records for outcome in record["clients"]]
        known = {outcome["pid"] for outcome in outcomes}
        suspects = {outcome["pid"] for outcome in outcomes if outcome["suspect"]}
        for server, program in zip(self._servers, fault.programs, strict=False):
            program.suspect = server.pid in suspects if server.pid in known else None

    def _add_moves(self, fault: Fault, new_records: Sequence[Mapping[str, Any]]) -> None:
        for server, program in zip(self._servers, fault.programs, strict=False):
            program.moves = records.moves(new_records, server.pid)
            program.trial = records.trial_ms(new_records, server.pid)
        if fault.carried is not None:
            fault.trial = records.trial_ms(new_records, fault.carried)

    def _start_unproxied(self) -> None:
        """Start the client without the proxy, where the last one has ended. Raises DeadlineError.

        It is a client of the domain before the offender starts, because mpsd may take the client that was
        started last for the offender.
        """
        if not self._offenders.beside_unproxied:
            return
        if self._unproxied is not None:
            # After a planned move it is still in the domain that the programs have left.
            self._unproxied.end()
        self._unproxied_started += 1
        name = f"unproxied-{self._unproxied_started}"
        client = self._unproxied = self._rig.spawn(name, "survivor", "--pause-ms", UNPROXIED_PAUSE_MS)
        client.require("ready", timeout=UP_S)

        def attached(status: Mapping[str, Any]) -> bool:
            return any((c["pid"], c["state"]) == (client.pid, "attached") for c in status["clients"])

        if self._rig.mpsd.until(attached, UP_S) is None:
            raise DeadlineError("mpsd does not know the client without the proxy")

    def _end_unproxied(self) -> None:
        if self._unproxied is not None:
            self._unproxied.end()

    def _check_unproxied(self, fault: Fault) -> None:
        """Note whether the client without the proxy was lost; after a planned move it is not."""
        if self._unproxied is not None:
            met = self._unproxied.wait("error", "gone", timeout=UNPROXIED_LOST_S)
            fault.unproxied = met is not None

    def _new_faults(self) -> list[Mapping[str, Any]]:
        """Return what mpsd has recorded since, in short."""
        try:
            all_records = self._rig.mpsd.ask(lambda c: c.faults())
        except MpsdError:
            return []
        new = [r for r in all_records if r["id"] > self._seen_faults]
        self._seen_faults = max((r["id"] for r in new), default=self._seen_faults)
        return [records.fault(record) for record in new]

    def _programs(self) -> Mapping[int, Mapping[str, Any]]:
        slots = self._rig.mpsd.status()["slots"]
        return {p["pid"]: {**p, "slot": slot} for slot in slots for p in slot["programs"]}

    def _wait_until_ready(self, workers: Sequence[Worker]) -> None:
        limit_s = READY_SIMULATED_S if self._libraries.driver else READY_S
        end, why = clock() + limit_s, "no answer"
        while clock() < end:
            known = self._programs()
            programs = [known.get(worker.pid) for worker in workers]
            if all(p is not None and p["standing"] == "ready" and p["slot"]["survivable"] for p in programs):
                return
            lost = next((worker for worker in workers if not worker.running), None)
            if lost is not None:
                raise DeadlineError(self._describe_lost(lost))
            why = "; ".join(
                "unknown"
                if p is None
                else f"{p['standing']} {p['reason']} {p['opaque']} {p['slot']['why_none']}"
                for p in programs
            )
            time.sleep(POLL_S)
        raise DeadlineError(f"not every program had a standby within {limit_s:.0f} s: {why}")

    def _take_offender(self, kind: str, number: int) -> Worker:
        """Return the offender that waits, or start one."""
        waiting = self._earlier.pop((kind, number), None)
        if waiting is not None:
            return waiting
        spawn = self._spawn_proxied if self._proxied_offenders else self._rig.spawn
        known = ("--known", "--stay") if self._offenders.known else ()
        fault_arguments = EXIT_DURING_WORK if kind in HANG else (kind,)
        return spawn(f"offender-{kind}-{number}", "offender", *fault_arguments, *known)

    @staticmethod
    def _order_fault(fault: Fault, offender: Worker) -> float:
        at = offender.tell("go")
        outcome = offender.wait("outcome", timeout=0.05)
        fault.offender_code = outcome.data.get("code") if outcome else None
        return at

    def _trigger(self, fault: Fault, server: int | None, offender: Worker | None) -> float:
        """Let the offender fault, kill the server of this pid, or drain. Return when."""
        if offender is not None:
            return self._order_fault(fault, offender)
        return self._drain() if server is None else self._kill_server(server)

    def _drain(self) -> float:
        at = clock()
        self._rig.mpsd.ask(lambda c: c.drain())
        self._rig.mpsd.ask(lambda c: c.undrain())
        return at

    def _find_server(self) -> int:
        """Return the pid of the programs' MPS server. Raises DeadlineError."""
        status = self._rig.mpsd.status()
        active = {slot["active"] for slot in status["slots"] if slot["programs"]}
        pid = next((d["server_pid"] for d in status["domains"] if d["id"] in active), None)
        if pid is None:
            raise DeadlineError("there is no MPS server")
        return int(pid)

    @staticmethod
    def _kill_server(pid: int) -> float:
        at = clock()
        os.kill(pid, signal.SIGKILL)
        return at

    @staticmethod
    def _check_wait_succeeded(fault: Fault, offender: Worker | None) -> bool:
        """Return whether the offender's wait succeeded. Raises DeadlineError without a fail-over."""
        outcome = offender.first_message("outcome") if offender is not None else None
        if outcome is not None:
            fault.offender_code = outcome.data["code"]
        if fault.offender_code != 0:
            raise DeadlineError(NOT_RECORDED)
        return True

    def _await_record(self, at: float) -> Mapping[str, Any]:
        """Wait for the fail-over. Raises DeadlineError."""
        record = self._poll_record(at)
        if record is None:
            raise DeadlineError(NOT_RECORDED)
        return record

    def _poll_record(self, at: float) -> Mapping[str, Any] | None:
        """Return the new fail-over's record once every program in it has a fate; None without one in time.

        Raises DeadlineError for a fail-over that does not end.
        """
        time.sleep(QUIET_S)
        end, new = clock() + MOVED_S, list[Any]()
        while clock() < end:
            new = self._failovers_since(self._seen_failovers + 1)
            if new and records.is_settled(new[0]):
                self._seen_failovers = new[0]["id"]
                return new[0]
            time.sleep(QUIET_S)
        if new:
            raise DeadlineError(f"a fail-over did not end within {MOVED_S:.0f} s")
        return None

    def _await_settled(self) -> None:
        """Wait until no fail-over is in progress and all are seen. Raises DeadlineError."""
        end = clock() + MOVED_S
        while clock() < end:
            new = self._failovers_since(self._seen_failovers)
            if all(map(records.is_settled, new)):
                self._seen_failovers = max((r["id"] for r in new), default=self._seen_failovers)
                return
            time.sleep(POLL_S)
        raise DeadlineError(f"a fail-over did not end within {MOVED_S:.0f} s")

    def _failovers_since(self, number: int) -> list[Mapping[str, Any]]:
        """Return mpsd's fail-overs from this one on, oldest first.

        A record is complete when the replay in each program's turn is over."""
        all_records = self._rig.mpsd.ask(lambda c: c.failovers())
        return [records.failover(r) for r in all_records if r["id"] >= number]

    def _reset_reports(self) -> None:
        for server in self._servers:
            self._report(server)

    def _report(self, server: Worker) -> Mapping[str, Any] | None:
        before = self._reports.get(server.name, 0)
        server.tell("report")
        report = server.wait("report", timeout=FAULT_S, after=before)
        self._reports[server.name] = before + 1
        return report.data if report else None

    def _collect(self, fault: Fault, at: float) -> None:
        for server in self._servers:
            report = self._report(server)
            if report is None:
                fault.programs.append(ProgramOutcome(False, 0, 0, None, None))
                fault.problem = fault.problem or self._describe_lost(server)
                continue
            fault.programs.append(program_outcome(report, at))

    def _describe_lost(self, server: Worker) -> str:
        error = server.first_message("error")
        exit_message = server.first_message("gone")
        silent = f"it ended with {exit_message.data['status']}" if exit_message else "it says nothing"
        report = f"{error.data['text']}, after {error.data.get('told')}" if error else silent
        return f"{server.name} is lost ({report}): {self._rig.error_text(server, 120)}"

    def end(self) -> str:
        """Return what mpsd holds against innocent programs that ended; empty for nothing.

        Raises DeadlineError.
        """
        self._end_earlier()
        self._end_unproxied()
        for server in self._servers:
            server.tell("stop")
        for server in self._servers:
            server.require("done", "gone", timeout=FAULT_S)
        self._bystander.end()
        return self._blame_after_end()

    def _blame_after_end(self) -> str:
        """Wait until mpsd knows how their work ended."""
        pids, end = {server.pid for server in self._servers}, clock() + ENDED_S
        while self._is_any_known(pids):
            if clock() > end:
                return f"mpsd still holds programs that ended {ENDED_S:.0f} s before"
            time.sleep(POLL_S)
        named = [r for r in self._new_faults() if r["offender"] and r["offender"]["pid"] in pids]
        return "; ".join(f"mpsd blames a program that ended: {records.summary(record)}" for record in named)

    def _is_any_known(self, pids: set[int]) -> bool:
        status = self._rig.mpsd.status()
        return any(client["pid"] in pids for client in (*status["clients"], *status["dead"]))


def _is_named(faults: Sequence[Mapping[str, Any]], offender: Worker | None) -> bool:
    named = [record["offender"]["pid"] for record in faults if record["offender"]]
    return offender is not None and offender.pid in named


def _count(kinds: Mapping[str, int]) -> int:
    return sum(kinds.values())
