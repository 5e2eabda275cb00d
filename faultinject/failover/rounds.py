"""Faults one after another beside the same servers under mpsd-run; what each cost, and what mpsd recorded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faultinject.bystander import Bystander
from faultinject.failover import kept
from faultinject.failover.outcomes import Fault, Moved, moved
from faultinject.history import clock
from faultinject.kinds import ENGINE, ENGINE_DELAY_MS, HANG
from faultinject.leftovers import descriptor_kinds, open_descriptors
from faultinject.proxy.library import MPSD_RUN, Libraries
from faultinject.rig import Rig
from faultinject.worker import Worker
from mpsd.errors import DeadlineError, MpsdError

SETTINGS = {
    "vault.enabled": "true",
    "failover.enabled": "true",
    "failover.per_minute": "1000",
    **{f"guard.{name}": "false" for name in ("low", "file", "heap", "stack")},
}
"""Without guards, so that memory faults reach everybody too. Moves are not bounded: many faults, one run."""

ONLY_WANTED = {"domains.spare": "false"}
"""No standby of a slot in which nobody wants one: the channels of one more server prolong the GPU's stall
(reports, -stall)."""

SERVERS = 3
UP_S, READY_S, FAULT_S, MOVED_S, ENDED_S = 60.0, 15.0, 20.0, 15.0, 15.0
POLL_S = 0.01
# Each question costs mpsd a millisecond, and programs wait for its words: none is asked before that is over.
QUIET_S = 0.25
DIES_AT_WORK = ("sigkill_running", "--variant", "endless")
LINGER_MS = 2000.0
"""So long mpsd waits for the end of what a dead client left before it calls that endless."""
NOT_RECORDED = f"no fail-over was recorded within {MOVED_S:.0f} s"
PARTS = ("server_death", "drain")


@dataclass(frozen=True, slots=True)
class Offenders:
    """`carried`: they are under mpsd-run too, so where nobody knows who it was they are carried over as the
    others are. `earlier`: of which kinds, and of which number, those are that are started before all others,
    and wait for their fault. `known`: what they launch then is nothing new. `lasts`: what one of them does
    harms nobody before mpsd has waited for its end."""

    carried: bool = False
    earlier: Sequence[tuple[str, int]] = ()
    known: bool = False
    lasts: bool = False


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
        self._carried = self._offenders.carried
        self._earlier: dict[tuple[str, int], Worker] = {}
        self._servers: list[Worker] = []
        self._reports: dict[str, int] = {}
        self._seen_failovers = self._seen_faults = 0

    def start(self) -> None:
        """The servers, working. Raises DeadlineError."""
        self._start_earlier()
        for number in range(SERVERS):
            options = ("--seed", str(number), *self._libraries.server_options)
            self._servers.append(self._spawn_carried(f"server-{number}", "server", *options))
        for server in self._servers:
            server.must("ready", timeout=UP_S)
        self._stand_by()

    def _start_earlier(self) -> None:
        """Raises DeadlineError."""
        self._earlier = {which: self._offender(*which) for which in self._offenders.earlier}
        for offender in self._earlier.values():
            offender.must("ready", timeout=UP_S)

    def _end_earlier(self) -> None:
        """Of those whose turn did not come."""
        for offender in self._earlier.values():
            offender.end()
        self._earlier.clear()

    def _spawn_carried(self, name: str, module: str, *arguments: str) -> Worker:
        """Under mpsd-run. On the simulated GPU its driver is the stand-in."""
        service = self._rig.mpsd
        return self._rig.spawn(
            name,
            module,
            *arguments,
            environment=self._libraries.proxied(service.environment, service.socket, vault=True),
            through=MPSD_RUN,
            device="standin" if self._libraries.driver else None,
        )

    def _stand_by(self) -> None:
        self._bystander = Bystander(self._rig)
        self._bystander.ready()

    def run(self, kind: str, faults: int, deadline_s: float) -> list[Fault]:
        """So many of one kind, as far as the time reaches."""
        end, found = clock() + deadline_s, []
        for number in range(faults):
            if clock() > end:
                found.append(Fault(kind, f"the deadline passed after {number} of {faults}"))
                break
            found.append(self._one(kind, number))
            done = "nothing came of it" if found[-1].nothing else "done"
            self._tell(f"{kind} {number + 1}/{faults}: {found[-1].problem or done}")
            if found[-1].problem:
                break
        return found

    def _one(self, kind: str, number: int) -> Fault:
        fault, offender = Fault(kind), None
        if kind in ENGINE and self._rig.node.name == "nvidia":
            fault.delay = ENGINE_DELAY_MS
        if kind in HANG:
            fault.delay = LINGER_MS
        try:
            # It comes up while the others get their standbys.
            offender = None if kind in PARTS else self._offender(kind, number)
            self._wait_until_ready(self._servers)
            self._count_descriptors(fault)
            if offender is not None:
                offender.must("ready", timeout=UP_S)
            if offender is not None and self._carried:
                self._wait_until_ready([*self._servers, offender, *self._earlier.values()])
            self._reset_reports()
            self._bystander.stall()
            at = self._begin(fault, kind, offender)
            fault.record = self._found(at)
            if fault.record is None:
                fault.nothing = self._succeeded(fault, offender)
            else:
                fault.word = kept.since(at, fault.record["time"])
            if offender is not None and self._carried and not fault.nothing:
                self._await_end(fault, offender)
            self._collect(fault, at)
            if fault.record is not None:
                if self._carried:
                    # Who had no standby yet when the offender's work faulted again is moved when it has.
                    self._wait_until_ready(self._servers)
                self._settled()
                mine = self._since(fault.record["id"])
                fault.record, fault.later = mine[0], mine[1:]
                self._suspects(fault, mine)
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
        """Of an offender that mpsd carries over: by the time that its own work has faulted once more.

        Raises DeadlineError.
        """
        fault.named, fault.carried = False, offender.pid
        # Its end may be seen before its last words.
        ended = offender.wait("outcome", timeout=MOVED_S)
        if ended is None and offender.running:
            raise DeadlineError(f"the offender goes on, {MOVED_S:.0f} s after its fault")
        fault.offender_code = ended.data.get("code") if ended else None

    def _count_descriptors(self, fault: Fault) -> None:
        try:
            most = max((descriptor_kinds(server.pid) for server in self._servers), key=_count)
            fault.descriptors = [open_descriptors(self._rig.mpsd.pid), _count(most)]
            fault.kinds = most
            fault.threads = max(len(os.listdir(f"/proc/{server.pid}/task")) for server in self._servers)
        except OSError:
            # One of them has ended: what that means is seen by others.
            return

    def _suspects(self, fault: Fault, records: Sequence[Mapping[str, Any]]) -> None:
        """Whoever was one in one of these."""
        fates = [fate for record in records for fate in record["clients"]]
        known = {fate["pid"] for fate in fates}
        suspects = {fate["pid"] for fate in fates if fate["suspect"]}
        for server, program in zip(self._servers, fault.programs, strict=False):
            program.suspect = server.pid in suspects if server.pid in known else None

    def _new_faults(self) -> list[Mapping[str, Any]]:
        """What mpsd has recorded since, in short."""
        try:
            records = self._rig.mpsd.ask(lambda c: c.faults())
        except MpsdError:
            return []
        mine = [r for r in records if r["id"] > self._seen_faults]
        self._seen_faults = max((r["id"] for r in mine), default=self._seen_faults)
        return [kept.fault(record) for record in mine]

    def _programs(self) -> Mapping[int, Mapping[str, Any]]:
        slots = self._rig.mpsd.status()["slots"]
        return {p["pid"]: {**p, "slot": slot} for slot in slots for p in slot["programs"]}

    def _wait_until_ready(self, workers: Sequence[Worker]) -> None:
        end, why = clock() + READY_S, "no answer"
        while clock() < end:
            known = self._programs()
            mine = [known.get(worker.pid) for worker in workers]
            if all(p is not None and p["standing"] == "ready" and p["slot"]["survivable"] for p in mine):
                return
            lost = next((worker for worker in workers if not worker.running), None)
            if lost is not None:
                raise DeadlineError(self._last_words(lost))
            why = "; ".join(
                "unknown"
                if p is None
                else f"{p['standing']} {p['reason']} {p['opaque']} {p['slot']['why_none']}"
                for p in mine
            )
            time.sleep(POLL_S)
        raise DeadlineError(f"not every program had a standby within {READY_S:.0f} s: {why}")

    def _offender(self, kind: str, number: int) -> Worker:
        """The one that waits, or one that is started now."""
        waiting = self._earlier.pop((kind, number), None)
        if waiting is not None:
            return waiting
        spawn = self._spawn_carried if self._carried else self._rig.spawn
        known = ("--known", "--stay") if self._offenders.known else ()
        deed = DIES_AT_WORK if kind in HANG else (kind,)
        return spawn(f"offender-{kind}-{number}", "offender", *deed, *known)

    @staticmethod
    def _offend(fault: Fault, offender: Worker) -> float:
        at = offender.tell("go")
        outcome = offender.wait("outcome", timeout=0.05)
        fault.offender_code = outcome.data.get("code") if outcome else None
        return at

    def _begin(self, fault: Fault, kind: str, offender: Worker | None) -> float:
        if offender is not None:
            return self._offend(fault, offender)
        return self._server_dies() if kind == "server_death" else self._drain()

    def _drain(self) -> float:
        at = clock()
        self._rig.mpsd.ask(lambda c: c.drain())
        self._rig.mpsd.ask(lambda c: c.undrain())
        return at

    def _server_dies(self) -> float:
        status = self._rig.mpsd.status()
        mine = {slot["active"] for slot in status["slots"] if slot["programs"]}
        pid = next((d["server_pid"] for d in status["domains"] if d["id"] in mine), None)
        if pid is None:
            raise DeadlineError("there is no MPS server")
        at = clock()
        os.kill(pid, signal.SIGKILL)
        return at

    @staticmethod
    def _succeeded(fault: Fault, offender: Worker | None) -> bool:
        """Raises DeadlineError where there was a fault, and no fail-over."""
        outcome = offender.heard("outcome") if offender is not None else None
        if outcome is not None:
            fault.offender_code = outcome.data["code"]
        if fault.offender_code != 0:
            raise DeadlineError(NOT_RECORDED)
        return True

    def _record(self, at: float) -> Mapping[str, Any]:
        """Raises DeadlineError where there is none in time."""
        record = self._found(at)
        if record is None:
            raise DeadlineError(NOT_RECORDED)
        return record

    def _found(self, at: float) -> Mapping[str, Any] | None:
        """The new fail-over's record, once every program in it has a fate; None: there is none in time.

        Raises DeadlineError where one began and did not end.
        """
        time.sleep(QUIET_S)
        end, mine = clock() + MOVED_S, list[Any]()
        while clock() < end:
            mine = self._since(self._seen_failovers + 1)
            if mine and kept.is_settled(mine[0]):
                self._seen_failovers = mine[0]["id"]
                return mine[0]
            time.sleep(QUIET_S)
        if mine:
            raise DeadlineError(f"a fail-over did not end within {MOVED_S:.0f} s")
        return None

    def _settled(self) -> None:
        """No fail-over is under way, and all that have come are seen. Raises DeadlineError."""
        end = clock() + MOVED_S
        while clock() < end:
            mine = self._since(self._seen_failovers)
            if all(map(kept.is_settled, mine)):
                self._seen_failovers = max((r["id"] for r in mine), default=self._seen_failovers)
                return
            time.sleep(POLL_S)
        raise DeadlineError(f"a fail-over did not end within {MOVED_S:.0f} s")

    def _since(self, number: int) -> list[Mapping[str, Any]]:
        """mpsd's fail-overs from this one on, oldest first, as they have become: what is done again in a
        program's turn is known when that is over."""
        records = self._rig.mpsd.ask(lambda c: c.failovers())
        return [kept.failover(r) for r in records if r["id"] >= number]

    def _reset_reports(self) -> None:
        for server in self._servers:
            self._report(server)

    def _report(self, server: Worker) -> Mapping[str, Any] | None:
        before = self._reports.get(server.name, 0)
        server.tell("report")
        said = server.wait("report", timeout=FAULT_S, after=before)
        self._reports[server.name] = before + 1
        return said.data if said else None

    def _collect(self, fault: Fault, at: float) -> None:
        for server in self._servers:
            said = self._report(server)
            if said is None:
                fault.programs.append(Moved(False, 0, 0, None, None))
                fault.problem = fault.problem or self._last_words(server)
                continue
            fault.programs.append(moved(said, at))

    def _last_words(self, server: Worker) -> str:
        error = server.heard("error")
        gone = server.heard("gone")
        silent = f"it ended with {gone.data['status']}" if gone else "it says nothing"
        said = f"{error.data['text']}, after {error.data.get('told')}" if error else silent
        return f"{server.name} is lost ({said}): {self._rig.error_text(server, 120)}"

    def end(self) -> str:
        """What mpsd has against programs that have ended, who did nothing; empty: nothing.

        Raises DeadlineError."""
        self._end_earlier()
        for server in self._servers:
            server.tell("stop")
        for server in self._servers:
            server.must("done", "gone", timeout=FAULT_S)
        self._bystander.end()
        return self._said_of_the_ended()

    def _said_of_the_ended(self) -> str:
        """Once it knows what became of their work."""
        pids, end = {server.pid for server in self._servers}, clock() + ENDED_S
        while self._is_any_known(pids):
            if clock() > end:
                return f"mpsd does not let go of programs that ended {ENDED_S:.0f} s before"
            time.sleep(POLL_S)
        named = [r for r in self._new_faults() if r["offender"] and r["offender"]["pid"] in pids]
        return "; ".join(f"mpsd blames a program that ended: {kept.words(record)}" for record in named)

    def _is_any_known(self, pids: set[int]) -> bool:
        status = self._rig.mpsd.status()
        return any(client["pid"] in pids for client in (*status["clients"], *status["dead"]))


def _is_named(faults: Sequence[Mapping[str, Any]], offender: Worker | None) -> bool:
    named = [record["offender"]["pid"] for record in faults if record["offender"]]
    return offender is not None and offender.pid in named


def _count(kinds: Mapping[str, int]) -> int:
    return sum(kinds.values())
