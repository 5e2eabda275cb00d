"""A program that evaluates commands while its driver is changed: run by tests/libcuda/test_failover.py.

Each line of its input is a Python expression; the answer is a line with its repr.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from faultinject.programs.devices.instance import Driver, DriverError
from tests.support import nodes as kinds
from tests.support.nodes import EMPTY, GRAPH, HOST, KERNEL, MEMCPY, MEMSET, Nodes

IMAGE = b"standin module\nkernel add add 0\nkernel late add 200000\nkernel fill fill 0\n"
IMAGE += b"kernel copy copy 0\nkernel slow add 3000000\nkernel long add 30000000\nkernel store store 0\n"
IMAGE += b"kernel trap trap 0\nkernel condition condition 0\nglobal table 16\n"
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
ADD = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)


class Arguments:
    """Arguments of `add` and similar kernels, valid while this object lives."""

    def __init__(self, values: Sequence[int]) -> None:
        self._held = [kind(value) for kind, value in zip(ADD, values, strict=True)]
        self.pointers = (ctypes.c_void_p * len(self._held))(*map(ctypes.addressof, self._held))


class Program(Driver):
    def __init__(self) -> None:
        super().__init__(ctypes.CDLL("libcuda.so.1"))
        self("cuInit", 0)
        self.context = self.made("cuDevicePrimaryCtxRetain", int(os.environ.get("MPSD_TEST_DEVICE", "0")))
        self.current()
        self.module = self.made("cuModuleLoadData", IMAGE)
        for name in ("add", "late", "fill", "copy", "slow", "long", "store", "trap", "condition"):
            self.functions[name] = self.made("cuModuleGetFunction", self.module, name.encode())
        self.began: list[str] = []
        self.ran: list[tuple[str, int]] = []
        self.may_go: dict[str, threading.Event] = {}
        self._hosted: list[object] = []

    def host(
        self, name: str, *, stream: int = 0, callback: bool = False, holds: bool = False, does: str = ""
    ) -> int:
        """Add a host callback or stream callback to the stream; with `holds` it waits for go(name)."""
        self.may_go[name] = threading.Event()

        def run(status: int) -> None:
            self.began.append(name)
            if holds:
                self.may_go[name].wait()
            self.ran.append((name, eval(does) if does else status))

        if callback:
            given = CALLBACK(lambda of, status, _: run(status if (of or 0) == stream else -1))
            self._hosted.append(given)
            return self.code("cuStreamAddCallback", stream, given, None, 0)
        made = FUNCTION(lambda _: run(0))
        self._hosted.append(made)
        return self.code("cuLaunchHostFunc", stream, made, None)

    def go(self, name: str) -> None:
        self.may_go[name].set()

    def memory(self, size: int) -> int:
        address = self.made("cuMemAlloc_v2", size)
        self("cuMemsetD8_v2", address, 0, size)
        return address

    def run(self, kernel: str, *values: int, stream: int = 0, shared: int = 0) -> int:
        """Launch a kernel with `shared` bytes of dynamic shared memory."""
        function, arguments = self.functions[kernel], Arguments(values)
        return self.code("cuLaunchKernel", function, *[1] * 6, shared, stream, arguments.pointers, None)

    def run_with(self, attribute: ctypes.Array[ctypes.c_uint32], *values: int, stream: int = 0) -> int:
        """Launch `add` with one launch attribute: 18 words, of which the first is its number."""
        layout = "=7I4xQQI4x"
        config = struct.pack(layout, *[1] * 6, 0, stream, ctypes.addressof(attribute), 1)
        function, arguments = self.functions["add"], Arguments(values)
        return self.code("cuLaunchKernelEx", config, function, arguments.pointers, None)

    def own(self, call: str, address: int, value: int) -> int:
        """Launch `add` on 8 words in the per-thread default stream."""
        arguments = Arguments((address, 8, value))
        return self.code(call, self.functions["add"], *[1] * 6, 0, 0, arguments.pointers, None)

    def found(self, kernel: str, way: str) -> int:
        """Find a kernel in a newly loaded module or library, by this way, and name it after the way."""
        if way.startswith("library"):
            library = ctypes.c_void_p()
            self("cuLibraryLoadData", ctypes.byref(library), IMAGE, None, None, 0, None, None, 0)
        else:
            module = self.made("cuModuleLoadData", IMAGE)
        if way.endswith("listed"):
            of, kinds = (
                (library, "LibraryEnumerateKernels")
                if "library" in way
                else (module, "ModuleEnumerateFunctions")
            )
            several = (ctypes.c_uint64 * 16)()
            self(f"cu{kinds}", several, 16, of)
            names = {self.name_of(one): one for one in several if one}
            self.functions[way] = names[kernel]
        else:
            at = ctypes.c_void_p()
            self("cuGetExportTable", ctypes.byref(at), b"s" * 16)
            find = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
            table = ctypes.cast(at, ctypes.POINTER(ctypes.c_void_p))
            if "library" in way:
                module = self.made("cuLibraryGetModule", library)
            function = ctypes.c_void_p()
            assert find(table[1] or 0)(ctypes.addressof(function), module, kernel.encode()) == 0
            self.functions[way] = function.value or 0
        return 0

    def name_of(self, function: int) -> str:
        name = ctypes.c_char_p()
        self("cuFuncGetName", ctypes.byref(name), ctypes.c_uint64(function))
        return (name.value or b"").decode()

    def variable(self, name: str) -> int:
        """Return the address of a module variable."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        self("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), self.module, name.encode())
        return address.value

    def put(self, address: int, *words: int) -> int:
        given = (ctypes.c_uint32 * len(words))(*words)
        return self.code("cuMemcpyHtoD_v2", address, given, 4 * len(words))

    def sync(self) -> int:  # type: ignore[override]
        return self.code("cuCtxSynchronize")

    def word(self, address: int) -> int:
        out = ctypes.c_uint32()
        self("cuMemcpyDtoH_v2", ctypes.byref(out), address, 4)
        return out.value

    def timed(self, event: int) -> int:
        """Record the event and wait for it."""
        self("cuEventRecord", event, 0)
        return self.code("cuEventSynchronize", event)

    def elapsed(self, start: int, end: int) -> float:
        out = ctypes.c_float()
        self("cuEventElapsedTime", ctypes.byref(out), start, end)
        return out.value

    def peek(self, address: int, words: int) -> list[int]:
        """Return the words that a kernel reads there, copied to plain memory."""
        out = self.memory(4 * words)
        held = [ctypes.c_uint64(value) for value in (out, address, words)]
        pointers = (ctypes.c_void_p * 3)(*map(ctypes.addressof, held))
        self("cuLaunchKernel", self.functions["copy"], 1, 1, 1, 1, 1, 1, 0, 0, pointers, None)
        return [self.word(out + 4 * i) for i in range(words)]

    def now(self) -> int:
        return self.made("cuCtxGetCurrent")

    def function(self, name: str) -> int:
        out = ctypes.c_uint64()
        self("cuGetProcAddress_v2", name.encode(), ctypes.byref(out), 12000, 0, None)
        return out.value

    def pinned(self) -> int:
        """Allocate and free pinned memory."""
        return self.code("cuMemFreeHost", self.made("cuMemHostAlloc", 1 << 20, 0))


class Later:
    """A thread with a current context that answers one expression at a time."""

    def __init__(self, driver: Program) -> None:
        self._ask, self._answered = threading.Event(), threading.Event()
        self._expression, self._answer = "", None
        self._thread = threading.Thread(target=self._run, args=(driver,), daemon=True)
        self._thread.start()

    def _run(self, driver: Program) -> None:
        driver.current()
        while True:
            self._ask.wait()
            self._ask.clear()
            try:
                self._answer = eval(self._expression)
            except DriverError as error:
                self._answer = str(error)
            self._answered.set()

    def start(self, expression: str) -> None:
        self._expression = expression
        self._answered.clear()
        self._ask.set()

    def comes_back(self) -> bool:
        """Return whether the answer comes within 0.2 s; a later answer is possible."""
        return self._answered.wait(0.2)

    def result(self) -> object:
        assert self._answered.wait(20)
        return self._answer


def mappings(part: str) -> int:
    return sum(part in line for line in Path("/proc/self/maps").read_text().splitlines())


def memory_descriptors() -> int:
    """Count the descriptors of the stand-in's physical memory."""
    names = (os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return sum("standin" in name for name in names)


def memory_of_another(size: int) -> int:
    """Return a descriptor as another process would export it: the stand-in's physical memory."""
    fd = os.memfd_create("another's", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def in_child(expression: str) -> int:
    """Evaluate in a forked child and return the value, up to 255."""
    child = os.fork()
    if not child:
        os._exit(eval(expression))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


__all__ = ["EMPTY", "GRAPH", "HOST", "KERNEL", "MEMCPY", "MEMSET", "kinds"]

gpu = Program()
nodes = Nodes(gpu)
os.write(1, b"%d\n" % os.getpid())
for line in sys.stdin:
    try:
        answer = repr(eval(line))
    except DriverError as error:
        answer = str(error)
    except SyntaxError:
        exec(line)
        answer = "None"
    os.write(1, answer.encode() + b"\n")
