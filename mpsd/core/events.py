"""Events: everything that can happen to the daemon, as frozen values.

The daemon creates them, core decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from mpsd.base.model import (
    AddressKind,
    ClientId,
    KernelFault,
    KernelXid,
    Liveness,
    Nearby,
    NvmlXid,
    ProcessFacts,
    ProcessInstance,
    Requester,
    ServerState,
    UvmEvent,
    ZonePolicy,
    ZoneRole,
)
from mpsd.core.failover.reports import MemberEvent
from mpsd.core.faults.records import LoggedProcess
from mpsd.core.state import DomainState, LogState


class DomainRole(StrEnum):
    ACTIVE = "active"
    SPARE = "spare"
    SECOND = "second"
    OLD = "old"


@dataclass(frozen=True, slots=True)
class SlotWanted:
    """A user asked for the path of these GPUs. `uid` None: a shared slot.

    `start` false: the slot is only restored, with the time of its last use (monotonic seconds). AdoptionDone
    then starts the missing domains. `account`, `joined`: as of a Slot. `admin`: the request comes from an
    administrator.
    """

    slot: str
    gpus: tuple[str, ...]
    uid: int | None
    exclusive: bool = False
    start: bool = True
    used: float | None = None
    account: int | None = None
    admin: bool = False
    joined: bool = False


@dataclass(frozen=True, slots=True)
class DomainAdopted:
    """A domain of an earlier daemon was found alive and verified.

    HEADLESS without a control process: the domain itself has ended, but programs of it live on. `bereft`,
    `private`, `trial`: see core.state.Domain.
    """

    domain: str
    slot: str
    role: DomainRole
    state: DomainState
    control: ProcessInstance | None
    server: ProcessInstance | None
    server_state: ServerState
    bereft: frozenset[ProcessInstance] = frozenset()
    private: bool = False
    trial: ProcessInstance | None = None


@dataclass(frozen=True, slots=True)
class LeaseRestored:
    """The descriptor store holds leases, by number, of a client that exited while no daemon ran.

    `listed`: its server had named it.
    """

    domain: str
    facts: ProcessFacts
    spaces: tuple[int, ...]
    listed: bool = False


@dataclass(frozen=True, slots=True)
class AdoptionDone:
    """mpsd took all over and may start missing domains. `unlisted`: domains whose servers list no clients."""

    unlisted: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DomainStarted:
    """`private`: see core.state.Domain."""

    domain: str
    control: ProcessInstance
    server: ProcessInstance | None
    private: bool = False


@dataclass(frozen=True, slots=True)
class DomainStartFailed:
    """A domain did not start. `by_server`: the server itself gave the reason, so it is hardly transient."""

    domain: str
    reason: str
    by_server: bool = False


@dataclass(frozen=True, slots=True)
class DomainUnreachable:
    """New clients cannot connect to this domain, whatever its processes do. mpsd cannot mend that."""

    domain: str
    reason: str


@dataclass(frozen=True, slots=True)
class DomainStopped:
    domain: str


@dataclass(frozen=True, slots=True)
class ControlDied:
    domain: str
    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class ServerSeen:
    """`uid`: the user that the server runs for, if it was read."""

    domain: str
    server: ProcessInstance
    uid: int | None = None


@dataclass(frozen=True, slots=True)
class ServerDied:
    domain: str
    server: ProcessInstance


@dataclass(frozen=True, slots=True)
class ServerStartFailed:
    """A server that the control daemon started for a first client did not become ACTIVE.

    `server`: None if it ended before mpsd saw the process. `late`: the server still runs, but its deadline
    has passed.
    """

    domain: str
    reason: str
    server: ProcessInstance | None = None
    late: bool = False


@dataclass(frozen=True, slots=True)
class ServerStateSeen:
    domain: str
    state: ServerState


@dataclass(frozen=True, slots=True)
class ServerAtFault:
    """This server has been inside a driver call since an Xid of this GPU that names no process."""

    domain: str
    server: ProcessInstance
    gpu: str


@dataclass(frozen=True, slots=True)
class LogStateSeen:
    """Whether the log of a domain announces its clients has changed. `reason`: why it does not."""

    domain: str
    log: LogState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ClientsUnpinned:
    """So many clients that the server of a domain lists have no pin for want of descriptors."""

    domain: str
    count: int


@dataclass(frozen=True, slots=True)
class ServerFatalLogged:
    """A domain's log says that its server handles a fatal GPU error (core.faults.sources weighs the text)."""

    domain: str
    text: str


@dataclass(frozen=True, slots=True)
class ClientRefused:
    """A domain could not take a new client, which saw error 807.

    `full`: error 808, because its server had no place for another client. The log does not say for which.
    """

    domain: str
    pid: int | None
    full: bool = False


@dataclass(frozen=True, slots=True)
class ClientNoticed:
    """A pinned process joined a domain, according to the domain's log. It may not have an address space yet.

    `listed`: the server named the process when it was asked.
    """

    domain: str
    facts: ProcessFacts
    listed: bool = False


@dataclass(frozen=True, slots=True)
class ForeignNoticed:
    """A log line named a process of a user that is not in that domain. Only a list makes it a client."""

    domain: str


@dataclass(frozen=True, slots=True)
class ClientsListed:
    """The server of a domain has listed its clients.

    `began`: monotonic seconds at which the server was asked.
    """

    domain: str
    began: float
    pids: frozenset[int]


@dataclass(frozen=True, slots=True)
class ClientAttached:
    """Leases are held for this many address spaces, numbered from `space`. `tracked`: faults are visible.

    `unstored`: the numbers that the descriptor store does not hold yet. `apart`: none of these address spaces
    is also leased for another domain.
    """

    domain: str
    process: ProcessInstance
    spaces: int
    tracked: bool
    problem: str = ""
    space: int = 0
    unstored: tuple[int, ...] = ()
    apart: bool = False


@dataclass(frozen=True, slots=True)
class LeaseStored:
    """The descriptor store holds a delayed lease now, so the lease survives the daemon."""

    client: ClientId


@dataclass(frozen=True, slots=True)
class AttachFailed:
    domain: str
    process: ProcessInstance
    reason: str
    space: int = 0


@dataclass(frozen=True, slots=True)
class ClientDied:
    """The process has exited: its pidfd became readable."""

    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The process lives on but is no client any more, after an exec or a closed context."""

    process: ProcessInstance
    how: str


@dataclass(frozen=True, slots=True)
class WorkEnded:
    """No work that this exited client left on the GPU can still run. `sign`: the evidence."""

    client: ClientId
    sign: str


@dataclass(frozen=True, slots=True)
class WorkRuns:
    """A requested check found work on the GPU. `clients`: the clients of one domain that owned it.

    `left`: a description of the work.
    """

    clients: tuple[ClientId, ...]
    left: str


@dataclass(frozen=True, slots=True)
class WorkNotVisible:
    """This machine does not show when the work of this exited client ends."""

    client: ClientId


@dataclass(frozen=True, slots=True)
class NeverLaunched:
    """This living client has launched nothing in any context of its process."""

    client: ClientId


@dataclass(frozen=True, slots=True)
class UvmFatal:
    """A fault that UVM could not service.

    `own_memory`: the vault holds memory for this process at the address, mapped by a context in use. Such a
    fault comes from an old context that the process has left. `age_s`: age of the event when it was read,
    from the driver's stamp.
    """

    client: ClientId
    event: UvmEvent
    own_memory: bool = False
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GuardHit:
    """Guard zones of this client absorbed `count` accesses; `event` is the first of them.

    `liveness` was read just before. `idle`: the client's ledger says that all its launched work has ended.
    """

    client: ClientId
    event: UvmEvent
    role: ZoneRole
    count: int
    liveness: Liveness
    idle: bool = False


@dataclass(frozen=True, slots=True)
class KernelFaultSeen:
    """A record of the kernel module. `liveness` of its process was read just before.

    `own_memory`, `age_s`: as in UvmFatal. `idle`: as in GuardHit.
    """

    fault: KernelFault
    liveness: Liveness
    own_memory: bool = False
    age_s: float = 0.0
    idle: bool = False


@dataclass(frozen=True, slots=True)
class HitDescribed:
    """Entry of the client's own ledger for a guard hit. None: the ledger has none."""

    fault: int
    nearby: Nearby | None
    kernel: str | None


@dataclass(frozen=True, slots=True)
class ZonePolicySet:
    """The policy of this process for absorbed accesses was set."""

    process: ProcessInstance
    policy: ZonePolicy


@dataclass(frozen=True, slots=True)
class FreezeRestored:
    """An earlier daemon stopped this process."""

    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class FreezeRefused:
    """A process was not stopped: the check before the signal found that another user may own it."""

    process: ProcessInstance
    reason: str


@dataclass(frozen=True, slots=True)
class LivenessSeen:
    """Scheduling state of a process that mpsd has stopped."""

    process: ProcessInstance
    liveness: Liveness


@dataclass(frozen=True, slots=True)
class Inspected:
    """Kind of mapping found at a fault's address in the offender's own address space."""

    fault: int
    lies_there: AddressKind


@dataclass(frozen=True, slots=True)
class NvmlXidSeen:
    xid: NvmlXid


@dataclass(frozen=True, slots=True)
class KernelXidSeen:
    """An Xid line of the kernel log. `gpu`: the uuid of the line's PCI address, None if there is none."""

    gpu: str | None
    xid: KernelXid


@dataclass(frozen=True, slots=True)
class ProcessIdentified:
    """The answer to Identify about a process that the kernel log named.

    `facts`: None if no process with this pid and name runs since before the line. `on_mps`: whether NVML
    lists it as a client of an MPS server; None if NVML does not list it.
    """

    gpu: str
    logged: LoggedProcess
    facts: ProcessFacts | None
    on_mps: bool | None


@dataclass(frozen=True, slots=True)
class EvictRequested:
    """Evict this process and answer `request` when it is done. `liveness` was read just before.

    `owner`: the requesting user, with power over that user's own processes only; None for an administrator.
    `requester`: for the audit log.
    """

    process: ProcessInstance
    liveness: Liveness
    request: str
    reason: str
    owner: int | None = None
    requester: Requester | None = None


@dataclass(frozen=True, slots=True)
class TerminateFinished:
    """terminate_client returned or missed its deadline. `done`: the server confirmed it."""

    process: ProcessInstance
    done: bool
    text: str


@dataclass(frozen=True, slots=True)
class GpuLost:
    """An earlier mpsd saw that this GPU does not work any more, and the GPU still does not answer."""

    gpu: str
    why: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Stop or resume new slots on these GPUs. Empty means all GPUs."""

    gpus: tuple[str, ...]
    on: bool


@dataclass(frozen=True, slots=True)
class StopRequested:
    """End every domain when the daemon stops (--stop-domains)."""


@dataclass(frozen=True, slots=True)
class KillRefused:
    """A process was not killed: the check before the signal found that another user may own it.

    See Kill.owner.
    """

    process: ProcessInstance
    reason: str


@dataclass(frozen=True, slots=True)
class ModeSeen:
    """The compute mode of a slot's GPUs changed. `exclusive`: it admits one server only."""

    slot: str
    exclusive: bool


@dataclass(frozen=True, slots=True)
class GpuFull:
    """A GPU's free memory is below the reserve for programs that cannot ask for it."""

    gpu: str


@dataclass(frozen=True, slots=True)
class Counted:
    """Counters to be added up and shown, without further consequences."""

    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class DriverFilesSeen:
    """The driver files for standby contexts were checked. `problem`: why there are none, else empty."""

    problem: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer of an ArmTimer effect has expired."""

    kind: str
    subject: str


Event = (
    SlotWanted
    | DomainAdopted
    | LeaseRestored
    | AdoptionDone
    | DomainStarted
    | DomainStartFailed
    | DomainUnreachable
    | DomainStopped
    | ControlDied
    | ServerSeen
    | ServerDied
    | ServerStartFailed
    | ServerStateSeen
    | ServerAtFault
    | LogStateSeen
    | ClientsUnpinned
    | ClientsListed
    | ServerFatalLogged
    | ClientRefused
    | ClientNoticed
    | ForeignNoticed
    | ClientAttached
    | LeaseStored
    | AttachFailed
    | ClientDied
    | ClientLeft
    | WorkEnded
    | WorkRuns
    | WorkNotVisible
    | NeverLaunched
    | UvmFatal
    | GuardHit
    | KernelFaultSeen
    | HitDescribed
    | ZonePolicySet
    | FreezeRestored
    | FreezeRefused
    | LivenessSeen
    | Inspected
    | NvmlXidSeen
    | KernelXidSeen
    | ProcessIdentified
    | EvictRequested
    | TerminateFinished
    | DrainRequested
    | GpuLost
    | StopRequested
    | KillRefused
    | ModeSeen
    | GpuFull
    | Counted
    | MemberEvent
    | DriverFilesSeen
    | TimerFired
)
