"""Leases of domains that this mpsd does not know: the state file was lost, but what it described lives on.

The rule: such a lease is held as long as letting go of it could harm anybody. It is given up when the work
of its client is seen to have ended after the client has, or when every process of its domain has gone that
was there at the start (the control daemon and the servers, which name the domain's directory in their
environment): then nobody is left who shared a fault with it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from mpsd import procs
from mpsd.core import events as ev
from mpsd.errors import BusyError, GpuError, MpsdError
from mpsd.gpu.base import Uvm, WorkInspector
from mpsd.lease import Kept, Lease, adopt
from mpsd.leasestore import LeaseStore
from mpsd.linux import procfs
from mpsd.model import ClientId, ProcessInstance
from mpsd.workwatch import WorkWatch

log = structlog.get_logger("mpsd.orphans")

MPS_PREFIX = "nvidia-cuda-mps-"
WHY = "its domain is of an earlier mpsd and not supervised"


@dataclass(slots=True)
class Orphan:
    """`process`: its pin while it lives. `since` is monotonic seconds. `uid`: None where it had died before
    it could be asked. `blind`: nobody sees the end of its work."""

    lease: Lease
    process: procs.Pinned | None
    since: float
    uid: int | None = None
    blind: bool = False


@dataclass(slots=True)
class Strange:
    """A stored set that is not understood. `domain`: what its name says, if it says so."""

    fds: Sequence[int]
    domain: str | None

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Orphans:
    """Lives on the event loop; decides by the rule above alone, core knows nothing of it."""

    def __init__(self, uvm: Uvm, inspector: WorkInspector, interval_s: float, store: LeaseStore) -> None:
        self._uvm = uvm
        self._work = WorkWatch(inspector, interval_s, self._heard)
        self._store = store
        self._held: dict[ClientId, Orphan] = {}
        self._strange: dict[str, Strange] = {}
        self._domains: dict[str, list[procs.Pinned]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._ending: dict[ClientId, int | None] = {}

    def __len__(self) -> int:
        return len(self._held) + len(self._strange)

    def take(self, domain: str, processes: Sequence[procs.Pinned], kept: Mapping[ClientId, Kept]) -> None:
        """Hold these leases of a domain whose processes are given; a set that is none is told and dropped."""
        self._domains.setdefault(domain, []).extend(processes)
        for client, found in kept.items():
            try:
                lease = adopt(self._uvm, found)
            except GpuError as error:
                log.error("a stored lease is not usable", client=str(client), reason=str(error))
                self._store.drop(found.name)
                continue
            self._work.adopt_or_tell(client, found.work)
            process = _pinned(client.process)
            if process is not None and not self._work.is_present(client.process, self._work.fds(client)):
                # After an exec: what held this lease has ended.
                process.close()
                process = None
            self._held[client] = Orphan(lease, process, time.monotonic(), _owner(client.process))
            log.warning("lease of an unknown domain is held", client=str(client))
            if process is None:
                self._work.watch(client)

    def hold(
        self, name: str, fds: Sequence[int], domain: str | None, processes: Sequence[procs.Pinned]
    ) -> None:
        """Hold a stored set that is not understood until its domain, whose processes these are, has gone.

        Without a domain it is held for good: the store may be shared with something else.
        """
        log.warning("a stored set is not understood, and held", name=name, domain=domain)
        self._strange[name] = Strange(fds, domain)
        if domain is not None:
            self._domains.setdefault(domain, []).extend(processes)

    def look_around(self) -> None:
        """Once a second: whose client has died, what the living have come to use, whose domain has gone."""
        for client, orphan in self._held.items():
            if orphan.process is not None and not orphan.process.alive():
                orphan.process.close()
                orphan.process = None
                self._work.watch(client)
        self._work.refresh([c for c, orphan in self._held.items() if orphan.process is not None])
        for domain, processes in tuple(self._domains.items()):
            if any(p.alive() for p in processes):
                continue
            for process in self._domains.pop(domain):
                process.close()
            self._release([c for c in self._held if c.domain == domain], "its domain has gone")
            for name in [n for n, s in self._strange.items() if s.domain == domain]:
                log.info("a stored set of a domain that has gone was given up", name=name)
                self._close_apart(self._strange.pop(name), name)

    def _heard(self, event: ev.Event) -> None:
        if isinstance(event, ev.WorkNotVisible) and event.client in self._held:
            self._held[event.client].blind = True
        if isinstance(event, ev.WorkEnded):
            self._release([event.client] if event.client in self._held else [], event.sign)

    def _release(self, clients: Sequence[ClientId], why: str) -> None:
        for client in clients:
            orphan = self._held.pop(client)
            self._work.forget(client)
            if orphan.process is not None:
                orphan.process.close()
            log.info("lease of an unknown domain was given up", client=str(client), why=why)
            self._ending[client] = orphan.uid
            task = self._close_apart(orphan.lease, orphan.lease.name)
            task.add_done_callback(partial(self._ended, client))

    def _ended(self, client: ClientId, _: asyncio.Task[None]) -> None:
        del self._ending[client]

    def _close_apart(self, held: Lease | Strange, name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._close(held, name))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _close(self, held: Lease | Strange, name: str) -> None:
        await asyncio.to_thread(held.close)
        self._store.drop(name)

    def holders(self) -> list[tuple[ProcessInstance, int | None, bool]]:
        """Whose they are, until they are closed: process, user where that is known, whether nobody sees the
        end of its work. The living too: that one has died is seen a second later."""
        held = [(client.process, orphan.uid, orphan.blind) for client, orphan in self._held.items()]
        return [*held, *((client.process, uid, False) for client, uid in self._ending.items())]

    def rows(self) -> list[dict[str, Any]]:
        """The dead among their clients, as `status` shows the dead."""
        return [
            {
                "domain": client.domain,
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
            for client, orphan in self._held.items()
            if orphan.process is None
        ]

    def problems(self) -> list[str]:
        found = []
        if self._strange:
            found.append(f"{len(self._strange)} set(s) in the descriptor store are not understood, and held")
        domains = sorted({c.domain for c in self._held})
        if not domains:
            return found
        return [
            *found,
            f"{len(self._held)} lease(s) of domains {', '.join(domains)} of an earlier mpsd are held "
            "until the work of their clients has ended, or those domains have",
        ]

    async def close(self) -> None:
        """Let go of everything that is this process's own. What the store holds lives on."""
        await self._work.close()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for strange in self._strange.values():
            strange.close()
        for orphan in self._held.values():
            orphan.lease.close()
            if orphan.process is not None:
                orphan.process.close()
        for processes in self._domains.values():
            for process in processes:
                process.close()


def pin_domain(pipe_dir: str) -> list[procs.Pinned]:
    """The living control daemon and servers of a pipe directory. A client may be told of it by its own name,
    too: it is none of them."""
    found = [_pinned(p) for p in procs.with_environment("CUDA_MPS_PIPE_DIRECTORY", pipe_dir) if _is_mps(p)]
    return [p for p in found if p is not None]


def _is_mps(process: ProcessInstance) -> bool:
    try:
        # A script (the simulated stand-in) runs under its interpreter and shows in the arguments.
        names = (procfs.exe_path(process.pid), *procfs.command_line(process.pid)[:3])
    except OSError:
        return False
    return any(os.path.basename(name).startswith(MPS_PREFIX) for name in names)


def _owner(process: ProcessInstance) -> int | None:
    try:
        return procs.users(process).effective
    except MpsdError:
        return None


def _pinned(process: ProcessInstance) -> procs.Pinned | None:
    """None once it has ended, or where that is not to be told now."""
    try:
        return procs.Pinned.living(process)
    except BusyError:
        return None
