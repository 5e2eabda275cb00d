"""What waits after a word to move, and what does not: by a clock of the test's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpsd import host, pipedir
from mpsd.calm import CALM_S, MOST_S, Aside, Calm
from mpsd.core import events as ev
from mpsd.layout import Layout
from mpsd.settings import ControlSettings

DEADLINE_S = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def turns_of_the_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_words_in_a_row_do_not_put_off_for_ever_what_waits() -> None:
    async def run() -> None:
        clock = Clock()
        calm = Calm(clock)
        assert calm.left_s() == 0
        ended = 0
        for _ in range(round(MOST_S / CALM_S) * 5):
            calm.begin()
            assert 0 < calm.left_s() <= CALM_S
            clock.now += CALM_S * 0.6
            ended += calm.left_s() == 0
        assert ended >= 2

    asyncio.run(run())


def test_what_comes_afterwards_is_before_tasks_that_begin_then_and_waits_for_the_end() -> None:
    async def run() -> None:
        clock, done = Clock(), list[str]()
        calm, over = Calm(clock), asyncio.Event()

        async def begin() -> None:
            done.append("began")

        calm.afterwards(lambda: done.append("saved"))
        task = asyncio.create_task(begin())
        await task
        assert done == ["saved", "began"]
        # It begins in the same turn of the loop, after that was asked for.
        calm.afterwards(over.set)
        calm.begin()
        await turns_of_the_loop()
        assert not over.is_set()
        clock.now += CALM_S
        await asyncio.wait_for(over.wait(), DEADLINE_S)

    asyncio.run(run())


def hosts(done: list[str], posted: list[ev.Event], calm: Calm) -> host.Hosts:
    callbacks = host.Callbacks(
        posted.append,
        lambda *_: None,
        lambda *_: None,
        lambda: None,
        lambda: done.append("saved"),
        lambda _: True,
    )
    layout: Any = SimpleNamespace(
        pipe_dir=lambda name: f"/{name}",
        domain_log_dir=lambda name: f"/log/{name}",
        forget_domain=lambda name: None,
    )
    settings: Any = SimpleNamespace(commands=lambda uid: ())
    return host.Hosts(
        "none",
        {},
        cast("Layout", layout),
        cast("ControlSettings", settings),
        callbacks,
        calm,
        start_deadline_s=1.0,
    )


def test_a_domain_is_started_afterwards_and_not_before_the_state_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, posted = list[str](), list[ev.Event]()

    def prepare(*_: object) -> None:
        done.append("started")
        raise OSError(28, "no space left")

    async def run() -> None:
        clock = Clock()
        calm = Calm(clock)
        made = hosts(done, posted, calm)
        calm.begin()
        made.start("d1", ("GPU-1",), None)
        await turns_of_the_loop()
        assert done == [] and posted == []
        clock.now += CALM_S
        while not posted:
            await asyncio.sleep(0)
        assert done == ["saved", "started"]
        # Without a word to move nothing waits.
        made.start("d2", ("GPU-1",), None)
        await turns_of_the_loop()
        assert done == ["saved", "started"] * 2

    monkeypatch.setattr(pipedir, "prepare", prepare)
    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert [type(event) for event in posted] == [ev.DomainStartFailed] * 2


def test_what_is_told_aside_waits_in_its_order_and_what_fails_holds_up_nothing() -> None:
    async def run() -> None:
        clock, told, failed = Clock(), list[str](), list[Exception]()
        calm, over = Calm(clock), asyncio.Event()
        aside = Aside(calm, failed.append)

        def breaks() -> None:
            raise ValueError("what JSON cannot say")

        aside.do(lambda: told.append("at once"))
        assert told == ["at once"]
        calm.begin()
        for call in (lambda: told.append("first"), breaks, lambda: told.append("second"), over.set):
            aside.do(call)
        await turns_of_the_loop()
        assert told == ["at once"] and failed == []
        clock.now += CALM_S
        # The calm is over, but what waits comes before what is told now.
        aside.do(lambda: told.append("third"))
        assert told == ["at once"]
        await asyncio.wait_for(over.wait(), DEADLINE_S)
        assert told == ["at once", "first", "second", "third"]
        assert [str(error) for error in failed] == ["what JSON cannot say"]

    asyncio.run(run())


def test_at_the_end_what_waits_is_told_at_once() -> None:
    async def run() -> None:
        told = list[str]()
        calm = Calm(Clock())
        aside = Aside(calm, lambda error: None)
        calm.begin()
        aside.do(lambda: told.append("first"))
        aside.close()
        aside.do(lambda: told.append("second"))
        assert told == ["first", "second"]

    asyncio.run(run())
