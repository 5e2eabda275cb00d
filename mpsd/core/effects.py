"""Effects: everything that the daemon can decide to do. mpsd.daemon.performer carries them out in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpsd.base.model import (
    ClientId,
    FailoverMode,
    ProcessInstance,
    Reclaimable,
    ReplayMode,
    Requester,
    ZoneRole,
)
from mpsd.core.failover.participants import FailoverRecord
from mpsd.core.faults.records import FaultRecord, LoggedProcess


@dataclass(frozen=True, slots=True)
class StartDomain:
    """Start a control daemon, start its server for `uid` (0 for a shared domain), and apply the settings.

    `server`: False leaves the start of the server to the control daemon, which starts it for a first client.
    """

    domain: str
    gpus: tuple[str, ...]
    uid: int | None
    server: bool = True


@dataclass(frozen=True, slots=True)
class StopDomain:
    """Ask the control daemon to quit. Kill it and its servers after the deadline."""

    domain: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SwitchPath:
    """Point the slot's stable path at this domain, atomically."""

    slot: str
    domain: str


@dataclass(frozen=True, slots=True)
class DropPath:
    """Remove the stable path of a slot that is retired, or that has no domain left at the end of mpsd."""

    slot: str


@dataclass(frozen=True, slots=True)
class AskServer:
    """Query the server of a domain and its state, within a deadline. `clients`: query its clients as well.

    `patient`: wait for the end of a quiet period, in which programs that fail over answer.
    """

    domain: str
    clients: bool = False
    patient: bool = False


@dataclass(frozen=True, slots=True)
class Attach:
    """Lease and track this process as soon as it has an address space. Number its clients from `space`."""

    domain: str
    process: ProcessInstance
    space: int = 0


@dataclass(frozen=True, slots=True)
class Grounds:
    """The grounds of an act of force, for the audit log.

    `proof`: kinds of proof that the process is a client (mpsd.core.proof). `requester`: None for policy.
    `fault`, `fault_class`: of the record that the act answers, if there is one.
    """

    uid: int
    reason: str
    proof: tuple[str, ...] = ()
    requester: Requester | None = None
    fault: int | None = None
    fault_class: str = ""
    steps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AuditEviction:
    """Write the line of the audit log about an eviction that begins, or that a requester joins."""

    client: ClientId
    outcome: str
    grounds: Grounds


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send terminate_client with a deadline. Never sent to a domain in FAULT or for a stopped client."""

    domain: str
    server: ProcessInstance
    process: ProcessInstance
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL by pidfd, with the lease held. `client`: the client that justifies the kill.

    `owner`: kill only if the process belongs to this user alone at that moment.
    """

    client: ClientId
    why: str
    owner: int | None = None
    grounds: Grounds | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ProbeWork:
    """Watch for the end of an exited client's work. The end arrives as WorkEnded."""

    client: ClientId


@dataclass(frozen=True, slots=True)
class ConfirmWork:
    """Check an exited client's work once more after the linger limit. The answer, if it runs: WorkRuns."""

    client: ClientId


@dataclass(frozen=True, slots=True)
class ProbeUse:
    """Find out whether a living client has launched work. The answer, if it has not: NeverLaunched."""

    client: ClientId


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Close the duplicated descriptors, here and in the descriptor store, and the tracker.

    `uid`: the client's user if core knows it. A client that exited before this daemon began has no pin to
    read it from.
    """

    client: ClientId
    uid: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Forget:
    """Close the pin (pidfd) of a process that is no client any more."""

    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class Inspect:
    """Look up the mapping at an address of a process. The answer arrives as Inspected."""

    fault: int
    process: ProcessInstance
    address: int


@dataclass(frozen=True, slots=True)
class Identify:
    """Look up a process that the kernel log names. The answer arrives as ProcessIdentified.

    `at`: when the line was read [monotonic s]. A process that started later is another one.
    """

    gpu: str
    logged: LoggedProcess
    at: float


@dataclass(frozen=True, slots=True)
class WatchServers:
    """Watch which of these servers, by domain, handles a fault of this GPU.

    The answer is ServerAtFault, if exactly one server does.
    """

    gpu: str
    servers: Mapping[str, ProcessInstance]


@dataclass(frozen=True, slots=True)
class HoldQueries:
    """Hold the SM queries of these clients of a faulted domain for a moment, if they make any.

    The answer for each client that makes one: ClientQueried.
    """

    domain: str
    clients: frozenset[ProcessInstance]


@dataclass(frozen=True, slots=True)
class ReleaseQueries:
    """Let the clients of this domain go on whose queries are held."""

    domain: str


@dataclass(frozen=True, slots=True)
class Describe:
    """Look up in the client's ledger which allocation is next to the guard hit. The answer: HitDescribed."""

    fault: int
    process: ProcessInstance
    address: int
    role: ZoneRole


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the kernel module that mpsd evicts the client of this space; it then waits before it kills."""

    space: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """Send SIGSTOP by pidfd, for inspection. `owner`: as for Kill; FreezeRefused if it does not match."""

    client: ClientId
    owner: int | None = None
    grounds: Grounds | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LookAtFrozen:
    """Read the scheduling state of a stopped process. The answer arrives as LivenessSeen."""

    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class Record:
    """Write a fault record, or a new revision of it, to the journal and the event stream."""

    record: FaultRecord


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish an event to root, the group, the `owner`, and `others`: other users with affected clients."""

    kind: str
    owner: int | None
    data: Mapping[str, object]
    others: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Answer:
    """Send the result of a request that took time."""

    request: str
    ok: bool
    data: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ArmTimer:
    """Deliver TimerFired(kind, subject) after `delay_s`. Arming the same timer again moves its deadline."""

    kind: str
    subject: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class Welcome:
    """Tell a program its mode of fail-over. After OFF it gets no further commands.

    `time_budget`: thousandths of an epoch that saving may add, 0: any; None: it has no budgets. `switches`:
    it knows the order to leave fail-over, so it hears that mpsd knows its answer.
    """

    process: ProcessInstance
    mode: FailoverMode
    time_budget: int | None = None
    switches: bool = False


@dataclass(frozen=True, slots=True)
class OfferStandby:
    """Tell a program that it may create a standby context in this domain."""

    process: ProcessInstance
    generation: int
    domain: str


@dataclass(frozen=True, slots=True)
class StandDown:
    """Tell a program that its standby context of this generation is not usable any more.

    `final`: there will be no other standby context.
    """

    process: ProcessInstance
    generation: int
    why: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """Tell a program to fail over to its standby context now. `why` is for its log.

    `planned`: the old context works, so the program finishes its work there first. `again`: treatment of the
    work in flight (mode exact). `exception_logged`: the driver logged an SM exception, or may have done so.
    Otherwise no SM keeps the program counter of one, and programs that search for it only delay each other.
    `may_go_on`: a program that denies the fault replays as soon as it has moved, without GrantTurn.
    `hurries`: the likely offender has ended, so a long search for the exception is not worth its time.
    """

    process: ProcessInstance
    generation: int
    why: str
    planned: bool = False
    again: ReplayMode = ReplayMode.LOST
    exception_logged: bool = True
    may_go_on: bool = False
    hurries: bool = False


@dataclass(frozen=True, slots=True)
class Fenced:
    """Tell a program that moves into this generation that its old domain cannot write any more."""

    process: ProcessInstance
    generation: int


@dataclass(frozen=True, slots=True)
class GrantTurn:
    """Grant the turn to a program that waits in this generation to replay its work in flight."""

    process: ProcessInstance
    generation: int


@dataclass(frozen=True, slots=True)
class RequestMemory:
    """Ask a program to release memory held for fail-over only: another program's allocation would fail."""

    process: ProcessInstance
    spared: Reclaimable


@dataclass(frozen=True, slots=True)
class GrantMemory:
    """Tell a program that other programs have released this many bytes for its failed allocation `number`.

    0 bytes: no program can release memory.
    """

    process: ProcessInstance
    bytes: int
    number: int


@dataclass(frozen=True, slots=True)
class LimitSnapshots:
    """Tell a program how many bytes its snapshot buffers may take."""

    process: ProcessInstance
    bytes: int
    answers: int = 0
    """The wish [bytes] that this answers; 0: the program has not asked."""


@dataclass(frozen=True, slots=True)
class SwitchOff:
    """Tell a program to leave fail-over for good. It stays at level guard."""

    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class ExcludeWork:
    """Ignore bytes [start, end), those of its old context, when looking for the work of a process.

    `anew`: drop the ranges ignored so far. No range is added if start equals end.
    """

    process: ProcessInstance
    anew: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RecordFailover:
    """Write a record of a fail-over, or a new revision of it, to the journal and the event stream."""

    record: FailoverRecord


ProgramCommand = (
    Welcome
    | OfferStandby
    | StandDown
    | Move
    | Fenced
    | GrantTurn
    | RequestMemory
    | GrantMemory
    | LimitSnapshots
    | SwitchOff
)
"""Commands to a program that runs under mpsd's libcuda."""

Effect = (
    StartDomain
    | StopDomain
    | SwitchPath
    | DropPath
    | AskServer
    | Attach
    | AuditEviction
    | Terminate
    | Kill
    | ProbeWork
    | ConfirmWork
    | ProbeUse
    | ReleaseLease
    | Forget
    | Inspect
    | Identify
    | WatchServers
    | HoldQueries
    | ReleaseQueries
    | Describe
    | Acknowledge
    | Freeze
    | LookAtFrozen
    | Record
    | ProgramCommand
    | ExcludeWork
    | RecordFailover
    | Publish
    | Answer
    | ArmTimer
)
