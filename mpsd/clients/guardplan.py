"""Planner of the outer guard: the ranges of a client's address space that it may cover. Pure.

A range of the low class is a hole: nothing is mapped there, and no mapping appears there unless the program
asks for that address. The other classes cover host mappings, which the GPU may not access unless the program
registers them. They are off unless measurements (faultinject/evidence/mechanisms.md) allow them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mpsd.base.model import GuardClass
from mpsd.os.procfs import MemoryMap

GRANULE = 64 << 10
# The driver locks the client's address space while it lays a range: short ranges keep waits short.
MAX_RANGE = 256 << 20
LOW_START = 64 << 10
LOW_END = 8 << 30
# Space above a mapping: the heap of a non-PIE program may grow into it before the guard follows.
LOW_MARGIN = 64 << 20
_NEVER = ("/dev/", "/memfd:", "/SYSV", "/anon_hugepage", "[")


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Bytes [base, base+length), both multiples of 64 KiB."""

    base: int
    length: int
    kind: GuardClass


def plan(maps: Sequence[MemoryMap], kinds: Collection[GuardClass], limit: int) -> tuple[Range, ...]:
    """Return the ranges to cover, lowest address first, at most `limit`."""
    found: list[Range] = []
    if GuardClass.LOW in kinds:
        found += _low(maps)
    programs = {m.path for m in maps if "x" in m.permissions and m.path.startswith("/")}
    for row in maps:
        kind = _kind(row, programs)
        if kind in kinds and kind is not None:
            found += _inside(row.start, row.end, kind)
    return tuple(sorted(found)[:limit])


def _kind(row: MemoryMap, programs: Collection[str]) -> GuardClass | None:
    if row.path == "[heap]":
        return GuardClass.HEAP
    if row.path == "[stack]":
        return GuardClass.STACK
    if row.path.startswith(_NEVER) or row.path not in programs or row.deleted or "s" in row.permissions:
        return None
    return GuardClass.FILE


def _low(maps: Iterable[MemoryMap]) -> Iterator[Range]:
    start = LOW_START
    for row in maps:
        if row.start >= LOW_END:
            break
        yield from _inside(start, max(start, row.start), GuardClass.LOW)
        start = max(start, row.end + LOW_MARGIN)
    yield from _inside(start, LOW_END, GuardClass.LOW)


def _inside(start: int, end: int, kind: GuardClass) -> Iterator[Range]:
    """Split into whole granules: a guard must not reach into a neighbour that may be registered."""
    base, last = -(-start // GRANULE) * GRANULE, end // GRANULE * GRANULE
    while base < last:
        length = min(last, (base // MAX_RANGE + 1) * MAX_RANGE) - base
        yield Range(base, length, kind)
        base += length
