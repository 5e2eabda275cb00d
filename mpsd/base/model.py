"""Frozen values shared by every package of mpsd. Validation only; no behaviour, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


@dataclass(frozen=True, slots=True, order=True)
class ProcessInstance:
    """Identify one life of one process. A pid alone is only a claim, because the kernel reuses pids.

    `start_ticks` is field 22 of /proc/PID/stat (clock ticks since boot, proc(5)).
    """

    pid: int
    start_ticks: int

    def __str__(self) -> str:
        return f"{self.pid}@{self.start_ticks}"


@dataclass(frozen=True, slots=True)
class Requester:
    """The peer behind a request. The kernel vouches for its uid and gid; pid and cgroup are claims."""

    uid: int
    gid: int
    pid: int
    cgroup: str


@dataclass(frozen=True, slots=True, order=True)
class ClientId:
    """Identify a client of MPS: one address space of one process instance in one fault domain."""

    domain: str
    process: ProcessInstance
    space: int = 0

    def __str__(self) -> str:
        return f"{self.domain}/{self.process}/{self.space}"


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Facts that /proc gave about a process when it was pinned. Names are untrusted text.

    `uid` is the effective user. `borrowed`: the real or the saved user is another one.
    """

    instance: ProcessInstance
    ppid: int
    uid: int
    gid: int
    command: str
    exe: str
    cgroup: str = ""
    borrowed: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `uuid` as NVML prints it (GPU-...), `pci` as dddd:bb:dd.f in lower case."""

    index: int
    uuid: str
    name: str
    pci: str
    memory_bytes: int


class ComputeMode(StrEnum):
    DEFAULT = "default"
    EXCLUSIVE_PROCESS = "exclusive-process"
    PROHIBITED = "prohibited"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that NVML lists on a GPU. `memory_bytes` is None where NVML does not report it."""

    pid: int
    memory_bytes: int | None
    mps: bool


class Access(StrEnum):
    """Access type of a GPU fault (uvm_types.h: 1 read, 2 write, 3 atomic, 4 prefetch)."""

    READ = "read"
    WRITE = "write"
    ATOMIC = "atomic"
    PREFETCH = "prefetch"
    UNKNOWN = "unknown"


class UvmFaultType(IntEnum):
    """UVM fault types (uvm_types.h). Numbers 5 and up cannot be serviced by any mapping."""

    UNKNOWN = 0
    INVALID_PDE = 1
    INVALID_PTE = 2
    WRITE = 3
    ATOMIC = 4
    PDE_SIZE = 5
    LIMIT = 6
    UNBOUND_INSTANCE = 7
    PRIVILEGE = 8
    PITCH = 9
    WORK_CREATION = 10
    APERTURE = 11
    COMPRESSION = 12
    KIND = 13
    REGION = 14
    POISON = 15
    CONFIDENTIAL = 16


class UvmReason(IntEnum):
    """Reason why UVM could not service a fault (uvm_types.h)."""

    UNKNOWN = 0
    INVALID_ADDRESS = 1
    PERMISSIONS = 2
    FAULT_TYPE = 3
    OUT_OF_MEMORY = 4
    INTERNAL = 5
    INVALID_OPERATION = 6


@dataclass(frozen=True, slots=True)
class UvmEvent:
    """One entry of a UVM tools queue.

    `fatal` is event type 6 (UVM could not service the fault); otherwise type 3, a serviced fault.
    `timestamp_ns` is the driver's CLOCK_MONOTONIC_RAW stamp.
    """

    fatal: bool
    fault_type: UvmFaultType
    access: Access
    reason: UvmReason
    address: int
    timestamp_ns: int
    gpu_index: int = 0


@dataclass(frozen=True, slots=True)
class TrackerBatch:
    """Events of one read, and how many events the driver has dropped since the tracker began."""

    events: tuple[UvmEvent, ...]
    dropped: int


@dataclass(frozen=True, slots=True)
class NvmlXid:
    """A critical Xid as NVML reports it: a GPU and a number, never a process."""

    gpu_uuid: str
    xid: int


@dataclass(frozen=True, slots=True)
class KernelXid:
    """An Xid line of the kernel log. `pid` and `name` are the line's own claims (None if absent)."""

    pci: str
    xid: int
    pid: int | None
    name: str
    text: str
    timestamp_us: int


class Liveness(StrEnum):
    """Scheduling state of a process, which decides whether terminate_client can get an answer from it."""

    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "traced"
    FROZEN = "frozen"
    DEAD = "dead"


class Confidence(StrEnum):
    """Confidence of an attribution. `certain` only if the evidence rules out every other client."""

    CERTAIN = "certain"
    LIKELY = "likely"
    UNKNOWN = "unknown"


class AddressKind(StrEnum):
    """Kind of mapping found at a fault's address in the offender's own address space."""

    NULL_PAGE = "null page"
    FREED = "freed or never mapped part of a GPU reservation"
    HOST_MAPPING = "host mapping"
    UNKNOWN = "unknown"


class ServerState(StrEnum):
    """Answer of get_server_status (MPS guide), plus GONE if there is no server."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"
    GONE = "GONE"


class GuardClass(StrEnum):
    """Class of address range that the outer guard can cover with sparse mappings."""

    LOW = "low"
    FILE = "file"
    HEAP = "heap"
    STACK = "stack"


class ZonePolicy(StrEnum):
    """Policy for a client after a guard zone absorbed and reported its stray access.

    evict: mpsd evicts the client. absorb: the client runs on, and the record says so. freeze: mpsd stops the
    client (SIGSTOP) for inspection. mpsd never sends terminate_client for a stopped client, because that
    stalls all other clients.
    """

    EVICT = "evict"
    ABSORB = "absorb"
    FREEZE = "freeze"


class FailoverMode(StrEnum):
    """Mode of fail-over of a program when its domain faults.

    keep: the program's memory is kept; work in flight may be half done, and the program's log says so. exact:
    work in flight is rolled back and replayed. off: the program gets the CUDA error.
    """

    OFF = "off"
    KEEP = "keep"
    EXACT = "exact"


class ReplayMode(IntEnum):
    """Treatment of the work that a program had in flight when it moved.

    LOST: the work is lost. AGAIN: replay as soon as the program has moved. IN_TURN: replay during the
    program's turn. AT_ONCE: the same, and the program has its turn as soon as it has moved. Only daemons of
    earlier releases told programs so.
    """

    LOST = 0
    AGAIN = 1
    IN_TURN = 2
    AT_ONCE = 3


class Reclaimable(IntEnum):
    """GPU memory held for fail-over only. ROOM: snapshot buffers. STANDBY: the standby context."""

    ROOM = 0
    STANDBY = 1


class SnapshotBudget(IntEnum):
    """Budget for which a client has left fail-over. TIME: saving slows it. MEMORY: a snapshot does not fit.

    BY_HAND: no budget, its fail-over was switched off (mpsd-ctl protect).
    """

    TIME = 1
    MEMORY = 2
    BY_HAND = 3


class ExceptionOwner(IntEnum):
    """Owner of the code that raised an SM exception, as one program of the faulted domain sees it.

    OWN, OTHERS: an SM still holds the address of the faulting warp, inside or outside this process's code.
    FIRST: no address is left, but this context's error arrived as only the trapping context's does
    (mpsd/docs/mechanisms-failover.md). NO_SIGN: no address is left, and this context's error did not.
    """

    UNKNOWN = 0
    OWN = 1
    OTHERS = 2
    FIRST = 3
    NO_SIGN = 4


class IsolationMode(StrEnum):
    """Reaction of the kernel module to a fatal MMU fault.

    off: as the stock driver. report: the stock driver answers, and the module records the fault. isolate: the
    module absorbs the faults that it can, and the offending client must be evicted.
    """

    OFF = "off"
    REPORT = "report"
    ISOLATE = "isolate"


class KernelAction(StrEnum):
    """Action of the kernel module: on a fault, on a client with absorbed faults, or on an orphan.

    ORPHAN: the fault belongs to work with no address space any more.
    """

    REPORTED = "reported"
    SUNK = "sunk"
    REFUSED = "refused"
    KILL = "kill"
    STOP = "stop"
    GIVE_UP = "give up"
    ORPHAN = "orphan"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KernelFault:
    """One record of the kernel module (kmod_patches/src/mpsd-abi.h).

    `space` identifies the address space inside the module. `process` owns that address space: None if it is
    unknown or not visible from here. `event.fatal` says only that UVM could not service the fault. `why`: the
    reason for a stock answer; empty if the fault was or would be absorbed. `faults`: faults of this space so
    far, including this one. `acknowledged`: mpsd has acknowledged that it is evicting this client.
    """

    seq: int
    action: KernelAction
    space: int
    process: ProcessInstance | None
    event: UvmEvent
    engine: str
    why: str
    faults: int
    gpu_uuid: str
    sink_bytes: int = 0
    acknowledged: bool = False


class ZoneRole(StrEnum):
    """Kind of memory that absorbed an access.

    A guard zone was laid in advance by the program. The last value is a sparse mapping that the kernel module
    placed under the access.
    """

    GUARD = "guard"
    QUARANTINE = "quarantine"
    NULL_PAGE = "null page"
    FAR = "far"
    SINK = "sink"


class Relation(StrEnum):
    """Position of an address of a stray access relative to an allocation."""

    BEFORE = "before the start of"
    PAST = "past the end of"
    INSIDE = "inside"


@dataclass(frozen=True, slots=True)
class Nearby:
    """The allocation next to a stray access, from the program's own ledger: a claim, not proof.

    `distance` [bytes]: back from the start (BEFORE), on from the end (PAST), or on from the start (INSIDE).
    It is that of the access itself, or of its 4 KiB page (`page`). `order` counts the program's allocations
    from 1. `age_s`: time since the allocation; `freed_s`: time since the free, None while the allocation
    lives.
    """

    relation: Relation
    distance: int
    page: bool
    address: int
    size: int
    order: int
    age_s: float
    freed_s: float | None = None
