"""Background tasks of one part of the daemon. A failure is never silent: it is logged and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from mpsd.core import events as ev

log = structlog.get_logger("mpsd.tasks")


class Tasks:
    """Running tasks, kept referenced until they end or are cancelled."""

    def __init__(self, post: Callable[[ev.Event], None]) -> None:
        self._post = post
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task on the running loop. An exception is a bug of mpsd: `internal_errors` counts it."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", task=task.get_name(), error=repr(error), exc_info=error)
            self._post(ev.Counted({"internal_errors": 1}))

    def running(self) -> set[asyncio.Task[None]]:
        return set(self._running)

    async def ended(self, timeout_s: float | None = None) -> None:
        """Wait until the tasks that run now have ended, at most `timeout_s` seconds."""
        if running := self.running():
            await asyncio.wait(running, timeout=timeout_s)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        for task in self.running():
            task.cancel()
        await self.ended()
