"""How clients were started: their environment and mappings, read in threads.

`status` needs an answer at once, so each client is read once. `doctor` reads all of them again, because a
program can load a library at any time.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from mpsd.base.errors import MpsdError
from mpsd.base.model import ProcessInstance
from mpsd.base.protection import ProtectionLevel
from mpsd.core.state import Client
from mpsd.os import procfs
from mpsd.os.probes import ProbePool

LEVEL_VARIABLE = "MPSD_PROTECTION"
PROXY_MAPPING = b"/memfd:mpsd-libcuda"
"""A mapping of every process that has loaded mpsd's libcuda (clients/libcuda/src/stats.c)."""
REPLY_WAIT_S = 0.03
DEADLINE_S = 0.25
_DRIVER = re.compile(r"/libcuda\.so(\.\d+)*( \(deleted\))?$")
_SMALLEST_DRIVER = 1 << 16
"""Bytes of mappings. mpsd's libcuda.so, which only leads to its libcuda.so.1, has less."""


@dataclass(frozen=True, slots=True)
class Start:
    """How a program was started, by its environment and mappings. `level`: the level that mpsd-run gave it;
    None without mpsd-run. `proxy`: whether mpsd's libcuda is loaded. `libcudas`: the file of each loaded
    libcuda, mpsd's among them; a file that is loaded twice is there twice."""

    level: ProtectionLevel | None
    proxy: bool
    libcudas: tuple[str, ...] = ()


class Starts:
    """The starts of the clients that live. A process that blocks the read is read again by a later call."""

    def __init__(self) -> None:
        self._known: dict[ProcessInstance, Start | None] = {}
        self._reads: dict[ProcessInstance, asyncio.Task[None]] = {}
        self._probes: ProbePool | None = None

    async def of(self, clients: Iterable[Client]) -> Mapping[ProcessInstance, Start]:
        """Return the starts of these clients as far as they are known soon. Forget all other processes.

        A process that blocks its read delays no answer by more than REPLY_WAIT_S."""
        users = {c.id.process: c.facts.uid for c in clients if c.living}
        self._known = {process: start for process, start in self._known.items() if process in users}
        for process in users:
            if process not in self._known and process not in self._reads:
                self._reads[process] = asyncio.create_task(self._read(users[process], process))
        if self._reads:
            await asyncio.wait(self._reads.values(), timeout=REPLY_WAIT_S)
        return {process: start for process, start in self._known.items() if start is not None}

    async def now(self, clients: Iterable[Client]) -> Mapping[ProcessInstance, Start]:
        """Return the starts of these clients as they are now, without those that block the read."""
        users = {c.id.process: c.facts.uid for c in clients if c.living}
        reads = [self._probe(uid, process) for process, uid in users.items()]
        found = zip(users, await asyncio.gather(*reads, return_exceptions=True), strict=True)
        return {process: start for process, start in found if isinstance(start, Start)}

    async def _probe(self, uid: int, process: ProcessInstance) -> Start | None:
        self._probes = self._probes or ProbePool("client-starts")
        return await self._probes.run(uid, partial(start_of, process), DEADLINE_S)

    async def _read(self, uid: int, process: ProcessInstance) -> None:
        try:
            self._known[process] = await self._probe(uid, process)
        except MpsdError:
            return
        finally:
            self._reads.pop(process, None)


def start_of(process: ProcessInstance) -> Start | None:
    """Return how a process was started; None if it cannot be read. Blocks while it changes its mappings."""
    try:
        named = procfs.environment(process.pid).get(LEVEL_VARIABLE)
        mapped = procfs.map_lines(process.pid)
        if procfs.start_ticks(process.pid) != process.start_ticks:
            return None
    except OSError:
        return None
    # A text of the program: an unknown level counts as none.
    level = ProtectionLevel(named) if named in {each.value for each in ProtectionLevel} else None
    return Start(level, PROXY_MAPPING in mapped.text, libcudas(mapped))


def libcudas(mapped: procfs.MapLines) -> tuple[str, ...]:
    """Return the file of each libcuda in these mappings. A library's first mapping starts at offset 0."""
    lines = map(procfs.parse_map, (line for line in mapped.lines if "/libcuda.so" in line))
    maps = [one for one in lines if _DRIVER.search(one.path)]
    sizes = Counter[tuple[str, int]]()
    for one in maps:
        sizes[one.device, one.inode] += one.end - one.start
    drivers = {file for file, size in sizes.items() if size >= _SMALLEST_DRIVER}
    return tuple(one.path for one in maps if one.offset == 0 and (one.device, one.inode) in drivers)
