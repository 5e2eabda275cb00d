"""The binary interface of /dev/nvidia-uvm and /dev/nvidia-uvm-tools. Pure: bytes in, values out.

UVM ioctl requests are plain numbers (no _IOC bits). A call that reached the driver returns 0 and leaves its
result in a status field of the structure. The field's offset differs by driver branch, and the interface has
no version query. So every status field is filled with `UNWRITTEN` before the call: a driver of another branch
leaves it untouched, and a layout counts as proven only if its status field was written.

Sources: uvm_ioctl.h, uvm_linux_ioctl.h and uvm_types.h of the open kernel modules 535 to 595
(MIT); sizes compiled from 535.288, 550.163, 570.211, 580.142, 595.45. Seen on 580.159.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from mpsd.base.model import Access, UvmEvent, UvmFaultType, UvmReason

UVM_FREE = 34
UVM_INIT_EVENT_TRACKER = 56
UVM_SET_NOTIFICATION_THRESHOLD = 57
UVM_EVENT_QUEUE_ENABLE_EVENTS = 58
UVM_CREATE_EXTERNAL_RANGE = 73
UVM_MAP_EXTERNAL_SPARSE = 74
UVM_INIT_EVENT_TRACKER_V2 = 76

EVENT_GPU_FAULT = 3
EVENT_FATAL_FAULT = 6

# Sparse mappings have a granularity of 64 KiB.
SPARSE_GRANULE = 0x10000

STATUS_OK = 0
STATUS_WRONG_FD = 0x16
UNWRITTEN = 0xFFFF_FFFF

_STATUS_NAMES = {
    0x00: "OK",
    0x0F: "GPU_IS_LOST",
    0x16: "ILLEGAL_ACTION",
    0x17: "IN_USE",
    0x1A: "INSUFFICIENT_RESOURCES",
    0x1B: "INSUFFICIENT_PERMISSIONS",
    0x1E: "INVALID_ADDRESS",
    0x1F: "INVALID_ARGUMENT",
    0x40: "INVALID_STATE",
    0x51: "NO_MEMORY",
    0x56: "NOT_SUPPORTED",
    0x59: "OPERATING_SYSTEM",
    0x65: "TIMEOUT",
    0x68: "UVM_ADDRESS_IN_USE",
}

FAULT_TYPES = {member.value: member for member in UvmFaultType}
REASONS = {member.value: member for member in UvmReason}
ACCESSES = {1: Access.READ, 2: Access.WRITE, 3: Access.ATOMIC, 4: Access.PREFETCH}


def status_name(status: int) -> str:
    """Return a driver status (rmStatus) as text, for example "ILLEGAL_ACTION (0x16)"."""
    if status == UNWRITTEN:
        return "no answer (the structure belongs to another driver branch)"
    return f"{_STATUS_NAMES.get(status, 'status')} ({status:#x})"


@dataclass(frozen=True, slots=True)
class EntryLayout:
    """Offsets of a queue entry's fields, in bytes."""

    size: int
    fatal_processor: struct.Struct
    fatal_processor_at: int
    fatal_reason_at: int
    fault_gpu: struct.Struct
    fault_gpu_at: int
    fault_access_at: int


ENTRY_V1 = EntryLayout(64, struct.Struct("=B"), 3, 4, struct.Struct("=B"), 3, 2)
ENTRY_V2 = EntryLayout(72, struct.Struct("=H"), 4, 3, struct.Struct("=H"), 2, 37)


@dataclass(frozen=True, slots=True)
class ControlLayout:
    """The ring's control block: four u32 positions at 0, then u64 drop counters by event type."""

    size: int
    dropped_at: int


CONTROL = ControlLayout(528, 16)
CONTROL_550_V2 = ControlLayout(536, 24)


@dataclass(frozen=True, slots=True)
class TrackerLayout:
    """Layout of the INIT_EVENT_TRACKER structure in one branch.

    `version_at` is the requested entry version, `granted_at` the version that the driver chose; None if the
    branch has no such field.
    """

    name: str
    request: int
    size: int
    status_at: int
    entry: EntryLayout
    control: ControlLayout
    version: int = 1
    version_at: int | None = None
    granted_at: int | None = None


TRACKER_535 = TrackerLayout("535", UVM_INIT_EVENT_TRACKER, 56, 48, ENTRY_V1, CONTROL)
TRACKER_550 = TrackerLayout(
    "550", UVM_INIT_EVENT_TRACKER, 64, 48, ENTRY_V1, CONTROL, version_at=52, granted_at=56
)
TRACKER_550_V2 = TrackerLayout(
    "550-v2",
    UVM_INIT_EVENT_TRACKER,
    64,
    48,
    ENTRY_V2,
    CONTROL_550_V2,
    version=2,
    version_at=52,
    granted_at=56,
)
TRACKER_560 = TrackerLayout("560", UVM_INIT_EVENT_TRACKER, 56, 52, ENTRY_V1, CONTROL, version_at=48)
TRACKER_560_V2 = TrackerLayout(
    "560-v2", UVM_INIT_EVENT_TRACKER, 56, 52, ENTRY_V2, CONTROL, version=2, version_at=48
)
TRACKER_565_V2 = TrackerLayout("565-v2", UVM_INIT_EVENT_TRACKER_V2, 56, 48, ENTRY_V2, CONTROL)
TRACKER_565 = TrackerLayout("565", UVM_INIT_EVENT_TRACKER, 56, 48, ENTRY_V1, CONTROL)

_BRANCHES: tuple[tuple[int, tuple[TrackerLayout, ...]], ...] = (
    (565, (TRACKER_565, TRACKER_565_V2)),
    (560, (TRACKER_560, TRACKER_560_V2)),
    (550, (TRACKER_550, TRACKER_550_V2)),
    (0, (TRACKER_535,)),
)


@dataclass(frozen=True, slots=True)
class FreeLayout:
    """Layout of UVM_FREE in one branch: with or without the length of the range."""

    name: str
    size: int
    status_at: int
    with_length: bool


FREE_WITH_LENGTH = FreeLayout("base, length", 24, 16, True)
FREE_BASE_ONLY = FreeLayout("base", 16, 8, False)
# First branch known to have dropped the length field from UVM_FREE.
_FREE_BASE_ONLY_SINCE = 610


def branch_of(driver_version: str) -> int:
    """Return the branch of a driver version ("580.159.04" -> 580); 0 for an invalid version."""
    head = driver_version.strip().split(".")[0]
    return int(head) if head.isdecimal() else 0


def tracker_layouts(branch: int) -> tuple[TrackerLayout, ...]:
    """Return the tracker layouts to try on a driver branch: its own first, then the nearest."""
    own = next(index for index, (since, _) in enumerate(_BRANCHES) if branch >= since)
    by_distance = sorted(range(len(_BRANCHES)), key=lambda index: abs(index - own))
    return tuple(layout for index in by_distance for layout in _BRANCHES[index][1])


def free_layouts(branch: int) -> tuple[FreeLayout, ...]:
    """Return the UVM_FREE layouts to try on a driver branch."""
    if branch >= _FREE_BASE_ONLY_SINCE:
        return (FREE_BASE_ONLY, FREE_WITH_LENGTH)
    return (FREE_WITH_LENGTH, FREE_BASE_ONLY)


def read_u32(buffer: bytes | bytearray | memoryview, offset: int) -> int:
    """Return the little-endian u32 at `offset`."""
    return int(struct.unpack_from("=I", buffer, offset)[0])


def encode_tracker(layout: TrackerLayout, queue: int, entries: int, control: int, uvm_fd: int) -> bytearray:
    """Return the parameters of INIT_EVENT_TRACKER for all processors.

    `queue` and `control` are page-aligned addresses; `entries` is a power of two, at least 2.
    """
    buffer = bytearray(layout.size)
    struct.pack_into("=QQQ16sIi", buffer, 0, queue, entries, control, bytes(16), 1, uvm_fd)
    if layout.version_at is not None:
        struct.pack_into("=I", buffer, layout.version_at, layout.version)
    if layout.granted_at is not None:
        struct.pack_into("=I", buffer, layout.granted_at, UNWRITTEN)
    struct.pack_into("=I", buffer, layout.status_at, UNWRITTEN)
    return buffer


def tracker_status(layout: TrackerLayout, buffer: bytearray) -> int:
    """Return the driver's answer to INIT_EVENT_TRACKER; UNWRITTEN if it has another layout."""
    status = read_u32(buffer, layout.status_at)
    if status == STATUS_OK and layout.granted_at is not None:
        granted = read_u32(buffer, layout.granted_at)
        return STATUS_OK if granted == layout.version else UNWRITTEN
    return status


def encode_threshold(threshold: int) -> bytearray:
    """Return the parameters of SET_NOTIFICATION_THRESHOLD; status at 4."""
    return bytearray(struct.pack("=II", threshold, UNWRITTEN))


def encode_enable(mask: int) -> bytearray:
    """Return the parameters of EVENT_QUEUE_ENABLE_EVENTS; `mask`: bits 1 << event type; status at 8."""
    return bytearray(struct.pack("=QII", mask, UNWRITTEN, 0))


def encode_external_range(base: int, length: int) -> bytearray:
    """Return the parameters of CREATE_EXTERNAL_RANGE; status at 16."""
    return bytearray(struct.pack("=QQII", base, length, UNWRITTEN, 0))


def encode_map_sparse(base: int, length: int, gpu: bytes) -> bytearray:
    """Return the parameters of MAP_EXTERNAL_SPARSE for the GPU with 16-byte uuid `gpu`; status at 32."""
    return bytearray(struct.pack("=QQ16sII", base, length, gpu, UNWRITTEN, 0))


def encode_free(layout: FreeLayout, base: int, length: int) -> bytearray:
    """Return the parameters of UVM_FREE for the range that begins at `base`."""
    buffer = bytearray(layout.size)
    struct.pack_into("=Q", buffer, 0, base)
    if layout.with_length:
        struct.pack_into("=Q", buffer, 8, length)
    struct.pack_into("=I", buffer, layout.status_at, UNWRITTEN)
    return buffer


def uuid_bytes(gpu_uuid: str) -> bytes:
    """Return the 16 bytes of a GPU uuid as NVML prints it ("GPU-..."). Raises ValueError."""
    raw = bytes.fromhex(gpu_uuid.removeprefix("GPU-").replace("-", ""))
    if len(raw) != 16:
        raise ValueError(f"GPU uuid {gpu_uuid!r} has {len(raw)} bytes, not 16")
    return raw


def decode_entry(layout: EntryLayout, entry: bytes | memoryview) -> UvmEvent | None:
    """Decode one queue entry; None for event types other than GPU fault and fatal fault."""
    kind = entry[0]
    if kind == EVENT_FATAL_FAULT:
        access, reason = entry[2], entry[layout.fatal_reason_at]
        processor = layout.fatal_processor.unpack_from(entry, layout.fatal_processor_at)[0]
    elif kind == EVENT_GPU_FAULT:
        access, reason = entry[layout.fault_access_at], 0
        processor = layout.fault_gpu.unpack_from(entry, layout.fault_gpu_at)[0]
    else:
        return None
    address, timestamp = struct.unpack_from("=QQ", entry, 8)
    return UvmEvent(
        fatal=kind == EVENT_FATAL_FAULT,
        fault_type=FAULT_TYPES.get(entry[1], UvmFaultType.UNKNOWN),
        access=ACCESSES.get(access, Access.UNKNOWN),
        reason=REASONS.get(reason, UvmReason.UNKNOWN),
        address=address,
        timestamp_ns=timestamp,
        gpu_index=processor,
    )


class Ring:
    """The consumer's half of a tracker queue.

    The driver writes an entry at put_behind and then advances put_ahead and put_behind. The consumer copies
    the entries out and then advances get_behind and get_ahead. One slot stays free. Positions count entries
    modulo `capacity`, a power of two.
    """

    def __init__(
        self,
        queue: memoryview,
        control: memoryview,
        capacity: int,
        entry: EntryLayout,
        layout: ControlLayout,
    ) -> None:
        if capacity < 2 or capacity & (capacity - 1):
            raise ValueError(f"queue capacity {capacity} is not a power of two of at least 2")
        if len(queue) < capacity * entry.size or len(control) < layout.size:
            raise ValueError("the queue or control block is smaller than its layout")
        self._queue = queue
        self._control = control
        self._capacity = capacity
        self._entry = entry
        self._layout = layout

    def take(self) -> list[UvmEvent]:
        """Return every queued fault and free all slots that were read."""
        get = read_u32(self._control, 0) % self._capacity
        put = read_u32(self._control, 12) % self._capacity
        events: list[UvmEvent] = []
        while get != put:
            start = get * self._entry.size
            event = decode_entry(self._entry, bytes(self._queue[start : start + self._entry.size]))
            if event is not None:
                events.append(event)
            get = (get + 1) % self._capacity
        struct.pack_into("=II", self._control, 0, get, get)
        return events

    def dropped(self) -> int:
        """Number of events of all types that the driver dropped because the queue was full."""
        return sum(struct.unpack_from("=64Q", self._control, self._layout.dropped_at))
