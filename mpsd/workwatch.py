"""Watching the dead: from the death of a client until its work on the GPU has ended."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from mpsd.core import events as ev
from mpsd.errors import GpuError
from mpsd.gpu.base import WorkInspector, WorkView
from mpsd.model import ProcessInstance
from mpsd.tasks import Tasks

log = structlog.get_logger("mpsd.workwatch")

SLOWEST_S = 0.25
# A client is leased before it has a context; what its driver maps comes in the second after.
YOUNG_S = 2.0
YOUNG_STEP_S = 0.02
LOOKERS = 4
CLOSE_S = 5.0


class WorkWatch:
    """One view for each leased process; looks are spaced out the longer the work lasts."""

    def __init__(self, inspector: WorkInspector, interval_s: float, post: Callable[[ev.Event], None]) -> None:
        self._inspector = inspector
        self._interval_s = interval_s
        self._post = post
        self._views: dict[ProcessInstance, WorkView] = {}
        self._tasks: dict[ProcessInstance, asyncio.Task[None]] = {}
        self._closing = Tasks(post)
        self._pending: dict[ProcessInstance, str] = {}
        self._round: asyncio.Task[None] | None = None
        self._lookers = ThreadPoolExecutor(LOOKERS, "work")

    def look(self, process: ProcessInstance, pidfd: int) -> WorkView:
        """A first look at a living client, from any thread; `follow` it then. Raises GpuError."""
        return self._inspector.open(process, pidfd)

    def follow(self, process: ProcessInstance, view: WorkView) -> Mapping[str, int]:
        """Begin to follow a living client; the descriptors to store with its lease."""
        self._put(process, view)
        self._closing.spawn(self._follow_young(process, view))
        return view.fds

    async def _follow_young(self, process: ProcessInstance, view: WorkView) -> None:
        end = time.monotonic() + YOUNG_S
        while time.monotonic() < end and self._views.get(process) is view and process not in self._tasks:
            await self._refresh(view)
            await asyncio.sleep(YOUNG_STEP_S)

    def adopt_or_tell(self, process: ProcessInstance, fds: Mapping[str, int]) -> None:
        """Take over a view that the descriptor store kept; `fds` are ours from now on."""
        try:
            view = self._inspector.adopt(process, fds)
        except (GpuError, OSError, ValueError) as error:
            log.warning("the end of a client's work will not be seen", client=str(process), reason=str(error))
            for fd in fds.values():
                os.close(fd)
            return
        self._put(process, view)

    def _put(self, process: ProcessInstance, view: WorkView) -> None:
        before = self._views.get(process)
        self._views[process] = view
        if before is not None and process not in self._tasks:
            # After an exec, or for a second domain. One being watched is closed when its watch ends.
            self._closing.spawn(_close(None, before))

    def has(self, process: ProcessInstance) -> bool:
        return process in self._views

    def refresh(self, leased: Collection[ProcessInstance]) -> None:
        """Look at the living anew, unless that is still under way."""
        living = [v for p, v in self._views.items() if p in leased and p not in self._tasks]
        if self._round is None or self._round.done():
            self._round = self._closing.spawn(self._refresh_all(living))

    async def _refresh_all(self, views: Sequence[WorkView]) -> None:
        for view in views:
            await self._refresh(view)

    async def _refresh(self, view: WorkView) -> None:
        """In a thread: a process that changes its mappings all the time makes a look at them wait."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._lookers, view.refresh)
        except OSError as error:
            log.warning("areas of a client are not noted", reason=str(error))

    def all_pending(self) -> Mapping[ProcessInstance, str]:
        """What each dead client still has on the GPU, for `status`."""
        return dict(self._pending)

    def watch(self, process: ProcessInstance) -> None:
        """Look until the work has ended, then say so. Once for each process."""
        if process not in self._tasks:
            self._tasks[process] = asyncio.get_running_loop().create_task(self._watch(process))

    async def _watch(self, process: ProcessInstance) -> None:
        view = self._views.get(process)
        try:
            await self._until_ended(process, view)
        finally:
            # A process that was a client before its exec can be one again, and die again.
            if self._tasks.get(process) is asyncio.current_task():
                del self._tasks[process]
            if view is not None and self._views.get(process, view) is not view:
                await asyncio.to_thread(view.close)

    async def _until_ended(self, process: ProcessInstance, view: WorkView | None) -> None:
        began = time.monotonic()
        while view is not None:
            try:
                left = await asyncio.to_thread(view.pending)
            except (OSError, GpuError) as error:
                log.warning("work of a dead client cannot be seen", pid=process.pid, reason=str(error))
                left = None
            if left is None:
                break
            if not left:
                self._pending.pop(process, None)
                self._post(ev.WorkEnded(process, "its semaphores have been released"))
                return
            self._pending[process] = left
            await asyncio.sleep(min(max(self._interval_s, (time.monotonic() - began) / 20), SLOWEST_S))
        # No sign to go by: the lease stays until the domain has no living client.
        self._pending[process] = "not visible on this machine"
        self._post(ev.WorkNotVisible(process))

    def forget(self, process: ProcessInstance) -> None:
        """Drop the view of a process that holds nothing any more."""
        self._pending.pop(process, None)
        task = self._tasks.pop(process, None)
        view = self._views.pop(process, None)
        if view is None and task is None:
            return
        self._closing.spawn(_close(task, view))

    async def close(self) -> None:
        for process in (*self._tasks, *self._views):
            self.forget(process)
        await self._closing.ended(CLOSE_S)
        self._lookers.shutdown(wait=False, cancel_futures=True)


async def _close(task: asyncio.Task[None] | None, view: WorkView | None) -> None:
    """A look may be under way in a thread: the view is closed after it."""
    if task is not None and task is not asyncio.current_task():
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if view is not None:
        await asyncio.to_thread(view.close)
