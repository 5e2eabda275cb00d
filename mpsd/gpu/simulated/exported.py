"""Exported memory of the stand-in driver: a sealed memfd with its name (clients/libcuda/standin/vmm.c).

Simulated only. The size is the file's own. The GPU cannot be determined, so the first one is assumed.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping

from mpsd.base.errors import GpuError
from mpsd.gpu.base import ExportedMemory
from mpsd.os.filetype import file_type

NAME = "mpsd-standin-vmm"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SimulatedMemory:
    """MemoryInspector. `memory`: bytes of each GPU by its UUID."""

    def __init__(self, memory: Mapping[str, int]) -> None:
        self._gpu, self._most = next(iter(memory.items()))
        sample = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            self._on = file_type(sample).on
            self._link = os.readlink(f"/proc/self/fd/{sample}")
        finally:
            os.close(sample)

    def identify(self, fd: int, claimed: ExportedMemory) -> ExportedMemory:
        try:
            found = file_type(fd)
            link = os.readlink(f"/proc/self/fd/{fd}")
            # Every process can use that name; memfds are all on one file system of the kernel.
            if not stat.S_ISREG(found.mode) or found.on != self._on or link != self._link:
                raise GpuError("a descriptor is not memory of the stand-in driver")
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise GpuError(f"cannot inspect a descriptor: {error.strerror}") from error
        if sealed & SEALS != SEALS:
            raise GpuError("the size of a descriptor's memory is not sealed")
        if not 0 < found.size <= self._most:
            raise GpuError(f"{found.size} bytes exceed the GPU's {self._most} bytes")
        return ExportedMemory(found.size, self._gpu)
