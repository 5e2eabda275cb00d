"""Whose turn it is: what mpsd-standby decides, and nothing of how it is done.

One process works. Another may wait in the standby domain, ready but for its turn. When the one that works
ends, or its domain is lost, it is ended for certain, and the one that waits is given its turn; where none
waits, the program is started anew. That is once nothing of the first one runs on the GPU any more; or, after
a fault, once it has said that it has let go of its memory: then it ends beside the next one. What happens
comes in by the methods; they return what is to be done, in that order. What takes time (Start, Settle, End,
LetGo) is told of later. Times are monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

STANDBY_TRIES = 3
STEADY_S = 60.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.25, 5.0


class Role(Enum):
    """What a process is told of itself when it is started."""

    FIRST = "first"
    STANDBY = "standby"
    AGAIN = "again"


class Left(Enum):
    """What a process that has ended has left on the GPU. UNKNOWN: nobody sees the end of its work."""

    NOTHING = "nothing"
    UNKNOWN = "unknown"
    WORK = "work"


@dataclass(frozen=True, slots=True)
class Start:
    role: Role


@dataclass(frozen=True, slots=True)
class End:
    """Kill it; `ended` is told in any case."""

    actor: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """Tell it to let go of its memory; `left` is told if it says that it has, `overdue` later in any case."""

    actor: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Wait until nothing of this process runs on the GPU any more; `settled` is told."""

    actor: int


@dataclass(frozen=True, slots=True)
class GiveTurn:
    actor: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Everything is over: exit with this status, which is negative for a signal."""

    status: int


@dataclass(frozen=True, slots=True)
class Say:
    """`kind` is one word for programs, `text` for people."""

    kind: str
    text: str


Action = Start | End | LetGo | Settle | GiveTurn | Leave | Say


@dataclass(slots=True)
class Actor:
    """One process of the program. `number`: its pid. `ready`: since when. `over`: why it has been ended, or
    is to be. `hears`: it can be told to let go of its memory. `told`: it has been. `left`: it says that it
    has let go, and can have none again. `ending`: it is being ended."""

    number: int
    role: Role
    domain: str
    ready: float | None = None
    over: str = ""
    hears: bool = False
    told: bool = False
    left: bool = False
    ending: bool = False


class Rota:
    """`warm`: have one wait. After `restarts` within `within_s`, by whomever, the program is taken to fail by
    itself."""

    def __init__(self, *, warm: bool, restarts: int = 5, within_s: float = 60.0) -> None:
        self._warm = warm
        self._restarts, self._within_s = restarts, within_s
        self._given: deque[float] = deque()
        self._lost = set[str]()
        self._tries = self._unready = 0
        self._wanted: Role | None = None
        # Those that have let go of their memory: not ended yet, and ended but perhaps still on the GPU.
        self._dying, self._settling = set[int](), set[int]()
        # Nobody has the turn, and whoever comes gets it.
        self._due = False
        self._status = 0
        self.working: Actor | None = None
        self.waiting: Actor | None = None
        self.stopping = False

    @property
    def pause_s(self) -> float:
        """Before a process is started anew: longer each time in a row that one ended before it was ready."""
        return min(FIRST_PAUSE_S * 2 ** (self._unready - 1), LAST_PAUSE_S) if self._unready else 0.0

    def begin(self) -> list[Action]:
        return self._start(Role.FIRST)

    def _start(self, role: Role) -> list[Action]:
        self._wanted = role
        return [Start(role)]

    def asking(self) -> None:
        """The daemon is asked where to start from here on. A domain that was lost before may be in service
        again: its server recovers once it is empty, and where nothing else was there it is used again."""
        self._lost.clear()

    def started(self, number: int, domain: str) -> list[Action]:
        """What was to be started last has been, where the daemon said when it was last asked."""
        assert self._wanted is not None
        actor, self._wanted = Actor(number, self._wanted, domain), None
        if actor.role is Role.STANDBY:
            self.waiting = actor
        else:
            self.working = actor
        if self.stopping:
            actor.over = "it is stopped"
            return [End(number)]
        if domain in self._lost:
            actor.over = "its domain was lost meanwhile"
            return [End(number)]
        return self._turn() if self._due else []

    def not_started(self, status: int = 0) -> list[Action]:
        """What was to be started has not been. `status`: what that is for the program; 0: a standby had no
        domain to wait in, and `wants_standby` is to be asked later."""
        role, self._wanted = self._wanted, None
        if self.stopping:
            return self._all_over()
        if role is not Role.STANDBY:
            return [Leave(status or 1)]
        self._tries += status != 0
        return self._turn() if self._due else []

    def ready(self, number: int, now: float) -> list[Action]:
        """It has done all that it can do before its turn."""
        for actor in (self.working, self.waiting):
            if actor is not None and actor.number == number:
                actor.ready = now
        if self.waiting is not None and self.waiting.number == number:
            return [Say("standby", f"process {number} waits in domain {self.waiting.domain}")]
        return self.wants_standby()

    def wants_standby(self) -> list[Action]:
        """Asked from time to time: one may have ended, or have had no domain to wait in. Three at a time
        would need more memory than there is, perhaps."""
        working = self.working
        fit = working is not None and working.ready is not None and not working.over and self._wanted is None
        third = self.waiting is not None or self._dying or self._settling
        if not (self._warm and fit) or third or self.stopping:
            return []
        if self._tries >= STANDBY_TRIES:
            self._warm = False
            text = f"{STANDBY_TRIES} standbys in a row did not last: restarts are cold from now on"
            return [Say("cold", text)]
        return self._start(Role.STANDBY)

    def lost(
        self, domain: str, why: str, now: float, *, work_too: bool = True, faulted: bool = False
    ) -> list[Action]:
        """The domain takes no new clients any more; `work_too`: what runs there is lost as well. `faulted`:
        by a fault, after which nothing is written any more to memory that was unmapped."""
        ends: list[Action] = []
        if work_too:
            self._lost.add(domain)
        working, waiting = self.working, self.waiting
        if waiting is not None and waiting.domain == domain and not waiting.over:
            waiting.over = why
            ends.append(End(waiting.number))
        if work_too and working is not None and working.domain == domain and not working.over:
            working.over = why
            parts = self._part(working, now) if faulted and working.hears else self._end(working)
            return [Say("lost", f"domain {domain} was lost: {why}"), *parts, *ends]
        return ends

    def hears(self, number: int) -> list[Action]:
        """It has its turn, and can be told to let go."""
        if self.working is not None and self.working.number == number:
            self.working.hears = True
        return []

    def left(self, number: int, now: float) -> list[Action]:
        """It says that it has let go of its memory, and can have none again: told to, or by itself at its
        end, where it may know of the loss before anybody tells."""
        working = self.working
        if working is None or working.number != number or working.left:
            return []
        working.left = True
        return self._go_on_beside(working, now) if working.told else []

    def overdue(self, number: int) -> list[Action]:
        """It has been told to let go, and has had its time, or says that it cannot."""
        working = self.working
        told = working is not None and working.number == number and working.told
        return self._end(working) if working is not None and told else []

    def _part(self, actor: Actor, now: float) -> list[Action]:
        actor.told = True
        return self._go_on_beside(actor, now) if actor.left else [LetGo(actor.number)]

    def _go_on_beside(self, actor: Actor, now: float) -> list[Action]:
        """It has still to end, for which nobody waits; but where nobody is to go on, its status counts."""
        end = self._end(actor)
        if self.stopping or self._is_worn_out(now):
            return end
        self._dying.add(actor.number)
        self.working, self._unready, self._due = None, 0, True
        self._given.append(now)
        return [*end, *self._turn()]

    def _end(self, actor: Actor) -> list[Action]:
        if actor.ending:
            return []
        actor.ending = True
        return [End(actor.number)]

    def ended(self, number: int, status: int, now: float) -> list[Action]:
        """`status`: as waitstatus_to_exitcode gives it, negative for a signal."""
        if self.waiting is not None and self.waiting.number == number:
            return self._waiting_ended(status, now)
        if number in self._dying:
            self._dying.discard(number)
            if self.stopping:
                return self._all_over()
            self._settling.add(number)
            return [Settle(number)]
        if self.working is None or self.working.number != number:
            return []
        self._unready = self._unready + 1 if self.working.ready is None and not self.working.over else 0
        why, self.working = self.working.over or f"it ended ({_how(status)})", None
        if self.stopping:
            return self._stop_waiting()
        if status == 0 and why.startswith("it ended"):
            self._status = 0
            return self._stop_waiting()
        return self._next(number, status, why, now)

    def _waiting_ended(self, status: int, now: float) -> list[Action]:
        assert self.waiting is not None
        gone, self.waiting = self.waiting, None
        if self.stopping:
            return self._all_over()
        if gone.over:
            return self._turn() if self._due else []
        steady = gone.ready is not None and now - gone.ready >= STEADY_S
        self._tries = 1 if steady else self._tries + 1
        said = Say("standby-ended", f"the standby ended by itself ({_how(status)})")
        return [said, *(self._turn() if self._due else [])]

    def _next(self, number: int, status: int, why: str, now: float) -> list[Action]:
        if self._is_worn_out(now):
            self._status = status or 1
            text = f"{why}; it is left after {len(self._given)} restarts within {self._within_s:g} s"
            return [Say("given-up", text), *self._stop_waiting()]
        self._given.append(now)
        return [Settle(number)]

    def _is_worn_out(self, now: float) -> bool:
        while self._given and now - self._given[0] > self._within_s:
            self._given.popleft()
        return len(self._given) >= self._restarts

    def settled(self, number: int, left: Left) -> list[Action]:
        """Where work is left nobody goes on: he would share his memory with it; unless that was let go of."""
        if number in self._settling:
            self._settling.discard(number)
            stays = "work of the process before does not end; it has no memory of the next one's"
            return [Say("stays", stays)] if left is Left.WORK and not self.stopping else []
        if self.stopping:
            return self._stop_waiting()
        if left is Left.WORK:
            self._status = 1
            text = "work of the process before does not end: whoever went on would share its memory with it"
            return [Say("given-up", text), *self._stop_waiting()]
        self._due = True
        said = "nobody sees whether work of the process before has ended: it goes on all the same"
        return [*([Say("unseen", said)] if left is Left.UNKNOWN else []), *self._turn()]

    def _turn(self) -> list[Action]:
        """To whoever waits, else to whoever is just being started, else to a new one."""
        if self.waiting is not None and not self.waiting.over:
            self.working, self.waiting, self._due = self.waiting, None, False
            self.working.ready = None
            return [GiveTurn(self.working.number)]
        if self._wanted is not None:
            return []
        if self.working is not None:
            self._due = False
            return []
        return self._start(Role.AGAIN)

    def stop(self, status: int) -> list[Action]:
        """It is to end, all of it. Idempotent."""
        if self.stopping:
            return []
        self.stopping, self._status = True, status
        ends: list[Action] = []
        for actor in (self.working, self.waiting):
            if actor is not None and not actor.over:
                actor.over = "it is stopped"
                ends.append(End(actor.number))
        return ends or self._all_over()

    def _stop_waiting(self) -> list[Action]:
        self.stopping = True
        if self.waiting is None:
            return self._all_over()
        if self.waiting.over:
            return []
        self.waiting.over = "it is not needed any more"
        return [End(self.waiting.number)]

    def _all_over(self) -> list[Action]:
        somebody = self.working or self.waiting or self._wanted or self._dying
        return [] if somebody else [Leave(self._status)]


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
