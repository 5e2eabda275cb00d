"""Exported memory of the NVIDIA driver: checks of a descriptor of its control device.

cuMemExportToShareableHandle returns an open file of /dev/nvidiactl (character device 195:255) with memory
attached. Only the driver knows which memory and how much, and asking it needs a client of its own. So the
size is the program's claim, bounded by the GPU's memory. A plain open of that device passes as well: it
holds no memory, and only its owner can claim it.
**Written from the driver's documented device numbers; not yet run on a GPU.**
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from mpsd.base.errors import GpuError
from mpsd.gpu.base import ExportedMemory
from mpsd.os.filetype import file_type

CONTROL_DEVICE = os.makedev(195, 255)


class NvidiaMemory:
    """MemoryInspector of the real driver. `memory`: bytes of each GPU by its UUID.

    MIG instances have UUIDs of their own and are not listed, so memory on them is refused."""

    def __init__(self, memory: Mapping[str, int], device: int = CONTROL_DEVICE) -> None:
        self._memory = memory
        self._device = device

    def identify(self, fd: int, claimed: ExportedMemory) -> ExportedMemory:
        try:
            found = file_type(fd)
        except OSError as error:
            raise GpuError(f"cannot inspect a descriptor: {error.strerror}") from error
        if not stat.S_ISCHR(found.mode) or found.device != self._device:
            raise GpuError("a descriptor does not belong to the NVIDIA control device")
        most = self._memory.get(claimed.gpu_uuid)
        if most is None:
            raise GpuError(f"there is no GPU {claimed.gpu_uuid}")
        if not 0 < claimed.size <= most:
            raise GpuError(f"{claimed.size} bytes exceed the GPU's {most} bytes")
        return claimed
