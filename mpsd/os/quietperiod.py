"""The quiet period after programs were told to fail over: their answers come first.

The programs stand still until the daemon has read the answers of all of them. Starting a process blocks the
loop for 1 to 20 ms, and writing the state file for up to 8 ms, when all programs of a node are busy (seen on
an H200). Records and events take up to a millisecond each. All of these wait for the end of the period.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

QUIET_S = 0.05
QUIET_LIMIT_S = 0.2
"""Upper limit [s] of a quiet period that further moves extend, so that deferred work is not starved."""


class QuietPeriod:
    """The quiet period of one event loop. `clock`: monotonic seconds, by default the loop's."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._began = self._until = float("-inf")

    def begin(self) -> None:
        now = self._clock()
        if now >= self._until:
            self._began = now
        self._until = min(now + QUIET_S, self._began + QUIET_LIMIT_S)

    def remaining_s(self) -> float:
        return max(self._until - self._clock(), 0.0)

    async def wait(self) -> None:
        """Wait for the end of the quiet period, if there is one."""
        while remaining := self.remaining_s():
            await asyncio.sleep(remaining)

    def afterwards(self, call: Callable[[], object]) -> None:
        """Make a call in the next iteration of the loop, or after a quiet period that has begun by then."""
        self._loop.call_soon(self._when_over, call)

    def _when_over(self, call: Callable[[], object]) -> None:
        remaining = self.remaining_s()
        if remaining:
            self._loop.call_later(remaining, self._when_over, call)
        else:
            call()


class DeferredCalls:
    """Calls that no stopped program waits for: made at once, or in order after the quiet period."""

    def __init__(self, quiet_period: QuietPeriod, failed: Callable[[Exception], None]) -> None:
        """Keep the period and `failed`, which receives the error of a failed call; later calls still run."""
        self._quiet_period, self._failed = quiet_period, failed
        self._waiting = deque[Callable[[], None]]()
        self._closed = False

    def do(self, call: Callable[[], None]) -> None:
        if self._closed or not (self._waiting or self._quiet_period.remaining_s()):
            self._make(call)
            return
        self._waiting.append(call)
        if len(self._waiting) == 1:
            self._quiet_period.afterwards(self.tell)

    def close(self) -> None:
        """Make the deferred calls now, and later ones at once."""
        self._closed = True
        self.tell()

    def tell(self) -> None:
        """Make the deferred calls."""
        while self._waiting:
            self._make(self._waiting.popleft())

    def _make(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._failed(error)
