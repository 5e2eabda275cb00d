"""Notes of one size, by key, in a memory file that outlives the daemon in the descriptor store.

Each note is one write within a page, which completes or does not happen if the daemon is killed. The slot of
a note that was struck out is all zeros, and is used again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
MOST = 1 << 16


class SlotNotes(Generic[K]):
    """A file of notes. Owns the descriptor. For one thread at a time.

    `size`: bytes of a note, a divisor of the page size.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self._size = size
        self._slots: dict[K, int] = {}
        self._free: list[int] = []
        self._end = 0

    @classmethod
    def create(cls, name: str, size: int) -> SlotNotes[K]:
        """Create an empty file. Raises OSError."""
        return cls(os.memfd_create(name, os.MFD_CLOEXEC), size)

    def read(self, understand: Callable[[bytes], tuple[K, V] | None]) -> dict[K, V]:
        """Read the notes of an earlier daemon, once, before anything is written. Raises OSError.

        `understand` returns a note's key and value; None for bytes that are no note: their slot is free.
        """
        data = os.pread(self.fd, MOST * self._size, 0)
        found: dict[K, V] = {}
        for slot in range(len(data) // self._size):
            noted = understand(data[slot * self._size : (slot + 1) * self._size])
            if noted is None or noted[0] in found:
                self._free.append(slot)
            else:
                found[noted[0]] = noted[1]
                self._slots[noted[0]] = slot
            self._end = slot + 1
        return found

    def keys(self) -> frozenset[K]:
        return frozenset(self._slots)

    def write(self, key: K, note: bytes) -> None:
        """Write a new note, or a new value of one. Raises OSError."""
        slot = self._slots.get(key)
        if slot is None:
            slot = self._free.pop() if self._free else self._end
            self._end = max(self._end, slot + 1)
            self._slots[key] = slot
        os.pwrite(self.fd, note.ljust(self._size, b"\0"), slot * self._size)

    def strike(self, key: K) -> None:
        """Strike out a note. Raises OSError."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)
            os.pwrite(self.fd, bytes(self._size), slot * self._size)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
