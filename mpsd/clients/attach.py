"""Leases of clients: pins, leases, trackers. The adapter side of every client in core.

The control log names a client tens of milliseconds before the client has a context. From then on mpsd pins
the process (mpsd.clients.pins), and probes it every few milliseconds until it has an address space to lease.
Probes run in threads. The lease is in the descriptor store before core hears of it, unless the store takes
longer than a moment (mpsd.clients.leasestorage). In that case core gets an event at once, and another one
when the lease is stored.

Descriptors are charged to the budget: a probe when it begins, a lease until it is closed. A client that does
not fit is reported as not attached at once, and attached once enough descriptors are free.

A process can die, exec or be forgotten between any two of these steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import DeadlineError, GpuError, MpsdError, NotReadyError
from mpsd.base.logs import Repeated
from mpsd.base.model import ClientId, ProcessInstance
from mpsd.clients.endofwork import WorkWatch
from mpsd.clients.lease import Lease, RetainedLease, adopt, held_apart, held_before, is_current, take, track
from mpsd.clients.leasestorage import LeaseStorage
from mpsd.clients.pins import NO_DESCRIPTOR, SETTLE_S, Knows, MayJoin, Pin, Pins, Post
from mpsd.clients.trackers import Trackers
from mpsd.core import events as ev
from mpsd.fdstore.queue import LeaseStore
from mpsd.gpu.base import Uvm, WorkView
from mpsd.os import processes
from mpsd.os.descriptors import Charge, DescriptorBudget, Purpose
from mpsd.os.probes import ProbePool
from mpsd.os.tasks import Tasks

log = structlog.get_logger("mpsd.attach")

ATTACH_DEADLINE_S = 60.0
FIRST_TRIES_S = 2.0
FAST_STEP_S = 0.002
SLOW_STEP_S = 0.05
# Many programs create the contexts of a second driver instance one after the other.
SECOND_INSTANCE_S = 20.0
# A probe of a client takes milliseconds; one that hangs (files on a dead file server) is abandoned.
PROBE_DEADLINE_S = 10.0
PROBE_DESCRIPTORS = 12
"""Charged to a probe. A client with one address space needs as many while it is leased, with the copies for
the descriptor store: 2 UVM files, tracker, guard notes, memory, mappings, notes of its work; 5 copies."""


class _NoDescriptorError(MpsdError):
    """The budget has too few descriptors left. `needed`: how many the client needs."""

    def __init__(self, needed: int) -> None:
        super().__init__(NO_DESCRIPTOR)
        self.needed = needed


@dataclass(slots=True)
class Reached:
    """Result of a successful probe: the process's address spaces, and the view of its work if that is new."""

    leases: list[Lease]
    work: WorkView | None
    problems: Sequence[str]
    retained: bool = False
    charge: Charge | None = None

    def descriptors(self) -> int:
        """Return the number of descriptors, copies for the descriptor store included."""
        stored = 0 if self.work is None else len(self.work.fds)
        return sum(lease.descriptors + lease.copies(stored) for lease in self.leases) + _viewed(self.work)

    def close(self) -> None:
        for lease in self.leases:
            lease.close()
        if self.work is not None:
            self.work.close()


def _viewed(work: WorkView | None) -> int:
    """Return the number of descriptors of a view: those that are stored, and the mappings of the process."""
    return len(work.fds) + 1 if work is not None and work.fds else 0


class _Probe:
    """The descriptors of one probe, charged from its begin until its thread has ended or its result is held.

    The thread owns `pidfd`.
    """

    def __init__(self, budget: DescriptorBudget, pin: Pin, needed: int) -> None:
        self._budget, self._pin, self._needed = budget, pin, needed
        self.charge: Charge | None = None
        self.pidfd = -1

    def begin(self) -> None:
        self.charge = self._budget.charge(Purpose.LEASE, self._needed)
        if self.charge is None:
            raise _NoDescriptorError(self._needed)
        try:
            self.pidfd = os.dup(self._pin.process.fileno())
        except OSError as error:
            self.end()
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise _NoDescriptorError(self._needed) from error
            raise NotReadyError("the process is no client any more") from error

    def not_begun(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)

    def end(self) -> None:
        if self.charge is not None:
            self.charge.release()


class Attacher:
    """All pins and leases of one daemon. Lives on the event loop; posts events, decides nothing."""

    def __init__(
        self,
        uvm: Uvm,
        work: WorkWatch,
        store: LeaseStore,
        post: Post,
        is_known: Knows | None = None,
        trackers: Trackers | None = None,
        budget: DescriptorBudget | None = None,
        may_join: MayJoin | None = None,
    ) -> None:
        """`is_known`, `may_join`: see Pins."""
        self._trackers = trackers or Trackers(post)
        self._uvm = uvm
        self._work = work
        self._store = store
        self._post = post
        self._budget = budget or DescriptorBudget.unlimited()
        self._leases: dict[ClientId, Lease] = {}
        self._storage = LeaseStorage(store, self._leases, work, post, self._budget)
        self._retained: dict[ClientId, RetainedLease] = {}
        self._retained_charges: dict[ClientId, Charge] = {}
        self._tasks = Tasks(post)
        self._ending: dict[ClientId, int | None] = {}
        self._loop = asyncio.get_running_loop()
        self._probes = ProbePool("attach")
        self.pins = Pins(post, self._tasks, self._probes, self._budget, is_known, may_join)
        # Clients that wait for descriptors, with the number that each needs.
        self._unleased: dict[tuple[str, ProcessInstance, int], int] = {}
        self._repeated = Repeated(log)

    @property
    def leases(self) -> Mapping[ClientId, Lease]:
        return self._leases

    def pinned(self, process: ProcessInstance) -> processes.Pinned | None:
        pin = self.pins.get(process)
        return pin.process if pin else None

    def notice(self, domain: str, pid: int, *, listed: bool = False) -> None:
        """Pin a process: Pins.notice()."""
        self.pins.notice(domain, pid, listed=listed)

    def listed(self, domain: str, pids: Collection[int]) -> None:
        """Take the client list of a domain: Pins.listed()."""
        self.pins.listed(domain, pids)

    async def noticed(self) -> None:
        await self.pins.noticed()

    def forget(self, process: ProcessInstance) -> None:
        """Drop the pin of a process that is no client any more."""
        self._unleased = {key: needed for key, needed in self._unleased.items() if key[1] != process}
        self.pins.forget(process)

    def kill(self, process: ProcessInstance, owner: int | None = None) -> str:
        """Send SIGKILL: Pins.kill()."""
        return self.pins.kill(process, owner)

    def freeze(self, process: ProcessInstance, owner: int | None = None) -> str:
        """Send SIGSTOP: Pins.freeze()."""
        return self.pins.freeze(process, owner)

    def check_identities(self, pid: int | None = None) -> None:
        self.pins.check_identities(pid)

    def attach(
        self, domain: str, process: ProcessInstance, space: int, needed: int = PROBE_DESCRIPTORS
    ) -> None:
        """Start to lease and track a pinned process. `needed`: the descriptors that the probe is charged."""
        pin = self.pins.get(process)
        if pin is None:
            self._post(ev.AttachFailed(domain, process, "the process has ended", space))
            return
        retained = {
            c: self._retained.pop(c)
            for c in sorted(self._retained)
            if (c.domain, c.process) == (domain, process)
        }
        # A task for a program that was replaced has yet to release what it took.
        older = [task for task, exec_count in pin.attaching.items() if exec_count != pin.exec_count]
        task = self._tasks.spawn(self._attach(domain, pin, space, retained, older, needed))
        pin.attaching[task] = pin.exec_count
        task.add_done_callback(lambda done: pin.attaching.pop(done, None))

    async def _attach(
        self,
        domain: str,
        pin: Pin,
        space: int,
        retained: Mapping[ClientId, RetainedLease],
        older: Sequence[asyncio.Task[None]],
        needed: int,
    ) -> None:
        process = pin.process.instance
        if older:
            await asyncio.wait(older)
        exec_count = pin.exec_count

        def stale() -> bool:
            return self.pins.get(process) is not pin or pin.exec_count != exec_count

        try:
            reached = await self._taken_over(retained, space) or await self._until_reached(
                domain, pin, exec_count, needed
            )
        except (MpsdError, OSError) as error:
            if not stale():
                if isinstance(error, _NoDescriptorError):
                    self._wait_for_descriptors(domain, process, space, error.needed)
                self._post(ev.AttachFailed(domain, process, str(error), space))
            return
        if reached is None:
            return
        clients = [ClientId(domain, process, space + n) for n in range(len(reached.leases))]
        if stale():
            # After an exec, for example: core has forgotten this program of the process.
            await self._discard(clients, reached)
            return
        # One driver instance has one address space. With two spaces, the other belongs to another domain.
        alone = len(reached.leases) == 1
        apart = alone and held_apart(reached.leases, self._leases_of_other_domains(domain, process))
        self._hold(clients, reached)
        late: tuple[int, ...] = ()
        if reached.retained:
            for lease in reached.leases:
                self._store.belongs(lease.name, pin.uid)
            await self._storage.renew([c for c in clients if not is_current(self._leases[c].name)], pin.uid)
        else:
            late = await self._storage.put(clients, pin.uid)
        if stale():
            for client in clients:
                self.release(client, uid=pin.uid)
            return
        for client in clients:
            tracker = self._leases[client].tracker
            if tracker is not None:
                self._trackers.add(client, tracker)
        tracked = all(lease.tracker is not None for lease in reached.leases)
        problem = "; ".join(reached.problems)
        self._post(ev.ClientAttached(domain, process, len(clients), tracked, problem, space, late, apart))

    def _hold(self, clients: Sequence[ClientId], reached: Reached) -> None:
        """Take over the leases and the view, each with its part of the charge."""
        self._leases.update(zip(clients, reached.leases, strict=True))
        if reached.charge is not None:
            viewed = 0 if reached.work is None else len(reached.work.fds)
            for lease in reached.leases:
                lease.charge = reached.charge.split(lease.descriptors)
                lease.stored = reached.charge.split(lease.copies(viewed))
        if reached.work is not None:
            self._work.follow(clients, reached.work, reached.charge)

    async def _discard(self, clients: Sequence[ClientId], reached: Reached) -> None:
        """Close the result of a probe that no client needs."""
        if reached.retained:
            for client in clients:
                self._work.forget(client)
        await asyncio.to_thread(reached.close)
        if reached.charge is not None:
            reached.charge.release()
        for lease in reached.leases:
            self._store.drop(lease.name)
            if lease.charge is not None:
                lease.charge.release()

    def _wait_for_descriptors(self, domain: str, process: ProcessInstance, space: int, needed: int) -> None:
        """Attach this client later. Until then core knows it as unprotected."""
        self._unleased[domain, process, space] = needed
        self._repeated.warning("a client has no lease", domain=domain, pid=process.pid, reason=NO_DESCRIPTOR)

    def lease_waiting(self) -> None:
        """Attach clients that wait for descriptors, as many as fit now, in order."""
        wanted = 0
        for (domain, process, space), needed in tuple(self._unleased.items()):
            if self._budget.fits(Purpose.LEASE, wanted + needed):
                wanted += needed
                del self._unleased[domain, process, space]
                self.attach(domain, process, space, needed)

    def conditions(self) -> list[Condition]:
        """Return a condition if clients wait for descriptors."""
        waiting = len(self._unleased)
        return [Condition(Code.CLIENTS_WAITING, count=waiting)] if waiting else []

    def _leases_of_other_domains(self, domain: str, process: ProcessInstance) -> list[Lease]:
        """Return the leases of the process as a client of other domains."""
        return [lease for c, lease in self._leases.items() if c.process == process and c.domain != domain]

    def check_use(self, client: ClientId) -> None:
        """Post NeverLaunched if this living client has launched nothing. It may have no context at all."""
        pin = self.pins.get(client.process)
        if pin is not None and not self._work.check_use(client):
            self._tasks.spawn(self._check_space(client, pin))

    async def _check_space(self, client: ClientId, pin: Pin) -> None:
        try:
            reached = await self._probe(client.domain, pin, PROBE_DESCRIPTORS, time.monotonic())
        except NotReadyError:
            if not pin.exited.is_set():
                self._post(ev.NeverLaunched(client))
        except (MpsdError, OSError) as error:
            log.info("cannot see whether a client has a context", client=str(client), reason=str(error))
        else:
            if reached is not None:
                await self._discard([], reached)

    async def _until_reached(self, domain: str, pin: Pin, exec_count: int, needed: int) -> Reached | None:
        """Probe until there is something to lease; None when the process has ended or replaced its program.

        Raises MpsdError, OSError when further tries are pointless, a probe hangs, or no descriptor is left.
        """
        process = pin.process.instance
        began = time.monotonic()
        while (tried := time.monotonic()) - began < ATTACH_DEADLINE_S:
            # After an exec: the old lease still has the name that the new one will have in the store.
            if not any(c.process == process for c in self._ending):
                try:
                    if (reached := await self._probe(domain, pin, needed, began)) is not None:
                        return reached
                except NotReadyError:
                    pass
                except (MpsdError, OSError):
                    if pin.exited.is_set():
                        return None
                    raise
            now = time.monotonic()
            hurry = now - began < FIRST_TRIES_S and not self._leases_of_other_domains(domain, process)
            # Each probe of a process that has an address space already duplicates that space, too.
            step = FAST_STEP_S if hurry else SLOW_STEP_S
            # Many new clients at once must not use up the processor, nor one client with slow probes.
            busy = sum(1 for p in self.pins if p.attaching)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(step, busy * 0.001, 10 * (now - tried))):
                    await pin.exited.wait()
            if pin.exited.is_set() or pin.exec_count != exec_count:
                return None
        raise GpuError(f"the process created no GPU address space within {ATTACH_DEADLINE_S:g} s")

    async def _probe(self, domain: str, pin: Pin, needed: int, began: float) -> Reached | None:
        """Probe once; None if all address spaces belong to other domains. Raises MpsdError, OSError."""
        process = pin.process.instance
        probe = _Probe(self._budget, pin, needed)
        try:
            reached = await self._probes.run(
                pin.uid,
                partial(self._reach, process, probe),
                PROBE_DEADLINE_S,
                release_late=Reached.close,
                not_begun=probe.not_begun,
                begin=probe.begin,
                ended_late=probe.end,
            )
        except (DeadlineError, asyncio.CancelledError):
            # Its thread may still hold descriptors; ended_late follows, unless the probe never began.
            raise
        except BaseException:
            probe.end()
            raise
        if not await self._only_new(reached, domain, process, time.monotonic() - began):
            probe.end()
            return None
        count, charge = reached.descriptors(), probe.charge
        assert charge is not None
        if not charge.resize(count):
            await asyncio.to_thread(reached.close)
            charge.release()
            raise _NoDescriptorError(count)
        reached.charge = charge
        return reached

    async def _only_new(
        self, reached: Reached, domain: str, process: ProcessInstance, after_s: float
    ) -> bool:
        """Keep only the leases of this domain. If there is none, close all of them and return False."""
        known = held_before(reached.leases, self._leases_of_other_domains(domain, process))
        if not known:
            return True
        if len(known) < len(reached.leases):
            reached.leases = [lease for lease in reached.leases if not any(lease is k for k in known)]
            await asyncio.to_thread(_close_all, known)
            return True
        if after_s < SECOND_INSTANCE_S:
            await asyncio.to_thread(reached.close)
            return False
        # No new space for a long time: better hold a space twice than not at all.
        return True

    def _reach(self, process: ProcessInstance, probe: _Probe) -> Reached:
        """Probe a process: take its leases and its view. Runs in a thread, which owns the probe's pidfd."""
        try:
            tracked = [track(lease) for lease in take(self._uvm.open(process, probe.pidfd))]
            problems = [problem for _, problem in tracked if problem]
            work: WorkView | None = None
            try:
                work = self._work.open_view(process, probe.pidfd)
            except (GpuError, OSError) as error:
                problems.append(f"mpsd cannot see the end of its GPU work: {error}")
            return Reached([lease for lease, _ in tracked], work, problems)
        finally:
            os.close(probe.pidfd)

    async def _taken_over(self, retained: Mapping[ClientId, RetainedLease], space: int) -> Reached | None:
        """Take over the leases that an earlier daemon left of a living client; None when it left none.

        They are numbered from `space` on.
        """
        leases: list[Lease] = []
        for client, found in retained.items():
            if lease := self._adopted(client, found, space + len(leases)):
                leases.append(lease)
        tracked = [await self._loop.run_in_executor(None, track, lease) for lease in leases]
        for lease in leases:
            lease.shrink_charge()
        problems = [problem for _, problem in tracked if problem]
        return Reached(leases, None, problems, retained=True) if leases else None

    def inherit(self, retained: Mapping[ClientId, RetainedLease]) -> None:
        """Keep leases from the descriptor store of an earlier daemon, until they are adopted or discarded."""
        self._retained.update(retained)
        for client, lease in retained.items():
            self._retained_charges[client] = self._budget.charge_open(Purpose.LEASE, lease.descriptors)

    @property
    def retained(self) -> Mapping[ClientId, RetainedLease]:
        """Return the inherited leases that are not claimed yet."""
        return self._retained

    def restore(self, client: ClientId) -> bool:
        """Take over the kept lease of a client that has died; it needs no tracker any more."""
        retained = self._retained.pop(client, None)
        if retained is None:
            return False
        lease = self._adopted(client, retained, client.space)
        if lease is None:
            return False
        lease.shrink_charge()
        self._leases[client] = lease
        return True

    def is_present(self, client: ClientId) -> bool:
        """Return whether a kept lease belongs to the program that its living process runs now."""
        return self._work.is_present(client.process, self._retained[client].work)

    def _adopted(self, client: ClientId, retained: RetainedLease, space: int) -> Lease | None:
        """Adopt one stored lease as number `space`; None, logged, if it is malformed. The rest continue."""
        charge = self._retained_charges.pop(client)
        try:
            lease = adopt(self._uvm, retained)
        except GpuError as error:
            log.error("a stored lease is not usable", client=str(client), reason=str(error))
            self._post(ev.Counted({"leases_malformed": 1}))
            self._store.drop(retained.name)
            charge.release()
            return None
        self._work.adopt(replace(client, space=space), retained.work, charge.split(retained.viewed))
        lease.charge = charge
        return lease

    def discard_retained(self) -> int:
        """Release the kept leases that were not claimed; return their number."""
        unclaimed = tuple(self._retained)
        for client in unclaimed:
            retained = self._retained.pop(client)
            retained.close()
            self._retained_charges.pop(client).release()
            self._store.drop(retained.name)
        return len(unclaimed)

    def release(
        self, client: ClientId, free: Coroutine[Any, Any, None] | None = None, uid: int | None = None
    ) -> None:
        """Close the lease here and in the store. Closing may take long, so a thread does it.

        `free` ends when the descriptors are no longer in use. From now on a new process may get the same
        client id. `uid`: the owner; by default that of the pin, if there is one.
        """
        self._work.forget(client)
        lease = self._leases.pop(client, None)
        if lease is None:
            if free is not None:
                self._tasks.spawn(free)
            return
        self._trackers.remove(client)
        if uid is None and (pin := self.pins.get(client.process)) is not None:
            uid = pin.uid
        self._ending[client] = uid
        self._tasks.spawn(self._close(client, lease, free))

    async def _close(self, client: ClientId, lease: Lease, free: Coroutine[Any, Any, None] | None) -> None:
        try:
            if free is not None:
                await free
            await asyncio.to_thread(lease.close)
        finally:
            self._store.drop(lease.name)
            if lease.charge is not None:
                lease.charge.release()
            self._ending.pop(client, None)
            self.lease_waiting()

    @property
    def ending(self) -> Mapping[ClientId, int | None]:
        """Return the clients with leases that are released but not closed yet, with the user if known."""
        return self._ending

    async def attachments_done(self) -> None:
        """Wait until no attach is under way and all released leases are closed; SETTLE_S at most."""
        self.pins.stop()
        self._unleased.clear()
        await self._tasks.ended(SETTLE_S)

    def close(self) -> None:
        """Release the resources of this process. The content of the store stays."""
        self.pins.close()
        for client, lease in self._leases.items():
            self._trackers.remove(client)
            lease.close()
        self._leases.clear()
        self._probes.close()


def _close_all(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.close()
