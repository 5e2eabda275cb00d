"""Questions to control daemons: paced, joined, and at once where a decision waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise

from mpsd.mps.asking import STEP_S, PacedQuestions
from mpsd.os.quietperiod import QUIET_S, QuietPeriod

DEADLINE_S = 20.0


class Asked:
    """Records the questions and their times. `gate`: what an answer waits for."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.quiet_period = QuietPeriod()
        self.tasks: list[asyncio.Task[None]] = []
        self.seen: list[tuple[str, bool, float]] = []
        self.gate: asyncio.Event | None = None
        self.fails = False
        self.questions = PacedQuestions(self.ask, self.spawn, self.quiet_period)

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        self.tasks.append(self.loop.create_task(work))

    async def ask(self, domain: str, clients: bool) -> None:
        self.seen.append((domain, clients, self.loop.time()))
        if self.fails:
            raise OSError
        if self.gate is not None:
            await self.gate.wait()

    async def done(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self.tasks, return_exceptions=True)


def run(test: Callable[[Asked], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        await test(Asked())

    asyncio.run(main())


def test_requests_during_a_question_join_the_next_one() -> None:
    async def test(asked: Asked) -> None:
        asked.gate = asyncio.Event()
        asked.questions.request("d1")
        await asyncio.sleep(0)
        for n in range(1000):
            asked.questions.request("d1", clients=n == 500)
        asked.questions.request("d2")
        await asyncio.sleep(0)
        assert [(d, c) for d, c, _ in asked.seen] == [("d1", False), ("d2", False)], "one for each domain"
        asked.gate.set()
        await asked.done()
        assert [(d, c) for d, c, _ in asked.seen][2:] == [("d1", True)]
        assert asked.seen[2][2] - asked.seen[0][2] >= 0.9 * STEP_S

    run(test)


def test_a_flood_is_paced() -> None:
    async def test(asked: Asked) -> None:
        began = asked.loop.time()
        while asked.loop.time() - began < 4 * STEP_S:
            asked.questions.request("d1")
            await asyncio.sleep(0)
        await asked.done()
        times = [at for _, _, at in asked.seen]
        assert all(b - a >= 0.9 * STEP_S for a, b in pairwise(times))
        assert len(times) >= 2

    run(test)


def test_a_patient_question_waits_for_the_quiet_period_and_an_urgent_request_does_not() -> None:
    async def test(asked: Asked) -> None:
        asked.quiet_period.begin()
        began = asked.loop.time()
        asked.questions.request("d1", patient=True)
        asked.questions.request("d2", patient=True)
        await asyncio.sleep(0)
        assert asked.seen == []
        asked.questions.request("d2")
        await asked.done()
        when = {domain: at - began for domain, _, at in asked.seen}
        assert when["d1"] >= QUIET_S
        assert [d for d, _, _ in asked.seen] == ["d2", "d1"]

    run(test)


def test_a_question_that_fails_does_not_stop_later_ones() -> None:
    async def test(asked: Asked) -> None:
        asked.fails = True
        asked.questions.request("d1")
        await asked.done()
        asked.questions.forget("d1")
        asked.fails = False
        asked.questions.request("d1")
        await asked.done()
        assert len(asked.seen) == 2

    run(test)
