"""What NVML and /proc say of the GPUs and who is on them, for `status`: asked in threads, with deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from mpsd import procs
from mpsd.errors import DeadlineError, MpsdError
from mpsd.gpu.base import DeviceManager
from mpsd.looks import Looks
from mpsd.model import Gpu, ProcessFacts
from mpsd.statusview import GpuView, look_at_gpus

PATIENCE_S = 0.03
FIRST_PATIENCE_S = 5.0
FACTS_DEADLINE_S = 0.25


class GpuViews:
    """`known`: the processes that need no description, because they are ours."""

    def __init__(
        self, devices: DeviceManager, gpus: Sequence[Gpu], known: Callable[[], Collection[int]]
    ) -> None:
        self._devices = devices
        self._gpus = gpus
        self._known = known
        self._views: Sequence[GpuView] = ()
        self._looking: asyncio.Task[list[GpuView]] | None = None
        # One at a time of each process: one that makes them hang takes one thread.
        self._looks = Looks("gpu-processes", of_one=1)

    async def now(self) -> Sequence[GpuView]:
        """The last answer while NVML is held up, as it is during a fault."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        looking = self._looking
        done, _ = await asyncio.wait({looking}, timeout=PATIENCE_S if self._views else FIRST_PATIENCE_S)
        if done:
            if self._looking is looking:
                self._looking = None
            self._views = looking.result()
        return self._views or [GpuView(gpu, problem="NVML has not answered yet") for gpu in self._gpus]

    async def _look(self) -> list[GpuView]:
        views = await asyncio.to_thread(look_at_gpus, self._devices, self._gpus)
        known = self._known()
        pids = {p.pid for view in views for p in view.processes if not p.mps and p.pid not in known}
        facts = dict(zip(pids, await asyncio.gather(*map(self._described, pids)), strict=True))
        return [
            replace(v, strangers={p.pid: f for p in v.processes if (f := facts.get(p.pid))}) for v in views
        ]

    async def _described(self, pid: int) -> ProcessFacts | None:
        """To read a command line waits for a process that changes its mappings."""
        try:
            try:
                return await self._looks.run(pid, partial(procs.facts, pid), FACTS_DEADLINE_S)
            except DeadlineError:
                return procs.facts(pid, "[not readable in time]")
        except MpsdError:
            return None

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._looks.close()
