"""Sweeps: everybody is looked at in one thread, and who hangs keeps out nobody but himself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from mpsd.sweeps import HANG_OF_ONE, Sweep

PATIENCE_S = 0.05
ANSWER_S = 10.0


def fails() -> str:
    raise FileNotFoundError("gone")


def run(play: Callable[[Sweep[int, str]], object]) -> None:
    async def body() -> None:
        sweep: Sweep[int, str] = Sweep("test", PATIENCE_S)
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
        looks = {n: (0, lambda n=n: look(n)) for n in range(50)}
        assert await sweep.run({**looks, 50: (0, fails)}) == {n: str(n) for n in range(50)}
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
        looks = {1: (7, lambda: "a"), 2: (7, hangs), 3: (8, lambda: "c")}
        assert await sweep.run(looks) == {1: "a", 3: "c"}
        assert await sweep.run(looks) == {1: "a", 3: "c"}
        assert len(looked) == 1
        go_on.set()
        while 2 not in (found := await sweep.run(looks)):
            await asyncio.sleep(0)
        assert found == {1: "a", 2: "late", 3: "c"}

    run(play)


def test_a_user_whose_processes_hang_is_left_out_and_others_are_not() -> None:
    go_on = threading.Event()

    def hangs() -> str:
        go_on.wait(ANSWER_S)
        return ""

    async def play(sweep: Sweep[int, str]) -> None:
        looks = {n: (7, hangs) for n in range(HANG_OF_ONE)}
        looks[100], looks[101] = (7, lambda: "his"), (8, lambda: "another's")
        found = await sweep.run(looks)
        assert found == {101: "another's"}
        go_on.set()
        while len(found) < len(looks):
            found = await sweep.run(looks)

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
