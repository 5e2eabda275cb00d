"""A client with one window of addresses in two copies of libcuda: zones, globals, the steady cost.

Each finding is an event "row" as it comes. Times in milliseconds unless a name says otherwise.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from pathlib import Path
from statistics import median
from typing import Any

from faultinject.measure.failover_copies import row
from faultinject.measure.failover_driver import GRANULE, Copies, Driver, DriverError, first, ms, now
from faultinject.measure.nvml import Nvml
from faultinject.measure.zone_calls import lay, take_away, uvm_descriptors
from mpsd.gpu.nvidia import uvm_abi

WINDOW, SPAN = 0x2000_0000_0000, 256 << 30
BUFFER = WINDOW + (2 << 30)
ZONE, ZONE_BYTES = BUFFER + GRANULE, 32 << 20
GLOBALS = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 8 .b8 table[65536];
.visible .global .align 4 .u32 flag;
.visible .entry touch() { ret; }
"""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _placeholder(address: int) -> str:
    """The host mapping at this address, as the kernel lists it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address < end:
            return " ".join(line.split())[:80]
    return "nothing"


def reserve_both(a: Driver, b: Driver) -> None:
    """The window in A, then in B: with A's placeholder in the way, and without."""
    a.current()
    began = now()
    got = a.reserve(SPAN, WINDOW)
    row("A reserves", at=hex(got), ms=ms(began, now()), placeholder=_placeholder(WINDOW))
    b.current()
    elsewhere = b.reserve(SPAN, WINDOW)
    row("B reserves while A's placeholder lies there", at=hex(elsewhere), same=elsewhere == WINDOW)
    if elsewhere != WINDOW:
        b("cuMemAddressFree", elsewhere, SPAN)
        _libc.munmap(WINDOW, SPAN)
        began = now()
        there = b.reserve(SPAN, WINDOW)
        row(
            "B reserves after munmap of it", at=hex(there), same=there == WINDOW, ms=ms(began, now()),
            placeholder=_placeholder(WINDOW),
        )  # fmt: skip


def _touch(driver: Driver, kernel: str, *values: int) -> dict[str, Any]:
    driver.current()
    began = now()
    try:
        driver.launch(kernel, *values)
        driver.sync()
    except DriverError as error:
        return {"failed": str(error), "ms": ms(began, now())}
    return {"ms": ms(began, now())}


def same_memory(a: Driver, b: Driver) -> None:
    """One buffer at one address in both; a kernel of each."""
    a.current()
    handle = a.create()
    a.map(BUFFER, handle)
    a("cuMemsetD8_v2", BUFFER, 0, GRANULE)
    a.sync()
    fd = a.export(handle)
    b.current()
    b.map(BUFFER, b.adopt(fd))
    found = [_touch(driver, "increment", BUFFER, 1) for driver in (a, b)]
    row("one buffer at one address", kernels=found, both_wrote=b.read_u64(BUFFER) == 2)


def _ioctl(fd: int, request: int, buffer: bytearray, status_at: int) -> str:
    try:
        fcntl.ioctl(fd, request, buffer, True)
    except OSError as error:
        return str(error)
    return uvm_abi.status_name(uvm_abi.read_u32(buffer, status_at))


def _sparse(fds: list[int], gpu: str) -> dict[str, Any]:
    """A sparse range over the zone's addresses on whichever descriptor takes it."""
    said = {}
    for fd in fds:
        made = _ioctl(
            fd, uvm_abi.UVM_CREATE_EXTERNAL_RANGE, uvm_abi.encode_external_range(ZONE, ZONE_BYTES), 16
        )
        request = uvm_abi.encode_map_sparse(ZONE, ZONE_BYTES, uvm_abi.uuid_bytes(gpu))
        said[str(fd)] = [made, _ioctl(fd, uvm_abi.UVM_MAP_EXTERNAL_SPARSE, request, 32)]
    return said


def _free(fds: list[int]) -> dict[str, str]:
    layout = uvm_abi.FREE_WITH_LENGTH
    return {
        str(fd): _ioctl(fd, uvm_abi.UVM_FREE, uvm_abi.encode_free(layout, ZONE, ZONE_BYTES), layout.status_at)
        for fd in fds
    }


def zones(a: Driver, b: Driver, own: list[int], other: list[int]) -> None:
    """A managed zone of A's where B maps memory, has a sparse range, and later its own zone."""
    row("A's managed zone", **lay(ZONE, ZONE_BYTES, host=False, descriptors=own))
    row("A strays into it", **_touch(a, "store", ZONE + 4096), placeholder=_placeholder(ZONE))
    b.current()
    handle = b.create()
    try:
        b.map(ZONE, handle)
        found = _touch(b, "increment", ZONE, 1)
        row("B maps memory at the same address", **found, right=b.read_u64(ZONE) & 0xFFFFFFFF == 1)
        row("A strays into the zone meanwhile", **_touch(a, "store", ZONE + 65536))
        b.current()
        b.unmap(ZONE, handle)
    except DriverError as error:
        row("B maps memory at the same address", failed=str(error))
    row("B's sparse range there", **_sparse(other, Nvml().uuid))
    row("B strays into it", **_touch(b, "store", ZONE + 4096))
    row("A's zone is taken away", us=take_away(ZONE, ZONE_BYTES))
    began = now()
    row("B's sparse range is freed", **_free(other), ms=ms(began, now()))
    row("B's managed zone in its place", **lay(ZONE, ZONE_BYTES, host=False, descriptors=other))
    row("B strays into that", **_touch(b, "store", ZONE + 8192))


def global_addresses(a: Driver, b: Driver) -> None:
    """Where the same module's globals and the same allocation lie in each copy."""
    found: dict[str, list[str]] = {}
    for driver in (a, b):
        driver.current()
        module = driver.made("cuModuleLoadData", GLOBALS + b"\0")
        for name in ("table", "flag"):
            out, size = ctypes.c_uint64(), ctypes.c_size_t()
            driver("cuModuleGetGlobal_v2", ctypes.byref(out), ctypes.byref(size), module, name.encode())
            found.setdefault(name, []).append(hex(out.value))
        found.setdefault("cuMemAlloc 4 KiB", []).append(hex(driver.alloc(4096)))
        found.setdefault("cuMemAlloc 64 MiB", []).append(hex(driver.alloc(64 << 20)))
    row("addresses in A and B", **found)


def launch_us(driver: Driver, count: int = 3000) -> list[float]:
    """Launch and wait, microseconds: median and 99th percentile."""
    driver.current()
    word = driver.alloc(4096)
    step, wait, times = driver.prepare("increment", word, 1), driver.library.cuCtxSynchronize, []
    for _ in range(count):
        began = now()
        step()
        wait()
        times.append(now() - began)
    times.sort()
    return [round(times[count * share // 100] * 1e6, 2) for share in (50, 99)]


def _timed(kept: dict[str, list[float]], name: str, began: float) -> float:
    ended = now()
    kept.setdefault(name, []).append((ended - began) * 1e6)
    return ended


def _map_in_both(a: Driver, b: Driver, at: int, size: int, times: dict[str, list[float]]) -> tuple[int, int]:
    a.current()
    stamp = now()
    handle = a.create(size)
    stamp = _timed(times, "A create", stamp)
    a.map(at, handle, size)
    stamp = _timed(times, "A map", stamp)
    fd = a.export(handle)
    stamp = _timed(times, "export", stamp)
    b.current()
    other = b.adopt(fd)
    stamp = _timed(times, "B import", stamp)
    b.map(at, other, size)
    _timed(times, "B map", stamp)
    os.close(fd)
    return handle, other


def mapping_cost(a: Driver, b: Driver, mib: int, count: int) -> None:
    """What it takes to have each allocation in both copies from its creation on; microseconds."""
    size, times, nvml = mib << 20, dict[str, list[float]](), Nvml()
    before = nvml.used_mib()
    places = [WINDOW + (64 << 30) + n * size for n in range(count)]
    handles = [_map_in_both(a, b, at, size, times) for at in places]
    used = [nvml.used_mib() - before]
    for driver, side, name in ((a, 0, "A unmap"), (b, 1, "B unmap")):
        driver.current()
        for at, pair in zip(places, handles, strict=True):
            stamp = now()
            driver.unmap(at, pair[side], size)
            _timed(times, name, stamp)
        used.append(nvml.used_mib() - before)
    row(
        f"{count} allocations of {mib} MiB in both, us: median, worst",
        **{name: [round(median(all_), 1), round(max(all_), 1)] for name, all_ in times.items()},
        GPU_MiB_mapped_and_after_each_unmap=used,
    )


def window(cubin: str, folder: str, pipe: str) -> None:
    """All of it, in order; the last steps may be fatal for a copy."""
    a = first()
    a.start(Path(cubin))
    own = uvm_descriptors()
    alone = launch_us(a)
    b = Copies(Path(folder)).start(1, Path(pipe), Path(cubin))
    other = [fd for fd in uvm_descriptors() if fd not in own]
    row("launch and wait in A, us: median, p99", alone=alone, with_standby=launch_us(a))
    reserve_both(a, b)
    same_memory(a, b)
    try:
        global_addresses(a, b)
    except DriverError as error:
        row("addresses in A and B", failed=str(error))
    mapping_cost(a, b, 2, 500)
    mapping_cost(a, b, 64, 100)
    row("launch and wait in A afterwards, us: median, p99", with_standby=launch_us(a))
    zones(a, b, own, other)
