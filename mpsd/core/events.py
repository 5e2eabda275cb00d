"""Everything that can happen to the daemon. Frozen values; the daemon makes them, core decides.

Long because it is the one list of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from mpsd.core.memberevents import MemberEvent
from mpsd.core.state import DomainState
from mpsd.model import (
    ClientId,
    KernelFault,
    KernelXid,
    LiesThere,
    Liveness,
    Nearby,
    NvmlXid,
    ProcessFacts,
    ProcessInstance,
    ServerState,
    UvmEvent,
    ZonePolicy,
    ZoneRole,
)


class DomainRole(StrEnum):
    ACTIVE = "active"
    SPARE = "spare"
    OLD = "old"


@dataclass(frozen=True, slots=True)
class SlotWanted:
    """Somebody asked for the path of these GPUs for this user (None: shared).

    `start` false: the slot is only restored, with the time of its last use (monotonic seconds);
    AdoptionDone starts what is missing.
    """

    slot: str
    gpus: tuple[str, ...]
    uid: int | None
    exclusive: bool = False
    start: bool = True
    used: float | None = None


@dataclass(frozen=True, slots=True)
class DomainAdopted:
    """A domain of an earlier daemon was found alive and proven to be ours; or programs that live on are of
    one of which nothing is left (HEADLESS, with no process). `bereft`: see core.state.Domain."""

    domain: str
    slot: str
    role: DomainRole
    state: DomainState
    control: ProcessInstance | None
    server: ProcessInstance | None
    server_state: ServerState
    bereft: frozenset[ProcessInstance] = frozenset()


@dataclass(frozen=True, slots=True)
class LeaseRestored:
    """The descriptor store kept leases of a client that died while no daemon was there, by number."""

    domain: str
    facts: ProcessFacts
    spaces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdoptionDone:
    """Everything an earlier daemon left was taken over; what is missing may be started."""


@dataclass(frozen=True, slots=True)
class DomainStarted:
    domain: str
    control: ProcessInstance
    server: ProcessInstance | None


@dataclass(frozen=True, slots=True)
class DomainStartFailed:
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
    domain: str
    server: ProcessInstance


@dataclass(frozen=True, slots=True)
class ServerDied:
    domain: str
    server: ProcessInstance


@dataclass(frozen=True, slots=True)
class ServerStateSeen:
    domain: str
    state: ServerState


@dataclass(frozen=True, slots=True)
class ServerAtFault:
    """This server has been in a call of the driver ever since an Xid of this GPU that names nobody."""

    domain: str
    server: ProcessInstance
    gpu: str


@dataclass(frozen=True, slots=True)
class ServerFatalLogged:
    """server.log says that the server handles a fatal GPU error. `culprit` is a pid it names."""

    domain: str
    text: str
    culprit: int | None = None


@dataclass(frozen=True, slots=True)
class ClientRefused:
    """A client came to a domain that could not take it (it saw error 807)."""

    domain: str
    pid: int


@dataclass(frozen=True, slots=True)
class ClientNoticed:
    """A pinned process joined a domain, so its log says. It may not have an address space yet.

    `listed`: the server said so when it was asked.
    """

    domain: str
    facts: ProcessFacts
    listed: bool = False


@dataclass(frozen=True, slots=True)
class ClientAttached:
    """Leases are held for this many address spaces, numbered from `space`; `tracked`: faults are seen.

    `unstored`: the numbers of those that the descriptor store does not hold yet. `apart`: none of them is
    held for another domain as well.
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
    """A lease that was late is in the descriptor store now: it does not end with the daemon any more."""

    client: ClientId


@dataclass(frozen=True, slots=True)
class AttachFailed:
    domain: str
    process: ProcessInstance
    reason: str
    space: int = 0


@dataclass(frozen=True, slots=True)
class ClientDied:
    """The pidfd became readable."""

    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The process lives on but is no client any more: exec, or it closed its context."""

    process: ProcessInstance
    how: str


@dataclass(frozen=True, slots=True)
class WorkEnded:
    """Nothing that this dead client left on the GPU can run any more."""

    client: ClientId
    sign: str


@dataclass(frozen=True, slots=True)
class WorkRuns:
    """A look that was asked for has found work on the GPU. `clients`: of one domain, those that the life of
    the dead process was whose work it is; `left`: what, in words."""

    clients: tuple[ClientId, ...]
    left: str


@dataclass(frozen=True, slots=True)
class WorkNotVisible:
    """This machine does not show when the work of this dead client ends."""

    client: ClientId


@dataclass(frozen=True, slots=True)
class UvmFatal:
    """A fault that UVM could not service.

    `own_memory`: at an address where the vault holds memory for its process, which a context in use has
    mapped: it is met there by a context that the process has left. `age_s`: for how long it had been there,
    by the driver's stamp, when it was read.
    """

    client: ClientId
    event: UvmEvent
    own_memory: bool = False
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GuardHit:
    """Guard zones of this client absorbed `count` accesses, `event` the first of them.

    `liveness` was read just before. `idle`: its ledger says that whatever it launched has ended.
    """

    client: ClientId
    event: UvmEvent
    role: ZoneRole
    count: int
    liveness: Liveness
    idle: bool = False


@dataclass(frozen=True, slots=True)
class KernelFaultSeen:
    """A record of the kernel part. `liveness` of its process was read just before; `own_memory` and `age_s`
    as for UvmFatal; `idle` as for GuardHit."""

    fault: KernelFault
    liveness: Liveness
    own_memory: bool = False
    age_s: float = 0.0
    idle: bool = False


@dataclass(frozen=True, slots=True)
class HitDescribed:
    """What the client's own ledger says of a guard hit; None: nothing."""

    fault: int
    nearby: Nearby | None
    kernel: str | None


@dataclass(frozen=True, slots=True)
class ZonePolicySet:
    """What is to be done with this process when a guard zone absorbs an access of it."""

    process: ProcessInstance
    policy: ZonePolicy


@dataclass(frozen=True, slots=True)
class FreezeRestored:
    """An earlier daemon had stopped this process."""

    process: ProcessInstance


@dataclass(frozen=True, slots=True)
class FreezeRefused:
    """A process was not stopped: when it was looked at once more, it was not the user's own."""

    process: ProcessInstance
    reason: str


@dataclass(frozen=True, slots=True)
class LivenessSeen:
    """How a process that mpsd has stopped stands now."""

    process: ProcessInstance
    liveness: Liveness


@dataclass(frozen=True, slots=True)
class Inspected:
    """What was found at a fault's address in the offender's own address space."""

    fault: int
    lies_there: LiesThere


@dataclass(frozen=True, slots=True)
class NvmlXidSeen:
    xid: NvmlXid


@dataclass(frozen=True, slots=True)
class KernelXidSeen:
    """`gpu` is the uuid that belongs to the line's PCI address, None if there is none."""

    gpu: str | None
    xid: KernelXid


@dataclass(frozen=True, slots=True)
class EvictRequested:
    """Evict this process; `liveness` was read just before. `request` is answered when it is done.

    `owner`: the user who asks, who may have only his own processes killed; None for the admin.
    """

    process: ProcessInstance
    liveness: Liveness
    request: str
    reason: str
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class TerminateFinished:
    """terminate_client came back (or did not). `done`: the server confirmed it."""

    process: ProcessInstance
    done: bool
    text: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Stop (or resume) giving out slots on these GPUs; empty means all."""

    gpus: tuple[str, ...]
    on: bool


@dataclass(frozen=True, slots=True)
class StopRequested:
    """End every domain once the daemon stops (--stop-domains)."""


@dataclass(frozen=True, slots=True)
class KillRefused:
    """A process was not killed: when it was looked at once more, it was not the user's own (Kill.owner)."""

    process: ProcessInstance
    reason: str


@dataclass(frozen=True, slots=True)
class ModeSeen:
    """The compute mode of a slot's GPUs admits one server only (or no longer so)."""

    slot: str
    exclusive: bool


@dataclass(frozen=True, slots=True)
class GpuFull:
    """A GPU has less memory left than is kept free for programs that cannot ask for it."""

    gpu: str


@dataclass(frozen=True, slots=True)
class Counted:
    """Something to be counted and shown, without consequence."""

    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CopiesSeen:
    """The copies of the driver were looked at; `problem`: why there are none, empty when there are."""

    problem: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer armed by an ArmTimer effect has run out."""

    kind: str
    subject: str


Event = (
    SlotWanted
    | DomainAdopted
    | LeaseRestored
    | AdoptionDone
    | DomainStarted
    | DomainStartFailed
    | DomainStopped
    | ControlDied
    | ServerSeen
    | ServerDied
    | ServerStateSeen
    | ServerAtFault
    | ServerFatalLogged
    | ClientRefused
    | ClientNoticed
    | ClientAttached
    | LeaseStored
    | AttachFailed
    | ClientDied
    | ClientLeft
    | WorkEnded
    | WorkRuns
    | WorkNotVisible
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
    | EvictRequested
    | TerminateFinished
    | DrainRequested
    | StopRequested
    | KillRefused
    | ModeSeen
    | GpuFull
    | Counted
    | MemberEvent
    | CopiesSeen
    | TimerFired
)
