"""Checks once a second of states that no descriptor reports."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from mpsd.base import audit
from mpsd.base.conditions import Code, Condition
from mpsd.clients.attach import Attacher
from mpsd.clients.endofwork import WorkWatch
from mpsd.clients.orphans import Orphans
from mpsd.config import layout
from mpsd.config.layout import Layout
from mpsd.core import events as ev
from mpsd.core.lists import is_unsure
from mpsd.core.state import State
from mpsd.daemon.freememory import FreeMemory
from mpsd.daemon.pathchecks import PathChecks
from mpsd.mps.domains import RunningDomains
from mpsd.os.tasks import Tasks
from mpsd.records.conditionlog import ConditionLog
from mpsd.records.journal import Journal
from mpsd.records.statefile import StateFile

log = structlog.get_logger("mpsd.periodic")

ROUND_S = 1.0
MODE_EVERY, FLUSH_EVERY, LIST_EVERY, TRIM_EVERY = 5, 5, 10, 60
STAGGER_S = 0.01
"""Time [s] between the first commands to two control daemons: each starts a process."""
LOG_SPACE_NEEDED = 256 << 10


@dataclass(slots=True)
class PeriodicChecks:
    """The periodic checks.

    `exclusive` returns whether GPUs admit one server only; it may block. `list_clients` compares a domain's
    clients with the list of its server. `default_slot` is served on `default_path` too, unless that is None.
    `log_bytes`: maximum size of each log of control daemons and servers. `check_sockets` makes the daemon's
    sockets again where they were removed.
    """

    attacher: Attacher
    orphans: Orphans
    work: WorkWatch
    memory: FreeMemory
    files: Sequence[Journal | StateFile]
    domains: RunningDomains
    layout: Layout
    state: Callable[[], State]
    post: Callable[[ev.Event], None]
    exclusive: Callable[[Sequence[str]], bool]
    list_clients: Callable[[str], Awaitable[None]]
    default_slot: str
    default_path: Path | None
    log_bytes: int
    all_conditions: Callable[[], Sequence[Condition]]
    paths: PathChecks
    reported: ConditionLog
    check_sockets: Callable[[], None] = lambda: None
    _default_path_problem: str = ""
    _log_disk_full: bool = False
    _path_conditions: list[Condition] = field(default_factory=list)
    _modes: asyncio.Task[None] | None = field(default=None)
    _reaching: asyncio.Task[None] | None = field(default=None)
    # At most one for each domain.
    _reconciling: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        """Check forever. A check that fails is tried again in the next round."""
        number = 0
        while True:
            await asyncio.sleep(ROUND_S)
            number += 1
            try:
                await self.check_all(number)
            except Exception as error:
                log.error("round failed", error=repr(error), exc_info=True)

    def close(self) -> None:
        for task in (self._modes, self._reaching, *self._reconciling.values()):
            if task is not None:
                task.cancel()
        self.memory.close()

    def conditions(self) -> list[Condition]:
        """Return the conditions that the last round found."""
        found = [*self._path_conditions, *self.paths.conditions(), *self.memory.conditions()]
        if why := self._default_path_problem:
            found.append(Condition(Code.DEFAULT_PATH, str(self.default_path), why))
        if self._log_disk_full:
            where, needed = str(self.layout.log_dir), LOG_SPACE_NEEDED >> 10
            found.append(Condition(Code.LOG_DISK_FULL, where, count=needed))
        return found

    async def check_all(self, number: int) -> None:
        """Run round `number`, counted from 1."""
        self.attacher.check_identities()
        audit.refusals.flush()
        self.attacher.lease_waiting()
        self.orphans.check_all()
        self.work.refresh(set(self.attacher.leases))
        self.memory.check_all()
        for file in self.files:
            if file.problem:
                file.retry()
        self.check_sockets()
        self._path_conditions = self._check_paths()
        if self._reaching is None or self._reaching.done():
            # Not awaited: the first check of a user asks the user database.
            self._reaching = Tasks(self.post).spawn(self.paths.check_all())
        self._claim_default_path()
        if number % MODE_EVERY == 0 and (self._modes is None or self._modes.done()):
            # Not awaited: NVML can hang forever, and the other checks must continue.
            self._modes = asyncio.get_running_loop().create_task(self._check_modes())
        self._log_disk_full = self.layout.log_space() < LOG_SPACE_NEEDED
        # A process of another user is a client only if the server lists it: programs in a user namespace and
        # setuid programs are.
        now = asyncio.get_running_loop().time()
        foreign = {d.id for d in self.state().domains.values() if is_unsure(d, now)}
        unsure = sorted({*self.domains.check_logs(disk_full=self._log_disk_full), *foreign})
        # Where no line announces new clients, search for them each second.
        self._reconcile_all(self.domains.names() if number % LIST_EVERY == 0 else unsure)
        self.reported.look(self.all_conditions())
        # A flood can fill a disk within seconds.
        if unsure or number % TRIM_EVERY == 0:
            self.domains.trim_logs(self.log_bytes)
        if number % FLUSH_EVERY == 0:
            await asyncio.to_thread(self._flush)

    def _flush(self) -> None:
        """Flush files against a loss of power. Disks are slow: never call it on the loop."""
        for file in self.files:
            file.sync()

    async def _check_modes(self) -> None:
        for slot in tuple(self.state().slots.values()):
            exclusive = await asyncio.to_thread(self.exclusive, slot.gpus)
            if exclusive != slot.exclusive:
                self.post(ev.ModeSeen(slot.id, exclusive))

    def _check_paths(self) -> list[Condition]:
        """Retry to switch stable paths that could not be switched, for lack of disk space."""
        found = []
        for slot in self.state().slots.values():
            if slot.active is None or self.layout.domain_of_slot(slot.id) == slot.active:
                continue
            try:
                self.layout.switch(slot.id, slot.active)
            except OSError as error:
                why = f"domain {slot.active}: {error.strerror}"
                found.append(Condition(Code.PATH_NOT_SWITCHED, slot.id, why))
        if not found and (problem := self.layout.create_reserve()):
            found.append(Condition(Code.NO_RESERVE, str(self.layout.run_dir), problem))
        return found

    def _claim_default_path(self) -> None:
        path = self.default_path
        if path is None:
            return
        target = self.layout.slot_path(self.default_slot)
        if target.exists() and not (path.is_symlink() and os.readlink(path) == str(target)):
            self._default_path_problem = layout.claim_default_path(path, target)

    def _reconcile_all(self, domains: Sequence[str]) -> None:
        """Start a reconciliation of each domain without one. A stopped server takes seconds to time out, and
        must delay no other domain."""
        self._reconciling = {name: task for name, task in self._reconciling.items() if not task.done()}
        idle = [name for name in domains if name not in self._reconciling]
        for place, name in enumerate(idle):
            self._reconciling[name] = Tasks(self.post).spawn(self._reconcile(name, place * STAGGER_S))

    async def _reconcile(self, domain: str, delay_s: float) -> None:
        """Notice clients that no log line announced, and a server that changed unseen."""
        if delay_s:
            await asyncio.sleep(delay_s)
        await self.list_clients(domain)
        self.domains.ask(domain)
