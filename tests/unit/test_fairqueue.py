"""Much work on one subject is spread over turns of the loop, in order, and delays no other subject."""

from __future__ import annotations

import asyncio

from mpsd.clients.fairqueue import FairQueue


def test_the_rest_comes_in_later_turns_and_nothing_is_lost_or_done_twice() -> None:
    done: list[tuple[str, int]] = []

    async def run() -> None:
        turns = FairQueue[int](
            lambda s, n: done.append((s, n)), lambda s, n: done.append(("lost", n)), per_turn=3
        )
        for number in range(10):
            turns.ask("a", number)
            turns.ask("a", number)
        turns.ask("b", 0)
        # Two requests before anything waits run twice: that is cheap, and the actor knows.
        assert done == [("a", 0), ("a", 0), ("a", 1), ("b", 0)]
        await asyncio.sleep(0)
        assert len(done) == 7
        turns.ask("b", 1)
        assert done[-1] == ("b", 1)
        await turns.caught_up()

    asyncio.run(run())
    numbers = [n for s, n in done if s == "a"]
    assert numbers == [0, 0, 1, *range(1, 10)]


def test_what_waits_is_bounded_and_the_rest_is_told() -> None:
    done: list[int] = []
    lost: list[int] = []

    async def run() -> None:
        turns = FairQueue[int](
            lambda s, n: done.append(n), lambda s, n: lost.append(n), per_turn=1, queue_limit=2
        )
        for number in (0, 1, 2, 3, 1):
            turns.ask("a", number)
        await turns.caught_up()
        turns.ask("a", 4)
        turns.close()
        await turns.caught_up()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert (done, lost) == ([0, 1, 2], [3])
