"""Two instances of the stand-in driver in one process, as in a fail-over.

Run by tests/libcuda/test_standin_copies.py, which names the function to run and the helper library.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faultinject.programs.devices.driverfile import Helper, copy_plain, overwrite_slots
from faultinject.programs.devices.instance import Driver

MIB = 1 << 20
WINDOW, SPAN, GRANULE = 0x2000_0000_0000, 64 * MIB, 2 * MIB
KERNELS = {"store": b"store 0", "add": b"add 0", "late": b"add 200000", "long": b"add 30000000"}
IMAGE = b"standin module\n" + b"".join(b"kernel %s %s\n" % (n.encode(), k) for n, k in KERNELS.items())
KINDS = {"store": (ctypes.c_uint64, ctypes.c_uint32)}
ADD = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)

libc = ctypes.CDLL(None, use_errno=True)
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mmap.restype = ctypes.c_void_p
libc.dlclose.argtypes = [ctypes.c_void_p]

REAL = Path(os.environ["LD_LIBRARY_PATH"]) / "libcuda.so.1"
FOLDER, HELPER = Path(sys.argv[2]), Helper(Path(sys.argv[3]))
PIPES = [os.environ.get("CUDA_MPS_PIPE_DIRECTORY", ""), os.environ.get("SECOND_PIPE_DIRECTORY", "")]


class Copy(Driver):
    """A driver instance with its context and the stand-in's kernels."""

    def __init__(
        self, library: ctypes.CDLL, within: Callable[[Callable[[], Any]], Any] = lambda act: act()
    ) -> None:
        super().__init__(library)
        self._within = within

    def ready(self) -> Copy:
        def begin() -> None:
            self("cuInit", 0)
            self.context = self.made("cuDevicePrimaryCtxRetain", 0)

        self._within(begin)
        self.current()
        self.module = self.made("cuModuleLoadData", IMAGE)
        for name in KERNELS:
            self.functions[name] = self.made("cuModuleGetFunction", self.module, name.encode())
        return self

    def run(self, kernel: str, *values: int, stream: int = 0) -> None:
        kinds = KINDS.get(kernel, ADD)
        held = [kind(value) for kind, value in zip(kinds, values, strict=True)]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        self.current()
        self("cuLaunchKernel", self.functions[kernel], 1, 1, 1, 1, 1, 1, 0, stream, pointers, None)

    def ran(self, kernel: str, *values: int) -> int:
        """Run a kernel and return the code of a wait for it."""
        self.run(kernel, *values)
        return self.code("cuCtxSynchronize")

    def word(self, address: int) -> int:
        out = ctypes.c_uint32()
        self.current()
        self("cuMemcpyDtoH_v2", ctypes.byref(out), address, 4)
        return out.value

    def unload(self) -> None:
        assert libc.dlclose(self.library._handle) == 0


def own() -> Copy:
    return Copy(ctypes.CDLL(str(REAL), mode=os.RTLD_NOW | os.RTLD_LOCAL))


def another(number: int, pipe: int = 1) -> Copy:
    """Load one more driver file with its calls of bind() and getenv() redirected; not yet initialised."""
    path = copy_plain(REAL, FOLDER / f"copy-{number}.so")
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    before = HELPER.counts()
    assert overwrite_slots(library, path, HELPER)["slots written"] == 2
    assert HELPER.counts() == before
    return Copy(library, lambda act: HELPER.within(Path(PIPES[pipe]), number, act))


def both() -> tuple[Copy, Copy]:
    a, b = own().ready(), another(1).ready()
    assert a.context != b.context
    return a, b


def placeholder(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address < end:
            return line.split()[1]
    return "nothing"


def one_window(a: Copy, b: Copy) -> None:
    """Reserve the window in both instances."""
    a.current()
    assert a.reserve(SPAN, WINDOW) == WINDOW
    assert placeholder(WINDOW) == "---p"
    b.current()
    elsewhere = b.reserve(SPAN, WINDOW)
    assert elsewhere != WINDOW
    b("cuMemAddressFree", elsewhere, SPAN)
    assert libc.munmap(WINDOW, SPAN) == 0
    assert b.reserve(SPAN, WINDOW) == WINDOW
    assert placeholder(WINDOW) == "---p"


def shared(a: Copy, b: Copy, address: int) -> tuple[int, int]:
    """Map new memory of A at one address in both instances; return A's handle and B's."""
    a.current()
    handle = a.create()
    a.map(address, handle)
    fd = a.export(handle)
    b.current()
    adopted = b.adopt(fd)
    os.close(fd)
    b.map(address, adopted)
    return handle, adopted


def opened() -> list[str]:
    names = Path("/proc/net/unix").read_text().split("\n")
    return sorted(name.split()[-1] for name in names if name.endswith(f"-{os.getpid()}"))


# -- run by the test ---------------------------------------------------------------------------------------


def names() -> None:
    """The second instance finds the socket name taken; with redirected calls it gets its own name and
    directory."""
    a = own().ready()
    plain = Copy(ctypes.CDLL(str(copy_plain(REAL, FOLDER / "plain.so")), mode=os.RTLD_NOW | os.RTLD_LOCAL))
    assert plain.code("cuInit", 0) == 304
    assert plain.code("cuDeviceGetCount", ctypes.byref(ctypes.c_int())) == 3
    (first,) = opened()
    assert first.startswith("@cuda-uvmfd-") and str(os.stat("/proc/self/ns/pid").st_ino) in first
    b = another(1)
    assert HELPER.counts()["binds"] == 0
    b.ready()
    counts = HELPER.counts()
    assert (counts["binds"], counts["renamed"], counts["pipe reads"]) == (1, 1, 1)
    assert opened() == sorted([first, first.replace("@", "@mpsd-copy-1-")])
    child = os.fork()
    if not child:
        os._exit(0 if (a.code("cuInit", 0), b.code("cuInit", 0)) == (3, 3) else 1)
    assert os.waitpid(child, 0)[1] == 0
    a("cuDevicePrimaryCtxReset_v2", 0)
    a.unload()
    plain.unload()
    assert own().ready().code("cuCtxSynchronize") == 0


def memory() -> None:
    """Both instances map one buffer at one address, each with its own mapping and reservation."""
    a, b = both()
    one_window(a, b)
    at = WINDOW + 3 * GRANULE
    handle, adopted = shared(a, b, at)
    assert (a.ran("add", at, 4, 1), b.ran("add", at, 4, 2), a.word(at), b.word(at)) == (0, 0, 3, 3)
    a.unmap(at, handle)
    assert (b.ran("add", at, 4, 4), b.word(at)) == (0, 7)
    # A's GPU maps the address again, although B owns it on the host.
    second = shared(a, b, at + GRANULE)
    fresh = a.create()
    a.map(at, fresh)
    assert (a.ran("add", at, 1, 50), a.word(at), b.word(at)) == (0, 50, 7)
    b.unmap(at, adopted)
    assert b.code("cuMemcpyDtoH_v2", ctypes.byref(ctypes.c_uint32()), at, 4) == 1
    assert (a.ran("add", at, 1, 1), a.word(at)) == (0, 51)
    a.unmap(at, fresh)
    a.unmap(at + GRANULE, second[0])
    assert (a.code("cuMemAddressFree", WINDOW, SPAN), placeholder(WINDOW)) == (0, "---p")
    assert (b.ran("add", at + GRANULE, 1, 9), b.word(at + GRANULE)) == (0, 9)
    b.unmap(at + GRANULE, second[1])
    assert (b.code("cuMemAddressFree", WINDOW, SPAN), placeholder(WINDOW)) == (0, "nothing")


def live() -> None:
    """A third instance reserves the window of one that works in it: munmap on the host does not affect the
    latter."""
    a, b = both()
    one_window(a, b)
    shared(a, b, WINDOW)
    assert libc.munmap(WINDOW, SPAN) == 0
    assert b.ran("add", WINDOW, 8, 5) == 0
    # While nothing is mapped there, this instance's own reservations still avoid the window.
    elsewhere = b.reserve(SPAN, WINDOW)
    assert elsewhere != WINDOW
    c = another(2).ready()
    assert c.reserve(SPAN, WINDOW) == WINDOW
    b("cuMemAddressFree", elsewhere, SPAN)
    assert (b.word(WINDOW), a.word(WINDOW)) == (5, 5)


def strays() -> None:
    """A stray access in A to memory that only B maps ends A's context alone."""
    a, b = both()
    one_window(a, b)
    b.current()
    b.map(WINDOW, b.create())
    assert a.ran("store", WINDOW, 1) == 700
    assert (a.code("cuCtxSynchronize"), a.code("cuMemFree_v2", 0)) == (700, 700)
    assert (b.ran("add", WINDOW, 8, 5), b.word(WINDOW)) == (0, 5)
    a("cuDevicePrimaryCtxReset_v2", 0)
    a.ready()
    assert (a.ran("store", WINDOW, 1), b.ran("add", WINDOW, 8, 5), b.word(WINDOW)) == (700, 0, 10)


def unmapped() -> None:
    """Work queued behind the unmapping writes nothing, and a broken context does not block waits."""
    a, b = both()
    one_window(a, b)
    handle, _ = shared(a, b, WINDOW)
    a.run("late", WINDOW, 8, 1)
    a.current()
    a("cuMemsetD8Async", WINDOW, 1, 8, 0)
    a.unmap(WINDOW, handle)
    assert (a.code("cuCtxSynchronize"), b.word(WINDOW)) == (700, 0)
    a("cuDevicePrimaryCtxReset_v2", 0)
    a.ready()
    a.current()
    quick = a.made("cuStreamCreate", 1)
    a.run("long", WINDOW, 8, 1)
    a.run("store", 0x7E00_0000_0000, 1, stream=quick)
    assert a.code("cuStreamSynchronize", quick) == 700
    began = time.monotonic()
    a("cuDevicePrimaryCtxReset_v2", 0)
    assert time.monotonic() - began < 10


def host() -> None:
    """Both instances use the same pages: memory allocated by one can be registered with the other."""
    a, b = both()
    pages = libc.mmap(None, MIB, 3, 0x22, -1, 0)
    lent = a.made("cuMemHostAlloc", MIB, 2)
    for driver in (a, b):
        driver.current()
        driver("cuMemHostRegister_v2", pages, MIB, 2)
        assert driver.code("cuMemHostRegister_v2", pages, MIB, 2) == 712
        assert driver.made("cuMemHostGetDevicePointer_v2", pages, 0) == pages
        assert driver.ran("add", pages, 4, 1) == 0
    assert b.code("cuMemHostGetDevicePointer_v2", ctypes.byref(ctypes.c_uint64()), lent, 0) == 1
    b("cuMemHostRegister_v2", lent, MIB, 0)
    assert b.ran("add", lent, 4, 3) == 0
    assert (ctypes.c_uint32.from_address(pages).value, ctypes.c_uint32.from_address(lent).value) == (2, 3)
    b("cuMemHostUnregister", lent)
    assert b.code("cuMemHostUnregister", lent) == 713
    a.current()
    a("cuMemFreeHost", lent)
    a("cuDevicePrimaryCtxReset_v2", 0)
    assert b.ran("add", pages, 4, 1) == 0


def handles() -> None:
    """A handle is valid only in the instance that returned it."""
    a, b = both()
    made = {}
    for driver in (a, b):
        driver.current()
        stream = driver.made("cuStreamCreateWithPriority", 1, -3)
        priority, flags = ctypes.c_int(), ctypes.c_uint()
        driver("cuStreamGetPriority", stream, ctypes.byref(priority))
        driver("cuStreamGetFlags", stream, ctypes.byref(flags))
        assert (priority.value, flags.value) == (-3, 1)
        event = driver.made("cuEventCreate", 0)
        library = driver.made("cuLibraryLoadData", IMAGE, 0, 0, 0, 0, 0, 0)
        kernel = driver.made("cuLibraryGetKernel", library, b"add")
        assert driver.made("cuLibraryGetModule", library) and driver.made("cuKernelGetFunction", kernel)
        driver("cuStreamBeginCapture_v2", stream, 0)
        driver.run("late", WINDOW, 0, 0, stream=stream)
        graph = ctypes.c_uint64()
        driver("cuStreamEndCapture", stream, ctypes.byref(graph))
        ready = driver.made("cuGraphInstantiateWithFlags", graph.value, 0)
        made[driver] = stream, event, library, kernel, graph.value, ready
    stream, event, library, kernel, recorded, ready = made[a]
    b.current()
    out = ctypes.byref(ctypes.c_uint64())
    assert b.code("cuCtxSetCurrent", a.context) == 201
    wrong = [
        b.code("cuStreamQuery", stream),
        b.code("cuStreamSynchronize", stream),
        b.code("cuEventQuery", event),
        b.code("cuEventRecord", event, 0),
        b.code("cuEventRecord", made[b][1], stream),
        b.code("cuStreamWaitEvent", made[b][0], event, 0),
        b.code("cuLibraryGetKernel", out, library, b"add"),
        b.code("cuLibraryGetModule", out, library),
        b.code("cuLibraryUnload", library),
        b.code("cuKernelGetFunction", out, kernel),
        b.code("cuModuleGetFunction", out, a.module, b"add"),
        b.code("cuModuleGetGlobal_v2", out, 0, a.module, b"add"),
        b.code("cuFuncSetAttribute", a.functions["add"], 8, 0),
        b.code("cuKernelSetAttribute", 8, 0, kernel, 0),
        b.code("cuLaunchKernel", a.functions["add"], 1, 1, 1, 1, 1, 1, 0, 0, 0, 0),
        b.code("cuLaunchHostFunc", stream, 1, 0),
        b.code("cuMemsetD32Async", b.made("cuMemAlloc_v2", 64), 0, 4, stream),
    ]
    assert wrong == [400] * len(wrong)
    assert (b.code("cuGraphLaunch", ready, 0), b.code("cuGraphDestroy", recorded)) == (1, 1)
    attribute, limit = ctypes.c_int(), ctypes.c_size_t()
    most = 227 << 10
    assert b.code("cuLaunchKernel", b.functions["store"], 1, 1, 1, 1, 1, 1, most, 0, 0, 0) == 1
    assert b.code("cuFuncSetAttribute", b.functions["store"], 8, most + 1) == 1
    b("cuFuncSetAttribute", b.functions["store"], 8, most)
    b("cuFuncGetAttribute", ctypes.byref(attribute), 8, b.functions["store"])
    assert attribute.value == most
    b("cuCtxSetLimit", 0, 4096)
    for driver, value in ((a, 1024), (b, 4096)):
        driver.current()
        driver("cuCtxGetLimit", ctypes.byref(limit), 0)
        assert limit.value == value
    assert b.code("cuCtxSetLimit", 99, 1) == 215
    # An event of an ended context is invalid in the next one.
    b("cuDevicePrimaryCtxReset_v2", 0)
    b.ready()
    assert b.code("cuEventQuery", made[b][1]) == 400
    a.current()
    a("cuStreamSynchronize", stream)
    a("cuEventRecord", event, stream)
    a("cuEventSynchronize", event)


def _counts() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def _one_life(a: Copy, number: int) -> None:
    """Run an instance that works, leaves objects behind, and is unloaded."""
    # A driver does not map a range that was occupied when it created its context, so free the window first.
    assert libc.munmap(WINDOW, SPAN) == 0
    b = another(number).ready()
    assert b.reserve(SPAN, WINDOW) == WINDOW
    handle, _ = shared(a, b, WINDOW + number * GRANULE)
    b.current()
    at = b.made("cuMemAlloc_v2", 5 * MIB)
    for stream in (0, b.made("cuStreamCreate", 1), b.made("cuStreamCreate", 0)):
        b.run("add", WINDOW + number * GRANULE, 8, 1, stream=stream)
    b("cuCtxSynchronize")
    assert b.ran("store", at, 1) == 0
    a.unmap(WINDOW + number * GRANULE, handle)
    if number % 2:
        assert b.ran("store", 0x7E00_0000_0000, 1) == 700
    b("cuDevicePrimaryCtxReset_v2", 0)
    b.unload()
    path = FOLDER / f"copy-{number}.so"
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert libc.mmap(WINDOW, SPAN, 0, 0x104022, -1, 0) == WINDOW
    path.unlink()
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def cycles() -> None:
    """Run 20 instances in sequence, half of them with a fault."""
    a = own().ready()
    assert a.reserve(SPAN, WINDOW) == WINDOW
    a.run("add", a.made("cuMemAlloc_v2", MIB), 8, 1)
    for number in range(1, 4):
        _one_life(a, number)
    before = _counts()
    for number in range(4, 24):
        _one_life(a, number)
    after = _counts()
    assert {k: after[k] - before[k] for k in before} == dict.fromkeys(before, 0)
    assert a.code("cuCtxSynchronize") == 0


def obey() -> None:
    """Evaluate each line of the input and print its value."""
    a, b = both()
    one_window(a, b)
    handle, _ = shared(a, b, WINDOW)
    known = {**globals(), "a": a, "b": b, "handle": handle}
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        print(eval(line, known), flush=True)


if __name__ == "__main__":
    # The forked children end at once.
    warnings.simplefilter("ignore", DeprecationWarning)
    globals()[sys.argv[1]]()
    print("ok")
