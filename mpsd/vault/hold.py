"""The vault itself: the ledger joined with descriptors, their store, and the ends of processes.

Every descriptor is also in the descriptor store, under `vault.ID`, with one file of notes beside them
(`vault.notes`): a daemon that is killed drops nothing, and the next one rebuilds the ledger. A process's
end is that of its pidfd; a connection that ends is none, but for a process that replaced its program.

Long because descriptors, their store and the ends of processes can only be kept in step in one place.
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

from mpsd import procs
from mpsd.core.vault import Holding, Ledger, Limits, Outcome, Owner, Refusal
from mpsd.errors import MpsdError, StoreError
from mpsd.gpu.base import ExportedMemory, MemoryInspector
from mpsd.leasestore import FIRST_PAUSE_S, LONGEST_PAUSE_S, LeaseStore
from mpsd.looks import Looks
from mpsd.model import ProcessInstance
from mpsd.vault.notes import VaultNotes

log = structlog.get_logger("mpsd.vault")

PREFIX = "vault."
NOTES = "vault.notes"
EXEC_DEADLINE_S = 2.0
# So long an adoption waits for looks at the living; they go on, and nobody else waits for them.
ADOPTION_S = 0.5
GONE_DEADLINE_S = 1.0
STORED_DEADLINE_S = 1.0


@dataclass(slots=True)
class Client:
    """A living process that is connected, or of which something is held."""

    pinned: procs.Pinned
    owner: Owner
    program: procs.ExecIdentity | None
    connections: int = 0


class Vault:
    """Lives on the event loop. What may take long (closing memory, the store) is done in threads."""

    def __init__(self, limits: Limits, inspector: MemoryInspector, store: LeaseStore) -> None:
        self.ledger = Ledger(limits)
        self.counters: Counter[str] = Counter()
        self.offered_at = ""
        """The door's socket, while it is open."""
        self.on_end: list[Callable[[ProcessInstance], None]] = []
        """Told when a process has ended, runs another program, or left with nothing held."""
        self.held_elsewhere: Callable[[ProcessInstance], bool] = lambda process: False
        """Whether another part holds something of a process (its ledger), until it is told as above."""
        self.looks = Looks("vault")
        """At clients, each on its user's account."""
        self._inspector = inspector
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._closer = ThreadPoolExecutor(2, "vault-close")
        self._fds: dict[int, int] = {}
        self._clients: dict[ProcessInstance, Client] = {}
        self._notes: VaultNotes | None = None
        self._found: dict[str, list[int]] = {}
        # Names to be stored, and holdings whose notes are to be written (again), in order.
        self._unstored: dict[str, None] = {}
        self._unnoted: dict[int, None] = {}
        self._wake = asyncio.Event()
        self._store_moved = asyncio.Condition()
        self._storing = self._loop.create_task(self._store_one_by_one())
        self._looking: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._store_problem = self._note_problem = ""

    # -- processes ---------------------------------------------------------------------------------------

    def join(self, pinned: procs.Pinned, owner: Owner, program: procs.ExecIdentity | None) -> Owner | None:
        """A connection of a process; takes `pinned` over. The owner that the process has here, which for
        one that is known is the one it had (a cgroup can change under it); None for one that says now
        that it is somebody else."""
        known = self._clients.get(pinned.instance)
        if known is not None and None not in (known.program, program) and known.program != program:
            # It replaced its program and is faster than the look at that: what it brought before has gone.
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

    def _watch(self, pinned: procs.Pinned, owner: Owner, program: procs.ExecIdentity | None) -> Client:
        client = self._clients[pinned.instance] = Client(pinned, owner, program)
        self._loop.add_reader(pinned.fileno(), self._ended, pinned.instance)
        return client

    def leave(self, process: ProcessInstance) -> None:
        """The end of a connection: not that of its process, unless that runs another program now."""
        client = self._clients.get(process)
        if client is None:
            return
        client.connections -= 1
        if client.connections:
            return
        if not self.ledger.of(process) and not self.held_elsewhere(process):
            self._ended(process)
        elif client.program is not None:
            self._spawn_look(self._look_for_exec(client))

    def _spawn_look(self, look: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(look)
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _program_of(self, client: Client) -> procs.ExecIdentity | None:
        """None where that cannot be told, or not in time."""
        look = partial(procs.exec_identity, client.pinned.instance)
        try:
            return await self.looks.run(client.owner.uid, look, EXEC_DEADLINE_S)
        except (MpsdError, OSError):
            return None

    async def _look_for_exec(self, client: Client) -> None:
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
        self._settle(self.ledger.died(process, time.monotonic()))
        for tell in self.on_end:
            tell(process)

    def knows(self, process: ProcessInstance) -> bool:
        return process in self._clients

    def has(self, process: ProcessInstance, addresses: Sequence[int]) -> list[bool]:
        """Whether memory of this process that lies at each of these addresses is held."""
        spans = sorted((h.address, h.address + h.size) for h in self.ledger.of(process))
        starts = [start for start, _ in spans]
        # The furthest end of all that begin no later: a process may have pieces one over another.
        ends = [0, *accumulate((end for _, end in spans), max)]
        return [address < ends[bisect_right(starts, address)] for address in addresses]

    def owner_of(self, pid: int) -> tuple[ProcessInstance, Owner] | None:
        """The living client with this pid."""
        return next(((p, c.owner) for p, c in self._clients.items() if p.pid == pid), None)

    # -- what they ask -----------------------------------------------------------------------------------

    def put(
        self,
        process: ProcessInstance,
        claimed: ExportedMemory,
        number: int,
        address: int,
        fd: int,
        alone: str | None = None,
    ) -> Outcome:
        """Hold a descriptor; owns it from then on. `alone`: keep it under this name. Raises GpuError for
        one that is no exported memory: that one is still the caller's, who must not close it where that
        could wait."""
        found = self._inspector.identify(fd, claimed)
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
            self._close([fd])
            return outcome
        self.counters["taken"] += 1
        self._fds[outcome.holding.id] = fd
        self._note(outcome.holding)
        self._unstored[f"{PREFIX}{outcome.holding.id}"] = None
        self._wake.set()
        return outcome

    async def stored(self, holding: Holding) -> bool:
        """Whether it is where it outlives this daemon, once it is, or after STORED_DEADLINE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STORED_DEADLINE_S):
                async with self._store_moved:
                    await self._store_moved.wait_for(lambda: self.is_stored(holding))
        return self.is_stored(holding)

    def take(self, process: ProcessInstance, name: str, number: int, address: int) -> Outcome:
        """A piece kept alone becomes this process's. Whether the one that had it has ended says its pidfd,
        which the loop may not have looked at yet."""
        owner = self._clients[process].owner
        for holding in self.ledger.named(owner, name):
            known = self._clients.get(holding.process)
            if holding.died is None and known is not None and not known.pinned.alive():
                self._ended(holding.process)
        outcome = self.ledger.take(owner, process, name, number=number, address=address)
        self._settle(outcome)
        return outcome

    def unwatched(self, process: ProcessInstance, name: str) -> list[Client]:
        """Others who have what is kept under that name, and no connection whose end would tell of an exec."""
        holders = {h.process for h in self.named(process, name)} - {process}
        known = [self._clients[p] for p in holders if p in self._clients]
        return [client for client in known if not client.connections and client.program is not None]

    async def look_at_unwatched(self, process: ProcessInstance, name: str) -> None:
        """Those of them that run another program now have ended, once this returns."""
        await asyncio.gather(*(self._look_for_exec(client) for client in self.unwatched(process, name)))

    async def drop(self, process: ProcessInstance, number: int) -> bool:
        """The program has freed it: returns when nothing of it is held, or after GONE_DEADLINE_S.
        False where nothing was."""
        return await self.gone(self.ledger.drop(process, number))

    async def gone(self, outcome: Outcome) -> bool:
        waits = self._settle(outcome)
        if waits:
            await asyncio.wait(waits, timeout=GONE_DEADLINE_S)
        return bool(outcome.freed)

    def leave_piece(self, process: ProcessInstance, number: int) -> Outcome:
        outcome = self.ledger.leave(process, number, time.monotonic())
        self._settle(outcome)
        return outcome

    def keep(self, process: ProcessInstance, name: str) -> Outcome:
        outcome = self.ledger.keep(self._clients[process].owner, process, name)
        self._settle(outcome)
        return outcome

    def share(self, process: ProcessInstance, number: int, share: str) -> Refusal | None:
        """Open to other processes of its owner from now on; None for done."""
        outcome = self.ledger.share(process, number, share)
        self._settle(outcome)
        return outcome.refusal

    def shared(self, process: ProcessInstance, share: str) -> Holding | None:
        """What another process of the same owner has shared so."""
        return self.ledger.shared(self._clients[process].owner, share)

    def named(self, process: ProcessInstance, name: str) -> tuple[Holding, ...]:
        """What the process may claim: what its owner keeps under that name."""
        return self.ledger.named(self._clients[process].owner, name)

    def descriptor(self, holding: Holding) -> int:
        return self._fds[holding.id]

    # -- letting go --------------------------------------------------------------------------------------

    def _settle(self, outcome: Outcome) -> list[asyncio.Future[None]]:
        """Make it so; the futures end when the descriptors of what was freed are closed everywhere."""
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
            gone: asyncio.Future[None] = self._loop.create_future()
            self._store.drop(name, gone)
            waits += [gone, self._close([self._fds.pop(holding.id)])]
        if not len(self.ledger) and self._notes is not None:
            # Nothing is to be found any more: a keeper that holds nothing may end.
            self._unstored.pop(NOTES, None)
            self._store.drop(NOTES)
            self._notes.close()
            self._notes = None
        self._arm()
        return waits

    def _close(self, fds: Sequence[int]) -> asyncio.Future[None]:
        """The last close of GPU memory takes long."""
        return self._loop.run_in_executor(self._closer, _close_all, fds)

    def _note(self, holding: Holding) -> None:
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
        """One at a time, so that a lease never waits behind a program's thousand allocations."""
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
        """Note and store what is not yet. False where something failed and is to be tried again."""
        for holding_id in tuple(self._unnoted):
            holding = self.ledger.get(holding_id)
            if holding is not None:
                self._note(holding)
        while self._unstored:
            name = NOTES if NOTES in self._unstored else next(iter(self._unstored))
            notes = self._notes
            fd = notes.fd if name == NOTES and notes is not None else self._fds[_id_of(name)]
            try:
                held = self._store.put(name, [fd])
            except StoreError as error:
                self._store_problem = str(error)
                await self._tell_stored()
                return False
            # It ends by itself, tried again where the store fails; cancelled where it was dropped meanwhile.
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
        """Whether a set in the descriptor store is the vault's; then it owns the descriptors."""
        if not name.startswith(PREFIX):
            return False
        self._found[name] = list(fds)
        return True

    async def adopt(self) -> None:
        """Rebuild what an earlier daemon held from the sets that were given to `takes`."""
        found, self._found = self._found, {}
        if not found:
            return
        noted: dict[int, Holding] = {}
        notes = found.pop(NOTES, [])
        try:
            if notes:
                self._notes, noted = VaultNotes.adopt(notes[0])
        except OSError as error:
            log.error("the vault's notes cannot be read", reason=str(error))
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
        if self._looking:
            await asyncio.wait(self._looking, timeout=ADOPTION_S)
        log.info("the vault was taken over", held=sum(restored), freed=len(restored) - sum(restored))

    def _restored(self, name: str, fds: list[int], noted: dict[int, Holding], now: float) -> bool:
        holding = noted.get(_id_of(name))
        if holding is not None and len(fds) == 1:
            alive = self._alive(holding)
            if not alive and holding.name is not None and holding.died is None:
                holding = replace(holding, died=now)
            if (alive or holding.name is not None) and self.ledger.restore(holding):
                self._fds[holding.id] = fds[0]
                self._note(holding)
                return True
        self._store.drop(name)
        self._close(fds)
        return False

    def _alive(self, holding: Holding) -> bool:
        process = holding.process
        if process in self._clients:
            return True
        if holding.died is not None:
            return False
        # Where that is not to be told: rather no start than that a living one's memory goes.
        pinned = procs.Pinned.living(process)
        if pinned is None:
            return False
        self._spawn_look(self._learn_program(self._watch(pinned, holding.owner, None)))
        return True

    async def _learn_program(self, client: Client) -> None:
        program = await self._program_of(client)
        if client.program is None:
            client.program = program

    # -- looking -----------------------------------------------------------------------------------------

    def shown(self) -> dict[ProcessInstance, int]:
        """Bytes held of each living client of the vault."""
        return {process: self.ledger.bytes_of(process) for process in self._clients}

    def is_stored(self, holding: Holding) -> bool:
        """Whether it, and what is noted of it, would outlive this daemon if that ended now."""
        noted = self._notes is not None and holding.id not in self._unnoted and self._store.holds(NOTES)
        return noted and holding.id in self._fds and self._store.holds(f"{PREFIX}{holding.id}")

    def problems(self) -> list[str]:
        found = []
        if self._unnoted:
            found.append(f"{len(self._unnoted)} piece(s) of the vault are not noted: {self._note_problem}")
        if self._store_problem:
            found.append(f"{len(self._unstored)} piece(s) of the vault are not stored: {self._store_problem}")
        return [f"{text}; they end with mpsd" for text in found]

    def totals(self) -> dict[str, int]:
        held = tuple(self.ledger.holdings())
        dead = [h for h in held if h.died is not None]
        return {
            "vault_held": len(held),
            "vault_bytes": sum(h.size for h in held),
            "vault_dead_held": len(dead),
            "vault_dead_bytes": sum(h.size for h in dead),
            **{f"vault_{name}": count for name, count in sorted(self.counters.items())},
        }

    async def close(self) -> None:
        """Let go of what is this process's own. What the store holds lives on: what was brought last, too."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STORED_DEADLINE_S), self._store_moved:
                await self._store_moved.wait_for(lambda: not self._unstored or self._store_problem)
        for task in (self._storing, *self._looking):
            task.cancel()
        await asyncio.gather(self._storing, *self._looking, return_exceptions=True)
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
        self.looks.close()


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _id_of(name: str) -> int:
    text = name.removeprefix(PREFIX)
    return int(text) if text.isdecimal() else 0


def _by_id(item: tuple[str, list[int]]) -> int:
    return _id_of(item[0])
