"""The moment after programs were told to move, in which what they answer comes first.

They stand still until the daemon has heard of all of them. A process that is started then keeps the loop for
1 to 20 ms, and the state file for up to 8, on a node whose programs are all at work (seen on an H200).
"""

from __future__ import annotations

import asyncio

CALM_S = 0.05


class Calm:
    """For the thread of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = 0.0

    def begin(self) -> None:
        self._until = self._loop.time() + CALM_S

    def left_s(self) -> float:
        return max(self._until - self._loop.time(), 0.0)

    async def over(self) -> None:
        """Wait for its end, where there is one."""
        while left := self.left_s():
            await asyncio.sleep(left)
