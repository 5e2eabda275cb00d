"""The quiet period after a command to move: which work waits for its end, by a clock of the test."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpsd.config.layout import Layout
from mpsd.config.schema import Limits
from mpsd.core import events as ev
from mpsd.limits.book import LimitBook
from mpsd.mps import domains, pipedir
from mpsd.os.quietperiod import QUIET_LIMIT_S, QUIET_S, DeferredCalls, QuietPeriod

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
        quiet_period = QuietPeriod(clock)
        assert quiet_period.remaining_s() == 0
        ended = 0
        for _ in range(round(QUIET_LIMIT_S / QUIET_S) * 5):
            quiet_period.begin()
            assert 0 < quiet_period.remaining_s() <= QUIET_S
            clock.now += QUIET_S * 0.6
            ended += quiet_period.remaining_s() == 0
        assert ended >= 2

    asyncio.run(run())


def test_what_comes_afterwards_is_before_tasks_that_begin_then_and_waits_for_the_end() -> None:
    async def run() -> None:
        clock, done = Clock(), list[str]()
        quiet_period, over = QuietPeriod(clock), asyncio.Event()

        async def begin() -> None:
            done.append("began")

        quiet_period.afterwards(lambda: done.append("saved"))
        task = asyncio.create_task(begin())
        await task
        assert done == ["saved", "began"]
        # The quiet period begins in the same turn of the loop, after the call was registered.
        quiet_period.afterwards(over.set)
        quiet_period.begin()
        await turns_of_the_loop()
        assert not over.is_set()
        clock.now += QUIET_S
        await asyncio.wait_for(over.wait(), DEADLINE_S)

    asyncio.run(run())


def hosts(done: list[str], posted: list[ev.Event], quiet_period: QuietPeriod) -> domains.RunningDomains:
    callbacks = domains.Callbacks(
        posted.append,
        lambda *_: None,
        lambda *_: None,
        lambda: None,
        lambda: done.append("saved"),
        lambda _: True,
        lambda _: asyncio.sleep(0),
        lambda _: True,
    )
    layout: Any = SimpleNamespace(
        pipe_dir=lambda name: f"/{name}",
        domain_log_dir=lambda name: f"/log/{name}",
        forget_domain=lambda name: None,
    )
    return domains.RunningDomains(
        "none",
        {},
        cast("Layout", layout),
        LimitBook(Limits(), ()),
        callbacks,
        quiet_period,
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
        quiet_period = QuietPeriod(clock)
        made = hosts(done, posted, quiet_period)
        quiet_period.begin()
        made.start("d1", ("GPU-1",), None)
        await turns_of_the_loop()
        assert done == [] and posted == []
        clock.now += QUIET_S
        while not posted:
            await asyncio.sleep(0)
        assert done == ["saved", "started"]
        # Without a command to move nothing waits.
        made.start("d2", ("GPU-1",), None)
        await turns_of_the_loop()
        assert done == ["saved", "started"] * 2

    monkeypatch.setattr(pipedir, "prepare", prepare)
    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert [type(event) for event in posted] == [ev.DomainStartFailed] * 2


def test_what_is_told_aside_waits_in_its_order_and_what_fails_holds_up_nothing() -> None:
    async def run() -> None:
        clock, told, failed = Clock(), list[str](), list[Exception]()
        quiet_period, over = QuietPeriod(clock), asyncio.Event()
        aside = DeferredCalls(quiet_period, failed.append)

        def breaks() -> None:
            raise ValueError("what JSON cannot say")

        aside.do(lambda: told.append("at once"))
        assert told == ["at once"]
        quiet_period.begin()
        for call in (lambda: told.append("first"), breaks, lambda: told.append("second"), over.set):
            aside.do(call)
        await turns_of_the_loop()
        assert told == ["at once"] and failed == []
        clock.now += QUIET_S
        # The quiet period is over, but the waiting calls run before a new one.
        aside.do(lambda: told.append("third"))
        assert told == ["at once"]
        await asyncio.wait_for(over.wait(), DEADLINE_S)
        assert told == ["at once", "first", "second", "third"]
        assert [str(error) for error in failed] == ["what JSON cannot say"]

    asyncio.run(run())


def test_at_the_end_what_waits_is_told_at_once() -> None:
    async def run() -> None:
        told = list[str]()
        quiet_period = QuietPeriod(Clock())
        aside = DeferredCalls(quiet_period, lambda error: None)
        quiet_period.begin()
        aside.do(lambda: told.append("first"))
        aside.close()
        aside.do(lambda: told.append("second"))
        assert told == ["first", "second"]

    asyncio.run(run())
