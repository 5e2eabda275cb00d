"""GPUs and their processes for `status`, from NVML and /proc, read in threads with deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from mpsd.api import outside
from mpsd.api.statusview import GpuView, query_gpus
from mpsd.base.errors import DeadlineError, MpsdError
from mpsd.base.model import Gpu, ProcessFacts
from mpsd.gpu.base import DeviceManager
from mpsd.os import processes
from mpsd.os.probes import ProbePool

REPLY_WAIT_S = 0.03
FIRST_REPLY_WAIT_S = 5.0
FACTS_DEADLINE_S = 0.25


class GpuViews:
    """The GPUs' views. `known` returns mpsd's own pids and its clients', which need no description.

    `run_dir`: mpsd's run directory, of whose pipe directories a process outside MPS may name one.
    """

    def __init__(
        self, devices: DeviceManager, gpus: Sequence[Gpu], known: Callable[[], Collection[int]], run_dir: str
    ) -> None:
        self._devices = devices
        self._gpus = gpus
        self._known = known
        self._run_dir = run_dir
        self._views: Sequence[GpuView] = ()
        self._probing: asyncio.Task[list[GpuView]] | None = None
        # One read at a time for each process: a process that blocks the read holds one thread.
        self._probes = ProbePool("gpu-processes", per_key=1)

    async def now(self) -> Sequence[GpuView]:
        """Return the views now, or the last ones while NVML does not answer, as during a fault."""
        if self._probing is None:
            self._probing = asyncio.create_task(self._probe())
        probing = self._probing
        done, _ = await asyncio.wait({probing}, timeout=REPLY_WAIT_S if self._views else FIRST_REPLY_WAIT_S)
        if done:
            if self._probing is probing:
                self._probing = None
            self._views = probing.result()
        return self._views or [GpuView(gpu, problem="NVML has not answered yet") for gpu in self._gpus]

    async def _probe(self) -> list[GpuView]:
        views = await asyncio.to_thread(query_gpus, self._devices, self._gpus)
        known = self._known()
        pids = {p.pid for view in views for p in view.processes if not p.mps and p.pid not in known}
        found = dict(zip(pids, await asyncio.gather(*map(self._describe, pids)), strict=True))
        facts = {pid: each for pid, (each, _) in found.items() if each is not None}
        return [
            replace(
                view,
                other_processes={p.pid: facts[p.pid] for p in view.processes if p.pid in facts},
                reasons={p.pid: found[p.pid][1] for p in view.processes if p.pid in facts},
            )
            for view in views
        ]

    async def _describe(self, pid: int) -> tuple[ProcessFacts | None, str]:
        """Describe a process and say why it runs outside MPS, if its pipe directory is the cause.

        Reading its command line and environment blocks while it changes its mappings.
        """
        try:
            try:
                return await self._probes.run(pid, partial(self._look, pid), FACTS_DEADLINE_S)
            except DeadlineError:
                return processes.facts(pid, "[not readable in time]"), ""
        except MpsdError:
            return None, ""

    def _look(self, pid: int) -> tuple[ProcessFacts, str]:
        facts = processes.facts(pid)
        return facts, outside.reason(facts, self._run_dir)

    def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        self._probes.close()
