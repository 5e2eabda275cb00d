"""The GPU address space of one simulated client: mappings in memfds, reservations, sparse guards."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from mpsd.base.model import UvmFaultType
from mpsd.gpu.simulated.machine.semantics import NV_ADDRESS_IN_USE, NV_INVALID_ADDRESS, NV_OK

GRANULE = 1 << 16
PAGE = 1 << 12
WORD = 4
# Range of reservations. Clients keep the same range of their own address space free.
WINDOW_BASE, WINDOW_SIZE = 0x1000_0000_0000, 1 << 40
ADDRESS_LIMIT = 1 << 47


@dataclass(frozen=True, slots=True)
class Serviced:
    """An access that a managed range absorbed. `address`: of the page; `first`: it faulted, being the first
    in its 64 KiB."""

    address: int
    first: bool


@dataclass(frozen=True, slots=True)
class Violation:
    """The reason for an access that cannot be served. `address`: of the 4 KiB page, as hardware reports
    it."""

    address: int
    fault: UvmFaultType


class Mapping:
    """A reservation with memory behind it until it is unmapped. `size` in bytes."""

    def __init__(self, base: int, size: int, writable: bool) -> None:
        self.base, self.size, self.writable = base, size, writable
        self.fd = os.memfd_create("simulated-gpu", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self._bytes: mmap.mmap | None = None

    @property
    def mapped(self) -> bool:
        return self.fd >= 0

    def contents(self) -> mmap.mmap:
        if self._bytes is None:
            self._bytes = mmap.mmap(self.fd, self.size)
        return self._bytes

    def unmap(self) -> None:
        if self._bytes is not None:
            self._bytes.close()
            self._bytes = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class AddressMap:
    """All ranges of one address space. They never overlap."""

    def __init__(self) -> None:
        self._mappings: dict[int, Mapping] = {}
        self._bases: list[int] = []
        self._guards: list[tuple[int, int]] = []
        self._managed = ManagedRanges()
        self._absorbed: set[int] = set()
        self._next = WINDOW_BASE

    @property
    def bytes_used(self) -> int:
        return sum(m.size for m in self._mappings.values() if m.mapped)

    def allocate(self, size: int, *, writable: bool = True) -> Mapping | None:
        """Map `size` bytes (rounded up to 64 KiB) at a fresh address; None if a guard is there."""
        size = max(GRANULE, -(-size // GRANULE) * GRANULE)
        taken = self._guarded(self._next, size) or self._managed.overlaps(self._next, size)
        if taken or self._next + size > WINDOW_BASE + WINDOW_SIZE:
            return None
        mapping = Mapping(self._next, size, writable)
        self._mappings[mapping.base] = mapping
        # Fresh addresses only grow, so the list stays sorted.
        self._bases.append(mapping.base)
        self._next += size + GRANULE
        return mapping

    def unmap(self, base: int, *, keep_reservation: bool) -> bool:
        """Unmap the memory. False if no mapping begins at `base`."""
        mapping = self._mappings.get(base)
        if mapping is None:
            return False
        mapping.unmap()
        if not keep_reservation:
            del self._mappings[base]
            self._bases.remove(base)
        return True

    def find(self, address: int) -> Mapping | None:
        index = bisect_right(self._bases, address) - 1
        if index < 0:
            return None
        mapping = self._mappings[self._bases[index]]
        return mapping if address < mapping.base + mapping.size else None

    def access(self, address: int, size: int, *, writes: bool) -> Mapping | Serviced | Violation | None:
        """Return the mapping that serves an access; None if a guard absorbs it; else its fault."""
        mapping = self.find(address)
        if mapping is None or not mapping.mapped:
            if (first := self._managed.touch(address)) is not None:
                return Serviced(_page(address), first)
            if self._guarded(address, size) or address // GRANULE in self._absorbed:
                return None
            return Violation(_page(address), UvmFaultType.INVALID_PDE)
        end = mapping.base + mapping.size
        if address + size > end and end // GRANULE in self._absorbed:
            return None
        if address + size > end:
            return Violation(end, UvmFaultType.INVALID_PDE)
        if writes and not mapping.writable:
            return Violation(_page(address), UvmFaultType.WRITE)
        return mapping

    def guard(self, base: int, length: int) -> int:
        """Add a sparse range and return an NV_STATUS."""
        if base == 0 or length <= 0 or base % GRANULE or length % GRANULE or base + length > ADDRESS_LIMIT:
            return NV_INVALID_ADDRESS
        taken = any(m.base < base + length and base < m.base + m.size for m in self._mappings.values())
        if taken or self._guarded(base, length) or self._managed.overlaps(base, length):
            return NV_ADDRESS_IN_USE
        self._guards.insert(bisect_right(self._guards, (base, length)), (base, length))
        return NV_OK

    def unguard(self, base: int, length: int) -> int:
        """Remove a range with exactly these bounds and return an NV_STATUS."""
        if (base, length) not in self._guards:
            return NV_INVALID_ADDRESS
        self._guards.remove((base, length))
        return NV_OK

    def absorb(self, address: int) -> None:
        """Make unmapped parts of this granule read 0 and drop writes from now on, address 0 included."""
        self._absorbed.add(address // GRANULE)

    def manage(self, base: int, length: int) -> int:
        """Declare a managed range, also over a reservation without memory. Return an NV_STATUS."""
        if base < 0 or length <= 0 or base % PAGE or length % PAGE or base + length > ADDRESS_LIMIT:
            return NV_INVALID_ADDRESS
        taken = any(
            m.mapped and m.base < base + length and base < m.base + m.size for m in self._mappings.values()
        )
        if taken or self._guarded(base, length) or self._managed.overlaps(base, length):
            return NV_ADDRESS_IN_USE
        self._managed.add(base, length)
        return NV_OK

    def unmanage(self, base: int, length: int) -> None:
        """End managed ranges in [base, base+length)."""
        self._managed.cut(base, max(0, length))

    def guarded(self, base: int, length: int) -> bool:
        """Return whether any byte of the range lies under a guard."""
        return self._guarded(base, max(1, length))

    def _guarded(self, base: int, length: int) -> bool:
        index = bisect_right(self._guards, (base + length - 1, ADDRESS_LIMIT)) - 1
        return index >= 0 and self._guards[index][0] + self._guards[index][1] > base

    def destroy(self) -> None:
        for mapping in self._mappings.values():
            mapping.unmap()
        self._mappings.clear()
        self._bases.clear()
        self._guards.clear()
        self._absorbed.clear()
        self._managed = ManagedRanges()


class ManagedRanges:
    """Ranges that the driver services, and their touched granules. They never overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._touched: set[int] = set()

    def add(self, base: int, length: int) -> None:
        index = bisect_right(self._starts, base)
        self._starts.insert(index, base)
        self._ends.insert(index, base + length)
        self._forget(base, base + length)

    def overlaps(self, base: int, length: int) -> bool:
        index = bisect_left(self._starts, base + length) - 1
        return index >= 0 and self._ends[index] > base

    def cut(self, base: int, length: int) -> None:
        end = base + length
        pairs = list(zip(self._starts, self._ends, strict=True))
        left = [(start, min(stop, base)) for start, stop in pairs if start < base]
        right = [(max(start, end), stop) for start, stop in pairs if stop > end]
        pairs = sorted({(start, stop) for start, stop in left + right if start < stop})
        self._starts, self._ends = [start for start, _ in pairs], [stop for _, stop in pairs]
        self._forget(base, end)

    def touch(self, address: int) -> bool | None:
        """Return None for an unmanaged address; else whether this is the first access to its granule."""
        if not self.overlaps(address, 1):
            return None
        first = address // GRANULE not in self._touched
        self._touched.add(address // GRANULE)
        return first

    def _forget(self, start: int, end: int) -> None:
        self._touched = {g for g in self._touched if (g + 1) * GRANULE <= start or g * GRANULE >= end}


def _page(address: int) -> int:
    return address & -PAGE


def increment(data: bytes) -> bytes:
    """Return every little-endian 32-bit word plus one, wrapping, computed as one sum of big integers."""
    words = len(data) // WORD
    ones = int.from_bytes(b"\1\0\0\0" * words, "little")
    tops = ones << 31
    value = int.from_bytes(data, "little")
    # Add the top bit of each word separately, so that no carry leaves its word.
    low = (value & ~tops) + ones
    return (low ^ (value & tops)).to_bytes(len(data), "little")
