"""The outer guard's plan: whole granules, never over what a program may register."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mpsd.base.model import GuardClass
from mpsd.clients.guardplan import GRANULE, LOW_END, LOW_MARGIN, LOW_START, MAX_RANGE, Range, plan
from mpsd.os.procfs import MemoryMap

EVERYTHING = frozenset(GuardClass)
PATHS = ["", "[heap]", "/a", "/dev/x"]


def row(start: int, end: int, path: str = "", permissions: str = "rw-p") -> MemoryMap:
    return MemoryMap(start, end, permissions, 0, "00:00", 1 if path.startswith("/") else 0, path)


def covered(ranges: tuple[Range, ...]) -> list[tuple[int, int]]:
    """Return [start, end) of everything covered, adjoining ranges joined."""
    joined: list[tuple[int, int]] = []
    for found in ranges:
        if joined and joined[-1][1] == found.base:
            joined[-1] = (joined[-1][0], found.base + found.length)
        else:
            joined.append((found.base, found.base + found.length))
    return joined


def test_empty_low_range_is_one_hole() -> None:
    assert covered(plan([], {GuardClass.LOW}, 100)) == [(LOW_START, LOW_END)]


def test_ranges_are_short() -> None:
    assert max(r.length for r in plan([], {GuardClass.LOW}, 100)) == MAX_RANGE


def test_a_non_pie_program_keeps_its_surroundings() -> None:
    program = row(0x400000, 0x500000, "/bin/program", "r-xp")
    heap = row(0x600000, 0x800000, "[heap]")
    ranges = plan([program, heap], {GuardClass.LOW}, 100)
    below, hole = (LOW_START, 0x400000), (0x800000 + LOW_MARGIN, LOW_END)
    assert covered(ranges) == [below, hole]


def test_files_are_guarded_only_where_they_are_programs() -> None:
    base = 0x7F0000000000
    rows = [
        row(base, base + 4 * GRANULE, "/lib/code.so", "r-xp"),
        row(base + 4 * GRANULE, base + 8 * GRANULE, "/lib/code.so", "rw-p"),
        row(base + 8 * GRANULE, base + 16 * GRANULE, "/data/weights.bin", "r--p"),
        row(base + 16 * GRANULE, base + 32 * GRANULE, "/dev/shm/x", "rwxs"),
        row(base + 32 * GRANULE, base + 64 * GRANULE, "/memfd:x (deleted)", "rwxp"),
    ]
    found = plan(rows, {GuardClass.FILE}, 10)
    assert [(r.base, r.length) for r in found] == [(base, 4 * GRANULE), (base + 4 * GRANULE, 4 * GRANULE)]


def test_only_whole_granules_inside_a_mapping() -> None:
    heap = row(0x555500001000, 0x555500001000 + 3 * GRANULE, "[heap]")
    (only,) = plan([heap], {GuardClass.HEAP}, 10)
    assert only.base % GRANULE == 0 and only.length == 2 * GRANULE
    assert only.base >= heap.start and only.base + only.length <= heap.end
    assert plan([row(0x1000, 0x2000, "[stack]")], {GuardClass.STACK}, 10) == ()


@given(
    st.lists(
        st.tuples(
            st.integers(1, 1 << 36), st.integers(1, 1 << 20), st.sampled_from(["", "[heap]", "/a", "/dev/x"])
        ),
        max_size=20,
    ),
    st.integers(0, 8),
)
def test_ranges_never_overlap_and_never_leave_their_ground(
    pieces: list[tuple[int, int, str]], limit: int
) -> None:
    rows, at = [], 0
    for gap, size, path in pieces:
        start = (at + gap) & ~0xFFF
        rows.append(row(start, start + (size << 12), path, "r-xp" if path == "/a" else "rw-p"))
        at = rows[-1].end
    ranges = plan(rows, EVERYTHING, limit)
    assert len(ranges) <= limit
    for one, two in itertools.pairwise(ranges):
        assert one.base + one.length <= two.base
    for found in ranges:
        assert found.base % GRANULE == 0 and found.length % GRANULE == 0 and found.length > 0
        touched = [r for r in rows if r.start < found.base + found.length and found.base < r.end]
        if found.kind is GuardClass.LOW:
            assert not touched and found.base >= LOW_START and found.base + found.length <= LOW_END
        else:
            assert len(touched) == 1 and touched[0].path in ("/a", "[heap]")
