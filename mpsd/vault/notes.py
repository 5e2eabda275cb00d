"""The ledger's notes of each holding, in one memory file that outlives the daemon.

The file is in the descriptor store beside the descriptors. A holding is noted before its descriptor is
stored, and struck out when it is released. A descriptor without a note belongs to no client and is closed. A
note without a descriptor means nothing.
"""

from __future__ import annotations

import struct

from mpsd.base.model import ProcessInstance
from mpsd.core.vault import Owner, Segment
from mpsd.fdstore.notefile import SlotNotes

SLOT = 512
# id, pid, start ticks, uid, number, size, address, since, died (-1: lives), GPU, token, name, cgroup, share,
# and whether the name is of this segment alone. Fields that an earlier mpsd did not note are zero.
_NOTE = struct.Struct("<QIQIQQQdd48s64s64s255s16sB")
assert _NOTE.size <= SLOT


def digest(data: bytes) -> str:
    """Return SHA-256 in hexadecimal.

    Imported here, not above: OpenSSL, which comes with it, stays resident (3.5 MiB) in daemons without a
    vault.
    """
    import hashlib

    return hashlib.sha256(data).hexdigest()


def cgroup_text(cgroup: str) -> str:
    """Return a cgroup as owners have it: itself, or a digest if it is too long to be noted."""
    if len(cgroup.encode()) <= 255 and "\0" not in cgroup:
        return cgroup
    return "sha256:" + digest(cgroup.encode())


def share_digest(token: bytes) -> str:
    """Return the digest of the secret that memory is shared under: the 128 bits that fit a note."""
    return digest(token)[:32]


class VaultNotes:
    """The notes of the vault. Owns the descriptor. For one thread at a time."""

    def __init__(self, notes: SlotNotes[int]) -> None:
        self._notes = notes

    @classmethod
    def create(cls) -> VaultNotes:
        """Create an empty file of notes. Raises OSError."""
        return cls(SlotNotes.create("mpsd-vault-notes", SLOT))

    @classmethod
    def adopt(cls, fd: int) -> tuple[VaultNotes, dict[int, Segment]]:
        """Read the notes of an earlier daemon, by id. Raises OSError; the descriptor is not closed then."""
        notes = SlotNotes[int](fd, SLOT)
        return cls(notes), notes.read(_understood)

    @property
    def fd(self) -> int:
        return self._notes.fd

    def write(self, holding: Segment) -> None:
        """Write a new note, or new values of one. Raises OSError."""
        self._notes.write(holding.id, _pack(holding))

    def strike(self, holding_id: int) -> None:
        """Strike out a note. Raises OSError."""
        self._notes.strike(holding_id)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._notes.close()


def _understood(raw: bytes) -> tuple[int, Segment] | None:
    holding = _unpack(raw)
    return None if holding is None else (holding.id, holding)


def _pack(holding: Segment) -> bytes:
    return _NOTE.pack(
        holding.id,
        holding.process.pid,
        holding.process.start_ticks,
        holding.owner.uid,
        holding.number,
        holding.size,
        holding.address,
        holding.since,
        -1.0 if holding.died is None else holding.died,
        holding.gpu.encode(),
        holding.owner.token.encode(),
        (holding.name or "").encode(),
        holding.owner.cgroup.encode(),
        bytes.fromhex(holding.share),
        holding.alone,
    )


def _unpack(raw: bytes) -> Segment | None:
    number, pid, start, uid, own, size, address, since, died, *texts, share, alone = _NOTE.unpack_from(raw)
    try:
        gpu, token, name, cgroup = (text.rstrip(b"\0").decode() for text in texts)
    except UnicodeDecodeError:
        return None
    if not number or not size or since != since:
        return None
    return Segment(
        number,
        Owner(uid, cgroup, token),
        ProcessInstance(pid, start),
        own,
        size,
        address,
        gpu,
        since,
        name or None,
        died if died >= 0 else None,
        bool(alone and name),
        share.hex() if any(share) else "",
    )
