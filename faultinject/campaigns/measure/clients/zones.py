"""The measuring client that lays zones of managed memory in a window of its own and accesses them.

A zone is a mapping of the process's own UVM descriptor over an unmapped part of a reserved window. Commands
are lines on stdin, answers are {"ev": "answer", "answer": {...}}.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.clients.cuda import (
    VMM_BYTES,
    Cuda,
    CudaError,
    pointer_to,
)

WINDOW = 0x2000_0000_0000
SPAN = 4 << 30
BUFFER = WINDOW + (2 << 30)
ZONE = 32 << 20
NULL_PAGE = 64 << 10
MODES = {"store": 0, "load": 1, "atomic": 2}

UVM_SET_PREFERRED_LOCATION = 42
# uvm_ioctl.h of driver branches from 550 on: base, length, processor, NUMA node, status.
_PREFERRED = struct.Struct("<QQ16siI")
# The CPU as UVM calls it (nvCpuUuid.h).
_CPU = bytes.fromhex("a65e0f4ed7d47ba25047412c142a7773")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x01, 0x02, 0x10, 0x20
_FAILED = ctypes.c_void_p(-1).value


def uvm_descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/nvidia-uvm":
                found.append(int(name))
        except OSError:
            continue
    return sorted(found)


def prefer_host(fd: int, address: int, length: int) -> int:
    """Place the pages of this managed range in host memory; return the driver's status, 0 for done."""
    buffer = bytearray(_PREFERRED.pack(address, length, _CPU, -1, 0))
    fcntl.ioctl(fd, UVM_SET_PREFERRED_LOCATION, buffer, True)
    return int(_PREFERRED.unpack(buffer)[4])


def lay(address: int, length: int, *, host: bool, descriptors: list[int] | None = None) -> dict[str, Any]:
    """A managed range there, hidden from the CPU, its pages on the host or on the GPU; time taken.

    Of the address space of one of `descriptors`, or of any that the process has.
    """
    for fd in uvm_descriptors() if descriptors is None else descriptors:
        began = time.monotonic()
        got = _libc.mmap(address, length, 3, _MAP_SHARED | _MAP_FIXED, fd, address)
        if got == _FAILED or (got or 0) != address:
            continue
        code = _libc.mprotect(address, length, 0)
        found = {"laid": True, "mprotect": code}
        if host:
            found["prefer host"] = prefer_host(fd, address, length)
        return found | {"us": round((time.monotonic() - began) * 1e6, 1)}
    return {"laid": False, "errno": ctypes.get_errno()}


def take_away(address: int, length: int) -> float:
    """Return the addresses to libcuda's reservation; returns microseconds."""
    began = time.monotonic()
    _libc.munmap(address, length)
    _libc.mmap(address, length, 0, _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS, -1, 0)
    return round((time.monotonic() - began) * 1e6, 1)


class Zones:
    """The commands. Each returns a dictionary of its findings."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        got = int(cuda("cuMemAddressReserve", SPAN, 0, WINDOW, 0))
        self.window_as_asked = got == WINDOW
        self.handle, fd = cuda.create_shareable()
        os.close(fd)
        self._map()
        self.scratch = cuda.alloc(4096)
        self.ballast: list[int] = []
        self.host = False

    def _map(self) -> None:
        d = self.cuda.driver
        self.cuda("cuMemMap", BUFFER, VMM_BYTES, 0, self.handle, 0)
        access = d.CUmemAccessDesc()
        access.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = 0
        access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.cuda("cuMemSetAccess", BUFFER, VMM_BYTES, [access], 1)

    def lay(self, where: str) -> dict[str, Any]:
        self.host = where == "host"
        after = lay(BUFFER + VMM_BYTES, ZONE, host=self.host)
        before = lay(BUFFER - ZONE, ZONE, host=self.host)
        null = lay(0, NULL_PAGE, host=self.host) if os.geteuid() == 0 else {"laid": False}
        return {"window as asked": self.window_as_asked, "after": after, "before": before, "null": null}

    def many(self, count: str) -> dict[str, Any]:
        """`count` further zones of 32 MiB, each beside the last; all of them taken away again."""
        begins = [WINDOW + index * ZONE for index in range(int(count))]
        laid = [lay(at, ZONE, host=self.host) for at in begins]
        times = sorted(row["us"] for row in laid if row["laid"])
        away = sorted(take_away(at, ZONE) for at in begins)
        return {
            "laid": len(times),
            "lay us": [times[len(times) // 2], times[-1]] if times else [],
            "take away us": [away[len(away) // 2], away[-1]],
        }

    def touch(self, kind: str, offset: str) -> dict[str, Any]:
        """One access at this offset from the buffer; "null" is address 16."""
        address = 16 if offset == "null" else BUFFER + int(offset, 0)
        values = (address, self.scratch) if kind == "load" else (address,)
        began = time.monotonic()
        self.cuda.launch(kind, *values)
        self.cuda.sync()
        return {"at": hex(address), "launched": began, "ms": round((time.monotonic() - began) * 1e3, 2)}

    def stray(self, mode: str, begin: str, mib: str, ms: str, grid: str) -> dict[str, Any]:
        """Run a grid over `mib` MiB from this offset on, for `ms`."""
        began = time.monotonic()
        self.cuda.launch(
            "stray", BUFFER + int(begin, 0), int(mib) << 20, int(ms) * 1_000_000, MODES[mode],
            grid=int(grid), block=256,
        )  # fmt: skip
        if ms == "0":
            return {"launched": began}
        self.cuda.sync()
        return {"launched": began, "ms": round((time.monotonic() - began) * 1e3, 1)}

    def fill(self, leave_mib: str) -> dict[str, Any]:
        """Allocate the GPU's memory except `leave_mib`."""
        while True:
            free = int(self.cuda("cuMemGetInfo")[0]) - (int(leave_mib) << 20)
            if free < VMM_BYTES:
                break
            try:
                self.ballast.append(int(self.cuda("cuMemAlloc", min(free, 8 << 30))))
            except CudaError:
                break
        return {"free MiB": int(self.cuda("cuMemGetInfo")[0]) >> 20}

    def drain(self) -> dict[str, Any]:
        for address in self.ballast:
            self.cuda("cuMemFree", address)
        self.ballast = []
        return {"free MiB": int(self.cuda("cuMemGetInfo")[0]) >> 20}

    def zone(self, begin: str, mib: str) -> dict[str, Any]:
        return lay(BUFFER + int(begin, 0), int(mib) << 20, host=self.host)

    def quarantine(self) -> dict[str, Any]:
        """Unmap the buffer, cover it, access it, map it again."""
        self.cuda("cuMemUnmap", BUFFER, VMM_BYTES)
        covered = lay(BUFFER, VMM_BYTES, host=self.host)
        absorbed = self.touch("store", "0x40")
        away = take_away(BUFFER, VMM_BYTES)
        self._map()
        self.cuda.launch("store", BUFFER)
        self.cuda.sync()
        return {"covered": covered, "absorbed": absorbed, "away us": away, "mapped again": True}

    def unmap_under_work(self) -> dict[str, Any]:
        """cuMemUnmap while a kernel that counts in that memory runs for 300 ms."""
        handle, fd = self.cuda.create_shareable()
        os.close(fd)
        address = self.cuda.map(handle)
        self.cuda("cuMemsetD8", address, 0, VMM_BYTES)
        self.cuda.sync()
        self.cuda.launch("count", address, 300_000_000, address + 4096, stream=self.cuda.stream())
        began = time.monotonic()
        code = self.cuda.code_of("cuMemUnmap", address, VMM_BYTES)
        took = time.monotonic() - began
        try:
            self.cuda.sync()
            after = "ok"
        except CudaError as error:
            after = str(error)
        return {"code": code, "ms": round(took * 1e3, 2), "then": after}

    def register(self) -> dict[str, Any]:
        """Host registration beside zones: of anonymous, heap-like and just unmapped addresses."""
        found = {}
        with mmap.mmap(-1, 4 << 20) as anonymous:
            for name, address in (("anonymous", pointer_to(anonymous)), ("zone", BUFFER + VMM_BYTES)):
                code = self.cuda.code_of("cuMemHostRegister", address, 1 << 20, 0)
                if code == "CUDA_SUCCESS":
                    self.cuda("cuMemHostUnregister", address)
                found[name] = code
            gc.collect()
        heap = ctypes.create_string_buffer(8 << 10)
        code = self.cuda.code_of("cuMemHostRegister", ctypes.addressof(heap), len(heap), 0)
        if code == "CUDA_SUCCESS":
            self.cuda("cuMemHostUnregister", ctypes.addressof(heap))
        return found | {"heap": code}

    def managed(self, mib: str) -> dict[str, Any]:
        """The program's own managed memory beside zones, used from both sides."""
        size = int(mib) << 20
        address = int(self.cuda("cuMemAllocManaged", size, 1))
        self.cuda.launch("fill", address, size // 4, 7, grid=64, block=256)
        self.cuda.sync()
        right = ctypes.string_at(address, size) == b"\7\0\0\0" * (size // 4)
        self.cuda("cuMemFree", address)
        return {"at": hex(address), "right": right}

    def fork(self) -> dict[str, Any]:
        """Return a forked child's view of the zones, and whether its exit leaves them."""
        inside = 0
        child = os.fork()
        if child == 0:
            begin = hex(BUFFER + VMM_BYTES)[2:]
            os._exit(Path("/proc/self/maps").read_text().count(begin))
        inside = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {"mappings in the child": inside, "then": self.touch("store", hex(VMM_BYTES + 4096))}

    def far(self, kind: str, gib: str) -> dict[str, Any]:
        """Return the cost of ranges of `gib` GiB, managed or sparse."""
        from faultinject.campaigns.measure.clients.farzones import Ranges

        return Ranges(self.cuda, kind, int(gib)).measure()

    def rss(self) -> dict[str, Any]:
        """Pages that zones hold: resident and in the page tables of this process, in KiB."""
        text = Path("/proc/self/status").read_text()
        return {key: int(text.split(key + ":")[1].split()[0]) for key in ("VmRSS", "VmPTE", "VmSize")}


def serve(cuda: Cuda, emit: Callable[..., None]) -> None:
    zones = Zones(cuda)
    emit("ready", pid=os.getpid())
    for line in sys.stdin:
        name, *arguments = line.split()
        try:
            emit("answer", answer=getattr(zones, name)(*arguments))
        except CudaError as error:
            emit("failed", code=error.code, text=str(error))
