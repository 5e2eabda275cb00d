"""Holding on to clients: pins, leases, trackers. The adapter side of every client in core.

A client is noticed by the control log, tens of milliseconds before it has a context. From then on its
process is pinned, and tried every few milliseconds until it has an address space to be leased; the lease
is in the descriptor store before core hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from mpsd import procs
from mpsd.core import events as ev
from mpsd.errors import GpuError, MpsdError, NotReadyError, StoreError
from mpsd.fdstore import DescriptorStore
from mpsd.gpu.base import AddressSpace, Tracker, Uvm
from mpsd.model import ClientId, ProcessInstance
from mpsd.workwatch import WorkWatch

log = structlog.get_logger("mpsd.attacher")

Post = Callable[[ev.Event], None]
ATTACH_DEADLINE_S = 60.0
FIRST_TRIES_S = 2.0
FAST_STEP_S = 0.002
SLOW_STEP_S = 0.05
EVENTS_PER_DRAIN = 64
ROLES = ("mm", "va")
WORK_ROLES = ("areas", "mem")
_PREFIX = "lease"


@dataclass(slots=True)
class Lease:
    """What is held for one client. `since` is monotonic seconds."""

    space: AddressSpace
    tracker: Tracker | None
    since: float
    stored: bool


@dataclass(slots=True)
class Pin:
    process: procs.Pinned
    identity: procs.ExecIdentity | None
    attaching: asyncio.Task[None] | None = None
    dropped: dict[ClientId, int] = field(default_factory=dict)


def lease_name(client: ClientId) -> str:
    return f"{_PREFIX}.{client.domain}.{client.process.pid}.{client.process.start_ticks}.{client.space}"


def parse_lease_name(name: str) -> ClientId | None:
    """The client a stored set belongs to; None for names that are not ours."""
    parts = name.split(".")
    if len(parts) != 5 or parts[0] != _PREFIX or not all(p.isdigit() for p in parts[2:]):
        return None
    pid, start, space = (int(p) for p in parts[2:])
    return ClientId(parts[1], ProcessInstance(pid, start), space)


class Attacher:
    """All pins and leases of one daemon. Lives on the event loop; posts events, decides nothing."""

    def __init__(self, uvm: Uvm, work: WorkWatch, store: DescriptorStore, post: Post) -> None:
        self._uvm = uvm
        self._work = work
        self._store = store
        self._post = post
        self._pins: dict[ProcessInstance, Pin] = {}
        self._leases: dict[ClientId, Lease] = {}
        self._kept: dict[ClientId, Sequence[int]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._ending: set[ClientId] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def leases(self) -> Mapping[ClientId, Lease]:
        return self._leases

    def pinned(self, process: ProcessInstance) -> procs.Pinned | None:
        pin = self._pins.get(process)
        return pin.process if pin else None

    def notice(self, domain: str, pid: int, *, listed: bool = False) -> bool:
        """Pin a process that a domain's log or client list names, and tell core. False: it has gone.

        `listed`: the server named it when it was asked.
        """
        try:
            facts = procs.facts(pid)
            # Not by pid: the pin of a dead client whose lease is held may have had the same number.
            known = facts.instance in self._pins
            process = None if known else procs.Pinned.open(pid, facts.instance.start_ticks)
        except MpsdError as error:
            log.info("client missed", domain=domain, pid=pid, reason=str(error))
            self._post(ev.Counted({"clients_missed": 1}))
            return False
        if process is not None:
            self._pins[process.instance] = Pin(process, _identity(process.instance))
            self._loop.add_reader(process.fileno(), self._died, process.instance)
        self._post(ev.ClientNoticed(domain, facts, listed))
        return True

    def _died(self, process: ProcessInstance) -> None:
        pin = self._pins[process]
        self._loop.remove_reader(pin.process.fileno())
        if pin.attaching is not None:
            pin.attaching.cancel()
        self._post(ev.ClientDied(process))

    def attach(self, domain: str, process: ProcessInstance, space: int) -> None:
        """Start trying to lease and track a pinned process."""
        pin = self._pins.get(process)
        if pin is None:
            self._post(ev.AttachFailed(domain, process, "the process has gone", space))
            return
        if not self._try(domain, pin, space):
            pin.attaching = self._loop.create_task(self._keep_trying(domain, pin, space))

    async def _keep_trying(self, domain: str, pin: Pin, space: int) -> None:
        began, spent = time.monotonic(), 0.0
        while (waited := time.monotonic() - began) < ATTACH_DEADLINE_S:
            # Many newcomers at once must not eat the loop: the step grows with their number.
            busy = sum(1 for p in self._pins.values() if p.attaching and not p.attaching.done())
            step = FAST_STEP_S if waited < FIRST_TRIES_S else SLOW_STEP_S
            # Nor must one whose descriptors take long to look through.
            await asyncio.sleep(max(step, busy * 0.001, 10 * spent))
            tried = time.monotonic()
            if self._try(domain, pin, space):
                return
            spent = time.monotonic() - tried
        reason = f"no GPU address space within {ATTACH_DEADLINE_S:g} s"
        self._post(ev.AttachFailed(domain, pin.process.instance, reason, space))

    def _try(self, domain: str, pin: Pin, space: int) -> bool:
        """True when there is nothing more to try: attached, failed for good, or gone."""
        process = pin.process.instance
        if any(c.process == process for c in self._ending):
            # After an exec: the old lease still goes by the name that the new one will have in the store.
            return False
        try:
            found = self._open(domain, pin, space)
        except NotReadyError:
            return False
        except (MpsdError, OSError) as error:
            self._post(ev.AttachFailed(domain, process, str(error), space))
            return True
        problems = []
        for index, (opened, kept) in enumerate(found):
            client = ClientId(domain, process, space + index)
            tracker, problem = self._track(client, opened)
            work, unseen = ({}, "") if kept or index else self._look(pin.process)
            stored = kept or self._keep(client, opened, work)
            self._leases[client] = Lease(opened, tracker, time.monotonic(), stored)
            problems += [text for text in (problem, unseen) if text]
            problems += [] if stored else ["the lease is not in the descriptor store"]
        tracked = all(self._leases[ClientId(domain, process, space + i)].tracker for i in range(len(found)))
        self._post(ev.ClientAttached(domain, process, len(found), tracked, "; ".join(problems), space))
        return True

    def _look(self, process: procs.Pinned) -> tuple[Mapping[str, int], str]:
        """Begin to look at the client's work, so that its end can be seen after its death."""
        try:
            return self._work.open(process.instance, process.fileno()), ""
        except (GpuError, OSError) as error:
            return {}, f"the end of its work will not be seen: {error}"

    def _track(self, client: ClientId, space: AddressSpace) -> tuple[Tracker | None, str]:
        try:
            tracker = space.track()
        except (GpuError, OSError) as error:
            return None, f"faults are not seen: {error}"
        self._loop.add_reader(tracker.fileno(), self._drain, client, tracker)
        return tracker, ""

    def _drain(self, client: ClientId, tracker: Tracker) -> None:
        try:
            batch = tracker.drain()
        except GpuError as error:
            # It would stay readable for ever.
            self._loop.remove_reader(tracker.fileno())
            log.error("faults are not seen any more", client=str(client), reason=str(error))
            self._post(ev.Counted({"trackers_lost": 1}))
            return
        for event in [e for e in batch.events if e.fatal][:EVENTS_PER_DRAIN]:
            self._post(ev.UvmFatal(client, event))
        pin = self._pins.get(client.process)
        before = pin.dropped.get(client, 0) if pin else 0
        if pin is not None and batch.dropped > before:
            pin.dropped[client] = batch.dropped
            self._post(ev.Counted({"events_dropped": batch.dropped - before}))

    def _keep(self, client: ClientId, space: AddressSpace, work: Mapping[str, int]) -> bool:
        fds = [space.fds[role] for role in ROLES] + [work[role] for role in WORK_ROLES if role in work]
        try:
            self._store.put(lease_name(client), fds)
        except StoreError as error:
            log.warning("lease is held by this process only", client=str(client), reason=str(error))
            return False
        return True

    def inherit(self, kept: Mapping[ClientId, Sequence[int]]) -> None:
        """Leases that the descriptor store kept for an earlier daemon; each is used again or discarded."""
        self._kept.update(kept)

    def restore(self, client: ClientId) -> bool:
        """Take over the kept lease of a client that has died; it needs no tracker any more."""
        fds = self._kept.pop(client, None)
        if fds is None:
            return False
        self._leases[client] = Lease(self._adopted(client, fds), None, time.monotonic(), True)
        return True

    def _adopted(self, client: ClientId, fds: Sequence[int]) -> AddressSpace:
        work = dict(zip(WORK_ROLES, fds[len(ROLES) :], strict=False))
        try:
            self._work.adopt(client.process, work)
        except GpuError as error:
            log.warning("the end of a client's work will not be seen", client=str(client), reason=str(error))
        return self._uvm.adopt(dict(zip(ROLES, fds, strict=False)))

    def _open(self, domain: str, pin: Pin, space: int) -> Sequence[tuple[AddressSpace, bool]]:
        """Address spaces of a pinned process, and whether the descriptor store has them already."""
        process = pin.process.instance
        kept = sorted(c for c in self._kept if (c.domain, c.process) == (domain, process))
        if kept:
            return [(self._adopted(c, self._kept.pop(c)), True) for c in kept]
        return [(found, False) for found in self._uvm.open(process, pin.process.fileno())]

    def discard_kept(self) -> int:
        """Give up kept leases that nobody claimed; how many there were."""
        unclaimed = tuple(self._kept)
        for client in unclaimed:
            for fd in self._kept.pop(client):
                os.close(fd)
            with contextlib.suppress(StoreError):
                self._store.remove(lease_name(client))
        return len(unclaimed)

    def release(self, client: ClientId) -> None:
        """Close the lease here and in the store. Closing may take long, so a thread does it."""
        lease = self._leases.pop(client, None)
        if lease is None:
            return
        if lease.tracker is not None:
            self._loop.remove_reader(lease.tracker.fileno())
        self._ending.add(client)
        task = self._loop.create_task(self._close(client, lease))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, client: ClientId, lease: Lease) -> None:
        try:
            await asyncio.to_thread(_close_lease, lease)
            if lease.stored:
                self._store.remove(lease_name(client))
        except StoreError as error:
            log.warning("descriptor store", reason=str(error))
        finally:
            self._ending.discard(client)

    def forget(self, process: ProcessInstance) -> None:
        """Drop the pin of a process that is no client any more."""
        pin = self._pins.pop(process, None)
        if pin is None:
            return
        if pin.attaching is not None:
            pin.attaching.cancel()
        if pin.process.alive():
            self._loop.remove_reader(pin.process.fileno())
        else:
            with contextlib.suppress(ValueError):
                self._loop.remove_reader(pin.process.fileno())
        pin.process.close()

    def kill(self, process: ProcessInstance) -> None:
        """SIGKILL by pidfd."""
        pin = self._pins.get(process)
        if pin is not None:
            pin.process.signal(signal.SIGKILL)

    def check_identities(self, pid: int | None = None) -> None:
        """Notice clients that replaced their program: exec ends a client, its pidfd stays silent.

        `pid`: look at that one only.
        """
        for process, pin in tuple(self._pins.items()):
            if pid not in (None, process.pid):
                continue
            now = _identity(process)
            if now is None or pin.identity is None or now == pin.identity:
                continue
            pin.identity = now
            self._post(ev.ClientLeft(process, "exec"))

    async def settled(self) -> None:
        """Until every lease that was given up is closed."""
        pending: set[Awaitable[None]] = set(self._closing)
        if pending:
            await asyncio.gather(*pending)

    def close(self) -> None:
        """Let go of everything that is this process's own. What the store holds lives on."""
        for process in tuple(self._pins):
            self.forget(process)
        for lease in self._leases.values():
            if lease.tracker is not None:
                self._loop.remove_reader(lease.tracker.fileno())
            _close_lease(lease)
        self._leases.clear()


def _close_lease(lease: Lease) -> None:
    if lease.tracker is not None:
        lease.tracker.close()
    lease.space.close()


def _identity(process: ProcessInstance) -> procs.ExecIdentity | None:
    try:
        return procs.exec_identity(process)
    except MpsdError:
        return None
