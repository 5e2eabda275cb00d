"""The binary interface of /dev/nvidia-uvm-mpsd, the device of a patched nvidia-uvm. Bytes in, values out.

kmod_patches/src/mpsd-abi.h is the description; tests/kmod compares every size, offset and number here with
the compiler's. Input is checked: of a record of a newer version the known part is read, numbers without a
name become UNKNOWN, and an invalid record raises `RecordError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from mpsd.base.errors import GpuError
from mpsd.base.model import Access, UvmFaultType, UvmReason
from mpsd.base.text import gpu_uuid
from mpsd.gpu.nvidia.uvm_abi import ACCESSES, FAULT_TYPES, REASONS

DEVICE = "/dev/nvidia-uvm-mpsd"
ABI_VERSION = 1
RING_RECORDS = 256

RECORD = struct.Struct("=HHBBBBQQQQQQQQiIIIBBBBHHHHI16s16s24x")
QUERY = struct.Struct("=IIIIIIIIQQ32s32x")
SET_MODE = struct.Struct("=II")
TARGET = struct.Struct("=QQ")
HEAD = struct.Struct("=HH")

_MAGIC = 0xEC
_WRITE, _READ = 1, 2


def _request(direction: int, number: int, argument: struct.Struct) -> int:
    """Return an ioctl request as asm-generic/ioctl.h composes it (x86-64 and arm64)."""
    return direction << 30 | argument.size << 16 | _MAGIC << 8 | number


IOC_QUERY = _request(_READ, 0, QUERY)
IOC_SET_MODE = _request(_WRITE, 1, SET_MODE)
IOC_ACKNOWLEDGE = _request(_WRITE, 2, TARGET)
IOC_KILL = _request(_WRITE, 3, TARGET)
IOC_RELEASE = _request(_WRITE, 4, TARGET)

_NO_CHANNEL = 0xFFFF_FFFF
_NO_ID = 0xFFFF
# /proc/PID/stat counts in USER_HZ, which is 100 on all supported machines (proc(5)).
_NS_PER_TICK = 10_000_000


class RecordError(GpuError):
    """The device sent an invalid record: this mpsd and the module have different versions."""


class Mode(IntEnum):
    """The module's answer to a fatal fault (enum mpsd_mode)."""

    OFF = 0
    REPORT = 1
    ISOLATE = 2
    UNKNOWN = -1


class Action(IntEnum):
    """The result of a fault, or the step taken against a condemned client (enum mpsd_action)."""

    NONE = 0
    REPORTED = 1
    SUNK = 2
    SUNK_BEFORE = 3
    REFUSED = 4
    KILL = 16
    STOP = 17
    GIVE_UP = 18
    ORPHAN = 32
    UNKNOWN = -1


class Why(IntEnum):
    """The reason for the stock driver's answer to a fault (enum mpsd_why)."""

    NONE = 0
    FAULT_TYPE = 1
    ACCESS = 2
    REASON = 3
    PERMISSIONS = 4
    MANAGED = 5
    PROTECTED = 6
    RANGE = 7
    CLIENT = 8
    NONREPLAYABLE = 9
    ATS = 10
    UNADDRESSABLE = 11
    NO_GAP = 12
    LOOP = 13
    TOO_MANY = 14
    RELEASED = 15
    FAILED = 16
    ALONE = 17
    UNKNOWN = -1


class Engine(IntEnum):
    """The engine that faulted (enum mpsd_engine)."""

    UNKNOWN = 0
    GRAPHICS = 1
    HOST = 2
    CE = 3


class ClientType(IntEnum):
    """The type of unit that faulted (enum mpsd_client_type)."""

    UNKNOWN = 0
    GPC = 1
    HUB = 2


_MODES = {member.value: member for member in Mode}
_ACTIONS = {member.value: member for member in Action}
_WHYS = {member.value: member for member in Why}
_ENGINES = {member.value: member for member in Engine}
_CLIENTS = {member.value: member for member in ClientType}

FLAG_REPLAYABLE = 0x1
FLAG_CONDEMNED = 0x2
FLAG_ACKNOWLEDGED = 0x4
FLAG_RELEASED = 0x8


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One record: a fatal fault and its answer, a step against a client, or the fault of an exited client.

    `time_ns` and `deadline_ns` (None: no further step) are CLOCK_MONOTONIC_RAW. `pid` is None if this PID
    namespace does not contain the creator of the address space; `start_ticks` is still the creator's
    (proc(5), field 22). `sink` is (base, bytes), None if nothing was mapped. `channel`, `gpc` and `veid` are
    None if the fault does not report them. In a step all fields of a fault are unknown or 0.
    """

    seq: int
    time_ns: int
    action: Action
    why: Why
    mode: Mode
    space: int
    pid: int | None
    start_ticks: int
    comm: str
    gpu_uuid: str
    address: int
    sink: tuple[int, int] | None
    fault_type: UvmFaultType
    access: Access
    reason: UvmReason
    engine: Engine
    client_type: ClientType
    client: int
    gpc: int | None
    veid: int | None
    channel: int | None
    faults: int
    sinks: int
    deadline_ns: int | None
    replayable: bool
    condemned: bool
    acknowledged: bool
    released: bool


@dataclass(frozen=True, slots=True)
class KernelState:
    """The answer to IOC_QUERY: the module's version and settings. `written`: records since it was loaded.

    Another `loaded_ns` (CLOCK_BOOTTIME) means that `seq` began again."""

    abi_version: int
    record_size: int
    ring_records: int
    mode: Mode
    deadline_ms: int
    max_sinks: int
    nonreplayable: bool
    stop_channels: bool
    written: int
    loaded_ns: int
    driver: str


def _text(raw: bytes) -> str:
    """Decode text up to the first 0. Unprintable bytes become "?", because logs and terminals show it."""
    head = raw.split(b"\0", 1)[0]
    return "".join(chr(byte) if 0x20 <= byte < 0x7F else "?" for byte in head)


def _known(value: int, unknown: int) -> int | None:
    return None if value == unknown else value


def decode_record(raw: bytes | memoryview) -> KernelRecord:
    """Decode the record at the beginning of `raw`. Raises RecordError."""
    if len(raw) < RECORD.size:
        raise RecordError(f"a record has {len(raw)} bytes, but needs at least {RECORD.size}")
    fields = RECORD.unpack_from(raw)
    version, size, action, why, mode, fault_type, seq, time_ns, space, address = fields[:10]
    base, length, start_ns, deadline_ns, pid, faults, sinks, channel = fields[10:18]
    access, reason, engine, client_type, client, gpc, veid, flags, _, uuid, comm = fields[18:]
    if version < ABI_VERSION or size < RECORD.size:
        raise RecordError(f"a record of version {version} declares {size} bytes")
    return KernelRecord(
        seq=seq,
        time_ns=time_ns,
        action=_ACTIONS.get(action, Action.UNKNOWN),
        why=_WHYS.get(why, Why.UNKNOWN),
        mode=_MODES.get(mode, Mode.UNKNOWN),
        space=space,
        pid=pid if pid > 0 else None,
        start_ticks=start_ns // _NS_PER_TICK,
        comm=_text(comm),
        gpu_uuid=gpu_uuid(uuid) if any(uuid) else "",
        address=address,
        sink=(base, length) if length else None,
        fault_type=FAULT_TYPES.get(fault_type, UvmFaultType.UNKNOWN),
        access=ACCESSES.get(access, Access.UNKNOWN),
        reason=REASONS.get(reason, UvmReason.UNKNOWN),
        engine=_ENGINES.get(engine, Engine.UNKNOWN),
        client_type=_CLIENTS.get(client_type, ClientType.UNKNOWN),
        client=client,
        gpc=_known(gpc, _NO_ID),
        veid=_known(veid, _NO_ID),
        channel=_known(channel, _NO_CHANNEL),
        faults=faults,
        sinks=sinks,
        deadline_ns=deadline_ns or None,
        replayable=bool(flags & FLAG_REPLAYABLE),
        condemned=bool(flags & FLAG_CONDEMNED),
        acknowledged=bool(flags & FLAG_ACKNOWLEDGED),
        released=bool(flags & FLAG_RELEASED),
    )


def decode_records(raw: bytes) -> Iterator[KernelRecord]:
    """Yield all records of one read(), each with its own declared size. Raises RecordError."""
    view = memoryview(raw)
    while len(view):
        record = decode_record(view)
        _, size = HEAD.unpack_from(view)
        if size > len(view):
            raise RecordError(f"a record declares {size} bytes, but {len(view)} were read")
        yield record
        view = view[size:]


def decode_query(raw: bytes | bytearray) -> KernelState:
    """Decode the structure of IOC_QUERY. Raises RecordError for an invalid answer."""
    if len(raw) != QUERY.size:
        raise RecordError(f"the answer has {len(raw)} bytes instead of {QUERY.size}")
    version, size, ring, mode, deadline, sinks, nonreplayable, stop, written, loaded, driver = QUERY.unpack(
        raw
    )
    if version < ABI_VERSION or size < RECORD.size:
        raise RecordError(f"unknown interface version {version} with records of {size} bytes")
    return KernelState(
        abi_version=version,
        record_size=size,
        ring_records=ring,
        mode=_MODES.get(mode, Mode.UNKNOWN),
        deadline_ms=deadline,
        max_sinks=sinks,
        nonreplayable=nonreplayable != 0,
        stop_channels=stop != 0,
        written=written,
        loaded_ns=loaded,
        driver=_text(driver),
    )


def encode_set_mode(mode: Mode) -> bytes:
    """Return the argument of IOC_SET_MODE. Raises ValueError for UNKNOWN."""
    if mode is Mode.UNKNOWN:
        raise ValueError("the mode UNKNOWN cannot be set")
    return SET_MODE.pack(mode, 0)


def encode_target(space: int) -> bytes:
    """Return the argument of IOC_ACKNOWLEDGE, IOC_KILL and IOC_RELEASE: a record's `space`."""
    return TARGET.pack(space, 0)
