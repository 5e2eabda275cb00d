"""Sweeps: one thread probes all clients, and a client that hangs holds up only itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from mpsd.os.sweeps import HANGING_PER_USER, Sweep

PATIENCE_S = 0.05
ANSWER_S = 10.0


def fails() -> str:
    raise FileNotFoundError("gone")


class Hang:
    """A probe that hangs until it is freed, and then returns or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.free, self.looks = threading.Event(), 0
        self._error = error

    def __call__(self) -> str:
        self.looks += 1
        assert self.free.wait(ANSWER_S)
        if self._error is not None:
            raise self._error
        return "late"


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


async def still_waits(task: asyncio.Task[bool]) -> bool:
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


def run(play: Callable[[Sweep[int, str]], object], patience_s: float = PATIENCE_S) -> None:
    async def body() -> None:
        sweep: Sweep[int, str] = Sweep("test", patience_s)
        try:
            async with asyncio.timeout(ANSWER_S):
                await play(sweep)  # type: ignore[misc]
        finally:
            sweep.close()

    asyncio.run(body())


def test_all_are_looked_at_in_one_thread_and_failures_are_left_out() -> None:
    threads: set[str] = set()

    def look(key: int) -> str:
        threads.add(threading.current_thread().name)
        return str(key)

    async def play(sweep: Sweep[int, str]) -> None:
        probes = {n: (0, lambda n=n: look(n)) for n in range(50)}
        assert await sweep.run({**probes, 50: (0, fails)}) == {n: str(n) for n in range(50)}
        assert len(threads) == 1
        assert await sweep.run({}) == {}

    run(play)


def test_one_that_hangs_keeps_out_itself_alone_until_it_comes_back() -> None:
    go_on, looked = threading.Event(), []

    def hangs() -> str:
        looked.append(1)
        go_on.wait(ANSWER_S)
        return "late"

    async def play(sweep: Sweep[int, str]) -> None:
        probes = {1: (7, lambda: "a"), 2: (7, hangs), 3: (8, lambda: "c")}
        assert await sweep.run(probes) == {1: "a", 3: "c"}
        assert await sweep.run(probes) == {1: "a", 3: "c"}
        assert len(looked) == 1
        go_on.set()
        while 2 not in (found := await sweep.run(probes)):
            await asyncio.sleep(0)
        assert found == {1: "a", 2: "late", 3: "c"}

    run(play)


def test_a_user_whose_processes_hang_is_left_out_and_others_are_not() -> None:
    go_on = threading.Event()

    def hangs() -> str:
        go_on.wait(ANSWER_S)
        return ""

    async def play(sweep: Sweep[int, str]) -> None:
        probes = {n: (7, hangs) for n in range(HANGING_PER_USER)}
        probes[100], probes[101] = (7, lambda: "his"), (8, lambda: "another's")
        found = await sweep.run(probes)
        assert found == {101: "another's"}
        go_on.set()
        while len(found) < len(probes):
            found = await sweep.run(probes)

    run(play)


def test_a_run_while_another_is_under_way_finds_nothing() -> None:
    go_on = threading.Event()

    async def play(sweep: Sweep[int, str]) -> None:
        first = asyncio.create_task(sweep.run({1: (0, lambda: str(go_on.wait(ANSWER_S)))}))
        await asyncio.sleep(0)
        assert await sweep.run({2: (0, lambda: "b")}) == {}
        go_on.set()
        await first

    run(play)


@pytest.mark.parametrize("error", [None, FileNotFoundError("gone"), ValueError("a bug")])
def test_one_that_hung_is_waited_for_until_it_is_back_and_then_looked_at_anew(
    error: Exception | None,
) -> None:
    hang = Hang(error)

    async def play(sweep: Sweep[int, str]) -> None:
        assert await sweep.run({1: (0, hang), 2: (0, lambda: "b")}) == {2: "b"}
        assert not await sweep.wait_for_return(2)
        waiting = [asyncio.create_task(sweep.wait_for_return(1)) for _ in range(2)]
        assert await still_waits(waiting[0])
        assert await sweep.run({1: (0, hang)}) == {}
        hang.free.set()
        assert await asyncio.gather(*waiting) == [True, True]
        assert await sweep.run({1: (0, lambda: "a")}) == {1: "a"}
        assert hang.looks == 1

    run(play)


def test_one_left_out_is_not_begun_and_the_one_under_way_is_waited_for() -> None:
    hang, behind = Hang(), Hang()
    behind.free.set()

    async def play(sweep: Sweep[int, str]) -> None:
        probes = {1: (0, hang), 2: (0, behind), 3: (0, lambda: "c")}
        sweeping = asyncio.create_task(sweep.run(probes))
        await until(lambda: hang.looks)
        assert sweep.leave_out(1)
        assert not sweep.leave_out(2)
        waiting = asyncio.create_task(sweep.wait_for_return(1))
        assert await still_waits(waiting)
        hang.free.set()
        assert await waiting
        assert await sweeping == {1: "late", 3: "c"}
        assert not behind.looks
        assert await sweep.run(probes) == {1: "late", 2: "late", 3: "c"}

    run(play, ANSWER_S)


def test_a_run_that_is_cancelled_begins_nothing_more_and_knows_what_is_under_way() -> None:
    hang, behind = Hang(), Hang()

    async def play(sweep: Sweep[int, str]) -> None:
        sweeping = asyncio.create_task(sweep.run({1: (0, hang), 2: (0, behind)}))
        await until(lambda: hang.looks)
        sweeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sweeping
        assert await sweep.run({1: (0, hang), 3: (0, lambda: "c")}) == {3: "c"}
        waiting = asyncio.create_task(sweep.wait_for_return(1))
        assert await still_waits(waiting)
        hang.free.set()
        assert await waiting
        assert (hang.looks, behind.looks) == (1, 0)

    run(play, ANSWER_S)


def test_one_that_raises_what_it_should_not_ends_the_run_and_is_under_way_no_more() -> None:
    hang = Hang(ValueError("a bug"))

    async def play(sweep: Sweep[int, str]) -> None:
        sweeping = asyncio.create_task(sweep.run({1: (0, hang)}))
        await until(lambda: hang.looks)
        waiting = asyncio.create_task(sweep.wait_for_return(1))
        assert await still_waits(waiting)
        hang.free.set()
        assert await waiting
        with pytest.raises(ValueError, match="a bug"):
            await sweeping
        assert not await sweep.wait_for_return(1)

    run(play, ANSWER_S)


def test_hanging_processes_of_many_users_leave_the_others_theirs() -> None:
    """S14: processes of 32 users hang, and those of another user are probed all the same."""
    go_on = threading.Event()

    def hangs() -> str:
        go_on.wait(ANSWER_S)
        return ""

    async def play(sweep: Sweep[int, str]) -> None:
        hostile = {n: (1000 + n // 4, hangs) for n in range(32 * 4)}
        probes = {**hostile, 500: (7, lambda: "a"), 501: (0, lambda: "root's")}
        # A slow machine may take a short probe for a hanging one, until it has returned.
        while await sweep.run(probes) != {500: "a", 501: "root's"}:
            await asyncio.sleep(0.001)
        go_on.set()

    run(play, 0.02)


def test_users_with_hanging_processes_come_last_and_users_in_time_first() -> None:
    go_on, order = threading.Event(), list[str]()

    def hangs() -> str:
        go_on.wait(ANSWER_S)
        return ""

    def says(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    async def play(sweep: Sweep[int, str | None]) -> None:
        await sweep.run({1: (70, hangs), 2: (7, says("before"))})
        assert order == ["before"]
        await sweep.run({3: (70, says("suspect")), 4: (80, says("new")), 2: (7, says("known"))})
        assert order[1:] == ["known", "new", "suspect"]
        go_on.set()

    run(play, 0.2)


def test_at_the_limit_of_hanging_probes_known_users_and_root_are_probed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mpsd.os.sweeps.MAX_HANGING", 2)
    go_on = threading.Event()

    def hangs() -> str:
        go_on.wait(ANSWER_S)
        return ""

    async def play(sweep: Sweep[int, str]) -> None:
        known = {1: (7, lambda: "a")}
        hostile = {n: (n, hangs) for n in range(10, 12)}
        assert await sweep.run({**known, **hostile}) == {1: "a"}
        new = {2: (8, lambda: "new"), 3: (0, lambda: "root's")}
        assert await sweep.run({**known, **new, **hostile}) == {1: "a", 3: "root's"}
        go_on.set()

    run(play, 0.2)
