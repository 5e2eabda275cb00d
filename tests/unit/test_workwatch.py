"""Watching the work of the dead: each life of a process is watched to its end, views are closed once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from mpsd.core import events as ev
from mpsd.model import ProcessInstance
from mpsd.workwatch import WorkWatch

PROCESS = ProcessInstance(10, 1)


class View:
    fds: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.closed = 0
        self.left = ""

    def refresh(self) -> None:
        return

    def pending(self) -> str | None:
        return self.left

    def close(self) -> None:
        self.closed += 1


class Inspector:
    def __init__(self) -> None:
        self.views: list[View] = []

    def open(self, process: ProcessInstance, pidfd: int) -> View:
        self.views.append(View())
        return self.views[-1]

    def adopt(self, process: ProcessInstance, fds: Mapping[str, int]) -> View:
        return self.open(process, -1)


async def _until(told: list[ev.Event], count: int) -> None:
    async with asyncio.timeout(5):
        while len(told) < count:
            await asyncio.sleep(0.002)


def test_a_process_that_is_a_client_again_after_an_exec_is_watched_again() -> None:
    async def run() -> None:
        told: list[ev.Event] = []
        inspector = Inspector()
        watch = WorkWatch(inspector, 0.001, told.append)
        for life in (1, 2):
            watch.follow(PROCESS, watch.look(PROCESS, -1))
            watch.watch(PROCESS)
            await _until(told, life)
            await asyncio.sleep(0.01)
        assert all(isinstance(event, ev.WorkEnded) for event in told)
        watch.forget(PROCESS)
        await watch.close()
        assert [view.closed for view in inspector.views] == [1, 1]

    asyncio.run(run())


def test_a_view_that_is_replaced_while_it_is_watched_is_closed_after_the_watch() -> None:
    async def run() -> None:
        told: list[ev.Event] = []
        inspector = Inspector()
        watch = WorkWatch(inspector, 0.001, told.append)
        watch.follow(PROCESS, watch.look(PROCESS, -1))
        inspector.views[0].left = "a kernel"
        watch.watch(PROCESS)
        await asyncio.sleep(0.01)
        watch.follow(PROCESS, watch.look(PROCESS, -1))
        assert inspector.views[0].closed == 0
        inspector.views[0].left = ""
        await _until(told, 1)
        await asyncio.sleep(0.01)
        assert [view.closed for view in inspector.views] == [1, 0]
        await watch.close()
        assert [view.closed for view in inspector.views] == [1, 1]

    asyncio.run(run())


def test_views_that_two_domains_kept_of_one_process_are_closed_once_each() -> None:
    async def run() -> None:
        inspector = Inspector()
        watch = WorkWatch(inspector, 0.001, lambda event: None)
        for _ in range(2):
            watch.adopt_or_tell(PROCESS, {})
        await watch.close()
        assert [view.closed for view in inspector.views] == [1, 1]

    asyncio.run(run())
