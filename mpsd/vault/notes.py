"""What the ledger knows of each holding, in one memory file that outlives the daemon.

It lies in the descriptor store beside the descriptors. A holding is noted before its descriptor is stored
and struck out when it goes: a descriptor without a note is nobody's and is closed, a note without a
descriptor means nothing. Each note is one write of 512 bytes within a page, which is done whole or not at
all by a daemon that is killed.
"""

from __future__ import annotations

import hashlib
import os
import struct

from mpsd.core.vault import Holding, Owner
from mpsd.model import ProcessInstance

SLOT = 512
_MOST = 1 << 16
# id, pid, start ticks, uid, number, size, address, since, died (-1: lives), GPU, token, name, cgroup
_NOTE = struct.Struct("<QIQIQQQdd48s64s64s256s")
assert _NOTE.size <= SLOT


def cgroup_text(cgroup: str) -> str:
    """A cgroup as owners have it: itself, or a digest where it is too long to be noted."""
    if len(cgroup.encode()) <= 255 and "\0" not in cgroup:
        return cgroup
    return "sha256:" + hashlib.sha256(cgroup.encode()).hexdigest()


class VaultNotes:
    """Owns the descriptor. For one thread at a time."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._end = 0

    @classmethod
    def create(cls) -> VaultNotes:
        """Raises OSError."""
        return cls(os.memfd_create("mpsd-vault-notes", os.MFD_CLOEXEC))

    @classmethod
    def adopt(cls, fd: int) -> tuple[VaultNotes, dict[int, Holding]]:
        """What an earlier daemon noted, by id. Raises OSError; the descriptor is not closed then."""
        notes = cls(fd)
        data = os.pread(fd, _MOST * SLOT, 0)
        found: dict[int, Holding] = {}
        for slot in range(len(data) // SLOT):
            holding = _unpack(data[slot * SLOT : (slot + 1) * SLOT])
            if holding is None or holding.id in found:
                notes._free.append(slot)
            else:
                found[holding.id] = holding
                notes._slots[holding.id] = slot
            notes._end = slot + 1
        return notes, found

    def write(self, holding: Holding) -> None:
        """New, or with new values. Raises OSError."""
        slot = self._slots.get(holding.id)
        if slot is None:
            slot = self._free.pop() if self._free else self._end
            self._end = max(self._end, slot + 1)
            self._slots[holding.id] = slot
        os.pwrite(self.fd, _pack(holding).ljust(SLOT, b"\0"), slot * SLOT)

    def strike(self, holding_id: int) -> None:
        """Raises OSError."""
        slot = self._slots.pop(holding_id, None)
        if slot is not None:
            self._free.append(slot)
            os.pwrite(self.fd, bytes(SLOT), slot * SLOT)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _pack(holding: Holding) -> bytes:
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
    )


def _unpack(raw: bytes) -> Holding | None:
    number, pid, start, uid, own, size, address, since, died, *texts = _NOTE.unpack_from(raw)
    try:
        gpu, token, name, cgroup = (text.rstrip(b"\0").decode() for text in texts)
    except UnicodeDecodeError:
        return None
    if not number or not size or since != since:
        return None
    return Holding(
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
    )
