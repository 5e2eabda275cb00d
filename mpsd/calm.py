"""The moment after programs were told to move, in which what they answer comes first.

They stand still until the daemon has heard of all of them. A process that is started then keeps the loop for
1 to 20 ms, and the state file for up to 8, on a node whose programs are all at work (seen on an H200).
Records and events take up to a millisecond each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

CALM_S = 0.05
MOST_S = 0.2
"""However often somebody is told to move: what waits is not put off for ever."""


class Calm:
    """For the thread of one event loop. `clock`: monotonic seconds, the loop's own by default."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._began = self._until = float("-inf")

    def begin(self) -> None:
        now = self._clock()
        if now >= self._until:
            self._began = now
        self._until = min(now + CALM_S, self._began + MOST_S)

    def left_s(self) -> float:
        return max(self._until - self._clock(), 0.0)

    async def over(self) -> None:
        """Wait for its end, where there is one."""
        while left := self.left_s():
            await asyncio.sleep(left)

    def afterwards(self, call: Callable[[], object]) -> None:
        """In the next turn of the loop, and when it is over, if it has begun by then."""
        self._loop.call_soon(self._when_over, call)

    def _when_over(self, call: Callable[[], object]) -> None:
        left = self.left_s()
        if left:
            self._loop.call_later(left, self._when_over, call)
        else:
            call()


class Aside:
    """What is told to nobody who stands still: at once, or all of it, in its order, when the calm is over."""

    def __init__(self, calm: Calm, failed: Callable[[Exception], None]) -> None:
        """`failed` is told what a call has raised; the calls behind it are made all the same."""
        self._calm, self._failed = calm, failed
        self._waiting = deque[Callable[[], None]]()
        self._closed = False

    def do(self, call: Callable[[], None]) -> None:
        if self._closed or not (self._waiting or self._calm.left_s()):
            self._make(call)
            return
        self._waiting.append(call)
        if len(self._waiting) == 1:
            self._calm.afterwards(self.tell)

    def close(self) -> None:
        """Make the calls that wait now, and later ones at once."""
        self._closed = True
        self.tell()

    def tell(self) -> None:
        """Make the calls that wait."""
        while self._waiting:
            self._make(self._waiting.popleft())

    def _make(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._failed(error)
