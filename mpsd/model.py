"""Frozen values that every part of mpsd shares. Validation only; no behaviour, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


@dataclass(frozen=True, slots=True, order=True)
class ProcessInstance:
    """One life of one process: the pid alone is only a claim.

    `start_ticks` is field 22 of /proc/PID/stat (clock ticks since boot, proc(5)).
    """

    pid: int
    start_ticks: int

    def __str__(self) -> str:
        return f"{self.pid}@{self.start_ticks}"


@dataclass(frozen=True, slots=True, order=True)
class ClientId:
    """A client of MPS: one address space of one process instance in one fault domain."""

    domain: str
    process: ProcessInstance
    space: int = 0

    def __str__(self) -> str:
        return f"{self.domain}/{self.process}/{self.space}"


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What /proc said about a process when it was pinned. Names are untrusted text.

    `uid` is its effective user; `borrowed`: its real or saved user is another one.
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
    """A process that NVML lists on a GPU. `memory_bytes` is None where NVML cannot tell."""

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
    """Why UVM gave up on a fault (uvm_types.h)."""

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

    `fatal` is event type 6 (UVM gave up); otherwise type 3, a fault that was serviced.
    `timestamp_ns` is CLOCK_MONOTONIC_RAW as the driver took it.
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
    """Events read in one go and how many the driver dropped since the tracker began."""

    events: tuple[UvmEvent, ...]
    dropped: int


@dataclass(frozen=True, slots=True)
class NvmlXid:
    """A critical Xid as NVML reports it: it names a GPU and a number, never a process."""

    gpu_uuid: str
    xid: int


@dataclass(frozen=True, slots=True)
class KernelXid:
    """An Xid line of the kernel log. `pid` and `name` are what the line claims (None if absent)."""

    pci: str
    xid: int
    pid: int | None
    name: str
    text: str
    timestamp_us: int


class Liveness(StrEnum):
    """How a process stands, as far as asking for its help is concerned."""

    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "traced"
    FROZEN = "frozen"
    DEAD = "dead"


class Confidence(StrEnum):
    """How sure an attribution is: `certain` only where the evidence admits no other client."""

    CERTAIN = "certain"
    LIKELY = "likely"
    UNKNOWN = "unknown"


class LiesThere(StrEnum):
    """What was found at a fault's address in the offender's own address space."""

    NULL_PAGE = "null page"
    FREED = "freed or never mapped part of a GPU reservation"
    HOST_MAPPING = "host mapping"
    UNKNOWN = "unknown"


class ServerState(StrEnum):
    """Answer of get_server_status (MPS guide), plus `gone` for no server at all."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"
    GONE = "GONE"


class GuardClass(StrEnum):
    """Classes of address range that the outer guard can cover with sparse mappings."""

    LOW = "low"
    FILE = "file"
    HEAP = "heap"
    STACK = "stack"


class ZonePolicy(StrEnum):
    """What is done with a client whose stray access a guard zone absorbed and reported.

    evict: it is put out. absorb: it goes on, the record says so. freeze: it is stopped (SIGSTOP) to be
    looked at; nobody asks MPS to end a stopped client, for that would stall all others.
    """

    EVICT = "evict"
    ABSORB = "absorb"
    FREEZE = "freeze"


class FailoverMode(StrEnum):
    """What a program does when its domain is lost. keep: its memory is kept, what was in flight may be half
    done, and that is said. exact: what was in flight is undone and done again. off: it has the error.
    """

    OFF = "off"
    KEEP = "keep"
    EXACT = "exact"


class Again(IntEnum):
    """What becomes of what a program had in flight when it moves: it is lost, or done again as soon as it has
    moved, or when it has its turn; AT_ONCE: in a turn that it has with others, as soon as it has moved.
    """

    LOST = 0
    AGAIN = 1
    IN_TURN = 2
    AT_ONCE = 3


class Spared(IntEnum):
    """Memory that a program has for a fail-over alone: room for copies of what it writes; its standby."""

    ROOM = 0
    STANDBY = 1


class Whose(IntEnum):
    """Whose code a kernel's exception was in, as one program of the lost domain sees it. OWN, OTHERS: an SM
    keeps where the warp was, as an address of its own process's. FIRST: nothing is kept, but its context's
    error came as only that of who made a trap does (faultinject/reports, "Whose code it was")."""

    UNKNOWN = 0
    OWN = 1
    OTHERS = 2
    FIRST = 3


class IsolationMode(StrEnum):
    """What the kernel part does with a fatal MMU fault. off: the stock driver. report: the stock driver
    answers, and it is recorded. isolate: what may be sunk is, and the client that did it has to go.
    """

    OFF = "off"
    REPORT = "report"
    ISOLATE = "isolate"


class KernelAction(StrEnum):
    """What the kernel part did: with a fault, against a client that it sank faults of, or with the fault of
    work whose address space is gone (orphan)."""

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
    """One record of the kernel part (kmod_patches/src/mpsd-abi.h).

    `space` names the address space to the module. `process` made it: None where it is not known or not seen
    from here. `event.fatal` says only that UVM could not service it. `why`: the reason of a stock answer,
    empty where the fault was or would be sunk. `faults` of this space so far, this one included.
    `acknowledged`: somebody has said that this client is being put out.
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
    """Why an access was absorbed where it was: by a guard zone of the program's own, laid before, or by a
    sink that the kernel part put under it."""

    GUARD = "guard"
    QUARANTINE = "quarantine"
    NULL_PAGE = "null page"
    FAR = "far"
    SINK = "sink"


class Relation(StrEnum):
    """How a stray address lies to an allocation."""

    BEFORE = "before the start of"
    PAST = "past the end of"
    INSIDE = "inside"


@dataclass(frozen=True, slots=True)
class Nearby:
    """The allocation next to a stray access, as the program's own ledger has it: its words, not proof.

    `distance` in bytes: from the start back (BEFORE), from the end on (PAST), from the start on (INSIDE);
    of the access itself, or of the 4 KiB page that it was in (`page`). `order` counts the program's
    allocations from 1. `age_s` since it was made, `freed_s` since it was freed, None while it lives.
    """

    relation: Relation
    distance: int
    page: bool
    address: int
    size: int
    order: int
    age_s: float
    freed_s: float | None = None
