"""Delayed actions, on a clock that the caller moves."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Timers:
    """`now` is the current time in seconds (CLOCK_MONOTONIC in the GPU process)."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), action))

    @property
    def next_due(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Move the clock to `now` and run the due actions in order."""
        while self._heap and self._heap[0][0] <= now:
            when, _, action = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            action()
        self.now = max(self.now, now)
