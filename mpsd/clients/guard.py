"""The outer guard: sparse ranges that mpsd lays around running clients from outside. It is silent.

A range that absorbs an access raises no event: the offender continues with wrong results and is not named.
The guard therefore covers only ranges that cannot break a healthy program. It follows the client's mappings
within a second. A range is removed before a new one is laid, if the mappings below it have changed. Ranges of
an earlier daemon are removed first, by its notes: the configuration may have changed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from mpsd.base.errors import GpuError
from mpsd.base.model import ClientId, GuardClass, ProcessInstance
from mpsd.clients.guardnotes import GuardNotes
from mpsd.clients.guardplan import LOW_END, Range, plan
from mpsd.core import events as ev
from mpsd.gpu.base import AddressSpace
from mpsd.os import procfs
from mpsd.os.probes import ProbePool
from mpsd.os.sweeps import Sweep

log = structlog.get_logger("mpsd.guard")


@dataclass(slots=True)
class Guarded:
    """One client under guard. `refused`: ranges that the driver refused; they are tried only once.

    `seen` is a mark of the mappings that the ranges were laid for. `checked` is the time when they were last
    found unchanged (monotonic seconds). `inherited`: ranges noted by an earlier daemon.
    """

    space: AddressSpace
    gpus: tuple[str, ...]
    kinds: frozenset[GuardClass]
    notes: GuardNotes
    uid: int
    inherited: frozenset[Range] = frozenset()
    laid: set[Range] = field(default_factory=set)
    refused: set[Range] = field(default_factory=set)
    seen: int | None = None
    checked: float | None = None
    problem: str = ""


class Guards:
    """The guards of all clients. Work on one client is serial, in threads, and delays no other client."""

    def __init__(
        self,
        kinds: Collection[GuardClass],
        limit: int,
        interval_s: float,
        post: Callable[[ev.Event], None],
    ) -> None:
        self._kinds = frozenset(kinds)
        self._limit = limit
        self._interval_s = interval_s
        self._post = post
        self._guarded: dict[ClientId, Guarded] = {}
        self._locks: dict[ClientId, asyncio.Lock] = {}
        self._wake = asyncio.Event()
        self._probes = ProbePool("guard")
        self._sweep: Sweep[ClientId, procfs.MapLines] = Sweep("mappings")
        self._refreshing: dict[ClientId, asyncio.Task[None]] = {}

    @property
    def kinds(self) -> frozenset[GuardClass]:
        return self._kinds

    def add(
        self, client: ClientId, space: AddressSpace, gpus: Sequence[str], notes: GuardNotes, uid: int
    ) -> None:
        """Guard a client from the next round on, which is at once.

        A domain of several GPUs has no guard: a range belongs to one GPU, and laying it for a second GPU has
        not been measured. `notes`: from the last daemon and for the next. `uid`: the client's user.
        """
        kinds = self._kinds if self._limit > 0 and len(gpus) == 1 else frozenset[GuardClass]()
        inherited = notes.ranges()
        if kinds or inherited:
            self._guarded[client] = Guarded(space, tuple(gpus), kinds, notes, uid, inherited)
            self._locks[client] = asyncio.Lock()
            self._wake.set()

    def abandon(self, process: ProcessInstance) -> None:
        """Lay no more ranges for a process under eviction: the server needs its address space now."""
        for client in [c for c in self._guarded if c.process == process]:
            del self._guarded[client]

    async def remove(self, client: ClientId) -> None:
        """Stop following a client and wait until its descriptors are unused; they may be closed then."""
        lock = self._locks.pop(client, None)
        self._guarded.pop(client, None)
        if lock is not None:
            async with lock:
                pass

    def shown(self, client: ClientId) -> list[str]:
        """Return the texts for `status` about the ranges of this client."""
        guarded = self._guarded.get(client)
        if guarded is None:
            return []
        total = Counter[GuardClass]()
        # A copy, made in one step: the thread of the client may add a range meanwhile.
        for laid_bytes in tuple(guarded.laid):
            total[laid_bytes.kind] += laid_bytes.length
        texts = [f"guard:{kind} {size >> 20} MiB (silent)" for kind, size in sorted(total.items())]
        return texts + ([f"guard lost: {guarded.problem}"] if guarded.problem else [])

    def checked_s(self, client: ClientId) -> float | None:
        """Return the seconds since the ranges were found to fit the mappings; None: not yet, or no ranges."""
        guarded = self._guarded.get(client)
        if guarded is None or guarded.checked is None:
            return None
        return time.monotonic() - guarded.checked

    async def follow(self) -> None:
        """Keep every client's ranges on its mappings, until cancelled."""
        while True:
            for client in await self._changed_or_tell():
                # A client with unreadable mappings must not delay the other clients.
                if client in self._guarded and client not in self._refreshing:
                    self._refreshing[client] = asyncio.create_task(self._refresh_or_tell(client))
            try:
                async with asyncio.timeout(self._interval_s if self._guarded else None):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _changed_or_tell(self) -> list[ClientId]:
        try:
            return await self._changed()
        except Exception as error:
            # A range that does not follow its mappings breaks a healthy program: try again in the next round.
            log.error("cannot read the mappings of clients", error=repr(error))
            return []

    async def _changed(self) -> list[ClientId]:
        """Return the clients with changed mappings: usually none."""
        now = time.monotonic()
        settled = {c: g for c, g in self._guarded.items() if g.seen is not None and not g.inherited}
        probes = {c: (g.uid, partial(_mappings, c, g.kinds)) for c, g in settled.items()}
        found = await self._sweep.run(probes) if probes else {}
        changed = [c for c in self._guarded if c not in settled]
        for client, mapped in found.items():
            guarded = settled[client]
            if hash(mapped.text) != guarded.seen:
                changed.append(client)
            elif client not in self._refreshing:
                guarded.checked = now
        return changed

    async def _refresh_or_tell(self, client: ClientId) -> None:
        try:
            await self._refresh(client)
        except Exception as error:
            log.error("cannot update the guard of a client", client=str(client), error=repr(error))
        finally:
            del self._refreshing[client]

    async def _refresh(self, client: ClientId) -> None:
        lock = self._locks.get(client)
        guarded = self._guarded.get(client)
        if lock is None or guarded is None:
            return
        async with lock:
            if client in self._guarded:
                # Without a deadline: until its thread has finished, the descriptors must stay open.
                refused = await self._probes.run(guarded.uid, partial(self._lay, client, guarded))
                if refused:
                    self._post(ev.Counted({"guard_refused": refused}))
                if not (guarded.kinds or guarded.inherited):
                    # It was in the list only to remove the ranges of an earlier daemon.
                    self._guarded.pop(client, None)

    def _lay(self, client: ClientId, guarded: Guarded) -> int:
        """Bring one client's ranges up to date; return the number of refused ones."""
        began = time.monotonic()
        try:
            found = _mappings(client, guarded.kinds)
        except OSError:
            return 0
        for old in sorted(guarded.inherited):
            _clear(guarded, old)
        guarded.inherited = frozenset()
        mark = hash(found.text)
        if mark == guarded.seen:
            guarded.checked = began
            return 0
        guarded.seen = mark
        wanted: set[Range] = set()
        if found.truncated:
            # The mappings behind the last one read are unknown.
            guarded.problem = f"more than {procfs.MAPS_LIMIT} mappings"
        else:
            wanted.update(plan([procfs.parse_map(x) for x in found.lines], guarded.kinds, self._limit))
        for stale in sorted(guarded.laid - wanted):
            self._take_away(guarded, stale)
        refused = 0
        for fresh in sorted(wanted - guarded.laid - guarded.refused):
            if client not in self._guarded or (refused and not guarded.laid):
                break
            refused += not _put(guarded, fresh)
        if refused and not guarded.laid:
            # Before the client has its context the driver refuses all ranges: try again next time.
            guarded.refused.clear()
            guarded.seen = None
            return 0
        guarded.checked = began
        return refused

    def _take_away(self, guarded: Guarded, stale: Range) -> None:
        try:
            guarded.space.unmap_sparse(stale.base, stale.length)
        except GpuError as error:
            guarded.problem = str(error)
            log.warning("cannot remove a guard range", base=hex(stale.base), reason=str(error))
        guarded.notes.discard(stale)
        guarded.laid.discard(stale)


def _mappings(client: ClientId, kinds: Collection[GuardClass]) -> procfs.MapLines:
    """Read the mappings that ranges of these classes depend on. Raises OSError, also after the exit."""
    found = procfs.map_lines(client.process.pid, LOW_END if set(kinds) <= {GuardClass.LOW} else None)
    if procfs.start_ticks(client.process.pid) != client.process.start_ticks:
        raise ProcessLookupError(f"process {client.process} has ended")
    return found


def _clear(guarded: Guarded, old: Range) -> None:
    """Remove a range that an earlier daemon noted; the daemon may have died before it laid the range."""
    try:
        guarded.space.unmap_sparse(old.base, old.length)
    except GpuError as error:
        log.info("a noted guard range does not exist", base=hex(old.base), reason=str(error))
    guarded.notes.discard(old)


def _put(guarded: Guarded, fresh: Range) -> bool:
    guarded.notes.add(fresh)
    try:
        for gpu in guarded.gpus:
            guarded.space.map_sparse(fresh.base, fresh.length, gpu)
    except GpuError as error:
        guarded.notes.discard(fresh)
        guarded.refused.add(fresh)
        log.debug("guard range refused", base=hex(fresh.base), length=fresh.length, reason=str(error))
        return False
    guarded.laid.add(fresh)
    return True
