"""Whether a GPU is nearly full, looked at while somebody is there who cannot ask for memory.

Only then: programs that can ask are told to give when one of them has to, and keep what they have until then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from mpsd.core import events as ev
from mpsd.core.giving import watched
from mpsd.core.state import State
from mpsd.errors import MpsdError
from mpsd.gpu.base import DeviceManager
from mpsd.model import Gpu
from mpsd.tasks import Tasks

log = structlog.get_logger("mpsd.freememory")

STEP_S = 0.1
"""What one standby leaves is seen after that, or the next one is asked."""
SHARE = 40
"""A standby is made again where a twentieth of the GPU's memory stays free: twice what makes it go."""


class FreeMemory:
    """`limit`: bytes that are to stay free on each GPU; 0: however many are left."""

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
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._problems: dict[str, str] = {}

    def look_around(self) -> None:
        """Not awaited: NVML can hang for good, of one GPU."""
        for gpu in watched(self._state(), time.monotonic()):
            if gpu in self._limits and (gpu not in self._looking or self._looking[gpu].done()):
                self._looking[gpu] = self._tasks.spawn(self._look(gpu))

    async def _look(self, gpu: str) -> None:
        """Until nothing is to go any more, or there is nothing."""
        problem = ""
        try:
            while gpu in watched(self._state(), time.monotonic()) and await self._is_full(gpu):
                self._post(ev.GpuFull(gpu))
                await asyncio.sleep(STEP_S)
        except MpsdError as error:
            problem = str(error)
        if problem and problem != self._problems.get(gpu):
            log.warning("it is not seen whether a GPU is full", gpu=gpu, reason=problem)
        self._problems[gpu] = problem

    async def _is_full(self, gpu: str) -> bool:
        """Raises GpuError."""
        total, limit = self._limits[gpu]
        return limit > 0 and total - await asyncio.to_thread(self._devices.memory_used, gpu) < limit

    def close(self) -> None:
        for task in self._looking.values():
            task.cancel()
