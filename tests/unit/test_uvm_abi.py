"""Byte-exact layouts of the UVM tools interface, per driver branch, and the ring's reader."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.base.model import Access, UvmFaultType, UvmReason
from mpsd.gpu.nvidia import uvm_abi as abi

# branch -> (structure size, offset of the status, offset of the requested version, of the granted version)
TRACKER_TABLE = {
    535: (56, 48, None, None),
    545: (56, 48, None, None),
    550: (64, 48, 52, 56),
    555: (64, 48, 52, 56),
    560: (56, 52, 48, None),
    565: (56, 48, None, None),
    570: (56, 48, None, None),
    580: (56, 48, None, None),
    595: (56, 48, None, None),
}


@pytest.mark.parametrize("branch", TRACKER_TABLE)
def test_tracker_structure_of_each_branch(branch: int) -> None:
    layout = abi.tracker_layouts(branch)[0]
    size, status_at, version_at, granted_at = TRACKER_TABLE[branch]
    assert (layout.size, layout.status_at) == (size, status_at)
    assert (layout.version_at, layout.granted_at) == (version_at, granted_at)
    buffer = abi.encode_tracker(layout, 0x7000_0000_1000, 512, 0x7000_0000_2000, 9)
    expected = bytearray(size)
    struct.pack_into("<QQQ", expected, 0, 0x7000_0000_1000, 512, 0x7000_0000_2000)
    struct.pack_into("<II", expected, 40, 1, 9)
    struct.pack_into("<I", expected, status_at, abi.UNWRITTEN)
    if version_at is not None:
        struct.pack_into("<I", expected, version_at, 1)
    if granted_at is not None:
        struct.pack_into("<I", expected, granted_at, abi.UNWRITTEN)
    assert buffer == expected
    assert layout.request == 56
    assert (layout.entry.size, layout.control.size) == (64, 528)


def test_every_branch_tries_all_layouts_and_its_own_first() -> None:
    names = {layout.name for layout in abi.tracker_layouts(580)}
    for branch in (0, 470, 535, 550, 560, 565, 610):
        layouts = abi.tracker_layouts(branch)
        assert {layout.name for layout in layouts} == names
        assert len(layouts) == len(names)
    assert abi.tracker_layouts(560)[0].name == "560"
    assert abi.tracker_layouts(700)[0].name == "565"


def test_second_version_of_the_queue() -> None:
    layout = next(x for x in abi.tracker_layouts(580) if x.name == "565-v2")
    assert (layout.request, layout.size, layout.entry.size, layout.control.size) == (76, 56, 72, 528)
    layout = next(x for x in abi.tracker_layouts(550) if x.name == "550-v2")
    assert (layout.entry.size, layout.control.size, layout.control.dropped_at) == (72, 536, 24)


def test_an_untouched_status_proves_that_the_layout_is_wrong() -> None:
    own, other = abi.tracker_layouts(580)[0], abi.tracker_layouts(560)[0]
    buffer = abi.encode_tracker(other, 0x1000, 2, 0x2000, 3)
    struct.pack_into("<I", buffer, own.status_at, 0)
    assert abi.tracker_status(other, buffer) == abi.UNWRITTEN
    assert abi.tracker_status(own, buffer) == 0


def test_550_must_grant_the_version_that_was_asked_for() -> None:
    layout = abi.tracker_layouts(550)[0]
    buffer = abi.encode_tracker(layout, 0x1000, 2, 0x2000, 3)
    struct.pack_into("<I", buffer, 48, 0)
    assert abi.tracker_status(layout, buffer) == abi.UNWRITTEN
    struct.pack_into("<I", buffer, 56, 1)
    assert abi.tracker_status(layout, buffer) == 0


def test_small_structures() -> None:
    poison = abi.UNWRITTEN
    uuid = bytes(range(16))
    assert abi.encode_threshold(1) == struct.pack("<II", 1, poison)
    assert abi.encode_enable(1 << 6) == struct.pack("<QII", 64, poison, 0)
    assert abi.encode_external_range(0x10000, 0x20000) == struct.pack("<QQII", 0x10000, 0x20000, poison, 0)
    sparse = abi.encode_map_sparse(0x10000, 0x20000, uuid)
    assert sparse == struct.pack("<QQ", 0x10000, 0x20000) + uuid + struct.pack("<II", poison, 0)
    assert len(sparse) == 40


def test_free_lost_its_length_in_later_branches() -> None:
    with_length, base_only = abi.free_layouts(580)
    assert abi.encode_free(with_length, 0x10000, 0x20000) == struct.pack(
        "<QQII", 0x10000, 0x20000, abi.UNWRITTEN, 0
    )
    assert abi.encode_free(base_only, 0x10000, 0x20000) == struct.pack("<QII", 0x10000, abi.UNWRITTEN, 0)
    assert abi.free_layouts(610) == (base_only, with_length)


@pytest.mark.parametrize(
    ("text", "branch"), [("580.159.04", 580), ("535.288.01\n", 535), ("", 0), ("open", 0)]
)
def test_branch_of_a_version(text: str, branch: int) -> None:
    assert abi.branch_of(text) == branch


def test_uuid_of_a_gpu() -> None:
    text = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert abi.uuid_bytes(text) == bytes(range(16))
    with pytest.raises(ValueError, match="not 16"):
        abi.uuid_bytes("GPU-0001")


def fatal(version: int, address: int = 0x7E00_0000_0000, timestamp: int = 5) -> bytes:
    entry = bytearray(64 if version == 1 else 72)
    entry[0:3] = bytes((6, 1, 2))
    if version == 1:
        entry[3], entry[4] = 1, 1
    else:
        entry[3] = 1
        struct.pack_into("<H", entry, 4, 1)
    struct.pack_into("<QQ", entry, 8, address, timestamp)
    return bytes(entry)


@pytest.mark.parametrize(("version", "layout"), [(1, abi.ENTRY_V1), (2, abi.ENTRY_V2)])
def test_fatal_fault_entry(version: int, layout: abi.EntryLayout) -> None:
    event = abi.decode_entry(layout, fatal(version))
    assert event is not None
    assert event.fatal
    assert (event.fault_type, event.access) == (UvmFaultType.INVALID_PDE, Access.WRITE)
    assert (event.reason, event.address) == (UvmReason.INVALID_ADDRESS, 0x7E00_0000_0000)
    assert (event.timestamp_ns, event.gpu_index) == (5, 1)


def test_serviced_fault_entry_of_the_second_version() -> None:
    entry = bytearray(72)
    entry[0:2] = bytes((3, 2))
    struct.pack_into("<HHH", entry, 2, 300, 7, 8)
    struct.pack_into("<QQ", entry, 8, 0x1000, 9)
    entry[36:38] = bytes((1, 3))
    event = abi.decode_entry(abi.ENTRY_V2, bytes(entry))
    assert event is not None
    assert not event.fatal
    assert (event.gpu_index, event.access) == (300, Access.ATOMIC)


def test_unknown_numbers_and_other_event_types() -> None:
    entry = bytearray(fatal(1))
    entry[1:5] = bytes((99, 99, 0, 99))
    event = abi.decode_entry(abi.ENTRY_V1, bytes(entry))
    assert event is not None
    assert event.fault_type is UvmFaultType.UNKNOWN
    assert event.access is Access.UNKNOWN
    assert event.reason is UvmReason.UNKNOWN
    entry[0] = 4
    assert abi.decode_entry(abi.ENTRY_V1, bytes(entry)) is None


class Driver:
    """The producer's half of a ring, as the driver writes it: full when one slot is left."""

    def __init__(self, capacity: int, layout: abi.TrackerLayout) -> None:
        self.capacity, self.layout = capacity, layout
        self.queue = bytearray(capacity * layout.entry.size)
        self.control = bytearray(4096)
        self.ring = abi.Ring(
            memoryview(self.queue), memoryview(self.control), capacity, layout.entry, layout.control
        )

    def put(self, entry: bytes) -> None:
        get_ahead, _, _, put = struct.unpack_from("<IIII", self.control)
        following = (put + 1) % self.capacity
        if following == get_ahead:
            at = self.layout.control.dropped_at + 8 * entry[0]
            struct.pack_into("<Q", self.control, at, struct.unpack_from("<Q", self.control, at)[0] + 1)
            return
        self.queue[put * len(entry) : (put + 1) * len(entry)] = entry
        struct.pack_into("<II", self.control, 8, following, following)


@given(st.lists(st.integers(0, 9), max_size=40), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]))
def test_ring_gives_every_event_once_in_order_and_counts_the_rest(
    bursts: list[int], capacity: int, version: int
) -> None:
    name = "565" if version == 1 else "550-v2"
    layout = next(x for x in abi.tracker_layouts(580) if x.name == name)
    driver = Driver(capacity, layout)
    sent, seen = 0, []
    for burst in bursts:
        for _ in range(burst):
            driver.put(fatal(version, address=sent))
            sent += 1
        seen += [event.address for event in driver.ring.take()]
    assert seen == sorted(seen)
    assert len(seen) + driver.ring.dropped() == sent
    assert driver.ring.take() == []


def test_ring_skips_events_that_are_no_faults_and_frees_their_slots() -> None:
    driver = Driver(4, abi.tracker_layouts(580)[0])
    other = bytearray(fatal(1))
    other[0] = 4
    for _ in range(10):
        driver.put(bytes(other))
        driver.put(fatal(1))
        assert len(driver.ring.take()) == 1
    assert driver.ring.dropped() == 0


@pytest.mark.parametrize("capacity", [0, 1, 3, 1024])
def test_ring_refuses_a_wrong_size(capacity: int) -> None:
    layout = abi.tracker_layouts(580)[0]
    with pytest.raises(ValueError, match="queue"):
        abi.Ring(
            memoryview(bytearray(4096)), memoryview(bytearray(4096)), capacity, layout.entry, layout.control
        )


def test_status_names() -> None:
    assert abi.status_name(0x16) == "ILLEGAL_ACTION (0x16)"
    assert "0x7777" in abi.status_name(0x7777)
    assert "branch" in abi.status_name(abi.UNWRITTEN)
