"""Questions to control daemons: one at a time for each domain, and never faster than one in STEP_S.

Log lines cause questions, and every local user can write the logs of some domains. Requests that come while
a question waits or runs join the next one, so a flood of lines costs 20 questions a second at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

from mpsd.os.quietperiod import QuietPeriod

STEP_S = 0.05


@dataclass(slots=True)
class _Waiting:
    """The next question about a domain. `patient`: it waits for the end of a quiet period."""

    clients: bool = False
    patient: bool = True


@dataclass(slots=True)
class _Domain:
    next: _Waiting | None = None
    running: bool = False
    last: float = -math.inf
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class PacedQuestions:
    """`ask` puts one question about a domain, and about its clients if told so. `spawn` starts a task."""

    def __init__(
        self,
        ask: Callable[[str, bool], Awaitable[None]],
        spawn: Callable[[Coroutine[None, None, None]], object],
        quiet_period: QuietPeriod,
    ) -> None:
        self._ask, self._spawn, self._quiet_period = ask, spawn, quiet_period
        self._domains: dict[str, _Domain] = {}
        self._loop = asyncio.get_running_loop()

    def request(self, domain: str, *, clients: bool = False, patient: bool = False) -> None:
        """Ask about this domain soon: at once if the last question is old enough."""
        known = self._domains.setdefault(domain, _Domain())
        waiting = known.next = known.next or _Waiting()
        waiting.clients |= clients
        waiting.patient &= patient
        known.changed.set()
        if not known.running:
            known.running = True
            self._spawn(self._run(domain, known))

    def forget(self, domain: str) -> None:
        """Forget a domain that has ended."""
        self._domains.pop(domain, None)

    async def _run(self, domain: str, known: _Domain) -> None:
        try:
            while known.next is not None:
                await self._due(known)
                question, known.next = known.next, None
                known.last = self._loop.time()
                await self._ask(domain, question.clients)
        finally:
            known.running = False

    async def _due(self, known: _Domain) -> None:
        """Wait until the next question may be put. A request that is not patient shortens the wait."""
        while True:
            assert known.next is not None
            wait = known.last + STEP_S - self._loop.time()
            if known.next.patient:
                wait = max(wait, self._quiet_period.remaining_s())
            if wait <= 0:
                return
            known.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(known.changed.wait(), wait)
