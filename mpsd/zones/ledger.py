"""Reader of a client's ledger: shared memory that the client writes at any time and may fill with lies.

The file is proven to be a memfd of the right size that can neither shrink nor grow. It is read with pread(2),
not mapped: no page of it can fault the daemon, and holes in it cost nothing. All reads are bounded by the
layout. A row counts if its sequence was the same even number before and after the read; rows that make no
sense are skipped. The result is the client's claim about itself: it can get this client named and ended, and
no other client.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from mpsd.base.errors import GpuError
from mpsd.base.model import Nearby, Relation, ZoneRole
from mpsd.os.filetype import file_type
from mpsd.zones import layout
from mpsd.zones.layout import Kind, Role

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
PAGE = 4096
ADDRESS_LIMIT = 1 << 57
_MEMFD = "/memfd:"
_ROWS_AT_A_TIME = 1024
_NO_ROWS = bytes(_ROWS_AT_A_TIME * layout.NOTE.size)
_ROLES = {
    Role.GUARD: ZoneRole.GUARD,
    Role.QUARANTINE: ZoneRole.QUARANTINE,
    Role.NULL_PAGE: ZoneRole.NULL_PAGE,
    Role.FAR: ZoneRole.FAR,
}


@dataclass(frozen=True, slots=True)
class Head:
    """The counters of a ledger. `launched`, `settled`: kernels started and known to have ended.

    Far zones are among the managed ones.
    """

    launched: int
    settled: int
    names_used: int
    managed_bytes: int
    sparse_bytes: int
    managed_zones: int
    sparse_zones: int
    uncovered: int
    quarantine_bytes: int
    quarantine_count: int
    null_page: bool
    notes_lost: int
    far_bytes: int
    far_zones: int


@dataclass(frozen=True, slots=True)
class Zone:
    """A zone [start, end) that absorbs and reports, since `born_ns` (CLOCK_MONOTONIC_RAW, like events)."""

    start: int
    end: int
    role: ZoneRole
    born_ns: int = 0


class ZoneMap:
    """The reporting zones of one moment, searchable by address."""

    def __init__(self, zones: list[Zone]) -> None:
        self._zones = sorted(zones, key=lambda zone: zone.start)
        self._starts = [zone.start for zone in self._zones]

    def __len__(self) -> int:
        return len(self._zones)

    def __iter__(self) -> Iterator[Zone]:
        return iter(self._zones)

    def at(self, address: int) -> Zone | None:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._zones[index].end:
            return None
        return self._zones[index]


class Ledger:
    """One client's ledger. Owns its descriptor. Every method may be called from any thread."""

    def __init__(self, fd: int) -> None:
        """Take over `fd` once it is proven. Raises GpuError; then the caller still owns it."""
        _prove(fd)
        self._fd = fd
        if self._fields()[:4:3] != (layout.MAGIC, layout.SIZE) or self._fields()[1] != layout.VERSION:
            raise GpuError("the header of a ledger is not of this version")

    def again(self) -> Ledger:
        """Return the same ledger with its own descriptor, for a reader that may outlive this one."""
        made = Ledger.__new__(Ledger)
        made._fd = fcntl.fcntl(self._fd, fcntl.F_DUPFD_CLOEXEC, 3)
        return made

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, at: int, size: int) -> bytes:
        data = os.pread(self._fd, size, at)
        if len(data) != size:
            raise GpuError(f"the read of a ledger returned {len(data)} of {size} bytes")
        return data

    def _fields(self) -> tuple[int, ...]:
        return layout.HEAD.unpack(self._read(0, layout.HEAD.size))

    def head(self) -> Head:
        value = dict(zip(layout.HEAD_FIELDS, self._fields(), strict=False))
        return Head(
            launched=value["launched"],
            settled=value["settled"],
            names_used=min(value["names_used"], layout.NAMES),
            managed_bytes=min(value["managed_bytes"], ADDRESS_LIMIT),
            sparse_bytes=min(value["sparse_bytes"], ADDRESS_LIMIT),
            managed_zones=min(value["managed_zones"], layout.ZONES),
            sparse_zones=min(value["sparse_zones"], layout.ZONES),
            uncovered=min(value["uncovered"], layout.NOTES),
            quarantine_bytes=min(value["quarantine_bytes"], ADDRESS_LIMIT),
            quarantine_count=min(value["quarantine_count"], layout.ZONES),
            null_page=value["null_page"] == 1,
            notes_lost=value["notes_lost"],
            far_bytes=min(value["far_bytes"], ADDRESS_LIMIT),
            far_zones=min(value["far_zones"], layout.ZONES),
        )

    # -- zones -------------------------------------------------------------------------------------------

    def zone_bytes(self) -> bytes:
        """Return the rows of the zones as bytes: equal bytes mean that nothing has changed."""
        return self._read(layout.ZONES_AT, layout.ZONES * layout.ZONE.size)

    def zones(self, rows: bytes) -> ZoneMap:
        """Parse the reporting zones from `zone_bytes()`; a row counts if it still is the same."""
        again = self.zone_bytes()
        found = []
        # Rows are filled from the first on; usually few are in use.
        used = -(-len(rows.rstrip(b"\0")) // layout.ZONE.size) * layout.ZONE.size
        rows = rows[:used]
        for index, (sequence, kind, role, start, end, born) in enumerate(layout.ZONE.iter_unpack(rows)):
            if kind != Kind.MANAGED or sequence % 2 or not 0 <= start < end <= ADDRESS_LIMIT:
                continue
            at = index * layout.ZONE.size
            if role in _ROLES and again[at : at + layout.ZONE.size] == rows[at : at + layout.ZONE.size]:
                found.append(Zone(start, end, _ROLES[Role(role)], born))
        return ZoneMap(found)

    # -- allocations -------------------------------------------------------------------------------------

    def nearest(self, address: int, role: ZoneRole, now_ns: int) -> Nearby | None:
        """Return the allocation that an access to a zone was most likely meant for.

        `now_ns`: CLOCK_MONOTONIC. Reads three megabytes: call it from a thread.
        """
        best: tuple[tuple[int, int, int], Nearby] | None = None
        for note in self._notes():
            _, _, start, size, order, born, freed = note
            found = _relation(address, start, start + size, role, freed)
            if found is None:
                continue
            relation, distance = found
            # The nearest; a live allocation before a freed one, and a later before an older one.
            rank = (0 if relation is Relation.INSIDE else distance, 1 if freed else 0, -order)
            if best is None or rank < best[0]:
                age = max(0, now_ns - born) / 1e9
                gone = max(0, now_ns - freed) / 1e9 if freed else None
                page = address % PAGE == 0
                best = rank, Nearby(relation, distance, page, start, size, order, age, gone)
        return best[1] if best else None

    def _notes(self) -> Iterator[tuple[int, ...]]:
        """Yield the rows in use that were consistent when they were read."""
        size = layout.NOTE.size
        for first in range(0, layout.NOTES, _ROWS_AT_A_TIME):
            at, length = layout.NOTES_AT + first * size, _ROWS_AT_A_TIME * size
            before = self._read(at, length)
            if before == _NO_ROWS:
                continue
            rows = self._read(at, length)
            after = self._read(at, length)
            sequences = [memoryview(part).cast("I")[:: size // 4].tolist() for part in (before, after)]
            for sequence, then, note in zip(*sequences, layout.NOTE.iter_unpack(rows), strict=True):
                start, length = note[2], note[3]
                if not length or sequence != then or sequence % 2 or start + length > ADDRESS_LIMIT:
                    continue
                yield note
            # Parsing many rows holds the interpreter lock: let the event loop run.
            time.sleep(0)

    def kernel(self, head: Head) -> str | None:
        """Return the name of the kernel in flight when `head` was read; None if it was not exactly one."""
        if head.launched - head.settled != 1:
            return None
        row = (head.launched - 1) % layout.LAUNCHES
        at = layout.LAUNCHES_AT + row * layout.LAUNCH.size
        function, _ = layout.LAUNCH.unpack(self._read(at, layout.LAUNCH.size))
        if self.head().launched - head.launched >= layout.LAUNCHES:
            # So many kernels were launched since that the row describes a later one.
            return None
        return self._name_of(function, head.names_used)

    def _name_of(self, function: int, used: int) -> str | None:
        if not function or not used:
            return None
        size = layout.NAME.size
        rows = self._read(layout.NAMES_AT, used * size)
        wanted = struct.pack("=Q", function)
        for at in range(0, used * size, size):
            if rows[at + 8 : at + 16] != wanted:
                continue
            sequence, _, _, raw = layout.NAME.unpack_from(rows, at)
            text = raw.partition(b"\0")[0].decode("utf-8", "replace")
            if sequence % 2 == 0 and text and rows[at : at + size] == self._read(layout.NAMES_AT + at, size):
                return "".join(c if c.isprintable() else "?" for c in text)
        return None


def _relation(address: int, start: int, end: int, role: ZoneRole, freed: int) -> tuple[Relation, int] | None:
    """Return None for an allocation that cannot have been meant: there is no such zone around it."""
    if freed and role is ZoneRole.FAR and not start <= address < end:
        # A nearer allocation of the past explains nothing; at its own addresses, a use after free does.
        return None
    width = PAGE if address % PAGE == 0 else 1
    if address >= end:
        return Relation.PAST, address - end
    if address + width <= start:
        return Relation.BEFORE, start - address
    # If addresses are used again, a freed allocation once covered the present one.
    if freed and role in (ZoneRole.QUARANTINE, ZoneRole.FAR):
        return Relation.INSIDE, max(0, address - start)
    return None


def _prove(fd: int) -> None:
    """Check that a file is a ledger; raises GpuError. Never waits for a file system."""
    try:
        found = file_type(fd)
        on, link = _memfds()
        # A name can be forged, but all memfds are on one internal file system of the kernel.
        name = os.readlink(f"/proc/self/fd/{fd}")
        if not stat.S_ISREG(found.mode) or found.on != on or not name.startswith(link):
            raise GpuError("the descriptor is not a memfd")
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise GpuError(f"cannot inspect the descriptor: {error.strerror}") from error
    if sealed & SEALS != SEALS:
        raise GpuError("the ledger is not sealed against a change of its size")
    if found.size != layout.SIZE:
        raise GpuError(f"the ledger has {found.size} bytes instead of {layout.SIZE}")


def _memfds() -> tuple[int, str]:
    """Return the file system of memfds, and the prefix of their names."""
    sample = os.memfd_create("mpsd-sample", os.MFD_CLOEXEC)
    try:
        return file_type(sample).on, _MEMFD
    finally:
        os.close(sample)
