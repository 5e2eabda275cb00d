"""When a dead client's kernels have ended: its semaphores, read through /proc/PID/mem.

The lease keeps the dead process's memory map, and with it the driver's mappings and, behind them, its
channels. A descriptor of /proc/PID/mem that was opened while the process lived reads on.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpsd.errors import UnsupportedError
from mpsd.gpu.nvidia.semaphores import LOW_END, Area, Signs, areas
from mpsd.linux import procfs
from mpsd.model import ProcessInstance

PIECE = 2 << 20
BLOCK = 16 << 10
OVERLAP = 64
"""Longer than any pattern, so that none is cut in two."""
CALM = 2
"""Consecutive looks that must find nothing: a mark and the report of its launch are two writes."""
DROPPED_S = 3.0
"""Launches still queued this long after the death have been dropped: the driver gives them 2.0 s."""

_ZERO = bytes(BLOCK + OVERLAP)


def written(data: bytes) -> Iterator[bytes]:
    """The blocks of a piece of memory that hold anything: most of a command buffer was never used."""
    for at in range(0, len(data), BLOCK):
        block = data[at : at + BLOCK + OVERLAP]
        if block != _ZERO[: len(block)]:
            yield block


class ProcessWork:
    """The work of one client. `mem` and `areas` outlive the daemon in the descriptor store.

    `refresh` may run in a thread while others are called. `_blind`: it has more mappings than are read.
    """

    def __init__(self, process: ProcessInstance, mem: int, notes: int) -> None:
        self._process = process
        self._mem = mem
        self._notes = notes
        self._areas: list[Area] = []
        self._blind = False
        self._turn = threading.Lock()
        self._signs: Signs | None = None
        self._calm = 0
        self._died = 0.0
        self._wrote_commands = False

    @property
    def fds(self) -> Mapping[str, int]:
        return {"areas": self._notes, "mem": self._mem}

    def refresh(self) -> None:
        mapped = _low_mappings(self._process)
        if mapped is None:
            return
        found = areas(mapped.rows)
        with self._turn:
            if self._notes < 0 or (found == self._areas and mapped.truncated == self._blind):
                return
            if mapped.truncated or found:
                self._areas, self._blind = found, mapped.truncated
                rows = None if self._blind else [[a.start, a.end] for a in found]
                os.ftruncate(self._notes, 0)
                os.pwrite(self._notes, json.dumps(rows).encode(), 0)

    def recall(self) -> None:
        """After adoption: the areas that an earlier daemon noted; null when there were too many to see."""
        noted = json.loads(os.pread(self._notes, 1 << 20, 0) or b"[]")
        self._blind = noted is None
        self._areas = [Area(start, end) for start, end in noted or ()]

    def pending(self) -> str | None:
        if self._blind:
            return None
        if self._signs is None:
            self._signs = self._scan()
            self._died = time.monotonic()
        if not self._signs.understood:
            # A client that never launched anything has no commands at all; any others are not ours to read.
            return None if self._wrote_commands else ""
        running = self._signs.running(self._word)
        queued = [] if time.monotonic() - self._died > DROPPED_S else self._signs.queued(self._word)
        late = [*running, *queued]
        self._calm = 0 if late else self._calm + 1
        if late:
            return ", ".join(late[:4])
        return "" if self._calm >= CALM else "looking once more"

    def _scan(self) -> Signs:
        """Read every area once: the process is dead, so nobody writes commands any more."""
        signs = Signs()
        for area in self._areas:
            for at in range(area.start, area.end, PIECE):
                for block in written(self._read(at, min(PIECE + OVERLAP, area.end - at))):
                    self._wrote_commands = True
                    signs.scan(block)
        return signs

    def _read(self, at: int, size: int) -> bytes:
        try:
            return os.pread(self._mem, size, at)
        except OSError:
            return b""

    def _word(self, address: int) -> int | None:
        data = self._read(address, 4)
        return int.from_bytes(data, "little") if len(data) == 4 else None

    def close(self) -> None:
        with self._turn:
            for fd in (self._mem, self._notes):
                if fd >= 0:
                    os.close(fd)
            self._mem = self._notes = -1


class NvidiaWork:
    """WorkInspector of the real driver."""

    def open(self, process: ProcessInstance, pidfd: int) -> ProcessWork:
        try:
            mem = os.open(f"/proc/{process.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UnsupportedError(
                f"may not read the memory of process {process.pid}: {error.strerror}",
                remedy="run mpsd with CAP_SYS_PTRACE",
            ) from error
        view = ProcessWork(process, mem, os.memfd_create("mpsd-areas", os.MFD_CLOEXEC))
        view.refresh()
        return view

    def adopt(self, process: ProcessInstance, fds: Mapping[str, int]) -> ProcessWork:
        if not {"mem", "areas"} <= fds.keys():
            raise UnsupportedError(f"the work of process {process.pid} was not looked at while it lived")
        view = ProcessWork(process, fds["mem"], fds["areas"])
        view.recall()
        return view


@dataclass(frozen=True, slots=True)
class _Mapped:
    rows: list[tuple[int, int, str, str]]
    truncated: bool


def _low_mappings(process: ProcessInstance) -> _Mapped | None:
    """The mappings below LOW_END, which stand first in maps; None when the process has gone."""
    try:
        found = procfs.map_lines(process.pid, LOW_END)
        if procfs.start_ticks(process.pid) != process.start_ticks:
            return None
    except OSError:
        return None
    rows = [procfs.parse_map(line) for line in found.lines]
    return _Mapped([(r.start, r.end, r.permissions, r.path) for r in rows], found.truncated)
