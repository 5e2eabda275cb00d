"""Watch for nearly full GPUs, while a client is running that cannot ask for memory.

Programs that can ask are served when an allocation of one would fail, and keep their standby contexts until
then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import MpsdError
from mpsd.base.model import Gpu
from mpsd.core import events as ev
from mpsd.core.failover.memory import watched_gpus
from mpsd.core.state import State
from mpsd.gpu.base import DeviceManager
from mpsd.os.tasks import Tasks

STEP_S = 0.1
"""Time [s] after which the memory of a released standby context is seen; then the next one is asked for."""
SHARE = 40
"""Divisor of a GPU's memory that bounds the limit. A standby context is made again where a twentieth of
the memory stays free: twice the bound."""


class FreeMemory:
    """Watches free memory. `limit`: bytes to keep free on each GPU; 0: releases nothing."""

    def __init__(
        self,
        devices: DeviceManager,
        gpus: Sequence[Gpu],
        limit: int,
        state: Callable[[], State],
        post: Callable[[ev.Event], None],
    ) -> None:
        self._devices = devices
        self._limits = {gpu.uuid: (gpu.memory_bytes, min(limit, gpu.memory_bytes // SHARE)) for gpu in gpus}
        self._state, self._post = state, post
        self._tasks = Tasks(post)
        self._checking: dict[str, asyncio.Task[None]] = {}
        self._problems: dict[str, str] = {}

    def check_all(self) -> None:
        """Start a check of each watched GPU. Not awaited: NVML can hang forever for one GPU."""
        for gpu in watched_gpus(self._state(), time.monotonic()):
            if gpu in self._limits and (gpu not in self._checking or self._checking[gpu].done()):
                self._checking[gpu] = self._tasks.spawn(self._check(gpu))

    async def _check(self, gpu: str) -> None:
        """Report the GPU as full until it is not, or until there is nothing more to release."""
        problem = ""
        try:
            while gpu in watched_gpus(self._state(), time.monotonic()) and await self._is_full(gpu):
                self._post(ev.GpuFull(gpu))
                await asyncio.sleep(STEP_S)
        except MpsdError as error:
            problem = str(error)
        self._problems[gpu] = problem

    def conditions(self) -> list[Condition]:
        """Return a condition for each GPU with memory that could not be read at the last check."""
        return [Condition(Code.MEMORY_NOT_READ, gpu, why) for gpu, why in self._problems.items() if why]

    async def _is_full(self, gpu: str) -> bool:
        """Return whether less than the limit is free. Raises GpuError."""
        total, limit = self._limits[gpu]
        return limit > 0 and total - await asyncio.to_thread(self._devices.memory_used, gpu) < limit

    def close(self) -> None:
        for task in self._checking.values():
            task.cancel()
