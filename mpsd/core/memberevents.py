"""What programs that can go on in a second domain say of themselves (mpsd/failover/README.md)."""

from __future__ import annotations

from dataclasses import dataclass

from mpsd.model import FailoverMode, ProcessInstance, Spared, Whose


@dataclass(frozen=True, slots=True)
class MemberCame:
    """A program said HELLO. `generation`: of the standby in which it lives by now; 0: its first context.
    `fences`: it takes the daemon's word that its old domain writes no more; `gives`: it can be asked for
    memory that is there for a fail-over alone."""

    process: ProcessInstance
    uid: int
    mode: FailoverMode
    generation: int = 0
    fences: bool = False
    gives: bool = False


@dataclass(frozen=True, slots=True)
class MemberRestored:
    """An earlier daemon knew this member; it has not come again yet."""

    process: ProcessInstance
    uid: int
    mode: FailoverMode
    home: str
    left_behind: str = ""


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """Its connection has ended."""

    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class MemberReady:
    process: ProcessInstance
    generation: int
    after_ns: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemberUnready:
    """`for_memory`: that is why, so it may be ready later."""

    process: ProcessInstance
    generation: int
    reason: str
    for_memory: bool = False


@dataclass(frozen=True, slots=True)
class MemberOpaque:
    """It made something that cannot be carried over, by this function of the driver."""

    process: ProcessInstance
    name: str


@dataclass(frozen=True, slots=True)
class MemberUnsure:
    """It did something that cannot be undone or done again."""

    process: ProcessInstance
    name: str


@dataclass(frozen=True, slots=True)
class MemberShort:
    """Its allocation (`number` names it) of `wanted` bytes would fail: so many are free, by its own word."""

    process: ProcessInstance
    wanted: int
    free: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class MemberGave:
    """It has given so many bytes of what it was asked for."""

    process: ProcessInstance
    bytes: int
    spared: Spared


@dataclass(frozen=True, slots=True)
class MemberError:
    """Its own context gave this error, so it says."""

    process: ProcessInstance
    code: int


@dataclass(frozen=True, slots=True)
class MemberMoved:
    """It goes on in the standby of this generation; times since it was told. `missing`: why what was in
    flight may be missing or half done; empty where nothing is. `waits`: it holds its calls for its turn, and
    what was `replayed` is to be done then, which took it so many ns before (0: it does not say). `new_s`: so
    long before its calls were held it launched a kernel for the first time (None: it does not say)."""

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
class MemberLooked:
    """Whose code had the exception from which it moves in this moment, as far as it has found that: it says
    MemberMoved next."""

    process: ProcessInstance
    generation: int
    whose: Whose


@dataclass(frozen=True, slots=True)
class MemberPages:
    """Pages [start, end) that a copy of the driver which it has left shared with the GPU; none where these
    are equal. `anew`: those said before are no more."""

    process: ProcessInstance
    anew: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class MemberDone:
    """It has had its turn, or has given it up (`missing`), in the domain of this generation. `runs_on`: what
    it has done again has not ended yet, and it says so when it has."""

    process: ProcessInstance
    generation: int
    restored: int = 0
    replayed: int = 0
    missing: str = ""
    runs_on: bool = False


@dataclass(frozen=True, slots=True)
class MemberStayed:
    process: ProcessInstance
    generation: int
    reason: str


MemberEvent = (
    MemberCame
    | MemberRestored
    | MemberLeft
    | MemberReady
    | MemberUnready
    | MemberOpaque
    | MemberUnsure
    | MemberShort
    | MemberGave
    | MemberError
    | MemberMoved
    | MemberLooked
    | MemberPages
    | MemberDone
    | MemberStayed
)
