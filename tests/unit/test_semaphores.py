"""The signs of pending work in command buffers: marks, reports, wrap-around, and false signs."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from mpsd.gpu.nvidia.semaphores import BUSY, LOW_END, Area, Signs, areas, behind
from mpsd.gpu.nvidia.work import BLOCK, written

SLOT, REPORT = 0x2_0303_7F34, 0x2_0300_FFF0


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def mark(address: int) -> bytes:
    header = words(0x20022062, address >> 32, address & 0xFFFFFFFF)
    return header + words(0x20022060, 4, 1, 0x2001206C, 0x41, 0x6001206D, BUSY)


def report(address: int, number: int) -> bytes:
    return words(0x200426C0, address >> 32, address & 0xFFFFFFFF, number, 4)


def launch(number: int, slot: int = SLOT) -> bytes:
    return mark(slot) + words(0x200120AD, 0x20380C8, 0x200120B0, 0xA) + report(REPORT, number)


def pending(signs: Signs, memory: dict[int, int]) -> bool:
    return bool(signs.running(memory.get) or signs.queued(memory.get))


def test_a_running_kernel_is_pending_until_its_mark_changes() -> None:
    signs = Signs()
    signs.scan(bytes(64) + launch(0x7E))
    assert signs.understood
    assert pending(signs, {SLOT: 0, REPORT: 0x7D})
    assert pending(signs, {SLOT: BUSY, REPORT: 0x7E})
    assert not pending(signs, {SLOT: 6, REPORT: 0x7E})


def test_a_queued_launch_is_pending_though_nothing_runs() -> None:
    signs = Signs()
    signs.scan(launch(0x7E) + launch(0x7F, SLOT - 8) + launch(0x80, SLOT - 16))
    assert pending(signs, {SLOT: 6, SLOT - 8: 6, SLOT - 16: 0, REPORT: 0x7F})
    assert not pending(signs, {SLOT: 6, SLOT - 8: 6, SLOT - 16: 6, REPORT: 0x80})


def test_what_does_not_lie_in_pages_that_are_shared_with_the_gpu_is_no_sign() -> None:
    signs, far = Signs(), SLOT + (1 << 21)
    signs.scan(launch(0x7E) + launch(0x80, far))
    signs.keep([Area(SLOT, SLOT + 4), Area(REPORT, REPORT + 16)])
    assert signs.understood and signs.marks == {SLOT} and set(signs.numbers) == {REPORT}
    assert not pending(signs, {SLOT: 6, far: BUSY, REPORT: 0x80})
    signs.keep([Area(far, far + 4)])
    assert not signs.understood and not pending(signs, {SLOT: BUSY, REPORT: 0})


def test_old_commands_in_the_ring_do_no_harm() -> None:
    signs = Signs()
    signs.scan(launch(0x10) + launch(0xFFFFFFF0) + launch(0x12))
    assert not pending(signs, {SLOT: 6, REPORT: 0x12})
    assert pending(signs, {SLOT: 6, REPORT: 0x11})


def test_copy_and_host_semaphores_count() -> None:
    copy, host = 0x2_0300_FF00, 0x2_0300_FE00
    signs = Signs()
    signs.scan(words(0x20038090, copy >> 32, copy & 0xFFFFFFFF, 9))
    signs.scan(words(0x20050017, host & 0xFFFFFFFF, host >> 32, 4, 0, 1))
    assert not pending(signs, {copy: 9, host: 4})
    assert pending(signs, {copy: 8, host: 4})
    assert pending(signs, {copy: 9, host: 3})


def test_nothing_launched_is_not_understood_and_not_pending() -> None:
    signs = Signs()
    signs.scan(bytes(4096))
    assert not signs.understood
    assert not pending(signs, {})


def test_addresses_of_others_are_no_signs() -> None:
    signs = Signs()
    signs.scan(report(LOW_END + 0x1000, 5) + report(REPORT + 4, 5) + mark(LOW_END + 0x1000))
    assert not signs.understood and not signs.marks


def test_unmapped_semaphores_are_over() -> None:
    signs = Signs()
    signs.scan(launch(3))
    assert not pending(signs, {})


@given(st.integers(0, 0xFFFFFFFF), st.integers(0, (1 << 31) - 1))
def test_serial_numbers_wrap(value: int, ahead: int) -> None:
    assert behind(value, (value + ahead) & 0xFFFFFFFF) == (ahead > 0)
    assert not behind((value + ahead) & 0xFFFFFFFF, value)


@given(st.binary(max_size=4096))
def test_any_bytes_can_be_scanned(data: bytes) -> None:
    signs = Signs()
    signs.scan(data)
    assert not signs.queued(lambda address: None) and not signs.running(lambda address: None)


def test_only_shared_system_memory_of_the_control_device_is_read() -> None:
    rows = [
        (0x400000, 0x500000, "r-xp", "/bin/python3"),
        (0x2_0060_0000, 0x2_0080_0000, "rw-s", "/dev/nvidia0"),
        (0x2_0080_0000, 0x2_02A0_0000, "rw-s", "/dev/nvidiactl"),
        (0x2_0300_0000, 0x2_0320_0000, "rw-s", "/dev/nvidiactl"),
        (LOW_END, LOW_END + 0x200000, "rw-s", "/dev/nvidiactl"),
    ]
    assert areas(rows) == [Area(0x2_0080_0000, 0x2_02A0_0000), Area(0x2_0300_0000, 0x2_0320_0000)]


def test_only_written_blocks_are_scanned_and_no_pattern_is_cut() -> None:
    data = bytearray(4 * BLOCK)
    cut = BLOCK - len(launch(1)) // 2
    data[cut : cut + len(launch(1))] = launch(1)
    blocks = list(written(bytes(data)))
    assert len(blocks) == 2
    signs = Signs()
    for block in blocks:
        signs.scan(block)
    assert signs.marks == {SLOT} and signs.numbers == {REPORT: {1}}
