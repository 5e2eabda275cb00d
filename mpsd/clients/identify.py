"""A look at a process that the kernel log names for a GPU fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from mpsd.base.errors import MpsdError
from mpsd.base.model import GpuProcess, ProcessFacts
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.faults.records import LoggedProcess
from mpsd.os import processes, procfs

DEADLINE_S = 1.0
COMM_BYTES = 15
"""Length of the longest name that the kernel keeps of a process."""


async def identify(
    effect: fx.Identify, list_processes: Callable[[str], Sequence[GpuProcess]]
) -> ev.ProcessIdentified:
    """Return what is known of the process. NVML does not answer while the driver handles a fault: then
    `on_mps` is None after the deadline.
    """
    logged = effect.logged
    facts = await asyncio.to_thread(_pin, logged, effect.at)
    on_mps = None
    try:
        async with asyncio.timeout(DEADLINE_S):
            listed = await asyncio.to_thread(list_processes, effect.gpu)
        on_mps = next((p.mps for p in listed if p.pid == logged.pid), None)
    except (TimeoutError, MpsdError):
        pass
    return ev.ProcessIdentified(effect.gpu, logged, facts, on_mps)


def _pin(logged: LoggedProcess, at: float) -> ProcessFacts | None:
    """Return the facts of the process with this pid and name, if it runs since before the line was read.

    `at`: monotonic seconds. The command is the log's name: reading more waits while the process changes its
    mappings.
    """
    try:
        facts = processes.facts(logged.pid, logged.name)
        stat = procfs.stat(logged.pid)
    except (OSError, MpsdError):
        return None
    is_same = stat.start_ticks == facts.instance.start_ticks and stat.comm == logged.name[:COMM_BYTES]
    is_older = procfs.age_s(stat.start_ticks) > time.monotonic() - at
    return facts if is_same and is_older else None
