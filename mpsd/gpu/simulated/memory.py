"""The GPU address space of one simulated client: mappings in memfds, reservations, sparse guards."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from dataclasses import dataclass

from mpsd.gpu.simulated.semantics import NV_ADDRESS_IN_USE, NV_INVALID_ADDRESS, NV_OK
from mpsd.model import UvmFaultType

GRANULE = 1 << 16
WORD = 4
# Where reservations lie. Clients keep the same range of their own address space free.
WINDOW_BASE, WINDOW_SIZE = 0x1000_0000_0000, 1 << 40
ADDRESS_LIMIT = 1 << 47


@dataclass(frozen=True, slots=True)
class Violation:
    """Why an access cannot be served. `address` is that of the 4 KiB page, as the hardware reports it."""

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
    """What lies where. Ranges never overlap."""

    def __init__(self) -> None:
        self._mappings: dict[int, Mapping] = {}
        self._bases: list[int] = []
        self._guards: list[tuple[int, int]] = []
        self._next = WINDOW_BASE

    @property
    def bytes_used(self) -> int:
        return sum(m.size for m in self._mappings.values() if m.mapped)

    def allocate(self, size: int, *, writable: bool = True) -> Mapping | None:
        """Map `size` bytes (rounded up to 64 KiB) at a fresh address; None when a guard lies there."""
        size = max(GRANULE, -(-size // GRANULE) * GRANULE)
        if self._guarded(self._next, size) or self._next + size > WINDOW_BASE + WINDOW_SIZE:
            return None
        mapping = Mapping(self._next, size, writable)
        self._mappings[mapping.base] = mapping
        # Fresh addresses only grow, so the list stays sorted.
        self._bases.append(mapping.base)
        self._next += size + GRANULE
        return mapping

    def unmap(self, base: int, *, keep_reservation: bool) -> bool:
        """Take the memory away. False when no mapping begins at `base`."""
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

    def access(self, address: int, size: int, *, writes: bool) -> Mapping | Violation | None:
        """The mapping that serves an access; None when a guard absorbs it; else why it faults."""
        mapping = self.find(address)
        if mapping is None or not mapping.mapped:
            if self._guarded(address, size):
                return None
            return Violation(_page(address), UvmFaultType.INVALID_PDE)
        if address + size > mapping.base + mapping.size:
            return Violation(mapping.base + mapping.size, UvmFaultType.INVALID_PDE)
        if writes and not mapping.writable:
            return Violation(_page(address), UvmFaultType.WRITE)
        return mapping

    def guard(self, base: int, length: int) -> int:
        """Lay a sparse range. Returns an NV_STATUS."""
        if base == 0 or length <= 0 or base % GRANULE or length % GRANULE or base + length > ADDRESS_LIMIT:
            return NV_INVALID_ADDRESS
        taken = any(m.base < base + length and base < m.base + m.size for m in self._mappings.values())
        if taken or self._guarded(base, length):
            return NV_ADDRESS_IN_USE
        self._guards.insert(bisect_right(self._guards, (base, length)), (base, length))
        return NV_OK

    def unguard(self, base: int, length: int) -> int:
        """Remove a range laid with these bounds. Returns an NV_STATUS."""
        if (base, length) not in self._guards:
            return NV_INVALID_ADDRESS
        self._guards.remove((base, length))
        return NV_OK

    def guarded(self, base: int, length: int) -> bool:
        """Whether any byte of the range lies under a guard."""
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


def _page(address: int) -> int:
    return address & ~0xFFF


def increment(data: bytes) -> bytes:
    """Every little-endian 32-bit word plus one, wrapping, as one sum of big integers."""
    words = len(data) // WORD
    ones = int.from_bytes(b"\1\0\0\0" * words, "little")
    tops = ones << 31
    value = int.from_bytes(data, "little")
    # The top bit of each word is added by hand, so that no carry leaves its word.
    low = (value & ~tops) + ones
    return (low ^ (value & tops)).to_bytes(len(data), "little")
