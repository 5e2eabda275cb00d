"""Decisions of mpsd-standby: which process has its turn, and when the next one gets it. No I/O.

One process works. A second process may wait in the standby domain, fully prepared. When the working process
ends or its domain faults, mpsd-standby ends it for certain and gives the turn to the waiting process; without
one, it starts the program again. The turn passes when nothing of the first process runs on the GPU any more.
After a fault it passes earlier: as soon as the first process reports that it has released its memory.

Methods take events and return the actions to perform, in order. Slow actions (Start, Settle, End, LetGo)
report their results through later events. Times are monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

STANDBY_TRIES = 3
STEADY_S = 60.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.25, 5.0


class Role(Enum):
    """The role of a process when it is started. AGAIN: a restart without a waiting process."""

    FIRST = "first"
    STANDBY = "standby"
    AGAIN = "again"


class RemainingWork(Enum):
    """Remains of an ended process on the GPU. UNKNOWN: the end of its work cannot be observed."""

    NOTHING = "nothing"
    UNKNOWN = "unknown"
    WORK = "work"


@dataclass(frozen=True, slots=True)
class Start:
    role: Role


@dataclass(frozen=True, slots=True)
class End:
    """Kill the process. An `ended` event always follows."""

    actor: int


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """Ask the process to release its memory. `left` follows if it has done so, `overdue` always."""

    actor: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Wait until nothing of the process runs on the GPU any more. A `settled` event follows."""

    actor: int


@dataclass(frozen=True, slots=True)
class GiveTurn:
    actor: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Exit with this status; negative for a signal."""

    status: int


@dataclass(frozen=True, slots=True)
class Say:
    """Report something: `kind` for programs, `text` for people."""

    kind: str
    text: str


Action = Start | End | ReleaseMemory | Settle | GiveTurn | Leave | Say


@dataclass(slots=True)
class ProgramProcess:
    """One process of the program. `number`: its pid. `ready`: time at which its preparation was complete.

    `end_reason`: reason for its end. `can_release`: it can release its memory on request.
    `asked_to_release`: it was asked to. `released`: it has released its memory and cannot attach more.
    `ending`: an End action was issued."""

    number: int
    role: Role
    domain: str
    ready: float | None = None
    end_reason: str = ""
    can_release: bool = False
    asked_to_release: bool = False
    released: bool = False
    ending: bool = False


class Scheduler:
    """The state machine. `warm`: keep a waiting process.

    After `restarts` restarts within `within_s` seconds the program counts as broken and is not restarted."""

    def __init__(self, *, warm: bool, restarts: int = 5, within_s: float = 60.0) -> None:
        self._warm = warm
        self._restarts, self._within_s = restarts, within_s
        self._restarted_at: deque[float] = deque()
        self._faulted_domains = set[str]()
        self._early_ends = self._unready_ends = 0
        self._starting_role: Role | None = None
        # Processes that released their memory: not ended yet, and ended but perhaps still on the GPU.
        self._ending, self._settling = set[int](), set[int]()
        # True while no process works: the next available process gets the turn.
        self._turn_due = False
        self._status = 0
        self.working: ProgramProcess | None = None
        self.waiting: ProgramProcess | None = None
        self.stopping = False

    @property
    def pause_s(self) -> float:
        """Pause [s] before a restart. Doubles for each process in a row that ended before it was ready."""
        return min(FIRST_PAUSE_S * 2 ** (self._unready_ends - 1), LAST_PAUSE_S) if self._unready_ends else 0.0

    def begin(self) -> list[Action]:
        return self._start(Role.FIRST)

    def _start(self, role: Role) -> list[Action]:
        self._starting_role = role
        return [Start(role)]

    def asking(self) -> None:
        """Forget faulted domains, because the daemon is asked for a domain now.

        A faulted domain may serve again: its server recovers once it has no clients."""
        self._faulted_domains.clear()

    def started(self, number: int, domain: str) -> list[Action]:
        """Handle the start of the process that was requested last, in the domain that the daemon named."""
        assert self._starting_role is not None
        actor, self._starting_role = ProgramProcess(number, self._starting_role, domain), None
        if actor.role is Role.STANDBY:
            self.waiting = actor
        else:
            self.working = actor
        if self.stopping:
            actor.end_reason = "mpsd-standby is stopping"
            return [End(number)]
        if domain in self._faulted_domains:
            actor.end_reason = "its domain faulted during the start"
            return [End(number)]
        return self._turn() if self._turn_due else []

    def not_started(self, status: int = 0) -> list[Action]:
        """Handle a failed start. `status`: exit status for the program.

        0: a waiting process had no domain, and the caller calls `wants_standby` again later."""
        role, self._starting_role = self._starting_role, None
        if self.stopping:
            return self._exit_when_empty()
        if role is not Role.STANDBY:
            return [Leave(status or 1)]
        self._early_ends += status != 0
        return self._turn() if self._turn_due else []

    def ready(self, number: int, now: float) -> list[Action]:
        """Handle the end of a process's preparation."""
        for actor in (self.working, self.waiting):
            if actor is not None and actor.number == number:
                actor.ready = now
        if self.waiting is not None and self.waiting.number == number:
            return [Say("standby", f"process {number} waits in domain {self.waiting.domain}")]
        return self.wants_standby()

    def wants_standby(self) -> list[Action]:
        """Return the start of a waiting process if one is missing. Called periodically.

        At most two processes exist at a time, because a third may not fit into GPU memory."""
        working = self.working
        can_start = (
            working is not None
            and working.ready is not None
            and not working.end_reason
            and self._starting_role is None
        )
        third = self.waiting is not None or self._ending or self._settling
        if not (self._warm and can_start) or third or self.stopping:
            return []
        if self._early_ends >= STANDBY_TRIES:
            self._warm = False
            text = (
                f"{STANDBY_TRIES} waiting processes in a row ended early: restarting without one from now on"
            )
            return [Say("cold", text)]
        return self._start(Role.STANDBY)

    def domain_left(
        self, domain: str, why: str, now: float, *, work_lost: bool = True, faulted: bool = False
    ) -> list[Action]:
        """Handle a domain that takes no new clients. `work_lost`: its clients' work is lost as well.

        `faulted`: the cause was a fault, after which the GPU writes nothing more to unmapped memory."""
        ends: list[Action] = []
        if work_lost:
            self._faulted_domains.add(domain)
        working, waiting = self.working, self.waiting
        if waiting is not None and waiting.domain == domain and not waiting.end_reason:
            waiting.end_reason = why
            ends.append(End(waiting.number))
        if work_lost and working is not None and working.domain == domain and not working.end_reason:
            working.end_reason = why
            parts = (
                self._request_release(working, now) if faulted and working.can_release else self._end(working)
            )
            return [Say("lost", f"domain {domain} faulted: {why}"), *parts, *ends]
        return ends

    def can_release(self, number: int) -> list[Action]:
        """Note that the working process can release its memory on request."""
        if self.working is not None and self.working.number == number:
            self.working.can_release = True
        return []

    def memory_released(self, number: int, now: float) -> list[Action]:
        """Handle a process's report that it has released its memory and cannot attach more.

        The report follows a request, or comes unasked at the end of a process that noticed the fault
        first."""
        working = self.working
        if working is None or working.number != number or working.released:
            return []
        working.released = True
        return self._pass_turn_before_end(working, now) if working.asked_to_release else []

    def release_overdue(self, number: int) -> list[Action]:
        """End a process that has not released its memory in time, or reports that it cannot."""
        working = self.working
        told = working is not None and working.number == number and working.asked_to_release
        return self._end(working) if working is not None and told else []

    def _request_release(self, actor: ProgramProcess, now: float) -> list[Action]:
        actor.asked_to_release = True
        return self._pass_turn_before_end(actor, now) if actor.released else [ReleaseMemory(actor.number)]

    def _pass_turn_before_end(self, actor: ProgramProcess, now: float) -> list[Action]:
        """End the process and pass the turn at once. Without a next process, its exit status counts."""
        end = self._end(actor)
        if self.stopping or self._has_too_many_restarts(now):
            return end
        self._ending.add(actor.number)
        self.working, self._unready_ends, self._turn_due = None, 0, True
        self._restarted_at.append(now)
        return [*end, *self._turn()]

    def _end(self, actor: ProgramProcess) -> list[Action]:
        if actor.ending:
            return []
        actor.ending = True
        return [End(actor.number)]

    def ended(self, number: int, status: int, now: float) -> list[Action]:
        """Handle the end of a process. `status`: as of waitstatus_to_exitcode, negative for a signal."""
        if self.waiting is not None and self.waiting.number == number:
            return self._waiting_ended(status, now)
        if number in self._ending:
            self._ending.discard(number)
            if self.stopping:
                return self._exit_when_empty()
            self._settling.add(number)
            return [Settle(number)]
        if self.working is None or self.working.number != number:
            return []
        self._unready_ends = (
            self._unready_ends + 1 if self.working.ready is None and not self.working.end_reason else 0
        )
        why, self.working = self.working.end_reason or f"it ended ({_how(status)})", None
        if self.stopping:
            return self._stop_waiting()
        if status == 0 and why.startswith("it ended"):
            self._status = 0
            return self._stop_waiting()
        return self._next(number, status, why, now)

    def _waiting_ended(self, status: int, now: float) -> list[Action]:
        assert self.waiting is not None
        exited, self.waiting = self.waiting, None
        if self.stopping:
            return self._exit_when_empty()
        if exited.end_reason:
            return self._turn() if self._turn_due else []
        steady = exited.ready is not None and now - exited.ready >= STEADY_S
        self._early_ends = 1 if steady else self._early_ends + 1
        message = Say("standby-ended", f"the waiting process ended early ({_how(status)})")
        return [message, *(self._turn() if self._turn_due else [])]

    def _next(self, number: int, status: int, why: str, now: float) -> list[Action]:
        if self._has_too_many_restarts(now):
            self._status = status or 1
            text = (
                f"{why}; not restarted again after {len(self._restarted_at)} restarts in {self._within_s:g} s"
            )
            return [Say("given-up", text), *self._stop_waiting()]
        self._restarted_at.append(now)
        return [Settle(number)]

    def _has_too_many_restarts(self, now: float) -> bool:
        while self._restarted_at and now - self._restarted_at[0] > self._within_s:
            self._restarted_at.popleft()
        return len(self._restarted_at) >= self._restarts

    def settled(self, number: int, remaining: RemainingWork) -> list[Action]:
        """Pass the turn, unless remaining work could write to memory that was not released."""
        if number in self._settling:
            self._settling.discard(number)
            stays = "GPU work of the previous process does not end; it has no access to the next one's memory"
            return [Say("stays", stays)] if remaining is RemainingWork.WORK and not self.stopping else []
        if self.stopping:
            return self._stop_waiting()
        if remaining is RemainingWork.WORK:
            self._status = 1
            text = (
                "GPU work of the previous process does not end and can still write to its buffers: stopping"
            )
            return [Say("given-up", text), *self._stop_waiting()]
        self._turn_due = True
        unseen = "the end of the previous process's GPU work cannot be observed: continuing without waiting"
        return [*([Say("unseen", unseen)] if remaining is RemainingWork.UNKNOWN else []), *self._turn()]

    def _turn(self) -> list[Action]:
        """Give the turn to the waiting process, else to the one being started, else to a new one."""
        if self.waiting is not None and not self.waiting.end_reason:
            self.working, self.waiting, self._turn_due = self.waiting, None, False
            self.working.ready = None
            return [GiveTurn(self.working.number)]
        if self._starting_role is not None:
            return []
        if self.working is not None:
            self._turn_due = False
            return []
        return self._start(Role.AGAIN)

    def stop(self, status: int) -> list[Action]:
        """End all processes. Idempotent."""
        if self.stopping:
            return []
        self.stopping, self._status = True, status
        ends: list[Action] = []
        for actor in (self.working, self.waiting):
            if actor is not None and not actor.end_reason:
                actor.end_reason = "mpsd-standby is stopping"
                ends.append(End(actor.number))
        return ends or self._exit_when_empty()

    def _stop_waiting(self) -> list[Action]:
        self.stopping = True
        if self.waiting is None:
            return self._exit_when_empty()
        if self.waiting.end_reason:
            return []
        self.waiting.end_reason = "the program has ended"
        return [End(self.waiting.number)]

    def _exit_when_empty(self) -> list[Action]:
        remaining = self.working or self.waiting or self._starting_role or self._ending
        return [] if remaining else [Leave(self._status)]


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
