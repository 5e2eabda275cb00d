"""Clients that hold the same things in two copies of libcuda: host memory, graphs, addresses.

Each finding is an event "row" as it comes; "told" is the end. Times in milliseconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faultinject.measure.client import emit
from faultinject.measure.cuda import pointer_to
from faultinject.measure.failover_copies import row
from faultinject.measure.failover_driver import GRANULE, Copies, Driver, DriverError, first, ms, now
from faultinject.measure.failover_window import window as run_window

PORTABLE_MAPPED = 0x1 | 0x2
ALREADY_REGISTERED = 712


def pair(cubin: str, folder: str, pipe: str) -> tuple[Driver, Driver]:
    """The ordinary libcuda and a copy in the other domain, both started."""
    a = first()
    a.start(Path(cubin))
    return a, Copies(Path(folder)).start(1, Path(pipe), Path(cubin))


def done() -> None:
    emit("told")
    sys.stdin.readline()
    os._exit(0)


def mapped(address: int) -> bool:
    """Whether the process has anything mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


def attempt(act: Callable[[], Any]) -> Any:
    """The result, or what failed."""
    try:
        return act()
    except DriverError as error:
        return str(error)


def register(driver: Driver, address: int, size: int) -> dict[str, Any]:
    """Register host memory with one copy; the device's address of it."""
    driver.current()
    began = now()
    code = driver.code("cuMemHostRegister_v2", address, size, PORTABLE_MAPPED)
    found: dict[str, Any] = {"code": code, "ms": ms(began, now())}
    if code in (0, ALREADY_REGISTERED):
        found["device address"] = attempt(
            lambda: hex(driver.made("cuMemHostGetDevicePointer_v2", address, 0))
        )
    return found


def gpu_writes(driver: Driver, address: int, host: int) -> str:
    """A kernel adds one through this copy; whether the CPU sees it."""
    try:
        driver.current()
        before = ctypes.c_uint32.from_address(host).value
        driver.launch("increment", address, 1)
        driver.sync()
        return "seen" if ctypes.c_uint32.from_address(host).value == before + 1 else "not seen"
    except DriverError as error:
        return str(error)


def _copies_through(driver: Driver, host: int, size: int) -> str:
    """An asynchronous copy out of this memory; "ok" or what failed."""
    try:
        driver.current()
        stream, target = driver.stream(), driver.alloc(size)
        driver("cuMemcpyHtoDAsync_v2", target, host, size, stream)
        driver("cuStreamSynchronize", stream)
        return "ok" if driver.read(target, 64) == ctypes.string_at(host, 64) else "wrong"
    except DriverError as error:
        return str(error)


def _both(a: Driver, b: Driver, host: int, size: int, what: str) -> None:
    """Register with A, then with B what A has registered; use both."""
    found = {"A": register(a, host, size), "B": register(b, host, size)}
    same = found["A"].get("device address") == found["B"].get("device address") == hex(host)
    row(
        what, **found, same_address=same, through_A=gpu_writes(a, host, host),
        through_B=gpu_writes(b, host, host), copy_through_B=_copies_through(b, host, size),
    )  # fmt: skip


def host(cubin: str, folder: str, pipe: str) -> None:
    """Pinned and mapped host memory in both copies, before and after the first one's reset."""
    a, b = pair(cubin, folder, pipe)
    size = 4 << 20
    pages = mmap.mmap(-1, size)
    _both(a, b, pointer_to(pages), size, "pages registered with A, then B")
    other = mmap.mmap(-1, size)
    _both(b, a, pointer_to(other), size, "pages registered with B, then A (the columns swapped)")
    a.current()
    allocated = a.made("cuMemHostAlloc", size, PORTABLE_MAPPED)
    found = register(b, allocated, size)
    row(
        "cuMemHostAlloc in A, registered with B", B=found, through_A=gpu_writes(a, allocated, allocated),
        through_B=gpu_writes(b, allocated, allocated), copy_through_B=_copies_through(b, allocated, size),
    )  # fmt: skip
    times = {}
    for mib in (4, 256, 1024):
        large = mmap.mmap(-1, mib << 20)
        at = pointer_to(large)
        ctypes.memset(at, 1, mib << 20)
        times[f"{mib} MiB"] = {"A": register(a, at, mib << 20)["ms"], "B": register(b, at, mib << 20)["ms"]}
        for driver in (a, b):
            driver.current()
            driver.code("cuMemHostUnregister", at)
    row("time of registering", **times)
    a.current()
    began = now()
    code = a.code("cuDevicePrimaryCtxReset_v2", 0)
    row("reset of A", code=code, ms=ms(began, now()))
    at = pointer_to(pages)
    row("registered pages after it", through_B=gpu_writes(b, at, at), copy=_copies_through(b, at, size))
    present = mapped(allocated)
    row("A's cuMemHostAlloc after it", still_mapped=present)
    if present:
        row("... used", through_B=gpu_writes(b, allocated, allocated))
    done()


# ---- graphs

KERNEL, MEMCPY, MEMSET = 0, 1, 2
_KERNEL_BYTES, _MEMSET_BYTES, _MEMCPY_BYTES = 72, 48, 256


def capture(driver: Driver, base: int, steps: int) -> int:
    """A graph of `steps` rounds: two kernels beside each other, a memset, a copy. Captured."""
    driver.current()
    line, side = driver.stream(), driver.stream()
    events = [driver.made("cuEventCreate", 2) for _ in range(2)]
    driver("cuStreamBeginCapture_v2", line, 1)
    for step in range(steps):
        offset = 256 * (step % 64)
        driver("cuEventRecord", events[0], line)
        driver("cuStreamWaitEvent", side, events[0], 0)
        driver.launch("increment", base + offset, 8, stream=line)
        driver.launch("increment", base + 65536 + offset, 8, stream=side)
        driver("cuEventRecord", events[1], side)
        driver("cuStreamWaitEvent", line, events[1], 0)
        driver("cuMemsetD32Async", base + 131072 + offset, step, 8, line)
        driver("cuMemcpyDtoDAsync_v2", base + 196608 + offset, base + 131072 + offset, 32, line)
    out = ctypes.c_uint64()
    driver("cuStreamEndCapture", line, ctypes.byref(out))
    return out.value


def _listed(driver: Driver, graph: int) -> tuple[list[int], list[tuple[int, int]]]:
    """The nodes of a graph and its edges."""
    count = ctypes.c_size_t()
    driver("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_uint64 * count.value)()
    driver("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    driver("cuGraphGetEdges", graph, None, None, ctypes.byref(count))
    begins, ends = (ctypes.c_uint64 * count.value)(), (ctypes.c_uint64 * count.value)()
    driver("cuGraphGetEdges", graph, begins, ends, ctypes.byref(count))
    return list(nodes), list(zip(begins, ends, strict=True))


def _node_again(a: Driver, b: Driver, functions: dict[int, int], graph: int, node: int) -> int:
    """A node of A's made again in B's graph, its function translated; B's node."""
    kind = ctypes.c_int()
    a("cuGraphNodeGetType", node, ctypes.byref(kind))
    if kind.value == KERNEL:
        buffer = ctypes.create_string_buffer(_KERNEL_BYTES)
        a("cuGraphKernelNodeGetParams_v2", node, buffer)
        (function,) = struct.unpack_from("<Q", buffer.raw)
        struct.pack_into("<Q", buffer, 0, functions[function])
        struct.pack_into("<QQ", buffer, 56, 0, 0)
        return b.made("cuGraphAddKernelNode_v2", graph, None, 0, buffer)
    sizes = {MEMCPY: ("Memcpy", _MEMCPY_BYTES), MEMSET: ("Memset", _MEMSET_BYTES)}
    name, size = sizes[kind.value]
    buffer = ctypes.create_string_buffer(size)
    a(f"cuGraph{name}NodeGetParams", node, buffer)
    return b.made(f"cuGraphAdd{name}Node", graph, None, 0, buffer, b.context)


def rebuild(a: Driver, b: Driver, source: int) -> int:
    """A's graph made again in B from what A's getters say. Raises DriverError, KeyError."""
    functions = {function: b.functions[name] for name, function in a.functions.items()}
    a.current()
    nodes, edges = _listed(a, source)
    b.current()
    graph = b.made("cuGraphCreate", 0)
    own = {node: _node_again(a, b, functions, graph, node) for node in nodes}
    begins = (ctypes.c_uint64 * len(edges))(*[own[begin] for begin, _ in edges])
    ends = (ctypes.c_uint64 * len(edges))(*[own[end] for _, end in edges])
    b("cuGraphAddDependencies", graph, begins, ends, len(edges))
    return graph


def _run(driver: Driver, graph: int, base: int) -> tuple[bytes, float, float]:
    """The bytes after two launches on zeroed memory; times of instantiation and of the first launch."""
    driver.current()
    began = now()
    executable = driver.made("cuGraphInstantiateWithFlags", graph, 0)
    made = now()
    driver("cuMemsetD8_v2", base, 0, 262144)
    driver.sync()
    launched = now()
    driver("cuGraphLaunch", executable, 0)
    driver.sync()
    ran = now()
    driver("cuGraphLaunch", executable, 0)
    driver.sync()
    return driver.read(base, 262144), ms(began, made), ms(launched, ran)


def graph(cubin: str, folder: str, pipe: str) -> None:
    """Graphs captured in A and made again in B, at one address, launched in both."""
    a, b = pair(cubin, folder, pipe)
    base = 0x2000_0000_0000
    a.current()
    handle = a.create()
    got = a.reserve(1 << 30, base)
    ctypes.CDLL(None).munmap(ctypes.c_void_p(got), ctypes.c_size_t(1 << 30))
    a.map(got, handle)
    fd = a.export(handle)
    b.current()
    there = b.reserve(1 << 30, got)
    row("addresses", A=hex(got), B=hex(there), same=got == there)
    b.map(there, b.adopt(fd), GRANULE)
    for steps in (5, 50, 500):
        source = capture(a, got, steps)
        result, instantiate, first_launch = _run(a, source, got)
        began = now()
        again = rebuild(a, b, source)
        rebuilt = ms(began, now())
        other, instantiate_b, first_b = _run(b, again, there)
        row(
            f"graph of {steps * 4} nodes", equal=result == other and any(result), rebuild_ms=rebuilt,
            instantiate_ms=[instantiate, instantiate_b], first_launch_ms=[first_launch, first_b],
        )  # fmt: skip
    done()


def window(cubin: str, folder: str, pipe: str) -> None:
    """The same addresses in both copies (faultinject.measure.failover_window)."""
    run_window(cubin, folder, pipe)
    done()
