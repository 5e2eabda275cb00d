"""What is done once a second, because no descriptor tells of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from mpsd import layout
from mpsd.attacher import Attacher
from mpsd.core import events as ev
from mpsd.core.state import State
from mpsd.freememory import FreeMemory
from mpsd.host import Hosts
from mpsd.journal import Journal
from mpsd.layout import Layout
from mpsd.orphans import Orphans
from mpsd.problemlog import ProblemLog
from mpsd.statefile import StateFile
from mpsd.tasks import Tasks
from mpsd.workwatch import WorkWatch

log = structlog.get_logger("mpsd.rounds")

ROUND_S = 1.0
MODE_EVERY, FLUSH_EVERY, LIST_EVERY, TRIM_EVERY = 5, 5, 10, 60
LOG_SPACE_NEEDED = 256 << 10


@dataclass(slots=True)
class Rounds:
    """`exclusive` says whether GPUs admit one server only; it may block. `list_clients` compares a
    domain's clients with those that its server lists. `default_slot` is served on
    `default_path` too, unless that is None. `log_bytes`: size of each log of control daemons and servers.
    """

    attacher: Attacher
    orphans: Orphans
    work: WorkWatch
    memory: FreeMemory
    kept: Sequence[Journal | StateFile]
    hosts: Hosts
    layout: Layout
    state: Callable[[], State]
    post: Callable[[ev.Event], None]
    exclusive: Callable[[Sequence[str]], bool]
    list_clients: Callable[[str], Awaitable[None]]
    default_slot: str
    default_path: Path | None
    log_bytes: int
    all_problems: Callable[[], Sequence[str]]
    _default_path_problem: str = ""
    _log_disk_full: bool = False
    _path_problems: list[str] = field(default_factory=list)
    _told: ProblemLog = field(default_factory=ProblemLog)
    _modes: asyncio.Task[None] | None = field(default=None)
    _reconciling: asyncio.Task[None] | None = field(default=None)

    async def run(self) -> None:
        """For ever. What fails in one round is tried in the next."""
        number = 0
        while True:
            await asyncio.sleep(ROUND_S)
            number += 1
            try:
                await self.look_around(number)
            except Exception as error:
                log.error("round failed", error=repr(error), exc_info=True)

    def close(self) -> None:
        for task in (self._modes, self._reconciling):
            if task is not None:
                task.cancel()
        self.memory.close()

    def problems(self) -> list[str]:
        """What the last round found wrong, for `status`."""
        found = [self._default_path_problem] if self._default_path_problem else []
        found += self._path_problems
        if self._log_disk_full:
            found.append(
                f"{self.layout.log_dir} is full (less than {LOG_SPACE_NEEDED >> 10} KiB left): "
                "clients are noticed once a second, and faults lack evidence"
            )
        return found

    async def look_around(self, number: int) -> None:
        """Round `number`, counted from 1."""
        self.attacher.check_identities()
        self.orphans.look_around()
        self.work.refresh(set(self.attacher.leases))
        self.memory.look_around()
        for file in self.kept:
            if file.problem:
                file.retry()
        self._path_problems = self._lead_paths()
        self._claim_default_path()
        if number % MODE_EVERY == 0 and (self._modes is None or self._modes.done()):
            # Not awaited: NVML can hang for good, and all else must go on.
            self._modes = asyncio.get_running_loop().create_task(self._look_at_modes())
        self._log_disk_full = self.layout.log_space() < LOG_SPACE_NEEDED
        # Without a log nobody tells of newcomers: they are looked for.
        if self._log_disk_full or number % LIST_EVERY == 0:
            self._reconcile_apart()
        self._told.look(self.all_problems())
        if number % TRIM_EVERY == 0:
            self.hosts.trim_logs(self.log_bytes)
        if number % FLUSH_EVERY == 0:
            await asyncio.to_thread(self._flush)

    def _flush(self) -> None:
        """For a loss of power. Disks take their time: never on the loop."""
        for file in self.kept:
            file.sync()

    async def _look_at_modes(self) -> None:
        for slot in tuple(self.state().slots.values()):
            exclusive = await asyncio.to_thread(self.exclusive, slot.gpus)
            if exclusive != slot.exclusive:
                self.post(ev.ModeSeen(slot.id, exclusive))

    def _lead_paths(self) -> list[str]:
        """Stable paths that could not be led elsewhere when they should have been, for want of room."""
        problems = []
        for slot in self.state().slots.values():
            if slot.active is None or self.layout.leads_to(slot.id) == slot.active:
                continue
            try:
                self.layout.switch(slot.id, slot.active)
            except OSError as error:
                path = self.layout.slot_path(slot.id)
                what = (
                    "make room there" if error.errno in layout.NO_ROOM else "mpsd must be able to write there"
                )
                problems.append(f"{path} does not lead to {slot.active}: {error.strerror}; {what}")
        if not problems and (problem := self.layout.set_room_aside()):
            problems.append(problem)
        return problems

    def _claim_default_path(self) -> None:
        path = self.default_path
        if path is None:
            return
        target = self.layout.slot_path(self.default_slot)
        if target.exists() and not (path.is_symlink() and os.readlink(path) == str(target)):
            self._default_path_problem = layout.claim_default_path(path, target)

    def _reconcile_apart(self) -> None:
        """Not awaited: every server that is stopped takes seconds to say nothing."""
        if self._reconciling is None or self._reconciling.done():
            self._reconciling = Tasks(self.post).spawn(self._reconcile())

    async def _reconcile(self) -> None:
        """Clients that no log line told of, servers that changed unseen."""
        for domain in self.hosts.names():
            await self.list_clients(domain)
            self.hosts.ask(domain)
