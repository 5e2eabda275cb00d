"""Values of fail-over: the programs that can go on in a second domain, and what became of them when it came
to that.

A STANDBY is the slot's spare, in which willing programs hold a second context. Its GENERATION is the number
of the domain: no name is given twice, over restarts neither. A MEMBER is a process that has said HELLO; its
HOME is the domain in which its work runs. A context that it has anywhere else is idle (a standby, or one that
it has left), and counts there as nobody's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mpsd.model import Again, FailoverMode, ProcessInstance, Spared, Whose

OPAQUE_KEPT = 64


class Standing(StrEnum):
    WAITING = "no standby"
    OFFERED = "preparing"
    READY = "ready"
    UNREADY = "not ready"
    MOVING = "moving"
    LEFT_BEHIND = "left behind"


OFFERED = frozenset({Standing.OFFERED, Standing.READY, Standing.UNREADY})
"""It was told of a standby, which is its `generation`."""


class Turn(StrEnum):
    """Of a program that had work in flight when nobody knew whose work was at fault."""

    NONE = ""
    WAITS = "waits for its turn"
    HAS = "does its work again"


@dataclass(frozen=True, slots=True)
class Short:
    """An allocation that would fail: which one of the program's, how many bytes it is of, and how many the
    GPU had free by its own word. `since`: monotonic seconds of when it said so last. `asked`: who was, and
    for what; `of`: who was last, while it waits for an answer."""

    number: int
    wanted: int
    free: int
    since: float
    asked: frozenset[tuple[ProcessInstance, Spared]] = frozenset()
    of: tuple[ProcessInstance, Spared] | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """`connected`: it can be told something. `reason`: why it is not ready, or was left behind.

    `opaque`: what it has made that cannot be carried over. `unsure`: what it did that cannot be undone.
    `told`: monotonic seconds of its moves in the last minute. `ready_ms`, `bytes`: of its standby
    context, by its own word. `since`: monotonic seconds of when it began to do its work again. `takes_s`:
    what it does again in its turn took before; `gathers`: it still lets others who need less time come
    first; `new_s`: so long before its calls were held it launched a kernel for the first time; `whose`:
    what it has found of who made the fault; `named`: that this is so of itself, so it waits for its end.
    `fences`: it can be told that its old domain writes no more. `among`: whoever made the fault from
    which it moves is among those who move. `again`: what it was to do with what it had in flight, when it
    was last told to move; `guessed`: monotonic seconds of when it was last to do that AT_ONCE or began
    to; `slow`: that took longer than a turn last time. `owed`: it has not been told of a turn since then.
    `gives`: it can be asked for memory that is there for a fail-over alone; `shorts`: what it asked for
    itself lately, the last one last; `asked`: the domain that it was told last to leave without a fault;
    `yields`: monotonic seconds of when it was asked for this standby, for programs that cannot ask.
    """

    process: ProcessInstance
    uid: int
    mode: FailoverMode
    connected: bool = True
    home: str | None = None
    standing: Standing = Standing.WAITING
    generation: int = 0
    reason: str = ""
    opaque: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()
    told: tuple[float, ...] = ()
    ready_ms: float | None = None
    bytes: int = 0
    turn: Turn = Turn.NONE
    since: float = 0.0
    takes_s: float = 0.0
    gathers: bool = False
    new_s: float | None = None
    whose: Whose = Whose.UNKNOWN
    named: bool = False
    fences: bool = False
    among: bool = False
    again: Again = Again.LOST
    guessed: float = 0.0
    slow: bool = False
    owed: bool = True
    gives: bool = False
    shorts: tuple[Short, ...] = ()
    asked: str | None = None
    yields: float | None = None

    @property
    def lasting(self) -> tuple[FailoverMode, str | None, str | None]:
        """What a later daemon needs of it."""
        left = self.reason if self.standing is Standing.LEFT_BEHIND else None
        return self.mode, self.home, left


class Outcome(StrEnum):
    TOLD = "told"
    MOVED = "moved"
    STAYED = "stayed"
    SILENT = "silent"
    NOT_TOLD = "not told"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one program. Times in ms since it was told, by its own word; but when it was given its
    turn (but where it had that at once), and said that what it did again then had ended, is by the daemon's
    clock. `whose`: what it has found of who made the fault."""

    process: ProcessInstance
    uid: int
    command: str
    outcome: Outcome
    why: str = ""
    suspect: bool = False
    told_ms: float | None = None
    held_ms: float | None = None
    fence_ms: float | None = None
    first_ms: float | None = None
    turn_ms: float | None = None
    done_ms: float | None = None
    restored_bytes: int = 0
    replayed: int = 0
    whose: Whose = Whose.UNKNOWN


@dataclass(frozen=True, slots=True)
class FailoverRecord:
    """One domain that was left. `generation`: of the standby that was moved to, 0 where there was none.

    `at`: monotonic seconds; `source_ns`: the driver's own stamp of the fault, where it gave one.
    `decision_ms`: from the first sign until it was decided. `fault`: the number of the fault's record.
    """

    id: int
    at: float
    slot: str
    domain: str
    to: str | None
    generation: int
    trigger: str
    planned: bool
    fault: int | None
    decision_ms: float
    source_ns: int | None
    fates: tuple[Fate, ...]
    revision: int = 1
