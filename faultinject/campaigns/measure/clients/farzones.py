"""The cost of ranges of several GiB in a client's address space, in chunks, as the proxy lays far zones.

Managed ones are mappings of the process's own UVM descriptor, sparse ones two ioctls of it.
"""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.clients.cuda import Cuda
from faultinject.campaigns.measure.clients.zones import lay, take_away, uvm_descriptors
from mpsd.gpu.nvidia import uvm_abi

CHUNK = 1 << 30
HINT = 0x3000_0000_0000
"""For the reservations, far from the window of the other commands. They are left to the process's end."""


def _ask(fd: int, request: int, buffer: bytearray, status_at: int) -> int:
    fcntl.ioctl(fd, request, buffer, True)
    return uvm_abi.read_u32(buffer, status_at)


def _lay_sparse(base: int, gpu: bytes) -> int | None:
    """The descriptor that took it: only that of the address space does."""
    for fd in uvm_descriptors():
        try:
            made = _ask(fd, uvm_abi.UVM_CREATE_EXTERNAL_RANGE, uvm_abi.encode_external_range(base, CHUNK), 16)
            if made != uvm_abi.STATUS_OK:
                continue
            request = uvm_abi.encode_map_sparse(base, CHUNK, gpu)
            if _ask(fd, uvm_abi.UVM_MAP_EXTERNAL_SPARSE, request, 32) == uvm_abi.STATUS_OK:
                return fd
            _free_sparse(fd, base)
        except OSError:
            continue
    return None


def _free_sparse(fd: int, base: int) -> bool:
    """Which layout a driver wants depends on its branch; the other one's status it does not write."""
    for layout in (uvm_abi.FREE_WITH_LENGTH, uvm_abi.FREE_BASE_ONLY):
        status = _ask(fd, uvm_abi.UVM_FREE, uvm_abi.encode_free(layout, base, CHUNK), layout.status_at)
        if status != uvm_abi.UNWRITTEN:
            return status == uvm_abi.STATUS_OK
    return False


class Ranges:
    """Chunks of one kind, laid and taken away again; times in microseconds."""

    def __init__(self, cuda: Cuda, kind: str, gib: int) -> None:
        self._cuda = cuda
        self._kind = kind
        self._gpu = bytes(cuda("cuDeviceGetUuid", cuda.device).bytes)[:16]
        self._base = int(cuda("cuMemAddressReserve", gib * CHUNK, 0, HINT, 0))
        self._all = [self._base + index * CHUNK for index in range(gib)]
        self._laid: dict[int, int] = {}

    def measure(self) -> dict[str, Any]:
        before = self._memory()
        lay_us = [self._lay(base) for base in self._all]
        laid = self._memory()
        found: dict[str, Any] = {
            "laid": len(self._laid),
            "lay us": lay_us,
            "GPU KiB": before["gpu"] - laid["gpu"],
            "host KiB": before["host"] - laid["host"],
        }
        if len(self._laid) == len(self._all):
            # Where one is missing an access would be fatal for the survivor too.
            found["touch ms"] = self._touch()
            hit = self._memory()
            found |= {
                "GPU KiB, hit": before["gpu"] - hit["gpu"],
                "host KiB, hit": before["host"] - hit["host"],
            }
        found["take away us"] = [self._take_away(base) for base in self._all if base in self._laid]
        after = self._memory()
        return found | {"GPU KiB, left": before["gpu"] - after["gpu"]}

    def _lay(self, base: int) -> float:
        began = time.monotonic()
        if self._kind == "managed":
            if lay(base, CHUNK, host=True)["laid"]:
                self._laid[base] = -1
        else:
            fd = _lay_sparse(base, self._gpu)
            if fd is not None:
                self._laid[base] = fd
        return round((time.monotonic() - began) * 1e6, 1)

    def _take_away(self, base: int) -> float:
        if self._kind == "managed":
            return take_away(base, CHUNK)
        began = time.monotonic()
        _free_sparse(self._laid[base], base)
        return round((time.monotonic() - began) * 1e6, 1)

    def _touch(self) -> list[float]:
        """One store in the middle of each chunk."""
        times = []
        for base in self._all:
            began = time.monotonic()
            self._cuda.launch("store", base + CHUNK // 2)
            self._cuda.sync()
            times.append(round((time.monotonic() - began) * 1e3, 2))
        return times

    def _memory(self) -> dict[str, int]:
        """Free memory of the GPU, and available memory of the host, in KiB."""
        text = Path("/proc/meminfo").read_text()
        host = int(text.split("MemAvailable:")[1].split()[0])
        return {"gpu": int(self._cuda("cuMemGetInfo")[0]) >> 10, "host": host}
