"""Everything the daemon can decide to do. Carried out in one place, in order (mpsd.performer)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpsd.core.records import FaultRecord
from mpsd.core.standby import FailoverRecord
from mpsd.model import Again, ClientId, FailoverMode, ProcessInstance, Spared, ZoneRole


@dataclass(frozen=True, slots=True)
class StartDomain:
    """Start a control daemon, warm its server for `uid` (0 for a shared one), apply the settings."""

    domain: str
    gpus: tuple[str, ...]
    uid: int | None


@dataclass(frozen=True, slots=True)
class StopDomain:
    """Ask the control daemon to quit; after the deadline kill it and its servers."""

    domain: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SwitchPath:
    """Let the slot's stable path lead to this domain, atomically."""

    slot: str
    domain: str


@dataclass(frozen=True, slots=True)
class DropPath:
    """Remove the stable path of a slot that is given up: nobody has used it for long, or all has ended."""

    slot: str


@dataclass(frozen=True, slots=True)
class AskServer:
    """Find out the server of a domain and its state (bounded by a deadline)."""

    domain: str


@dataclass(frozen=True, slots=True)
class Attach:
    """Lease and track this process as soon as it has an address space; its ids start at `space`."""

    domain: str
    process: ProcessInstance
    space: int = 0


@dataclass(frozen=True, slots=True)
class Terminate:
    """terminate_client with a deadline. Never for a domain in FAULT or a stopped client."""

    domain: str
    server: ProcessInstance
    process: ProcessInstance
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL by pidfd, with the lease held. `client`: as which client of which domain the process goes.

    `owner`: only if the process is, at that moment, this user's own and nobody else's.
    """

    client: ClientId
    why: str
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class ProbeWork:
    """Watch for the end of a dead client's work; WorkEnded when it has come."""

    client: ClientId


@dataclass(frozen=True, slots=True)
class ConfirmWork:
    """A dead client's work has had its time: WorkRuns if a look that begins now still finds it."""

    client: ClientId


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Close the duplicates here and in the descriptor store, with the tracker. `uid`: whose they are, where
    core knows it: who died before this mpsd began has no pin to tell."""

    client: ClientId
    uid: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the pin (pidfd) of a process that is no client any more."""

    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class Inspect:
    """Look up what lies at an address of a process; Inspected when known."""

    fault: int
    process: ProcessInstance
    address: int


@dataclass(frozen=True, slots=True)
class WatchServers:
    """Look which of these servers, by domain, is at a fault of this GPU; ServerAtFault if one alone is."""

    gpu: str
    servers: Mapping[str, ProcessInstance]


@dataclass(frozen=True, slots=True)
class Describe:
    """Look up in the client's ledger what lies where a guard zone was hit; HitDescribed when known."""

    fault: int
    process: ProcessInstance
    address: int
    role: ZoneRole


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the kernel part that who made this space is being put out, so that it waits before it kills."""

    space: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP by pidfd, so that it can be looked at. `owner`: as for Kill; FreezeRefused if it is not."""

    client: ClientId
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class LookAtFrozen:
    """Read how a stopped process stands; LivenessSeen."""

    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class Record:
    """Write a fault record (or a new revision of it) to the journal and the event stream."""

    record: FaultRecord


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell subscribers: root and the group, the `owner`, and `others`, whose clients it concerns too."""

    kind: str
    owner: int | None
    data: Mapping[str, object]
    others: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a request that took time."""

    request: str
    ok: bool
    data: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ArmTimer:
    """TimerFired(kind, subject) after `delay_s`; arming again moves it."""

    kind: str
    subject: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class Welcome:
    """Tell a program how it may fail over; OFF: it is told nothing more."""

    process: ProcessInstance
    mode: FailoverMode


@dataclass(frozen=True, slots=True)
class OfferStandby:
    """Tell a program that it may have a second context in this domain."""

    process: ProcessInstance
    generation: int
    domain: str


@dataclass(frozen=True, slots=True)
class StandDown:
    """Tell a program that the standby of this generation is none any more. `final`: no other comes."""

    process: ProcessInstance
    generation: int
    why: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """Tell a program to go on in its standby now. `why` is for its log. `planned`: its context is well, so it
    ends its work there first. `again`: what becomes there of what was in flight (mode exact)."""

    process: ProcessInstance
    generation: int
    why: str
    planned: bool = False
    again: Again = Again.LOST


@dataclass(frozen=True, slots=True)
class Fenced:
    """Tell a program that moves into this generation that nothing in its old domain writes any more."""

    process: ProcessInstance
    generation: int


@dataclass(frozen=True, slots=True)
class HaveTurn:
    """Tell a program that waits in this generation to do again what it had in flight."""

    process: ProcessInstance
    generation: int


@dataclass(frozen=True, slots=True)
class GiveMemory:
    """Ask a program for memory that is there for a fail-over alone: another one's allocation would fail."""

    process: ProcessInstance
    spared: Spared


@dataclass(frozen=True, slots=True)
class HaveMemory:
    """Tell a program whose allocation failed (its number) that another one has given so many bytes; 0: nobody
    does."""

    process: ProcessInstance
    bytes: int
    number: int


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Where a process's work is looked for, leave out bytes [start, end): its old context's. `anew`: and
    those that were left out before no longer. None where start and end are equal."""

    process: ProcessInstance
    anew: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RecordFailover:
    """Write a record of a fail-over (or a new revision of it) to the journal and the event stream."""

    record: FailoverRecord


Word = Welcome | OfferStandby | StandDown | Move | Fenced | HaveTurn | GiveMemory | HaveMemory
"""What a program under mpsd's libcuda is told."""

Effect = (
    StartDomain
    | StopDomain
    | SwitchPath
    | DropPath
    | AskServer
    | Attach
    | Terminate
    | Kill
    | ProbeWork
    | ConfirmWork
    | ReleaseLease
    | Forget
    | Inspect
    | WatchServers
    | Describe
    | Acknowledge
    | Freeze
    | LookAtFrozen
    | Record
    | Word
    | LeaveOut
    | RecordFailover
    | Publish
    | Answer
    | ArmTimer
)
