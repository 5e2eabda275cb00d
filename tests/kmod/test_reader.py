"""The Python reader of the kernel's records: valid records, newer ones and garbage."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsd.base.model import Access, UvmFaultType, UvmReason
from mpsd.gpu.nvidia import kernel_abi as abi

SIZE = abi.RECORD.size
UUID = bytes.fromhex("00112233445566778899aabbccddeeff")


def packed(size: int = SIZE, version: int = 1, pid: int = 4711, comm: bytes = b"python3\0junk") -> bytes:
    numbers = (7, 123, 55, 0x7F00_0000_1000, 0x7F00_0000_0000, 0x10000, 987_654_321_000_000, 2123)
    head = (version, size, abi.Action.SUNK, abi.Why.NONE, abi.Mode.ISOLATE, UvmFaultType.INVALID_PTE)
    units = (2, UvmReason.INVALID_ADDRESS, abi.Engine.GRAPHICS, abi.ClientType.GPC, 31, 5, 9)
    flags = abi.FLAG_REPLAYABLE | abi.FLAG_CONDEMNED
    raw = abi.RECORD.pack(*head, *numbers, pid, 3, 2, 17, *units, flags, 0, UUID, comm)
    return raw + bytes(size - SIZE)


WHOLE = abi.KernelRecord(
    seq=7,
    time_ns=123,
    action=abi.Action.SUNK,
    why=abi.Why.NONE,
    mode=abi.Mode.ISOLATE,
    space=55,
    pid=4711,
    start_ticks=98_765_432,
    comm="python3",
    gpu_uuid="GPU-00112233-4455-6677-8899-aabbccddeeff",
    address=0x7F00_0000_1000,
    sink=(0x7F00_0000_0000, 0x10000),
    fault_type=UvmFaultType.INVALID_PTE,
    access=Access.WRITE,
    reason=UvmReason.INVALID_ADDRESS,
    engine=abi.Engine.GRAPHICS,
    client_type=abi.ClientType.GPC,
    client=31,
    gpc=5,
    veid=9,
    channel=17,
    faults=3,
    sinks=2,
    deadline_ns=2123,
    replayable=True,
    condemned=True,
    acknowledged=False,
    released=False,
)


def test_a_whole_record() -> None:
    assert abi.decode_record(packed()) == WHOLE


def test_all_records_of_one_read() -> None:
    raw = packed() + packed(pid=0) + packed()
    assert list(abi.decode_records(raw)) == [WHOLE, replace(WHOLE, pid=None), WHOLE]
    assert list(abi.decode_records(b"")) == []


def test_a_newer_record_is_read_as_far_as_it_is_known() -> None:
    raw = packed(size=SIZE + 24, version=2) + packed(size=SIZE + 8, version=3)
    assert list(abi.decode_records(raw)) == [WHOLE, WHOLE]


@pytest.mark.parametrize(
    "raw",
    [
        packed()[:-1],
        packed()[:3],
        packed(version=0),
        struct.pack("=HH", 1, SIZE - 1) + packed()[4:],
        struct.pack("=HH", 1, 0) + packed()[4:],
        struct.pack("=HH", 1, SIZE + 1) + packed()[4:],
        packed() + b"x",
    ],
)
def test_what_cannot_be_a_record_is_an_error(raw: bytes) -> None:
    with pytest.raises(abi.RecordError):
        list(abi.decode_records(raw))


def test_a_process_name_cannot_write_to_a_terminal() -> None:
    assert abi.decode_record(packed(comm=b"\x1b[31mevil\n\xff\0")).comm == "?[31mevil??"
    assert abi.decode_record(packed(comm=b"0123456789abcdef")).comm == "0123456789abcdef"


def test_zero_and_all_ones_are_unknown() -> None:
    raw = bytearray(SIZE)
    struct.pack_into("=HH", raw, 0, 1, SIZE)
    empty = abi.decode_record(bytes(raw))
    assert (empty.action, empty.sink, empty.pid, empty.deadline_ns) == (abi.Action.NONE, None, None, None)
    assert (empty.fault_type, empty.access, empty.reason) == (0, Access.UNKNOWN, 0)
    assert (empty.comm, empty.gpu_uuid, empty.gpc) == ("", "", 0)
    full = abi.decode_record(struct.pack("=HH", 1, SIZE) + bytes([255] * (SIZE - 4)))
    assert (full.action, full.why, full.mode) == (abi.Action.UNKNOWN, abi.Why.UNKNOWN, abi.Mode.UNKNOWN)
    assert (full.engine, full.client_type) == (abi.Engine.UNKNOWN, abi.ClientType.UNKNOWN)
    assert (full.gpc, full.veid, full.channel, full.pid) == (None, None, None, None)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=3 * SIZE))
def test_garbage_is_a_record_or_an_error(raw: bytes) -> None:
    try:
        records = list(abi.decode_records(raw))
    except abi.RecordError:
        return
    assert SIZE * len(records) <= len(raw)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.binary(min_size=SIZE - 4, max_size=SIZE + 8), max_size=4))
def test_garbage_behind_a_good_head_is_always_records(bodies: list[bytes]) -> None:
    raw = b"".join(struct.pack("=HH", 1, 4 + len(body)) + body for body in bodies)
    records = list(abi.decode_records(raw))
    assert len(records) == len(bodies)
    assert all(record.comm.isprintable() and record.comm.isascii() for record in records)
    assert all(record.pid is None or record.pid > 0 for record in records)


def test_the_modules_state() -> None:
    numbers = (1, SIZE, 256, 2, 2000, 1024, 1, 0, 99, 10**12)
    raw = abi.QUERY.pack(*numbers, b"550.163.01\0junk")
    assert abi.decode_query(raw) == abi.KernelState(
        abi_version=1,
        record_size=SIZE,
        ring_records=256,
        mode=abi.Mode.ISOLATE,
        deadline_ms=2000,
        max_sinks=1024,
        nonreplayable=True,
        stop_channels=False,
        written=99,
        loaded_ns=10**12,
        driver="550.163.01",
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.one_of(st.binary(max_size=200), st.binary(min_size=abi.QUERY.size, max_size=abi.QUERY.size)))
def test_garbage_is_a_state_or_an_error(raw: bytes) -> None:
    try:
        state = abi.decode_query(raw)
    except abi.RecordError:
        return
    assert state.record_size >= SIZE
    assert len(raw) == abi.QUERY.size


def test_requests_are_packed_with_their_reserved_fields_zero() -> None:
    assert abi.encode_set_mode(abi.Mode.REPORT) == bytes([1, 0, 0, 0, 0, 0, 0, 0])
    assert abi.encode_target(0x1122) == bytes([0x22, 0x11]) + bytes(14)
    with pytest.raises(ValueError, match="UNKNOWN"):
        abi.encode_set_mode(abi.Mode.UNKNOWN)
