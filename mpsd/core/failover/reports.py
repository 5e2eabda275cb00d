"""Reports of fail-over participants about themselves (mpsd/docs/proxy-failover.md), and one observation of
other clients."""

from __future__ import annotations

from dataclasses import dataclass

from mpsd.base.model import ExceptionOwner, FailoverMode, ProcessInstance, Reclaimable
from mpsd.core.failover.participants import Excess, FailoverRecord, SavingCost, SnapshotLimit


@dataclass(frozen=True, slots=True)
class MemberCame:
    """A program said HELLO.

    `generation`: of the standby domain in which it lives by now; 0: its first context. `fences`: it accepts
    the daemon's message that its old domain writes no more. `gives`: it can be asked to release memory that
    it keeps for fail-over only. `budgets`: it keeps the budgets of mode exact. `switches`: it can be told to
    leave fail-over for good.
    """

    process: ProcessInstance
    uid: int
    mode: FailoverMode
    generation: int = 0
    fences: bool = False
    gives: bool = False
    budgets: bool = False
    switches: bool = False


@dataclass(frozen=True, slots=True)
class MemberRestored:
    """A participant known to an earlier daemon, which has not connected again yet.

    `limit`, `excess`: as of a Participant.
    """

    process: ProcessInstance
    uid: int
    mode: FailoverMode
    home: str
    left_behind: str = ""
    limit: SnapshotLimit | None = None
    excess: Excess | None = None


@dataclass(frozen=True, slots=True)
class FailoverRestored:
    """A record of an earlier daemon. `gone`: its programs that have ended."""

    record: FailoverRecord
    gone: frozenset[ProcessInstance] = frozenset()


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """The connection of a participant has ended."""

    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class MemberReady:
    """A standby context is ready. `after_ns`: time to make it; `bytes`: its GPU memory."""

    process: ProcessInstance
    generation: int
    after_ns: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemberUnready:
    """A standby context could not be made. `for_memory`: for lack of memory, so a later attempt may
    succeed."""

    process: ProcessInstance
    generation: int
    reason: str
    for_memory: bool = False


@dataclass(frozen=True, slots=True)
class MemberOpaque:
    """The program made an object that cannot be carried over. `name`: the driver function that made it."""

    process: ProcessInstance
    name: str


@dataclass(frozen=True, slots=True)
class MemberUnsure:
    """The program made a call that cannot be rolled back or replayed."""

    process: ProcessInstance
    name: str


@dataclass(frozen=True, slots=True)
class MemberWantsMemory:
    """An allocation (`number`) of `wanted` bytes would fail. `free`: free bytes, as the program reports."""

    process: ProcessInstance
    wanted: int
    free: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class MemberReleasedMemory:
    """The program released this many bytes of the kind that it was asked for."""

    process: ProcessInstance
    bytes: int
    spared: Reclaimable


@dataclass(frozen=True, slots=True)
class MemberHolds:
    """The program's snapshot buffers take `held` bytes; it wants them to take `wants` (0: no more)."""

    process: ProcessInstance
    held: int
    wants: int = 0


@dataclass(frozen=True, slots=True)
class MemberCost:
    """The program reports the cost of saving in the last period."""

    process: ProcessInstance
    cost: SavingCost


@dataclass(frozen=True, slots=True)
class MemberExposed:
    """The program has work in flight that cannot be rolled back, and `why`; None: no more."""

    process: ProcessInstance
    why: str | None


@dataclass(frozen=True, slots=True)
class MemberExceeds:
    """The program has left fail-over for good, because it exceeds a budget."""

    process: ProcessInstance
    excess: Excess


@dataclass(frozen=True, slots=True)
class MemberSwitchedOff:
    """A user has switched the program's fail-over off: `mpsd-ctl protect PID guard`."""

    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class MemberError:
    """The program reports an error of its own context."""

    process: ProcessInstance
    code: int


@dataclass(frozen=True, slots=True)
class MemberMoved:
    """The program continues in the standby domain of this generation. Times since it was told.

    `missing`: why work in flight may be missing or half done; empty if none is. `waits`: it holds its calls
    for its turn, and the `replayed` operations are replayed then; they took `takes_ns` before (0: not
    reported). `new_s`: time from the first launch of its newest kernel until its calls were held [s]; None:
    not reported.
    """

    process: ProcessInstance
    generation: int
    held_ns: int = 0
    fence_ns: int = 0
    first_ns: int = 0
    restored: int = 0
    replayed: int = 0
    missing: str = ""
    waits: bool = False
    takes_ns: int = 0
    new_s: float | None = None


@dataclass(frozen=True, slots=True)
class MemberFoundCode:
    """The program's finding about the code that raised the exception. MemberMoved follows.

    `goes_on`: it will replay as soon as it has moved (Move.may_go_on).
    """

    process: ProcessInstance
    generation: int
    whose: ExceptionOwner
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class ClientQueried:
    """mpsd saw the driver of this client, which takes no part in the fail-over, query the SMs for the error.

    `domain`: the faulted domain.
    """

    domain: str
    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class KernelLogFollowed:
    """From now on mpsd reads each line of the kernel log, or it does not (`is_read`)."""

    is_read: bool


@dataclass(frozen=True, slots=True)
class MemberPages:
    """Pages [start, end) that an abandoned driver instance shared with the GPU; start = end: none.

    `anew`: pages reported before are void.
    """

    process: ProcessInstance
    anew: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class MemberDone:
    """The program's turn in the domain of this generation is over, or it gave the turn up (`missing`).

    `runs_on`: its replay has not ended yet; a further report follows when it has.
    """

    process: ProcessInstance
    generation: int
    restored: int = 0
    replayed: int = 0
    missing: str = ""
    runs_on: bool = False


@dataclass(frozen=True, slots=True)
class MemberStayed:
    """The program did not move; `reason` says why."""

    process: ProcessInstance
    generation: int
    reason: str


MemberEvent = (
    MemberCame
    | MemberRestored
    | FailoverRestored
    | MemberLeft
    | MemberReady
    | MemberUnready
    | MemberOpaque
    | MemberUnsure
    | MemberWantsMemory
    | MemberReleasedMemory
    | MemberHolds
    | MemberCost
    | MemberExposed
    | MemberExceeds
    | MemberSwitchedOff
    | MemberError
    | MemberMoved
    | MemberFoundCode
    | ClientQueried
    | KernelLogFollowed
    | MemberPages
    | MemberDone
    | MemberStayed
)
