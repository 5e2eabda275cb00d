"""Watching the work of the dead: each life of a process is watched to its own end, views are closed once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from mpsd import workwatch
from mpsd.core import events as ev
from mpsd.model import ClientId, ProcessInstance
from mpsd.workwatch import WorkWatch

PROCESS = ProcessInstance(10, 1)
FIRST, SECOND = (ClientId("d1", PROCESS, space) for space in (0, 1))
A_KERNEL = "a kernel"


class View:
    """`left`: what is pending. `go_on`: cleared, a look at the living hangs."""

    fds: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.closed = self.refreshed = 0
        self.left: str | None = ""
        self.located = True
        self.looks = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def refresh(self) -> None:
        self.refreshed += 1
        assert self.go_on.wait(10)

    def pending(self) -> str | None:
        self.looks += 1
        assert not self.closed
        return self.left

    def close(self) -> None:
        self.closed += 1


class Desk:
    """A watch, its views in the order in which they were opened, and everything that it said."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self.told: list[ev.Event] = []
        self.watch = WorkWatch(self, 0.001, self.told.append)

    def open(self, process: ProcessInstance, pidfd: int) -> View:
        self.views.append(View())
        return self.views[-1]

    def adopt(self, process: ProcessInstance, fds: Mapping[str, int]) -> View:
        return self.open(process, -1)

    def is_present(self, process: ProcessInstance, fds: Mapping[str, int]) -> bool:
        return True

    def follow(self, *clients: ClientId) -> View:
        self.watch.follow(clients, self.watch.look(PROCESS, -1))
        return self.views[-1]

    def ended(self) -> list[ClientId]:
        assert all(isinstance(event, ev.WorkEnded) for event in self.told)
        return [event.client for event in self.told if isinstance(event, ev.WorkEnded)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


def at_a_desk(play: Callable[[Desk], Coroutine[Any, Any, None]]) -> Desk:
    """All views are closed once when it is over."""

    async def run() -> Desk:
        desk = Desk()
        try:
            await play(desk)
        finally:
            for view in desk.views:
                view.go_on.set()
            await desk.watch.close()
        return desk

    desk = asyncio.run(run())
    assert [view.closed for view in desk.views] == [1] * len(desk.views)
    return desk


def test_each_life_of_a_process_is_watched_to_its_own_end() -> None:
    async def play(desk: Desk) -> None:
        first = desk.follow(FIRST)
        first.left = A_KERNEL
        desk.watch.watch(FIRST)
        await until(lambda: first.looks)
        second = desk.follow(SECOND)
        second.left = A_KERNEL
        desk.watch.watch(SECOND)
        await until(lambda: second.looks)
        assert desk.watch.all_pending() == {PROCESS: A_KERNEL}
        first.left = ""
        await until(lambda: desk.told)
        looks = second.looks
        await until(lambda: second.looks > looks + 1)
        assert desk.ended() == [FIRST]
        assert desk.watch.all_pending() == {PROCESS: A_KERNEL}
        desk.watch.forget(FIRST)
        await until(lambda: first.closed)
        assert not second.closed
        second.left = ""
        await until(lambda: len(desk.told) == 2)
        assert desk.ended() == [FIRST, SECOND]

    at_a_desk(play)


def test_the_next_life_may_end_before_the_first() -> None:
    async def play(desk: Desk) -> None:
        desk.follow(FIRST).left = A_KERNEL
        desk.follow(SECOND)
        for client in (FIRST, SECOND):
            desk.watch.watch(client)
        await until(lambda: desk.told)
        assert desk.ended() == [SECOND]

    at_a_desk(play)


def test_two_address_spaces_of_one_life_share_its_view_and_end_together() -> None:
    async def play(desk: Desk) -> None:
        view = desk.follow(FIRST, SECOND)
        for client in (FIRST, SECOND):
            desk.watch.watch(client)
        await until(lambda: len(desk.told) == 2)
        assert desk.ended() == [FIRST, SECOND] and len(desk.views) == 1
        desk.watch.forget(FIRST)
        assert not view.closed
        desk.watch.forget(SECOND)
        await until(lambda: view.closed)

    at_a_desk(play)


def test_two_domains_of_one_process_are_told_of_one_by_one() -> None:
    async def play(desk: Desk) -> None:
        other = ClientId("d2", PROCESS)
        for client in (FIRST, other):
            desk.watch.adopt_or_tell(client, {})
        desk.watch.watch(other)
        await until(lambda: desk.told)
        assert desk.ended() == [other]
        desk.watch.watch(FIRST)
        await until(lambda: len(desk.told) == 2)
        assert desk.ended() == [other, FIRST]

    at_a_desk(play)


def test_what_cannot_be_seen_is_said_of_that_life() -> None:
    async def play(desk: Desk) -> None:
        desk.follow(FIRST).left = None
        for client in (FIRST, SECOND):
            desk.watch.watch(client)
        await until(lambda: len(desk.told) == 2)
        assert set(desk.told) == {ev.WorkNotVisible(FIRST), ev.WorkNotVisible(SECOND)}

    at_a_desk(play)


def test_a_view_that_is_given_up_while_it_is_watched_is_closed() -> None:
    async def play(desk: Desk) -> None:
        view = desk.follow(FIRST)
        view.left = A_KERNEL
        desk.watch.watch(FIRST)
        await until(lambda: view.looks)
        # The same number again, for the next life, once the first one's lease was given up.
        desk.follow(FIRST)
        await until(lambda: view.closed)
        assert not desk.told

    at_a_desk(play)


def test_a_look_that_hangs_holds_up_no_other_and_is_not_begun_twice() -> None:
    async def play(desk: Desk) -> None:
        hung, other = desk.follow(FIRST), desk.follow(SECOND)
        hung.go_on.clear()
        await until(lambda: hung.refreshed and other.refreshed)
        seen = other.refreshed
        for _ in range(3):
            desk.watch.refresh([FIRST, SECOND])
            await until(lambda seen=seen: other.refreshed > seen)  # type: ignore[misc]
            seen = other.refreshed
        assert hung.refreshed == 1
        desk.watch.forget(FIRST)
        desk.watch.refresh([FIRST, SECOND])
        assert not hung.closed, "a look is under way"

    at_a_desk(play)


def test_one_without_a_context_is_looked_at_until_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workwatch, "YOUNG_S", 0.0)
    monkeypatch.setattr(workwatch, "EMPTY_STEP_S", 0.001)

    async def run() -> None:
        desk = Desk()
        grown = desk.follow(FIRST)
        empty = desk.open(PROCESS, -1)
        empty.located = False
        desk.watch.follow([SECOND], empty)
        await until(lambda: empty.refreshed >= 3)
        assert grown.refreshed == 0
        empty.located = True
        await until(lambda: not desk.watch._tasks.running())
        await desk.watch.close()

    asyncio.run(run())
