"""Values of fail-over: participants, their turns, and the records of their moves.

A standby domain is the slot's second domain, in which participants hold a second context. Its generation is
the number of the domain; numbers are never reused, not after a restart either. A participant is a process
that has said HELLO. Its home is the domain in which its work runs. Its context in any other domain is idle: a
standby context, or one that it has left. No idle context counts as work in that domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mpsd.base.model import (
    ExceptionOwner,
    FailoverMode,
    ProcessInstance,
    Reclaimable,
    ReplayMode,
    SnapshotBudget,
)

OPAQUE_KEPT = 64
NOT_CONNECTED = "the client is not connected"
"""Why a participant is not told to move."""


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
class SnapshotLimit:
    """The GPU memory [bytes] that a participant's snapshot buffers may take, of the pools of these GPUs."""

    bytes: int
    gpus: frozenset[str]


@dataclass(frozen=True, slots=True)
class SavingCost:
    """The cost of mode exact, as a participant reports it.

    `bytes`: saved per epoch. `added_ns`: time that saving added to epochs that took `epoch_ns` without it.
    """

    bytes: int
    added_ns: int
    epoch_ns: int

    @property
    def share(self) -> float | None:
        """Return the added time as a share of the time without it; None if there was no work."""
        return self.added_ns / self.epoch_ns if self.epoch_ns else None


@dataclass(frozen=True, slots=True)
class Excess:
    """The budget that a participant exceeds, so that it has left fail-over for good; or it was switched off.

    `needs`, `has`: bytes for MEMORY, thousandths of an epoch for TIME. `listable`: a list of read-only
    parameters may bring it under the budget.
    """

    budget: SnapshotBudget
    needs: int
    has: int
    listable: bool = False

    @property
    def why(self) -> str:
        if self.budget is SnapshotBudget.BY_HAND:
            return "switched off by hand"
        if self.budget is SnapshotBudget.TIME:
            return f"saving would slow it by {_percent(self.needs)} %, the budget is {_percent(self.has)} %"
        return f"snapshot budget: {_need(self.needs, self.has)}"


SWITCHED_OFF = Excess(SnapshotBudget.BY_HAND, 0, 0)


def _percent(thousandths: int) -> str:
    return f"{thousandths / 10:.0f}" if thousandths >= 100 else f"{thousandths / 10:.1f}".removesuffix(".0")


def _need(needs: int, has: int) -> str:
    """Return what is needed, rounded up, and what there is, rounded down, in one unit."""
    shift, unit = next(((s, u) for s, u in ((30, "GiB"), (20, "MiB")) if needs >> s), (10, "KiB"))
    tenths = -(-needs * 10 >> shift), has * 10 >> shift
    shown = [f"{t / 10:.1f}".removesuffix(".0") for t in tenths]
    return f"needs {shown[0]} {unit}, has {shown[1]}"


@dataclass(frozen=True, slots=True)
class Participant:
    """A fail-over participant.

    Connection and standby context:
      - `connected`: the participant can be told something.
      - `heard`: it has said HELLO to this mpsd, so its home is the present one.
      - `reason`: why it is not ready, or was left behind.
      - `fences`: it accepts the daemon's message that its old domain writes no more.
      - `switches`: it accepts the daemon's order to leave fail-over for good.
      - `ready_ms`, `bytes`: cost of its standby context, as it reports.
      - `opaque`: objects that it made and that cannot be carried over.
      - `unsure`: calls that it made and that cannot be rolled back.
      - `exposed`: why its work in flight cannot be rolled back, now or a moment ago. None: it can.

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
      - `goes_on`: it denies the fault, and replays as soon as it has moved, without GrantTurn.
      - `named`: it is the offender by that finding, so it waits for its end.
      - `among`: the offender is certain to be among the participants that move.
      - `runs_on`: its turn is over, and its replay may still run.
      - `suspected`: it was a suspect (suspects.py) and has not replayed since.
      - `doubts`: faults that came while it replayed beside other clients, since its last clean replay.
      - `untried`: there was no trial domain for it in time, so it replays in its turn after all.
      - `owed`: it has not been told of a turn since it was last told to move.

    Memory (memory.py):
      - `gives`: it can be asked to release memory that it keeps for fail-over only.
      - `shorts`: the allocations for which it lately asked for memory, newest last.
      - `yields`: when it was asked for its standby context for clients that cannot ask [monotonic s].

    Budgets (budgets.py):
      - `budgets`: it keeps the budgets of mode exact.
      - `held`: bytes in its snapshot buffers; None if it has not said so since it connected again.
      - `limit`: the most that they may take; None before its GPUs are known.
      - `cost`: what saving costs it, as it reported last.
      - `excess`: the budget that it exceeds: it takes no part any more, and runs on.
      - `capped`: the GPU with too many standby contexts for one more.
      - `placed`: it counts among the standby contexts of its GPUs, between a move and its next one too.
    """

    process: ProcessInstance
    uid: int
    mode: FailoverMode
    connected: bool = True
    heard: bool = True
    home: str | None = None
    standing: Standing = Standing.WAITING
    generation: int = 0
    reason: str = ""
    opaque: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()
    exposed: str | None = None
    told: tuple[float, ...] = ()
    ready_ms: float | None = None
    bytes: int = 0
    turn: Turn = Turn.NONE
    since: float = 0.0
    takes_s: float = 0.0
    gathers: bool = False
    new_s: float | None = None
    whose: ExceptionOwner = ExceptionOwner.UNKNOWN
    goes_on: bool = False
    named: bool = False
    fences: bool = False
    switches: bool = False
    among: bool = False
    again: ReplayMode = ReplayMode.LOST
    guessed: float = 0.0
    runs_on: bool = False
    suspected: bool = False
    doubts: int = 0
    untried: bool = False
    owed: bool = True
    gives: bool = False
    shorts: tuple[MemoryShortage, ...] = ()
    asked: str | None = None
    yields: float | None = None
    budgets: bool = False
    held: int | None = 0
    limit: SnapshotLimit | None = None
    cost: SavingCost | None = None
    excess: Excess | None = None
    capped: str | None = None
    placed: bool = False

    @property
    def persistent_fields(self) -> tuple[object, ...]:
        """Return the fields that a later daemon needs."""
        left = self.reason if self.standing is Standing.LEFT_BEHIND else None
        return self.mode, self.home, left, self.limit, self.excess


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
    its turn was given (or mpsd heard that it replays without), and `done_ms`, when it reported the end of its
    replay.
    `whose`: its finding about the origin of the fault. `left`: the budget for which it had left fail-over.
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
    left: SnapshotBudget | None = None


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
