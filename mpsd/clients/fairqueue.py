"""A fair queue: a few things per subject in each iteration of the event loop, in order, each thing once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
PER_ITERATION = 32
# Per subject. A domain never has as many waiting processes; a log with invented pids may.
KEPT = 1 << 14


class FairQueue(Generic[T]):
    """The queue. `act` handles each thing; `lost` gets the things beyond `kept` that would have to wait."""

    def __init__(
        self,
        act: Callable[[str, T], None],
        lost: Callable[[str, T], None],
        *,
        per_turn: int = PER_ITERATION,
        queue_limit: int = KEPT,
    ) -> None:
        self._act, self._lost = act, lost
        self._per_turn, self._queue_limit = per_turn, queue_limit
        self._waiting: dict[str, dict[T, None]] = {}
        self._acted = Counter[str]()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle | None = None

    def ask(self, subject: str, thing: T) -> None:
        """Act now or in a later iteration; a thing that waits already is not queued twice."""
        waiting = self._waiting.get(subject, {})
        if not waiting and self._acted[subject] < self._per_turn:
            self._one(subject, thing)
        elif thing not in waiting and len(waiting) >= self._queue_limit:
            self._lost(subject, thing)
        else:
            self._waiting.setdefault(subject, {})[thing] = None
            self._idle.clear()
        if self._next is None:
            self._next = self._loop.call_soon(self._turn)

    def _one(self, subject: str, thing: T) -> None:
        self._acted[subject] += 1
        self._act(subject, thing)

    def _turn(self) -> None:
        self._next = None
        self._acted.clear()
        for subject, waiting in tuple(self._waiting.items()):
            for thing in tuple(islice(waiting, self._per_turn)):
                del waiting[thing]
                self._one(subject, thing)
            if not waiting:
                del self._waiting[subject]
        if self._waiting:
            self._next = self._loop.call_soon(self._turn)
        else:
            self._idle.set()

    async def caught_up(self) -> None:
        """Wait until nothing is queued."""
        await self._idle.wait()

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._waiting.clear()
        self._idle.set()
