"""Exported memory of the NVIDIA driver: a descriptor of its control device, whoever's it is.

cuMemExportToShareableHandle gives an open file of /dev/nvidiactl (character device 195:255) with the
memory attached to it. Which memory, and how much, only the driver knows, and asking it takes a client of
its own: so the size is the program's word, bounded by the GPU's memory, and a plain open of that device
passes as well. It holds nothing then, and can be claimed by its owner alone.
**Written from the driver's documented device numbers; not yet run on a GPU.**
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from mpsd.errors import GpuError
from mpsd.gpu.base import ExportedMemory
from mpsd.linux.filetype import file_type

CONTROL_DEVICE = os.makedev(195, 255)


class NvidiaMemory:
    """MemoryInspector. `memory`: bytes of each GPU by its UUID. MIG instances have UUIDs of their own and
    are not in it: what lies on them is not taken."""

    def __init__(self, memory: Mapping[str, int], device: int = CONTROL_DEVICE) -> None:
        self._memory = memory
        self._device = device

    def identify(self, fd: int, claimed: ExportedMemory) -> ExportedMemory:
        try:
            found = file_type(fd)
        except OSError as error:
            raise GpuError(f"a descriptor cannot be looked at: {error.strerror}") from error
        if not stat.S_ISCHR(found.mode) or found.device != self._device:
            raise GpuError("a descriptor is not of the NVIDIA control device")
        most = self._memory.get(claimed.gpu_uuid)
        if most is None:
            raise GpuError(f"there is no GPU {claimed.gpu_uuid}")
        if not 0 < claimed.size <= most:
            raise GpuError(f"{claimed.size} bytes are not in a GPU of {most}")
        return claimed
