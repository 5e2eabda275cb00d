"""Which guard ranges may lie around a client, in a memory file that outlives the daemon.

It is kept in the descriptor store with the lease. A range is noted before it is laid and struck out after
it was taken away, so that a daemon killed at any instant leaves no range that its successor cannot find.
Each note is one small write within a page, which is done whole or not at all.
"""

from __future__ import annotations

import os
import struct

from mpsd.guardplan import Range
from mpsd.model import GuardClass

_NOTE = struct.Struct("<QQQQ")
_KINDS = tuple(GuardClass)
# As many as the configuration allows around one client.
_MOST = 65536


class GuardNotes:
    """Owns the descriptor. For one thread at a time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._slots: dict[Range, int] = {}
        self._free: list[int] = []
        self._end = 0

    @classmethod
    def create(cls) -> GuardNotes:
        """Raises OSError."""
        return cls(os.memfd_create("mpsd-guard", os.MFD_CLOEXEC))

    @classmethod
    def adopt(cls, fd: int) -> GuardNotes:
        """What an earlier daemon noted. Raises OSError; the descriptor is not closed then."""
        notes = cls(fd)
        data = os.pread(fd, _MOST * _NOTE.size, 0)
        for slot, (base, length, kind, _) in enumerate(
            _NOTE.iter_unpack(data[: len(data) // _NOTE.size * _NOTE.size])
        ):
            if length and kind < len(_KINDS):
                notes._slots[Range(base, length, _KINDS[kind])] = slot
            else:
                notes._free.append(slot)
            notes._end = slot + 1
        return notes

    @property
    def fd(self) -> int:
        return self._fd

    def ranges(self) -> frozenset[Range]:
        return frozenset(self._slots)

    def add(self, noted: Range) -> None:
        """Before it is laid. Raises OSError."""
        slot = self._free.pop() if self._free else self._end
        self._end = max(self._end, slot + 1)
        self._write(slot, noted.base, noted.length, _KINDS.index(noted.kind))
        self._slots[noted] = slot

    def discard(self, noted: Range) -> None:
        """After it was taken away. Raises OSError."""
        slot = self._slots.pop(noted, None)
        if slot is not None:
            self._free.append(slot)
            self._write(slot, 0, 0, 0)

    def _write(self, slot: int, base: int, length: int, kind: int) -> None:
        os.pwrite(self._fd, _NOTE.pack(base, length, kind, 0), slot * _NOTE.size)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
