"""Which guard ranges may lie around a client, in a memory file that outlives the daemon.

It is kept in the descriptor store with the lease. A range is noted before it is laid and struck out after
it was taken away, so that a daemon killed at any instant leaves no range that its successor cannot find.
"""

from __future__ import annotations

import struct

from mpsd.guardplan import Range
from mpsd.model import GuardClass
from mpsd.slotnotes import SlotNotes

_NOTE = struct.Struct("<QQQQ")
_KINDS = tuple(GuardClass)


class GuardNotes:
    """Owns the descriptor. For one thread at a time."""

    def __init__(self, notes: SlotNotes[Range]) -> None:
        self._notes = notes

    @classmethod
    def create(cls) -> GuardNotes:
        """Raises OSError."""
        return cls(SlotNotes.create("mpsd-guard", _NOTE.size))

    @classmethod
    def adopt(cls, fd: int) -> GuardNotes:
        """What an earlier daemon noted. Raises OSError; the descriptor is not closed then."""
        notes = SlotNotes[Range](fd, _NOTE.size)
        notes.read(_understood)
        return cls(notes)

    @property
    def fd(self) -> int:
        return self._notes.fd

    def ranges(self) -> frozenset[Range]:
        return self._notes.keys()

    def add(self, noted: Range) -> None:
        """Before it is laid. Raises OSError."""
        self._notes.write(noted, _NOTE.pack(noted.base, noted.length, _KINDS.index(noted.kind), 0))

    def discard(self, noted: Range) -> None:
        """After it was taken away. Raises OSError."""
        self._notes.strike(noted)

    def close(self) -> None:
        """Idempotent."""
        self._notes.close()


def _understood(note: bytes) -> tuple[Range, None] | None:
    base, length, kind, _ = _NOTE.unpack(note)
    return (Range(base, length, _KINDS[kind]), None) if length and kind < len(_KINDS) else None
