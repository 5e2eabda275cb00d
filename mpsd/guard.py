"""The outer guard: sparse ranges laid around running clients from outside. Silent.

What a range absorbs gives no event: the offender lives on with wrong results and nobody is named. It is
laid only where it cannot break a healthy program, follows the client's mappings within a second, and a
range whose ground has changed is taken away before anything new is laid. What an earlier daemon laid is
taken away first, by its notes: it may not be wanted any more.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from mpsd.core import events as ev
from mpsd.errors import GpuError
from mpsd.gpu.base import AddressSpace
from mpsd.guardnotes import GuardNotes
from mpsd.guardplan import LOW_END, Range, plan
from mpsd.linux import procfs
from mpsd.looks import Looks
from mpsd.model import ClientId, GuardClass, ProcessInstance
from mpsd.sweeps import Sweep

log = structlog.get_logger("mpsd.guard")


@dataclass(slots=True)
class Guarded:
    """One client under guard. `refused`: ranges that the driver would not take, asked only once.

    `seen` is a mark of the mappings that the ranges were laid for, and `checked` when they were last found
    to be those (monotonic seconds); `inherited`: noted by an earlier daemon.
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
    """The guards of all clients. Work on one client is serial, done in threads, and holds nobody else up."""

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
        self._looks = Looks("guard")
        self._sweep: Sweep[ClientId, procfs.MapLines] = Sweep("mappings")
        self._refreshing: dict[ClientId, asyncio.Task[None]] = {}

    @property
    def kinds(self) -> frozenset[GuardClass]:
        return self._kinds

    def add(
        self, client: ClientId, space: AddressSpace, gpus: Sequence[str], notes: GuardNotes, uid: int
    ) -> None:
        """Guard a client from the next round on, which is at once.

        Not in a domain of several GPUs: a range belongs to one GPU, and laying it for the next one is
        not measured. `notes`: for the next daemon, and from the last. `uid`: whose client it is.
        """
        kinds = self._kinds if self._limit > 0 and len(gpus) == 1 else frozenset[GuardClass]()
        inherited = notes.ranges()
        if kinds or inherited:
            self._guarded[client] = Guarded(space, tuple(gpus), kinds, notes, uid, inherited)
            self._locks[client] = asyncio.Lock()
            self._wake.set()

    def abandon(self, process: ProcessInstance) -> None:
        """Lay nothing more for a process that is being evicted: the server needs its address space now."""
        for client in [c for c in self._guarded if c.process == process]:
            del self._guarded[client]

    async def remove(self, client: ClientId) -> None:
        """Stop following a client and wait until nobody uses its descriptors; they may be closed then."""
        lock = self._locks.pop(client, None)
        self._guarded.pop(client, None)
        if lock is not None:
            async with lock:
                pass

    def shown(self, client: ClientId) -> list[str]:
        """What protects this client, for `status`."""
        guarded = self._guarded.get(client)
        if guarded is None:
            return []
        total = Counter[GuardClass]()
        # A copy, made in one step: its thread may lay another one meanwhile.
        for laid in tuple(guarded.laid):
            total[laid.kind] += laid.length
        texts = [f"guard:{kind} {size >> 20} MiB (silent)" for kind, size in sorted(total.items())]
        return texts + ([f"guard lost: {guarded.problem}"] if guarded.problem else [])

    def checked_s(self, client: ClientId) -> float | None:
        """Seconds since the ranges around a client were found to fit its mappings; None: not yet, or none."""
        guarded = self._guarded.get(client)
        if guarded is None or guarded.checked is None:
            return None
        return time.monotonic() - guarded.checked

    async def follow(self) -> None:
        """Until cancelled: keep every client's ranges on its mappings."""
        while True:
            for client in await self._changed_or_tell():
                # A client whose mappings cannot be read just now must not hold up the others.
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
            # A range that does not follow its mappings breaks a healthy program: the next round comes.
            log.error("mappings could not be looked at", error=repr(error))
            return []

    async def _changed(self) -> list[ClientId]:
        """The clients whose ranges may have to be others: as a rule none."""
        now = time.monotonic()
        settled = {c: g for c, g in self._guarded.items() if g.seen is not None and not g.inherited}
        looks = {c: (g.uid, partial(_mappings, c, g.kinds)) for c, g in settled.items()}
        found = await self._sweep.run(looks) if looks else {}
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
            log.error("guard of a client failed", client=str(client), error=repr(error))
        finally:
            del self._refreshing[client]

    async def _refresh(self, client: ClientId) -> None:
        lock = self._locks.get(client)
        guarded = self._guarded.get(client)
        if lock is None or guarded is None:
            return
        async with lock:
            if client in self._guarded:
                # Without a deadline: until its thread is done, the descriptors must stay open.
                refused = await self._looks.run(guarded.uid, partial(self._lay, client, guarded))
                if refused:
                    self._post(ev.Counted({"guard_refused": refused}))
                if not (guarded.kinds or guarded.inherited):
                    # It was only cleared of what an earlier daemon had laid.
                    self._guarded.pop(client, None)

    def _lay(self, client: ClientId, guarded: Guarded) -> int:
        """Bring one client's ranges up to date; how many were refused."""
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
            # What lies behind the last one is not known.
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
            # Before the client has its context the driver takes none at all: ask again next time.
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
            log.warning("guard range cannot be removed", base=hex(stale.base), reason=str(error))
        guarded.notes.discard(stale)
        guarded.laid.discard(stale)


def _mappings(client: ClientId, kinds: Collection[GuardClass]) -> procfs.MapLines:
    """What ranges of these classes depend on. Raises OSError, also where the process has gone."""
    found = procfs.map_lines(client.process.pid, LOW_END if set(kinds) <= {GuardClass.LOW} else None)
    if procfs.start_ticks(client.process.pid) != client.process.start_ticks:
        raise ProcessLookupError(f"process {client.process} has gone")
    return found


def _clear(guarded: Guarded, old: Range) -> None:
    """Take away what an earlier daemon noted; it may have died before it laid it."""
    try:
        guarded.space.unmap_sparse(old.base, old.length)
    except GpuError as error:
        log.info("noted guard range is not there", base=hex(old.base), reason=str(error))
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
