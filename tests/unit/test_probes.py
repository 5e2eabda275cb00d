"""Probes that hang: abandoned in time, at no other user's expense; late results are released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from mpsd.base.errors import DeadlineError, NotFoundError
from mpsd.os import probes as probes_module
from mpsd.os.probes import FIRST_PROBES, MAX_HANGING, MAX_PROBES, PROBES_PER_USER, ProbePool

PATIENCE_S = 10


class Hang:
    def __init__(self) -> None:
        self.free, self.begun = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.free.wait(PATIENCE_S)
        return "late"


def play(
    act: Callable[[ProbePool], Awaitable[None]],
    *,
    most: int = 8,
    of_one: int = 2,
    most_hanging: int = MAX_HANGING,
) -> None:
    async def run() -> None:
        probes = ProbePool("test", most=most, per_key=of_one, most_hanging=most_hanging)
        async with asyncio.timeout(PATIENCE_S):
            await act(probes)
        probes.close()

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_what_a_look_returns_or_raises_comes_back() -> None:
    async def act(probes: ProbePool) -> None:
        assert await probes.run("a", lambda: 7) == 7

        def gone() -> None:
            raise NotFoundError("gone")

        with pytest.raises(NotFoundError):
            await probes.run("a", gone, 5)

    play(act)


def test_one_users_hung_looks_leave_the_others_theirs() -> None:
    late: list[str] = []
    unbegun: list[str] = []

    async def act(probes: ProbePool) -> None:
        hang = Hang()
        for _ in range(2):
            with pytest.raises(DeadlineError, match="it has not ended"):
                await probes.run("a", hang, 0.01, release_late=late.append)
        with pytest.raises(DeadlineError, match="2 probes for the same user hang"):
            await probes.run("a", hang, 0.01, release_late=late.append, not_begun=lambda: unbegun.append("x"))
        assert unbegun == ["x"]
        assert await probes.run("b", lambda: 1) == 1
        waits = asyncio.ensure_future(probes.run("a", lambda: 2))
        hang.free.set()
        assert await waits == 2
        await until(lambda: late == ["late"] * 2)

    play(act)


def test_users_take_turns_where_all_threads_are_taken() -> None:
    order: list[str] = []

    async def act(probes: ProbePool) -> None:
        hang = Hang()
        first = asyncio.ensure_future(probes.run("a", hang))
        await until(hang.begun.is_set)
        rest = [probes.run(key, lambda key=key: order.append(key)) for key in ("b", "b", "c")]  # type: ignore[misc]
        waiting = asyncio.gather(*rest)
        await asyncio.sleep(0)
        hang.free.set()
        await asyncio.gather(first, waiting)
        assert sorted(order) == ["b", "b", "c"]

    play(act, most=1)


def test_a_result_that_comes_as_its_waiter_is_cancelled_is_let_go_of() -> None:
    late: list[str] = []

    async def act(probes: ProbePool) -> None:
        hang = Hang()
        task = asyncio.ensure_future(probes.run("a", hang, release_late=late.append))
        await until(hang.begun.is_set)
        task.cancel()
        hang.free.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: late == ["late"])

    play(act)


@pytest.mark.parametrize("ended", [False, True])
def test_the_end_of_a_cancelled_probe_is_reported_once(ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its waiter is cancelled before the end, or in the moment in which the loop takes the result."""
    ends: list[str] = []

    async def act(probes: ProbePool) -> None:
        hang = Hang()
        task = asyncio.ensure_future(probes.run("a", hang, ended_late=lambda: ends.append("ended")))
        await until(hang.begun.is_set)
        take = probes._ended

        def take_and_cancel(*given: Any) -> None:
            take(*given)
            task.cancel()

        monkeypatch.setattr(probes, "_ended", take_and_cancel)
        if not ended:
            task.cancel()
        hang.free.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: ends)
        await asyncio.sleep(0)
        assert ends == ["ended"]

    play(act)


def test_after_the_end_of_the_loop_a_late_result_is_let_go_of_all_the_same() -> None:
    let_go = threading.Event()
    hang = Hang()

    async def act(probes: ProbePool) -> None:
        with pytest.raises(DeadlineError):
            await probes.run("a", hang, 0.01, release_late=lambda _: let_go.set())

    play(act)
    hang.free.set()
    assert let_go.wait(PATIENCE_S)


def test_what_waits_when_it_is_closed_never_begins() -> None:
    unbegun: list[int] = []

    async def act(probes: ProbePool) -> None:
        hang = Hang()
        first = asyncio.ensure_future(probes.run("a", hang))
        second = asyncio.ensure_future(probes.run("a", hang, not_begun=lambda: unbegun.append(2)))
        await until(hang.begun.is_set)
        probes.close()
        third = asyncio.ensure_future(probes.run("a", hang, not_begun=lambda: unbegun.append(3)))
        results = await asyncio.gather(second, third, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)
        assert unbegun == [2, 3]
        hang.free.set()
        assert await first == "late"

    play(act, of_one=1)


def test_what_is_let_go_of_slowly_holds_up_nobody_else() -> None:
    """The pool slot stays taken until the release is done, and a failing release ends no thread."""
    hang, slow = Hang(), Hang()

    def late(result: str) -> None:
        slow()
        raise ValueError(result)

    async def act(probes: ProbePool) -> None:
        with pytest.raises(DeadlineError):
            await probes.run("a", hang, 0.01, release_late=late)
        hang.free.set()
        await until(slow.begun.is_set)
        assert await probes.run("b", lambda: 1, PATIENCE_S) == 1
        slow.free.set()
        assert await probes.run("a", lambda: 2, PATIENCE_S) == 2

    play(act)


def test_a_result_that_comes_while_the_loop_no_longer_turns_is_let_go_of() -> None:
    """The result was queued for a loop that closes without another turn, where it would never be taken."""
    let_go, hang = threading.Event(), Hang()
    loop = asyncio.new_event_loop()

    async def give_up() -> ProbePool:
        probes = ProbePool("test")
        with pytest.raises(DeadlineError):
            await probes.run("a", hang, 0.01, release_late=lambda _: let_go.set())
        return probes

    probes = loop.run_until_complete(give_up())
    hang.free.set()
    assert let_go.wait(PATIENCE_S)
    loop.close()
    probes.close()


# Many users with probes that hang


async def hang_for(probes: ProbePool, uids: Sequence[int], hang: Hang, each: int) -> list[str]:
    """Begin hanging probes of these users. Return the reasons once all of them were abandoned."""
    asked = [probes.run(uid, hang, 0.05) for uid in uids for _ in range(each)]
    return [str(error) for error in await asyncio.gather(*asked, return_exceptions=True)]


def test_hung_probes_of_many_users_leave_the_others_theirs() -> None:
    """S14: 32 users with hanging address spaces do not starve the look-ups of another user."""

    async def act(probes: ProbePool) -> None:
        hang = Hang()
        reasons = await hang_for(probes, range(1, 33), hang, 8)
        begun = sum("it has not ended" in reason for reason in reasons)
        assert begun == 32 * FIRST_PROBES, "a user without a probe that ended in time has few"
        for uid in (0, 100, 101):
            assert await probes.run(uid, lambda: "found", PATIENCE_S) == "found"
        hang.free.set()

    play(act, most=MAX_PROBES, of_one=PROBES_PER_USER)


def test_a_probe_without_a_deadline_takes_no_place_of_others_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes_module, "OVERDUE_S", 0.01)

    async def act(probes: ProbePool) -> None:
        hang = Hang()
        waiting = [asyncio.ensure_future(probes.run(uid, hang)) for uid in range(1, 5)]
        assert await probes.run(100, lambda: 1, PATIENCE_S) == 1
        hang.free.set()
        assert await asyncio.gather(*waiting) == ["late"] * 4

    play(act, most=2)


def test_known_users_and_root_have_a_reserve_beyond_the_hanging_probes_of_all() -> None:
    async def act(probes: ProbePool) -> None:
        hang = Hang()
        assert await probes.run(100, lambda: 1) == 1
        await hang_for(probes, range(1, 4), hang, FIRST_PROBES)
        with pytest.raises(DeadlineError, match="6 probes for all users hang"):
            await probes.run(101, lambda: 1, 0.05)
        assert await probes.run(100, lambda: 1, PATIENCE_S) == 1
        assert await probes.run(0, lambda: 1, PATIENCE_S) == 1
        hang.free.set()
        # With the hanging probes the obstacle goes.
        assert await probes.run(101, lambda: 1, PATIENCE_S) == 1

    play(act, most_hanging=6)


def test_probes_that_end_in_time_earn_a_user_more_at_a_time() -> None:
    async def act(probes: ProbePool) -> None:
        for _ in range(PROBES_PER_USER):
            await probes.run(5, lambda: 1)
        hang = Hang()
        reasons = await hang_for(probes, [5], hang, PROBES_PER_USER + 2)
        assert sum("it has not ended" in reason for reason in reasons) == PROBES_PER_USER
        assert sum(f"{PROBES_PER_USER} probes for the same user hang" in r for r in reasons) == 2
        hang.free.set()

    play(act, most=MAX_PROBES, of_one=PROBES_PER_USER)
