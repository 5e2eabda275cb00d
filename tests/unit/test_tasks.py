"""Background tasks: held until they end, counted when they fail, ended together."""

from __future__ import annotations

import asyncio

from mpsd.core import events as ev
from mpsd.os.tasks import Tasks


def test_a_task_that_fails_is_counted_and_one_that_is_cancelled_is_not() -> None:
    async def run() -> None:
        said: list[ev.Event] = []
        tasks = Tasks(said.append)

        async def fails() -> None:
            raise ValueError("no")

        tasks.spawn(fails())
        forever = tasks.spawn(asyncio.Event().wait())  # type: ignore[arg-type]
        while not said:
            await asyncio.sleep(0)
        assert said == [ev.Counted({"internal_errors": 1})]
        assert tasks.running() == {forever}
        await tasks.cancel()
        assert forever.cancelled()
        assert not tasks.running()
        assert len(said) == 1

    asyncio.run(run())


def test_waiting_for_none_ends_at_once_and_for_one_at_the_deadline() -> None:
    async def run() -> None:
        tasks = Tasks(lambda event: None)
        await tasks.ended()
        go_on = asyncio.Event()
        task = tasks.spawn(go_on.wait())  # type: ignore[arg-type]
        await tasks.ended(0.001)
        assert not task.done()
        go_on.set()
        await tasks.ended()
        assert task.done()

    asyncio.run(run())
