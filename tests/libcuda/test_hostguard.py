"""The guard over a program's own host memory: which mappings it covers, and that programs still work."""

from __future__ import annotations

import os
import subprocess

import pytest

from mpsd_libcuda.stats import read_stats
from tests.support.libcudas import DEADLINE_S, Libraries, run
from tests.support.waiting import until
from tests.support.zoning import GUARD, MIB, SPARSE, Obedient

GIB = 1 << 30
GRANULE = 64 << 10
AREA = range(0x280000000000, 0x290000000000)
"""The driver's own mappings, as in place.c."""
BUFFER = "ctypes.addressof(globals().setdefault('buffer', ctypes.create_string_buffer(8 << 20)))"
HOST_POINTER = "(lambda p: (cuda.cuMemHostAlloc(ctypes.byref(p), ctypes.c_size_t(8 << 20), 0), p.value))"


def plan(libraries: Libraries, maps: str, *holes: int, most: int = 1 << 40) -> list[tuple[int, int]]:
    program = libraries.program("hostplan", sources=("hostplan.c",))
    command = [str(program), str(most), *map(str, holes)]
    done = subprocess.run(
        command, input=maps, capture_output=True, text=True, timeout=DEADLINE_S, check=True, env=os.environ
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    return [(int(base, 16), int(size, 16)) for base, size in rows]


def row(start: int, size: int, access: str = "rw-p", path: str = "") -> str:
    return f"{start:x}-{start + size:x} {access} 00000000 00:00 0 {' ' * 20}{path}\n"


@pytest.mark.parametrize("path", ["", "[heap]", "[stack]", "[anon: glibc: malloc]"])
def test_the_program_s_own_memory_is_covered(libraries: Libraries, path: str) -> None:
    assert plan(libraries, row(0x7F0000000000, MIB, path=path)) == [(0x7F0000000000, MIB)]


@pytest.mark.parametrize(
    "line",
    [
        row(0x400000, MIB),  # below 8 GiB
        row(0x7F0000000000, MIB, "---p"),  # only a reservation
        row(0x7F0000000000, MIB, "rw-s"),
        row(0x7F0000000000, MIB, path="/dev/nvidia-uvm"),
        row(0x7F0000000000, MIB, path="/dev/shm/a"),
        row(0x7F0000000000, MIB, path="/memfd:a (deleted)"),
        row(0x7F0000000000, MIB, path="/home/a/data.bin"),
        row(0x7F0000000000, MIB, "r-xp", path="/usr/lib/old.so (deleted)"),
        row(0x7F0000000000, MIB, path="[vvar]"),
        row(0x200000000000, MIB),  # a window
        row(0x7F0000001000, GRANULE),  # not aligned to a granule
    ],
)
def test_what_may_be_somebody_s_business_is_not_covered(libraries: Libraries, line: str) -> None:
    last = row(0x7FF000000000, MIB)
    assert plan(libraries, line + last) == [(0x7FF000000000, MIB)]


def test_a_library_is_covered_with_all_its_parts(libraries: Libraries) -> None:
    base = 0x7F0000000000
    maps = row(base, MIB, "r--p", "/usr/lib/a b.so") + row(base + MIB, MIB, "r-xp", "/usr/lib/a b.so")
    assert plan(libraries, maps + row(base + 2 * MIB, MIB, "rw-p", "/usr/lib/a b.so")) == [(base, 3 * MIB)]


def test_long_mappings_come_in_pieces_and_end_with_the_bytes(libraries: Libraries) -> None:
    base = 0x7F0000000000
    maps = row(base, GIB)
    assert plan(libraries, maps) == [(base + n * 256 * MIB, 256 * MIB) for n in range(4)]
    assert len(plan(libraries, maps, most=600 * MIB)) == 2


def test_holes_are_left_out(libraries: Libraries) -> None:
    base = 0x7F0000000000
    holes = (base + 3 * MIB + 5, 100, base + MIB, MIB)
    found = plan(libraries, row(base, 4 * MIB), *holes)
    assert found == [
        (base, MIB),
        (base + 2 * MIB, MIB),
        (base + 3 * MIB + GRANULE, MIB - GRANULE),
    ]


def guarded(libraries: Libraries, **extra: str) -> Obedient:
    chosen = {"vault": "1", "zone_budget": str(GIB), "host_guard_bytes": str(4 * GIB)}
    return Obedient(libraries.environment(proxied=True, **{**chosen, **extra}))


def covers(program: Obedient, address: int) -> bool:
    rows = [zone for zone in program.ledger().zones() if zone.kind == SPARSE]
    return any(zone.role == GUARD and zone.start <= address < zone.end for zone in rows)


def shown(program: Obedient) -> int:
    stats = read_stats(program.process.pid)
    assert stats is not None
    return stats.host_guard


def host_buffer(program: Obedient) -> int:
    """Return the middle of a zeroed host buffer of 8 MiB in the program."""
    program.do("alloc(1000)")
    return int(program.do(BUFFER)) + 4 * MIB


def test_a_kernel_that_gets_a_host_pointer_is_absorbed(libraries: Libraries) -> None:
    with guarded(libraries) as program:
        address = host_buffer(program)
        until(lambda: covers(program, address), "the buffer is covered")
        assert (program.do(f"hit({address})"), program.do("any(buffer.raw)")) == (0, False)
        assert shown(program) >= 7 * MIB


def test_without_it_such_a_pointer_is_fatal(libraries: Libraries) -> None:
    with guarded(libraries, host_guard_bytes="0") as program:
        assert program.do(f"hit({host_buffer(program)})") == 700
        assert shown(program) == 0


@pytest.mark.parametrize("name", ["cuMemHostRegister", "cuMemHostRegister_v2"])
def test_registered_memory_is_no_more_covered_until_it_is_let_go(libraries: Libraries, name: str) -> None:
    with guarded(libraries) as program:
        address = host_buffer(program)
        until(lambda: covers(program, address), "the buffer is covered")
        register = f"cuda.{name}(ctypes.c_void_p({address}), ctypes.c_size_t(4096), 0)"
        assert (program.do(register), covers(program, address)) == (0, False)
        assert (program.do(f"hit({address})"), program.do(f"buffer.raw[{4 * MIB}]")) == (0, 7)
        until(lambda: covers(program, address + MIB), "what lies beside it is covered again")
        assert not covers(program, address)
        assert program.do(register) == 712
        assert program.do(f"cuda.cuMemHostUnregister(ctypes.c_void_p({address}))") == 0
        until(lambda: covers(program, address), "the buffer is covered again")


def test_what_was_registered_in_a_context_that_has_gone_is_covered_again(libraries: Libraries) -> None:
    with guarded(libraries) as program:
        address = host_buffer(program)
        register = f"cuda.cuMemHostRegister_v2(ctypes.c_void_p({address}), ctypes.c_size_t({{}}), 0)"
        assert program.do(register.format(4096)) == 0
        assert program.do("cuda.cuDevicePrimaryCtxReset_v2(0)") == 0
        program.do("start()")
        program.do("alloc(1000)")
        assert program.do(register.format(8192)) == 0
        assert program.do(f"cuda.cuMemHostUnregister(ctypes.c_void_p({address}))") == 0
        until(lambda: covers(program, address), "the buffer is covered")


def test_the_driver_s_own_memory_lies_where_no_guard_comes(libraries: Libraries) -> None:
    with guarded(libraries) as program:
        address = host_buffer(program)
        until(lambda: covers(program, address), "the buffer is covered")
        program.do("bool(globals().pop('buffer'))")
        code, pinned = program.do(f"{HOST_POINTER}(ctypes.c_void_p())")
        assert code == 0 and pinned in AREA
        fresh = int(program.do(BUFFER)) + 4 * MIB
        until(lambda: covers(program, fresh), "the next buffer is covered")
        assert not covers(program, pinned)
        assert program.do(f"hit({pinned})") == 0
        assert program.do(f"ctypes.c_uint32.from_address({pinned}).value") == 7


TAKE = (
    "(lambda m: setattr(m, 'restype', ctypes.c_void_p)"
    " or m(*map(ctypes.c_size_t, ({}, {}, 0, 0x104022, 0, 0))))(ctypes.CDLL(None).mmap)"
)
"""Reserve a range only: no mapping is replaced and none is accounted."""


def test_the_driver_s_memory_passes_over_what_is_large(libraries: Libraries) -> None:
    with guarded(libraries) as program:
        program.do("alloc(1000)")
        _, first = program.do(f"{HOST_POINTER}(ctypes.c_void_p())")
        assert program.do(TAKE.format(first + 8 * MIB, 64 * GIB)) == first + 8 * MIB
        code, second = program.do(f"{HOST_POINTER}(ctypes.c_void_p())")
        assert code == 0 and second in AREA and second > first + 64 * GIB


def test_the_next_context_has_the_guard_again(libraries: Libraries) -> None:
    with guarded(libraries) as program:
        address = host_buffer(program)
        until(lambda: covers(program, address), "the buffer is covered")
        assert program.do("cuda.cuDevicePrimaryCtxReset_v2(0)") == 0
        assert not covers(program, address) and shown(program) == 0
        program.do("start()")
        program.do("alloc(1000)")
        until(lambda: covers(program, address), "the buffer is covered again")
        assert (program.do(f"hit({address})"), program.do("any(buffer.raw)")) == (0, False)


def test_a_forked_child_lays_nothing(libraries: Libraries) -> None:
    with guarded(libraries) as program:
        address = host_buffer(program)
        until(lambda: covers(program, address), "the buffer is covered")
        assert program.do("forked(lambda: 0)") == 0
        assert program.do(f"hit({address})") == 0


def test_without_zones_there_is_none_and_that_is_said(libraries: Libraries) -> None:
    chosen = {"vault": "1", "zone_bytes": "0", "host_guard_bytes": str(GIB)}
    environment = libraries.environment(proxied=True, zone_budget=str(GIB), **chosen)
    done = run([libraries.program("threads"), "dlsym"], environment)
    assert done.returncode == 0
    assert "no guard over host memory: guard zones are off" in done.stderr


def test_bytes_that_make_no_sense_are_said_and_not_used(libraries: Libraries) -> None:
    chosen = {"vault": "1", "zone_budget": str(GIB), "host_guard_bytes": "12345"}
    done = run([libraries.program("threads"), "dlsym"], libraries.environment(proxied=True, **chosen))
    assert done.returncode == 0
    assert "MPSD_DEBUG: host_guard_bytes=12345 is not a multiple of 65536" in done.stderr


def test_the_area_of_the_driver_s_mappings_can_be_chosen(libraries: Libraries) -> None:
    base = 0x7EA000000000
    with guarded(libraries, place_base=hex(base)) as program:
        program.do("alloc(1000)")
        code, pinned = program.do(f"{HOST_POINTER}(ctypes.c_void_p())")
        assert code == 0 and base <= pinned < base + (1 << 40)
