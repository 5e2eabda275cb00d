"""Which ranges of a client's address space the outer guard may cover. Pure.

A range of the low class is a hole: nothing is mapped there, and nobody maps there without asking for it.
The other classes lie on mappings of the host: the GPU has no business there unless the program registers
them, so they are off unless measurements (faultinject/reports) allow them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mpsd.linux.procfs import MemoryMap
from mpsd.model import GuardClass

GRANULE = 64 << 10
# The driver holds the client's address space while it lays a range: short ranges keep others from waiting.
PIECE = 256 << 20
LOW_START = 64 << 10
LOW_END = 8 << 30
# Room above a mapping, that a non-PIE program's heap may grow into before the guard has followed it.
LOW_MARGIN = 64 << 20
_NEVER = ("/dev/", "/memfd:", "/SYSV", "/anon_hugepage", "[")


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Bytes [base, base+length), both multiples of 64 KiB."""

    base: int
    length: int
    kind: GuardClass


def plan(maps: Sequence[MemoryMap], kinds: Collection[GuardClass], limit: int) -> tuple[Range, ...]:
    """The ranges to cover, lowest address first, at most `limit`."""
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
    """Whole granules only, in pieces: a guard must not reach into a neighbour that somebody registers."""
    base, last = -(-start // GRANULE) * GRANULE, end // GRANULE * GRANULE
    while base < last:
        length = min(last, (base // PIECE + 1) * PIECE) - base
        yield Range(base, length, kind)
        base += length
