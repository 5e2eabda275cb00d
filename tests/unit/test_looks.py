"""Looks that hang: given up in time, at nobody else's expense, and what they bring too late is let go of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from mpsd.errors import DeadlineError, NotFoundError
from mpsd.looks import Looks

PATIENCE_S = 10


class Hang:
    def __init__(self) -> None:
        self.free, self.begun = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.free.wait(PATIENCE_S)
        return "late"


def play(act: Callable[[Looks], Awaitable[None]], *, most: int = 8, of_one: int = 2) -> None:
    async def run() -> None:
        looks = Looks("test", most=most, of_one=of_one)
        async with asyncio.timeout(PATIENCE_S):
            await act(looks)
        looks.close()

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_what_a_look_returns_or_raises_comes_back() -> None:
    async def act(looks: Looks) -> None:
        assert await looks.run("a", lambda: 7) == 7

        def gone() -> None:
            raise NotFoundError("gone")

        with pytest.raises(NotFoundError):
            await looks.run("a", gone, 5)

    play(act)


def test_one_users_hung_looks_leave_the_others_theirs() -> None:
    late: list[str] = []
    unbegun: list[str] = []

    async def act(looks: Looks) -> None:
        hang = Hang()
        for _ in range(2):
            with pytest.raises(DeadlineError, match="it has not ended"):
                await looks.run("a", hang, 0.01, late=late.append)
        with pytest.raises(DeadlineError, match="2 others of its user hang"):
            await looks.run("a", hang, 0.01, late=late.append, unbegun=lambda: unbegun.append("x"))
        assert unbegun == ["x"]
        assert await looks.run("b", lambda: 1) == 1
        waits = asyncio.ensure_future(looks.run("a", lambda: 2))
        hang.free.set()
        assert await waits == 2
        await until(lambda: late == ["late"] * 2)

    play(act)


def test_users_take_turns_where_all_threads_are_taken() -> None:
    order: list[str] = []

    async def act(looks: Looks) -> None:
        hang = Hang()
        first = asyncio.ensure_future(looks.run("a", hang))
        await until(hang.begun.is_set)
        rest = [looks.run(key, lambda key=key: order.append(key)) for key in ("b", "b", "c")]  # type: ignore[misc]
        waiting = asyncio.gather(*rest)
        await asyncio.sleep(0)
        hang.free.set()
        await asyncio.gather(first, waiting)
        assert sorted(order) == ["b", "b", "c"]

    play(act, most=1)


def test_a_result_that_comes_as_its_waiter_is_cancelled_is_let_go_of() -> None:
    late: list[str] = []

    async def act(looks: Looks) -> None:
        hang = Hang()
        task = asyncio.ensure_future(looks.run("a", hang, late=late.append))
        await until(hang.begun.is_set)
        task.cancel()
        hang.free.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: late == ["late"])

    play(act)


def test_after_the_end_of_the_loop_a_late_result_is_let_go_of_all_the_same() -> None:
    let_go = threading.Event()
    hang = Hang()

    async def act(looks: Looks) -> None:
        with pytest.raises(DeadlineError):
            await looks.run("a", hang, 0.01, late=lambda _: let_go.set())

    play(act)
    hang.free.set()
    assert let_go.wait(PATIENCE_S)


def test_what_waits_when_it_is_closed_never_begins() -> None:
    unbegun: list[int] = []

    async def act(looks: Looks) -> None:
        hang = Hang()
        first = asyncio.ensure_future(looks.run("a", hang))
        second = asyncio.ensure_future(looks.run("a", hang, unbegun=lambda: unbegun.append(2)))
        await until(hang.begun.is_set)
        looks.close()
        third = asyncio.ensure_future(looks.run("a", hang, unbegun=lambda: unbegun.append(3)))
        results = await asyncio.gather(second, third, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)
        assert unbegun == [2, 3]
        hang.free.set()
        assert await first == "late"

    play(act, of_one=1)


def test_what_is_let_go_of_slowly_holds_up_nobody_else() -> None:
    """Its place is not another's before that is done, and whoever fails at it ends no thread."""
    hang, slow = Hang(), Hang()

    def late(result: str) -> None:
        slow()
        raise ValueError(result)

    async def act(looks: Looks) -> None:
        with pytest.raises(DeadlineError):
            await looks.run("a", hang, 0.01, late=late)
        hang.free.set()
        await until(slow.begun.is_set)
        assert await looks.run("b", lambda: 1, PATIENCE_S) == 1
        slow.free.set()
        assert await looks.run("a", lambda: 2, PATIENCE_S) == 2

    play(act)


def test_a_result_that_comes_while_the_loop_no_longer_turns_is_let_go_of() -> None:
    """It is queued for a loop that is closed without another turn: nobody would ever take it from there."""
    let_go, hang = threading.Event(), Hang()
    loop = asyncio.new_event_loop()

    async def give_up() -> Looks:
        looks = Looks("test")
        with pytest.raises(DeadlineError):
            await looks.run("a", hang, 0.01, late=lambda _: let_go.set())
        return looks

    looks = loop.run_until_complete(give_up())
    hang.free.set()
    assert let_go.wait(PATIENCE_S)
    loop.close()
    looks.close()
