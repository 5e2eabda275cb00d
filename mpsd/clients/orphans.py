"""Leases of domains that this mpsd does not know: the state file was lost, but the domains live on.

Rule: such a lease is held as long as its release could harm a client. It is released in either of two cases:
  - The client has ended, and its GPU work was seen to end.
  - Every process of its domain that ran at the start has ended (the control daemon and its servers, see
    pin_domain()): no client is left that shares a fault with it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import BusyError, GpuError, MpsdError
from mpsd.base.model import ClientId, ProcessInstance
from mpsd.clients.endofwork import WorkWatch
from mpsd.clients.lease import Lease, RetainedLease, adopt
from mpsd.core import events as ev
from mpsd.fdstore.queue import LeaseStore
from mpsd.gpu.base import Uvm, WorkInspector
from mpsd.os import processes as procs
from mpsd.os import procfs
from mpsd.os.descriptors import Charge, DescriptorBudget, Purpose

log = structlog.get_logger("mpsd.orphans")

MPS_PREFIX = "nvidia-cuda-mps-"
WHY = "its domain belongs to an earlier mpsd and is not supervised"


@dataclass(slots=True)
class Orphan:
    """One held lease. `process`: its pin while it lives. `since` is monotonic seconds.

    `uid`: None if the process had ended before its uid could be read. `blind`: the end of its work is not
    visible. `charge`: its descriptors in the budget.
    """

    charge: Charge
    lease: Lease
    process: procs.Pinned | None
    since: float
    uid: int | None = None
    blind: bool = False


@dataclass(slots=True)
class UnknownSet:
    """A stored set that does not parse. `domain`: the domain in its name, if there is one."""

    charge: Charge
    fds: Sequence[int]
    domain: str | None

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Orphans:
    """All orphaned leases. Lives on the event loop and decides by the rule above; core does not know them."""

    def __init__(
        self,
        uvm: Uvm,
        inspector: WorkInspector,
        interval_s: float,
        store: LeaseStore,
        budget: DescriptorBudget | None = None,
    ) -> None:
        self._budget = budget or DescriptorBudget.unlimited()
        self._uvm = uvm
        self._work = WorkWatch(inspector, interval_s, self._event_seen)
        self._store = store
        self._unknown_sets: dict[ClientId, Orphan] = {}
        self._unknown: dict[str, UnknownSet] = {}
        self._domains: dict[str, list[procs.Pinned]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._ending: dict[ClientId, int | None] = {}

    def __len__(self) -> int:
        return len(self._unknown_sets) + len(self._unknown)

    def take(
        self, domain: str, processes: Sequence[procs.Pinned], retained: Mapping[ClientId, RetainedLease]
    ) -> None:
        """Hold these leases of a domain and its processes; a set without a lease is logged and dropped."""
        self._watch(domain, processes)
        for client, found in retained.items():
            try:
                lease = adopt(self._uvm, found)
            except GpuError as error:
                log.error("a stored lease is not usable", client=str(client), reason=str(error))
                self._store.drop(found.name)
                continue
            # With the pin in place of a tracker. All of these are open already.
            charge = self._budget.charge_open(Purpose.LEASE, found.descriptors)
            self._work.adopt(client, found.work, charge.split(found.viewed))
            process = _pinned(client.process)
            if process is not None and not self._work.is_present(client.process, self._work.fds(client)):
                # After an exec: the program that held this lease has ended.
                process.close()
                process = None
            self._unknown_sets[client] = Orphan(
                charge, lease, process, time.monotonic(), _owner(client.process)
            )
            log.warning("the lease of an unknown domain is held", client=str(client))
            if process is None:
                self._work.watch(client)

    def hold(
        self, name: str, fds: Sequence[int], domain: str | None, processes: Sequence[procs.Pinned]
    ) -> None:
        """Hold a stored set that does not parse until the processes of its domain have ended.

        Without a domain it is held for good: the store may be shared with another program.
        """
        log.warning("a stored set does not parse; it is held", name=name, domain=domain)
        charge = self._budget.charge_open(Purpose.LEASE, len(fds))
        self._unknown[name] = UnknownSet(charge, fds, domain)
        if domain is not None:
            self._watch(domain, processes)

    def _watch(self, domain: str, processes: Sequence[procs.Pinned]) -> None:
        self._domains.setdefault(domain, []).extend(processes)
        self._budget.charge_open(Purpose.DOMAIN, len(processes))

    def check_all(self) -> None:
        """Check once a second for ended clients, new mappings of living clients, and ended domains."""
        for client, orphan in self._unknown_sets.items():
            if orphan.process is not None and not orphan.process.alive():
                orphan.process.close()
                orphan.process = None
                self._work.watch(client)
        self._work.refresh([c for c, orphan in self._unknown_sets.items() if orphan.process is not None])
        for domain, processes in tuple(self._domains.items()):
            if any(p.alive() for p in processes):
                continue
            for process in self._domains.pop(domain):
                process.close()
                self._budget.release(Purpose.DOMAIN)
            self._release([c for c in self._unknown_sets if c.domain == domain], "its domain has ended")
            for name in [n for n, s in self._unknown.items() if s.domain == domain]:
                log.info("released a stored set: its domain has ended", name=name)
                unknown = self._unknown.pop(name)
                self._start_close(unknown, name, unknown.charge)

    def _event_seen(self, event: ev.Event) -> None:
        if isinstance(event, ev.WorkNotVisible) and event.client in self._unknown_sets:
            self._unknown_sets[event.client].blind = True
        if isinstance(event, ev.WorkEnded):
            self._release([event.client] if event.client in self._unknown_sets else [], event.sign)

    def _release(self, clients: Sequence[ClientId], why: str) -> None:
        for client in clients:
            orphan = self._unknown_sets.pop(client)
            self._work.forget(client)
            if orphan.process is not None:
                orphan.process.close()
            log.info("released the lease of an unknown domain", client=str(client), why=why)
            self._ending[client] = orphan.uid
            task = self._start_close(orphan.lease, orphan.lease.name, orphan.charge)
            task.add_done_callback(partial(self._ended, client))

    def _ended(self, client: ClientId, _: asyncio.Task[None]) -> None:
        del self._ending[client]

    def _start_close(self, held: Lease | UnknownSet, name: str, charge: Charge) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._close(held, name, charge))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _close(self, held: Lease | UnknownSet, name: str, charge: Charge) -> None:
        await asyncio.to_thread(held.close)
        charge.release()
        self._store.drop(name)

    def holders(self) -> list[tuple[ProcessInstance, int | None, bool]]:
        """Return the owners of unclosed leases: process, user if known, whether the work is invisible."""
        held = [(client.process, orphan.uid, orphan.blind) for client, orphan in self._unknown_sets.items()]
        return [*held, *((client.process, uid, False) for client, uid in self._ending.items())]

    def rows(self) -> list[dict[str, Any]]:
        """Return the exited clients of these leases, in the format of `status`."""
        found: dict[ProcessInstance, list[ClientId]] = {}
        for client, orphan in self._unknown_sets.items():
            if orphan.process is None:
                found.setdefault(client.process, []).append(client)
        return [self._row(clients) for clients in found.values()]

    def _row(self, clients: Sequence[ClientId]) -> dict[str, Any]:
        client, orphan = clients[0], self._unknown_sets[clients[0]]
        return {
            "domain": client.domain,
            "domains": list(dict.fromkeys(c.domain for c in clients)),
            "pid": client.process.pid,
            "start_ticks": client.process.start_ticks,
            "space": client.space,
            "uid": None,
            "user": "[unknown]",
            "command": "[unknown: the state file was lost]",
            "state": "held",
            "held_gpu_bytes": None,
            "held_host_bytes": None,
            "since_s": round(time.monotonic() - orphan.since, 3),
            "pending": "; ".join(p for p in (WHY, self._work.all_pending().get(client.process, "")) if p),
        }

    def conditions(self) -> list[Condition]:
        """Return a condition for the sets and the leases that are held without a client."""
        found = [Condition(Code.SETS_HELD, count=len(self._unknown))] if self._unknown else []
        if domains := sorted({c.domain for c in self._unknown_sets}):
            names = ", ".join(domains)
            found.append(Condition(Code.LEASES_HELD, names, count=len(self._unknown_sets)))
        return found

    async def close(self) -> None:
        """Release the resources of this process. The content of the store stays."""
        await self._work.close()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for strange in self._unknown.values():
            strange.close()
        for orphan in self._unknown_sets.values():
            orphan.lease.close()
            if orphan.process is not None:
                orphan.process.close()
        for processes in self._domains.values():
            for process in processes:
                process.close()


def pin_domain(pipe_dir: str) -> list[procs.Pinned]:
    """Pin the living control daemon and servers of a pipe directory, without its clients.

    Every process can have such a name and such an environment. A control daemon counts only if root or mpsd's
    own user runs it. A server counts only as a child of such a control daemon. After the control daemon's end
    it counts if it is still in mpsd's cgroup, which a user cannot enter.
    """
    named = [p for p in procs.with_environment("CUDA_MPS_PIPE_DIRECTORY", pipe_dir) if _is_named_mps(p)]
    controls = {p.pid for p in named if _is_trusted(p)}
    found = [_pinned(p) for p in named if p.pid in controls or _is_server(p, controls)]
    return [p for p in found if p is not None]


def _is_named_mps(process: ProcessInstance) -> bool:
    try:
        # A script (the simulated control binary) runs under its interpreter; its name is in the arguments.
        names = (procfs.exe_path(process.pid), *procfs.command_line(process.pid)[:3])
    except OSError:
        return False
    return any(os.path.basename(name).startswith(MPS_PREFIX) for name in names)


def _is_trusted(process: ProcessInstance) -> bool:
    try:
        users = procs.users(process)
    except MpsdError:
        return False
    return users.all_are(0) or users.all_are(os.geteuid())


def _is_server(process: ProcessInstance, controls: Collection[int]) -> bool:
    try:
        stat = procfs.stat(process.pid)
    except OSError:
        return False
    if stat.start_ticks != process.start_ticks:
        return False
    ours = procfs.unified_cgroup(os.getpid())
    return stat.ppid in controls or (ours not in ("", "/") and procfs.unified_cgroup(process.pid) == ours)


def _owner(process: ProcessInstance) -> int | None:
    try:
        return procs.users(process).effective
    except MpsdError:
        return None


def _pinned(process: ProcessInstance) -> procs.Pinned | None:
    """Pin a process; None once it has ended, or if that is unknown now."""
    try:
        return procs.Pinned.living(process)
    except BusyError:
        return None
