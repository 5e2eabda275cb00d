"""Storing leases in the descriptor store: usually at once, with retries while the store refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from mpsd.base.errors import StoreError
from mpsd.base.model import ClientId
from mpsd.clients.endofwork import WorkWatch
from mpsd.clients.lease import GUARD_ROLE, Lease, file_of, lease_name
from mpsd.core import events as ev
from mpsd.fdstore.queue import LeaseStore
from mpsd.os.descriptors import DescriptorBudget, Purpose

log = structlog.get_logger("mpsd.leases")

PATIENCE_S = 0.05
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class _UnstoredLease:
    """A lease that could not be put into the store. `files`: the identity of the file of each descriptor."""

    client: ClientId
    lease: Lease
    fds: Mapping[str, int]
    files: Mapping[str, tuple[int, int] | None]
    uid: int


class LeaseStorage:
    """Stores leases. `leases` are the attacher's: a lease that was released is not stored any more."""

    def __init__(
        self,
        store: LeaseStore,
        leases: Mapping[ClientId, Lease],
        work: WorkWatch,
        post: Callable[[ev.Event], None],
        budget: DescriptorBudget,
    ) -> None:
        self._budget = budget
        self._store, self._leases, self._work, self._post = store, leases, work, post
        self._loop = asyncio.get_running_loop()

    async def put(self, clients: Sequence[ClientId], uid: int) -> tuple[int, ...]:
        """Put new leases into the store; return the numbers of those that it did not take in time."""
        waiting: dict[ClientId, asyncio.Future[None]] = {}
        for client in clients:
            lease = self._leases[client]
            own = {**lease.space.fds, GUARD_ROLE: lease.notes.fd, **self._work.fds(client)}
            lease.name = lease_name(client, own)
            if lease.stored is None:
                # A lease of an earlier daemon, which is stored anew.
                lease.stored = self._budget.charge_open(Purpose.LEASE, len(own))
            try:
                waiting[client] = self._store.put(lease.name, tuple(own.values()), uid, lease.stored)
            except StoreError as error:
                log.warning("a lease is held by this process only", client=str(client), reason=str(error))
                unstored = _UnstoredLease(client, lease, own, {r: file_of(fd) for r, fd in own.items()}, uid)
                self._loop.call_later(RETRY_S, self._again, unstored)
        if waiting:
            await asyncio.wait(waiting.values(), timeout=PATIENCE_S)
        late = {c: f for c, f in waiting.items() if not f.done()}
        for client, future in late.items():
            future.add_done_callback(partial(self._stored, client))
        return tuple(c.space for c in clients if c in late or c not in waiting)

    def _again(self, unstored: _UnstoredLease) -> None:
        """Try again: there was no free descriptor for the duplicates; there may be one now."""
        client, lease = unstored.client, unstored.lease
        if self._leases.get(client) is not lease:
            if lease.stored is not None:
                lease.stored.release()
            return
        # The descriptors of the lease are open. The view of its work may have been closed since.
        own = {r: fd for r, fd in unstored.fds.items() if file_of(fd) == unstored.files[r] is not None}
        lease.name = lease_name(client, own)
        try:
            future = self._store.put(lease.name, tuple(own.values()), unstored.uid, lease.stored)
        except StoreError:
            self._loop.call_later(RETRY_S, self._again, unstored)
        else:
            future.add_done_callback(partial(self._stored, client))

    async def renew(self, clients: Sequence[ClientId], uid: int) -> None:
        """Store a set again that an earlier mpsd stored without guard notes; then drop the old set."""
        before = {c: self._leases[c].name for c in clients}
        late = await self.put(clients, uid)
        for client, name in before.items():
            # A set that could not be replaced stays. The next mpsd finds both and takes the better one.
            if client.space not in late:
                self._store.drop(name)

    def _stored(self, client: ClientId, done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            self._post(ev.LeaseStored(client))
