"""The ledgers of all clients: which events are hits, the allocation nearby, the share of each client.

Lives on the event loop. An event is looked up on arrival, in the zones of that moment. An event that the
driver dated before the birth of its zone hit the program's own memory and is no hit. (A zone's birth is noted
after it is laid: accesses that it absorbs in the microseconds between are not reported.) A client with
managed memory of its own causes thousands of events a second, in batches some milliseconds apart
(mpsd.clients.trackers). For each batch the rows are read, and parsed only if they have changed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mpsd.base.errors import GpuError, MpsdError
from mpsd.base.model import Access, Liveness, Nearby, ProcessInstance, UvmEvent, ZoneRole
from mpsd.os import processes, procfs
from mpsd.os.probes import ProbePool
from mpsd.zones.grants import Grant, Grants, ZoneLimits
from mpsd.zones.ledger import Head, Ledger, Zone, ZoneMap

DESCRIBE_S = 2.0
# Clients of an earlier daemon connect again within this time, or get a new share.
RETURN_S = 60.0
LATE_S = 1.0


@dataclass(frozen=True, slots=True)
class Hit:
    """Accesses that one client's zones absorbed: the first of them, and their number."""

    event: UvmEvent
    role: ZoneRole
    count: int


@dataclass(frozen=True, slots=True)
class Description:
    """The ledger's information about a hit. Either part may be unknown."""

    nearby: Nearby | None
    kernel: str | None


@dataclass(slots=True)
class _Entry:
    """One client's ledger, and its zones at the time of the last read."""

    ledger: Ledger
    uid: int
    rows: bytes = b""
    zones: ZoneMap = field(default_factory=lambda: ZoneMap([]))


class Zones:
    def __init__(self, limits: ZoneLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.grants = Grants(limits)
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._began = clock()
        self._entries: dict[ProcessInstance, _Entry] = {}
        self._loop = asyncio.get_running_loop()
        self._probes = ProbePool("ledger")

    # -- clients -----------------------------------------------------------------------------------------

    def join(self, process: ProcessInstance, uid: int, gpus: Sequence[str], fd: int) -> Grant | None:
        """Take over a client's ledger, replacing an earlier one; None when there is nothing to grant.

        Owns `fd` from then on. Raises GpuError for a file that is no ledger; then the caller still owns it.
        """
        ledger = Ledger(fd)
        head = ledger.head()
        # Far zones yield: no client gets more than a share of the rest for them.
        laid = max(0, head.managed_bytes - head.far_bytes) if self._is_returning(process) else 0
        grant = self.grants.give(process, gpus, laid)
        if grant is None:
            ledger.close()
            self.counters["refused"] += 1
            return None
        before = self._entries.pop(process, None)
        if before is not None:
            before.ledger.close()
        self._entries[process] = _Entry(ledger, uid)
        self.counters["ledgers"] += 1
        return grant

    def _is_returning(self, process: ProcessInstance) -> bool:
        """Return whether the process may have laid zones under an earlier daemon."""
        up = self._clock() - self._began
        return up < RETURN_S and procfs.age_s(process.start_ticks) > up

    def refuse(self, fd: int) -> None:
        """Close the ledger of a client that gets nothing. Raises GpuError as `join` does."""
        Ledger(fd).close()
        self.counters["refused"] += 1

    def leave(self, process: ProcessInstance) -> None:
        """Release the grant of a process that has ended, or runs another program.

        Hits of an ended process may be reported a moment later, so its ledger stays for that long. Not so
        after an exec: the new program may have memory of its own where the zones were.
        """
        self.grants.take_back(process)
        entry = self._entries.get(process)
        if entry is None:
            return
        if processes.liveness(process) is Liveness.DEAD:
            self._loop.call_later(LATE_S, self._forget, process, entry)
        else:
            self._forget(process, entry)

    def _forget(self, process: ProcessInstance, entry: _Entry) -> None:
        if self._entries.get(process) is entry:
            del self._entries[process]
            entry.ledger.close()

    def knows(self, process: ProcessInstance) -> bool:
        return process in self._entries

    def idle(self, process: ProcessInstance) -> bool:
        """Return whether the ledger says that kernels were launched, and that all of them have ended."""
        entry = self._entries.get(process)
        try:
            head = entry.ledger.head() if entry is not None else None
        except (GpuError, OSError):
            return False
        return head is not None and 0 < head.launched == head.settled

    # -- hits --------------------------------------------------------------------------------------------

    def hits(self, process: ProcessInstance, events: Iterable[UvmEvent]) -> Hit | None:
        """Return the hit among these serviced faults: those that a zone of this client absorbed."""
        entry = self._entries.get(process)
        if entry is None:
            return None
        wanted = [e for e in events if not e.fatal and e.access is not Access.PREFETCH]
        return self._found(entry, wanted) if wanted and self._read(entry) else None

    def _found(self, entry: _Entry, events: Sequence[UvmEvent]) -> Hit | None:
        found: list[tuple[UvmEvent, Zone]] = []
        for event in events:
            zone = entry.zones.at(event.address)
            if zone is not None and event.timestamp_ns >= zone.born_ns:
                found.append((event, zone))
        self.counters["events_of_own_memory"] += len(events) - len(found)
        if not found:
            return None
        return Hit(found[0][0], found[0][1].role, len(found))

    def _read(self, entry: _Entry) -> bool:
        try:
            rows = entry.ledger.zone_bytes()
            if rows != entry.rows:
                entry.zones, entry.rows = entry.ledger.zones(rows), rows
        except (GpuError, OSError):
            self.counters["ledgers_unreadable"] += 1
            return False
        return True

    # -- descriptions ------------------------------------------------------------------------------------

    def describe(
        self, process: ProcessInstance, address: int, role: ZoneRole
    ) -> Coroutine[Any, Any, Description]:
        """Describe an address. The call itself duplicates the ledger, so the client may exit meanwhile.

        The coroutine never raises.
        """
        entry = self._entries.get(process)
        if entry is None:
            return self._described(0, None)
        try:
            # Read the head now: kernels launched before the thread runs were not in flight.
            head, ledger = entry.ledger.head(), entry.ledger.again()
        except (GpuError, OSError):
            return self._described(entry.uid, None)
        probe = partial(_describe, ledger, head, address, role, time.monotonic_ns())
        return self._described(entry.uid, probe, ledger.close)

    async def _described(
        self, uid: int, probe: Callable[[], Description] | None, unbegun: Callable[[], None] | None = None
    ) -> Description:
        if probe is not None:
            try:
                return await self._probes.run(uid, probe, DESCRIBE_S, not_begun=unbegun)
            except (MpsdError, OSError):
                self.counters["hits_not_described"] += 1
        return Description(None, None)

    # -- status ------------------------------------------------------------------------------------------

    def shown(self) -> Mapping[ProcessInstance, Mapping[str, Any]]:
        """Return the rows for `status`: the zones of each client with a ledger."""
        return {p: row for p, entry in self._entries.items() if (row := self._row(p, entry)) is not None}

    def _row(self, process: ProcessInstance, entry: _Entry) -> dict[str, Any] | None:
        grant = self.grants.of(process)
        try:
            head = entry.ledger.head()
        except (GpuError, OSError):
            return None
        return {
            "managed": head.managed_zones,
            "managed_bytes": head.managed_bytes,
            "sparse": head.sparse_zones,
            "sparse_bytes": head.sparse_bytes,
            "uncovered": head.uncovered,
            "far": head.far_zones,
            "far_bytes": head.far_bytes,
            "quarantined": head.quarantine_count,
            "quarantined_bytes": head.quarantine_bytes,
            "null_page": head.null_page,
            "granted_bytes": grant.bytes if grant else 0,
            "granted_zones": grant.zones if grant else 0,
        }

    def totals(self) -> dict[str, int]:
        return {f"zone_{name}": count for name, count in sorted(self.counters.items())}

    def close(self) -> None:
        for process, entry in tuple(self._entries.items()):
            self._forget(process, entry)
        self._probes.close()


def _describe(ledger: Ledger, head: Head, address: int, role: ZoneRole, now_ns: int) -> Description:
    """Describe a hit. Runs in a thread; closes `ledger`."""
    try:
        nearby = None if role is ZoneRole.NULL_PAGE else ledger.nearest(address, role, now_ns)
        return Description(nearby, ledger.kernel(head))
    finally:
        ledger.close()
