"""The vault: the ledger of segments joined with descriptors, their store, and the ends of processes.

Every descriptor is also in the descriptor store, under `vault.ID`, with one file of notes (`vault.notes`). A
daemon that is killed therefore drops nothing, and the next daemon rebuilds the ledger. The end of a process
is reported by its pidfd. The end of a connection is not the end of the process, unless the process replaced
its program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import structlog

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import MpsdError, StoreError
from mpsd.base.logs import Repeated
from mpsd.base.model import ProcessInstance
from mpsd.core.vault import Ledger, Limits, Outcome, Owner, Refusal, Segment
from mpsd.fdstore.queue import FIRST_PAUSE_S, LONGEST_PAUSE_S, LeaseStore
from mpsd.gpu.base import ExportedMemory, MemoryInspector
from mpsd.os import processes
from mpsd.os.descriptors import REMEDY, Charge, DescriptorBudget, Purpose
from mpsd.os.probes import ProbePool
from mpsd.vault.notes import VaultNotes

log = structlog.get_logger("mpsd.vault")

PREFIX = "vault."
NOTES = "vault.notes"
EXEC_DEADLINE_S = 2.0
# Limit [s] of an adoption for probes of living clients; later results are still used.
ADOPTION_S = 0.5
GONE_DEADLINE_S = 1.0
STORED_DEADLINE_S = 1.0
CLIENT_DESCRIPTORS = 2
"""Of one client: its pin, and the ledger of its guard zones."""
DESCRIPTORS = 2
"""Of one segment: the program's, and a copy for the descriptor store."""


@dataclass(slots=True)
class Client:
    """A living process that is connected, or owns held segments."""

    pinned: processes.Pinned
    owner: Owner
    program: processes.ExecIdentity | None
    connections: int = 0


class Vault:
    """Lives on the event loop. Slow steps (closing memory, the store) run in threads."""

    def __init__(
        self,
        limits: Limits,
        inspector: MemoryInspector,
        store: LeaseStore,
        budget: DescriptorBudget | None = None,
    ) -> None:
        self._budget = budget or DescriptorBudget.unlimited()
        self._charges: dict[int, Charge] = {}
        self._repeated = Repeated(log)
        self.ledger = Ledger(limits)
        self.counters: Counter[str] = Counter()
        self.offered_at = ""
        """The socket of the vault's server, while it is open."""
        self.on_end: list[Callable[[ProcessInstance], None]] = []
        """Called when a process has ended, runs another program, or left with nothing held."""
        self.held_elsewhere: Callable[[ProcessInstance], bool] = lambda process: False
        """Whether another part holds something of a process (its ledger) until the call above."""
        self.probes = ProbePool("vault")
        """Probes of clients, each charged to the client's user."""
        self._inspector = inspector
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._closer = ThreadPoolExecutor(2, "vault-close")
        self._fds: dict[int, int] = {}
        self._clients: dict[ProcessInstance, Client] = {}
        self._notes: VaultNotes | None = None
        self._found: dict[str, list[int]] = {}
        # Names to be stored, and holdings with notes to be written (again), in order.
        self._unstored: dict[str, None] = {}
        self._unnoted: dict[int, None] = {}
        self._wake = asyncio.Event()
        self._store_moved = asyncio.Condition()
        self._storing = self._loop.create_task(self._store_one_by_one())
        self._probing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._store_problem = self._note_problem = ""

    # -- processes ---------------------------------------------------------------------------------------

    def join(
        self, pinned: processes.Pinned, owner: Owner, program: processes.ExecIdentity | None
    ) -> Owner | None:
        """Register a connection of a process; return the owner recorded for the process.

        Takes `pinned` over. A known process keeps its first owner (a cgroup can change under it). Returns
        None for a known process that now presents a different owner.
        """
        known = self._clients.get(pinned.instance)
        if known is not None and None not in (known.program, program) and known.program != program:
            # It replaced its program before the probe noticed: the segments of the old program are gone.
            self._ended(pinned.instance)
            known = None
        if known is None:
            known = self._watch(pinned, owner, program)
        else:
            pinned.close()
            if (known.owner.uid, known.owner.token) != (owner.uid, owner.token):
                return None
        known.connections += 1
        return known.owner

    def _watch(
        self, pinned: processes.Pinned, owner: Owner, program: processes.ExecIdentity | None
    ) -> Client:
        # Counted, never refused: the pin is open, and a process without one would be a loss of memory.
        self._budget.charge_open(Purpose.SEGMENT, CLIENT_DESCRIPTORS)
        client = self._clients[pinned.instance] = Client(pinned, owner, program)
        self._loop.add_reader(pinned.fileno(), self._ended, pinned.instance)
        return client

    def leave(self, process: ProcessInstance) -> None:
        """Handle the end of a connection: not that of its process, unless that runs another program now."""
        client = self._clients.get(process)
        if client is None:
            return
        client.connections -= 1
        if client.connections:
            return
        if not self.ledger.of(process) and not self.held_elsewhere(process):
            self._ended(process)
        elif client.program is not None:
            self._spawn_probe(self._check_for_exec(client))

    def _spawn_probe(self, probe: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(probe)
        self._probing.add(task)
        task.add_done_callback(self._probing.discard)

    async def _program_of(self, client: Client) -> processes.ExecIdentity | None:
        """Return the client's program; None if unknown, or not in time."""
        probe = partial(processes.exec_identity, client.pinned.instance)
        try:
            return await self.probes.run(client.owner.uid, probe, EXEC_DEADLINE_S)
        except (MpsdError, OSError):
            return None

    async def _check_for_exec(self, client: Client) -> None:
        process = client.pinned.instance
        program = await self._program_of(client)
        if program is None:
            return
        if program != client.program and not client.connections and self._clients.get(process) is client:
            log.info("a client of the vault replaced its program", process=str(process))
            self._ended(process)

    def _ended(self, process: ProcessInstance) -> None:
        client = self._clients.pop(process, None)
        if client is None:
            return
        self._loop.remove_reader(client.pinned.fileno())
        client.pinned.close()
        self._budget.release(Purpose.SEGMENT, CLIENT_DESCRIPTORS)
        self._settle(self.ledger.died(process, time.monotonic()))
        for tell in self.on_end:
            tell(process)

    def knows(self, process: ProcessInstance) -> bool:
        return process in self._clients

    def has(self, process: ProcessInstance, addresses: Sequence[int]) -> list[bool]:
        """Return whether the vault holds memory of this process at each of these addresses."""
        spans = sorted((h.address, h.address + h.size) for h in self.ledger.of(process))
        starts = [start for start, _ in spans]
        # The furthest end of all segments that begin no later: segments of a process may overlap.
        ends = [0, *accumulate((end for _, end in spans), max)]
        return [address < ends[bisect_right(starts, address)] for address in addresses]

    def owner_of(self, pid: int) -> tuple[ProcessInstance, Owner] | None:
        """Return the living client with this pid."""
        return next(((p, c.owner) for p, c in self._clients.items() if p.pid == pid), None)

    # -- requests ----------------------------------------------------------------------------------------

    def put(
        self,
        process: ProcessInstance,
        claimed: ExportedMemory,
        number: int,
        address: int,
        fd: int,
        alone: str | None = None,
    ) -> Outcome:
        """Hold a descriptor; owns it from then on. `alone`: keep it under this name.

        Raises GpuError for a descriptor that is no exported memory. The caller still owns that one, and must
        not close it where the close could block.
        """
        found = self._inspector.identify(fd, claimed)
        charge = self._budget.charge(Purpose.SEGMENT, DESCRIPTORS)
        if charge is None:
            self.counters["refused_full"] += 1
            self._repeated.warning("segment refused: no descriptor left", remedy=f"raise {REMEDY}")
            self._close([fd])
            return Outcome(refusal=Refusal.FULL)
        outcome = self.ledger.admit(
            self._clients[process].owner,
            process,
            number=number,
            size=found.size,
            address=address,
            gpu=found.gpu_uuid,
            now=time.monotonic(),
            alone=alone,
        )
        self._settle(outcome)
        if outcome.holding is None:
            self.counters[f"refused_{(outcome.refusal or Refusal.FULL).name.lower()}"] += 1
            self._close([fd]).add_done_callback(lambda _: charge.release())
            return outcome
        self.counters["taken"] += 1
        self._charges[outcome.holding.id] = charge
        self._fds[outcome.holding.id] = fd
        self._note(outcome.holding)
        self._unstored[f"{PREFIX}{outcome.holding.id}"] = None
        self._wake.set()
        return outcome

    async def stored(self, holding: Segment) -> bool:
        """Return whether the segment is stored outside this daemon; wait at most STORED_DEADLINE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STORED_DEADLINE_S):
                async with self._store_moved:
                    await self._store_moved.wait_for(lambda: self.is_stored(holding))
        return self.is_stored(holding)

    def take(self, process: ProcessInstance, name: str, number: int, address: int) -> Outcome:
        """Move a segment that is kept alone to this process.

        The pidfd of the previous process tells whether it has ended; the loop may not have seen that yet.
        """
        owner = self._clients[process].owner
        for holding in self.ledger.named(owner, name):
            known = self._clients.get(holding.process)
            if holding.died is None and known is not None and not known.pinned.alive():
                self._ended(holding.process)
        outcome = self.ledger.take(owner, process, name, number=number, address=address)
        self._settle(outcome)
        return outcome

    def unwatched(self, process: ProcessInstance, name: str) -> list[Client]:
        """Return other clients with segments of that name and no connection that would report an exec."""
        holders = {h.process for h in self.named(process, name)} - {process}
        known = [self._clients[p] for p in holders if p in self._clients]
        return [client for client in known if not client.connections and client.program is not None]

    async def probe_unwatched(self, process: ProcessInstance, name: str) -> None:
        """Probe those clients. When this returns, those that run another program are treated as ended."""
        await asyncio.gather(*(self._check_for_exec(client) for client in self.unwatched(process, name)))

    async def drop(self, process: ProcessInstance, number: int) -> bool:
        """Drop a segment that the program has freed; return whether there was one.

        Returns when nothing of it is held, or after GONE_DEADLINE_S.
        """
        return await self.wait_until_released(self.ledger.drop(process, number))

    async def wait_until_released(self, outcome: Outcome) -> bool:
        waits = self._settle(outcome)
        if waits:
            await asyncio.wait(waits, timeout=GONE_DEADLINE_S)
        return bool(outcome.freed)

    def leave_segment(self, process: ProcessInstance, number: int) -> Outcome:
        outcome = self.ledger.leave(process, number, time.monotonic())
        self._settle(outcome)
        return outcome

    def keep(self, process: ProcessInstance, name: str) -> Outcome:
        outcome = self.ledger.keep(self._clients[process].owner, process, name)
        self._settle(outcome)
        return outcome

    def share(self, process: ProcessInstance, number: int, share: str) -> Refusal | None:
        """Share a segment with other processes of its owner from now on; None for success."""
        outcome = self.ledger.share(process, number, share)
        self._settle(outcome)
        return outcome.refusal

    def shared(self, process: ProcessInstance, share: str) -> Segment | None:
        """Return the segment that another process of the same owner has shared under this digest."""
        return self.ledger.shared(self._clients[process].owner, share)

    def named(self, process: ProcessInstance, name: str) -> tuple[Segment, ...]:
        """Return the segments that the process may claim: those that its owner keeps under that name."""
        return self.ledger.named(self._clients[process].owner, name)

    def descriptor(self, holding: Segment) -> int:
        return self._fds[holding.id]

    # -- release -----------------------------------------------------------------------------------------

    def _settle(self, outcome: Outcome) -> list[asyncio.Future[None]]:
        """Apply an outcome; the futures end when the descriptors of freed segments are closed everywhere."""
        for holding in outcome.changed:
            self._note(holding)
        waits: list[asyncio.Future[None]] = []
        for holding in outcome.freed:
            name = f"{PREFIX}{holding.id}"
            if self._notes is not None:
                with contextlib.suppress(OSError):
                    self._notes.strike(holding.id)
            self._unstored.pop(name, None)
            self._unnoted.pop(holding.id, None)
            released: asyncio.Future[None] = self._loop.create_future()
            self._store.drop(name, released)
            closed = self._close([self._fds.pop(holding.id)])
            closed.add_done_callback(partial(_release, self._charges.pop(holding.id)))
            waits += [released, closed]
        if not len(self.ledger) and self._notes is not None:
            # Nothing is left to restore: a keeper that holds nothing may end.
            self._unstored.pop(NOTES, None)
            self._store.drop(NOTES)
            self._notes.close()
            self._notes = None
        self._arm()
        return waits

    def _close(self, fds: Sequence[int]) -> asyncio.Future[None]:
        """Close in a thread: the last close of GPU memory takes long."""
        return self._loop.run_in_executor(self._closer, _close_all, fds)

    def _note(self, holding: Segment) -> None:
        try:
            if self._notes is None:
                self._notes = VaultNotes.create()
                self._unstored[NOTES] = None
            self._notes.write(holding)
            self._unnoted.pop(holding.id, None)
        except OSError as error:
            self._unnoted[holding.id] = None
            self._note_problem = error.strerror or str(error)
        if self._unnoted or self._unstored:
            self._wake.set()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.ledger.next_expiry()
        if due is not None:
            self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._settle(self.ledger.expire(time.monotonic()))

    # -- the store ---------------------------------------------------------------------------------------

    async def _store_one_by_one(self) -> None:
        """Store one at a time, so that a lease never waits behind a program's thousand allocations."""
        pause_s = FIRST_PAUSE_S
        while True:
            self._wake.clear()
            if await self._all_kept():
                pause_s = FIRST_PAUSE_S
                await self._wake.wait()
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _all_kept(self) -> bool:
        """Note and store what is pending. Returns False after a failure that is to be tried again."""
        for holding_id in tuple(self._unnoted):
            holding = self.ledger.get(holding_id)
            if holding is not None:
                self._note(holding)
        while self._unstored:
            name = NOTES if NOTES in self._unstored else next(iter(self._unstored))
            notes = self._notes
            fd = notes.fd if name == NOTES and notes is not None else self._fds[_id_of(name)]
            charge = self._charges[_id_of(name)].split(1) if name != NOTES else None
            try:
                held = self._store.put(name, [fd], charge=charge)
            except StoreError as error:
                if charge is not None:
                    self._charges[_id_of(name)].join(charge)
                self._store_problem = str(error)
                await self._tell_stored()
                return False
            # The future ends on its own: the store retries on failure, and a drop cancels it.
            await asyncio.wait({held})
            if held.cancelled() or (name == NOTES and self._notes is not notes):
                continue
            self._unstored.pop(name, None)
            await self._tell_stored()
        self._store_problem = ""
        await self._tell_stored()
        return not self._unnoted

    async def _tell_stored(self) -> None:
        async with self._store_moved:
            self._store_moved.notify_all()

    def takes(self, name: str, fds: Sequence[int]) -> bool:
        """Take a set of the descriptor store if it is the vault's; then it owns the descriptors."""
        if not name.startswith(PREFIX):
            return False
        self._found[name] = list(fds)
        return True

    async def adopt(self) -> None:
        """Rebuild the ledger of an earlier daemon from the sets that were given to `takes`."""
        found, self._found = self._found, {}
        if not found:
            return
        noted: dict[int, Segment] = {}
        notes = found.pop(NOTES, [])
        try:
            if notes:
                self._notes, noted = VaultNotes.adopt(notes[0])
        except OSError as error:
            log.error("cannot read the notes of the vault", reason=str(error))
            self._store.drop(NOTES)
            self._close(notes)
        self.ledger.next_id = 1 + max((_id_of(name) for name in found), default=0)
        now = time.monotonic()
        restored = [self._restored(name, fds, noted, now) for name, fds in sorted(found.items(), key=_by_id)]
        for lost in noted.keys() - self._fds.keys():
            if self._notes is not None:
                self._notes.strike(lost)
        self._settle(Outcome())
        self._expire()
        if self._probing:
            await asyncio.wait(self._probing, timeout=ADOPTION_S)
        log.info("the vault was taken over", held=sum(restored), freed=len(restored) - sum(restored))

    def _restored(self, name: str, fds: list[int], noted: dict[int, Segment], now: float) -> bool:
        holding = noted.get(_id_of(name))
        if holding is not None and len(fds) == 1:
            alive = self._alive(holding)
            if not alive and holding.name is not None and holding.died is None:
                holding = replace(holding, died=now)
            if (alive or holding.name is not None) and self.ledger.restore(holding):
                self._fds[holding.id] = fds[0]
                self._charges[holding.id] = self._budget.charge_open(Purpose.SEGMENT, 1)
                self._note(holding)
                return True
        self._store.drop(name)
        self._close(fds)
        return False

    def _alive(self, holding: Segment) -> bool:
        process = holding.process
        if process in self._clients:
            return True
        if holding.died is not None:
            return False
        # Raises if that is unknown: mpsd rather fails to start than frees a living client's memory.
        pinned = processes.Pinned.living(process)
        if pinned is None:
            return False
        self._spawn_probe(self._learn_program(self._watch(pinned, holding.owner, None)))
        return True

    async def _learn_program(self, client: Client) -> None:
        program = await self._program_of(client)
        if client.program is None:
            client.program = program

    # -- status ------------------------------------------------------------------------------------------

    def shown(self) -> dict[ProcessInstance, int]:
        """Return the bytes held of each living client of the vault."""
        return {process: self.ledger.bytes_of(process) for process in self._clients}

    def is_stored(self, holding: Segment) -> bool:
        """Return whether the segment and its note would outlive this daemon if that ended now."""
        noted = self._notes is not None and holding.id not in self._unnoted and self._store.holds(NOTES)
        return noted and holding.id in self._fds and self._store.holds(f"{PREFIX}{holding.id}")

    def conditions(self) -> list[Condition]:
        """Return a condition for the segments that would end with mpsd."""
        found = []
        if many := len(self._unnoted):
            found.append(Condition(Code.SEGMENTS_NOT_NOTED, detail=self._note_problem, count=many))
        if why := self._store_problem:
            found.append(Condition(Code.SEGMENTS_NOT_STORED, detail=why, count=len(self._unstored)))
        return found

    def totals(self) -> dict[str, int]:
        held = tuple(self.ledger.holdings())
        exited = [h for h in held if h.died is not None]
        return {
            "vault_held": len(held),
            "vault_bytes": sum(h.size for h in held),
            "vault_dead_held": len(exited),
            "vault_dead_bytes": sum(h.size for h in exited),
            **{f"vault_{name}": count for name, count in sorted(self.counters.items())},
        }

    async def close(self) -> None:
        """Release the resources of this process. The content of the store stays, with the last segments."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STORED_DEADLINE_S), self._store_moved:
                await self._store_moved.wait_for(lambda: not self._unstored or self._store_problem)
        for task in (self._storing, *self._probing):
            task.cancel()
        await asyncio.gather(self._storing, *self._probing, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        for client in self._clients.values():
            self._loop.remove_reader(client.pinned.fileno())
            client.pinned.close()
        self._clients.clear()
        if self._notes is not None:
            self._notes.close()
        await self._close(list(self._fds.values()))
        self._fds.clear()
        self._closer.shutdown(wait=False)
        self.probes.close()


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _release(charge: Charge, _: object) -> None:
    charge.release()


def _id_of(name: str) -> int:
    text = name.removeprefix(PREFIX)
    return int(text) if text.isdecimal() else 0


def _by_id(item: tuple[str, list[int]]) -> int:
    return _id_of(item[0])
