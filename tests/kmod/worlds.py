"""A generated GPU address space of a client: ranges that come and go, and a fault's surroundings."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from tests.kmod.policymodel import PAGE, WIDEST, Around, Range, Sink

LAST = (1 << 64) - 1
PAGES = 4096
# Bottom and top of the possible addresses, and the place of CUDA's allocations.
BASES = (0, 0x7F00_0000_0000, (1 << 49) - PAGES * PAGE, (1 << 64) - PAGES * PAGE)


@dataclass(frozen=True)
class Part:
    """A range [first, last] in bytes. `mapped`: the mapped parts of an external range."""

    first: int
    last: int
    kind: Range
    mapped: tuple[tuple[int, int], ...] = ()

    def holds(self, address: int) -> bool:
        return self.first <= address <= self.last


@dataclass
class World:
    """`parts` do not overlap; those in `gone` are absent now. Sparse mappings are given by GPU."""

    parts: list[Part]
    gone: set[int]

    def present(self) -> list[Part]:
        return [part for number, part in enumerate(self.parts) if number not in self.gone]

    def occupied(self, address: int) -> tuple[int, int, list[tuple[int, int]], Range]:
        """Return bounds to search for free memory, ranges taken inside them, and the kind of range."""
        part = next((part for part in self.present() if part.holds(address)), None)
        if part is None:
            return 0, LAST, [(each.first, each.last) for each in self.present()], Range.FREE
        if part.kind is not Range.HOLE:
            return 1, 0, [], part.kind
        mapped = any(first <= address <= last for first, last in part.mapped)
        return part.first, part.last, list(part.mapped), Range.MAPPED if mapped else Range.HOLE

    def around(self, address: int, sinks: list[tuple[int, Sink]], **more: bool) -> Around:
        """Return the surroundings of the address. `sinks`: (number from 1, sparse mapping) of that GPU."""
        first, last, taken, kind = self.occupied(address)
        covering = next((number for number, sink in sinks if sink.covers(address)), 0)
        taken += [(sink.base, sink.base + sink.bytes - 1) for _, sink in sinks]
        if covering or kind not in (Range.FREE, Range.HOLE):
            first, last = 1, 0
        for start, end in taken:
            if end < address:
                first = max(first, end + 1)
            if start > address:
                last = min(last, start - 1)
        window = [number for number, sink in sinks if sink.base // WIDEST == address // WIDEST]
        beside = window[0] if window and kind is Range.MAPPED else 0
        return Around(first, last, kind, covering, beside=beside, **more)


@st.composite
def parts_of(draw: st.DrawFn, base: int, first: int, last: int) -> Part:
    """Draw a range over pages [first, last) from `base`; an external range with mappings and holes in it."""
    kind = draw(st.sampled_from([Range.HOLE] * 4 + [Range.MANAGED, Range.PROTECTED, Range.UNKNOWN]))
    cuts = draw(st.lists(st.integers(first, last), max_size=6, unique=True).map(sorted))
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    mapped = tuple((base + a * PAGE, base + b * PAGE - 1) for a, b in pairs)
    return Part(base + first * PAGE, base + last * PAGE - 1, kind, mapped if kind is Range.HOLE else ())


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw up to six ranges in 16 MiB, some of them absent at first."""
    base = draw(st.sampled_from(BASES))
    cuts = draw(st.lists(st.integers(0, PAGES), max_size=12, unique=True).map(sorted))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    parts = [draw(parts_of(base, first, last)) for first, last in pairs]
    gone = draw(st.sets(st.integers(0, len(parts) - 1))) if parts else set()
    return World(parts, gone)


def addresses(world: World) -> st.SearchStrategy[int]:
    """Draw addresses in and around the ranges, above all at their edges."""
    edges = {edge for part in world.parts for edge in (part.first - 1, part.first, part.last, part.last + 1)}
    edges |= {edge for part in world.parts for pair in part.mapped for edge in (pair[0] - 1, pair[1] + 1)}
    near = sorted(edge for edge in edges if 0 <= edge <= LAST) or [0]
    base = min((part.first for part in world.parts), default=0)
    inside = st.integers(base, min(base + PAGES * PAGE - 1, LAST))
    return st.one_of(st.sampled_from(near), inside, st.sampled_from([0, PAGE, LAST, 1 << 46]))
