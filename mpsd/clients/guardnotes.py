"""Notes of the guard ranges around a client, in a memory file that outlives the daemon.

The descriptor store keeps the file with the lease. A range is noted before it is laid and struck out after it
was removed. A daemon that is killed at any instant therefore leaves no range that its successor cannot find.
"""

from __future__ import annotations

import struct

from mpsd.base.model import GuardClass
from mpsd.clients.guardplan import Range
from mpsd.fdstore.notefile import SlotNotes

_NOTE = struct.Struct("<QQQQ")
_KINDS = tuple(GuardClass)


class GuardNotes:
    """Notes of one client. Owns the descriptor. For one thread at a time."""

    def __init__(self, notes: SlotNotes[Range]) -> None:
        self._notes = notes

    @classmethod
    def create(cls) -> GuardNotes:
        """Create an empty file of notes. Raises OSError."""
        return cls(SlotNotes.create("mpsd-guard", _NOTE.size))

    @classmethod
    def adopt(cls, fd: int) -> GuardNotes:
        """Read the notes of an earlier daemon. Raises OSError; the descriptor is not closed then."""
        notes = SlotNotes[Range](fd, _NOTE.size)
        notes.read(_understood)
        return cls(notes)

    @property
    def fd(self) -> int:
        return self._notes.fd

    def ranges(self) -> frozenset[Range]:
        return self._notes.keys()

    def add(self, noted: Range) -> None:
        """Note a range, before it is laid. Raises OSError."""
        self._notes.write(noted, _NOTE.pack(noted.base, noted.length, _KINDS.index(noted.kind), 0))

    def discard(self, noted: Range) -> None:
        """Strike out a range, after it was removed. Raises OSError."""
        self._notes.strike(noted)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._notes.close()


def _understood(note: bytes) -> tuple[Range, None] | None:
    base, length, kind, _ = _NOTE.unpack(note)
    return (Range(base, length, _KINDS[kind]), None) if length and kind < len(_KINDS) else None
