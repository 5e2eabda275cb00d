"""Values of fail-over: participants, their turns, and the records of their moves.

A standby domain is the slot's second domain, in which participants hold a second context. Its generation is
the number of the domain; numbers are never reused, not after a restart either. A participant is a process
that has said HELLO. Its home is the domain in which its work runs. Its context in any other domain is idle: a
standby context, or one that it has left. No idle context counts as work in that domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mpsd.base.model import ExceptionOwner, FailoverMode, ProcessInstance, Reclaimable, ReplayMode

OPAQUE_KEPT = 64


class Standing(StrEnum):
    WAITING = "no standby"
    OFFERED = "preparing"
    READY = "ready"
    UNREADY = "not ready"
    MOVING = "moving"
    LEFT_BEHIND = "left behind"


OFFERED = frozenset({Standing.OFFERED, Standing.READY, Standing.UNREADY})
"""States of a participant that was told of a standby domain; its number is `generation`."""


class Turn(StrEnum):
    """State of a participant that had work in flight when no offender was known."""

    NONE = ""
    WAITS = "waits for its turn"
    HAS = "does its work again"


@dataclass(frozen=True, slots=True)
class MemoryShortage:
    """An allocation that would fail for lack of GPU memory.

    `number`: which allocation of the program. `wanted`, `free`: its size and the free memory of the GPU
    [bytes], as the program states them. `since`: when the program last said so [monotonic s]. `asked`: which
    participants were asked to release memory, and for what kind. `of`: the request that is unanswered.
    """

    number: int
    wanted: int
    free: int
    since: float
    asked: frozenset[tuple[ProcessInstance, Reclaimable]] = frozenset()
    of: tuple[ProcessInstance, Reclaimable] | None = None


@dataclass(frozen=True, slots=True)
class Participant:
    """A fail-over participant.

    Connection and standby context:
      - `connected`: the participant can be told something.
      - `reason`: why it is not ready, or was left behind.
      - `fences`: it accepts the daemon's message that its old domain writes no more.
      - `ready_ms`, `bytes`: cost of its standby context, as it reports.
      - `opaque`: objects that it made and that cannot be carried over.
      - `unsure`: calls that it made and that cannot be rolled back.

    Moves:
      - `told`: its moves of the last minute [monotonic s].
      - `asked`: the domain that it was last told to leave without a fault.
      - `again`: its orders for its work in flight at its last move.
      - `guessed`: when it was last told to replay AT_ONCE, or began to [monotonic s].

    Turns (serialreplay.py):
      - `since`: when its replay began [monotonic s].
      - `takes_s`: how long the work of its replay took before [s].
      - `gathers`: it still lets participants with shorter replays go first.
      - `new_s`: time from the first launch of its newest kernel until its calls were held [s].
      - `whose`: its finding about the origin of the fault.
      - `named`: it is the offender by that finding, so it waits for its end.
      - `among`: the offender is certain to be among the participants that move.
      - `slow`: its replay exceeded a turn last time.
      - `owed`: it has not been told of a turn since it was last told to move.

    Memory (memory.py):
      - `gives`: it can be asked to release memory that it keeps for fail-over only.
      - `shorts`: the allocations for which it lately asked for memory, newest last.
      - `yields`: when it was asked for its standby context for clients that cannot ask [monotonic s].
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
    whose: ExceptionOwner = ExceptionOwner.UNKNOWN
    named: bool = False
    fences: bool = False
    among: bool = False
    again: ReplayMode = ReplayMode.LOST
    guessed: float = 0.0
    slow: bool = False
    owed: bool = True
    gives: bool = False
    shorts: tuple[MemoryShortage, ...] = ()
    asked: str | None = None
    yields: float | None = None

    @property
    def persistent_fields(self) -> tuple[FailoverMode, str | None, str | None]:
        """Return the fields that a later daemon needs."""
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
class ParticipantOutcome:
    """The outcome of a fail-over for one participant.

    Times in ms since it was told to move, as it reports. Exceptions by the daemon's clock: `turn_ms`, when
    its turn was given (unless it replayed at once), and `done_ms`, when it reported the end of its replay.
    `whose`: its finding about the origin of the fault.
    """

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
    whose: ExceptionOwner = ExceptionOwner.UNKNOWN


@dataclass(frozen=True, slots=True)
class FailoverRecord:
    """One fail-over: a domain that its participants left.

    `generation`: of the standby domain, 0 if there was none. `at`: monotonic seconds. `source_ns`: the
    driver's time stamp of the fault, if it has one. `decision_ms`: from the first sign until the decision.
    `fault`: number of the fault's record.
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
    fates: tuple[ParticipantOutcome, ...]
    revision: int = 1
