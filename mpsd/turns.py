"""So much of one subject in one turn of the event loop; the rest in the next, in order, each thing once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
PER_TURN = 32
# Of one subject. As many processes of one domain as this do not wait at a time; numbers made up do.
KEPT = 1 << 14


class Turns(Generic[T]):
    """`act` is done with each; `lost` is told of what comes on top of `kept` that wait."""

    def __init__(
        self,
        act: Callable[[str, T], None],
        lost: Callable[[str, T], None],
        *,
        per_turn: int = PER_TURN,
        kept: int = KEPT,
    ) -> None:
        self._act, self._lost = act, lost
        self._per_turn, self._kept = per_turn, kept
        self._waiting: dict[str, dict[T, None]] = {}
        self._acted = Counter[str]()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle | None = None

    def ask(self, subject: str, thing: T) -> None:
        """Act now, or in a later turn; what waits already is not asked for twice."""
        waiting = self._waiting.get(subject, {})
        if not waiting and self._acted[subject] < self._per_turn:
            self._one(subject, thing)
        elif thing not in waiting and len(waiting) >= self._kept:
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
        """Until nothing waits."""
        await self._idle.wait()

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._waiting.clear()
        self._idle.set()
