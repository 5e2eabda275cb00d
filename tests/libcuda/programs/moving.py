"""A program that obeys, whose driver may be changed under it: run by tests/libcuda/test_failover.py.

Each line of its input is a Python expression; the answer is a line with its repr.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

from faultinject.measure.failover_driver import Driver, DriverError

IMAGE = b"standin module\nkernel add add 0\nkernel late add 200000\nkernel fill fill 0\n"
IMAGE += b"kernel long add 30000000\nkernel store store 0\n"
ADD = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)


class Program(Driver):
    def __init__(self) -> None:
        super().__init__(ctypes.CDLL("libcuda.so.1"))
        self("cuInit", 0)
        self.context = self.made("cuDevicePrimaryCtxRetain", 0)
        self.current()
        self.module = self.made("cuModuleLoadData", IMAGE)
        for name in ("add", "late", "fill", "long", "store"):
            self.functions[name] = self.made("cuModuleGetFunction", self.module, name.encode())

    def memory(self, size: int) -> int:
        address = self.made("cuMemAlloc_v2", size)
        self("cuMemsetD8_v2", address, 0, size)
        return address

    def run(self, kernel: str, *values: int, stream: int = 0) -> int:
        held = [kind(value) for kind, value in zip(ADD, values, strict=True)]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        return self.code(
            "cuLaunchKernel", self.functions[kernel], 1, 1, 1, 1, 1, 1, 0, stream, pointers, None
        )

    def sync(self) -> int:  # type: ignore[override]
        return self.code("cuCtxSynchronize")

    def word(self, address: int) -> int:
        out = ctypes.c_uint32()
        self("cuMemcpyDtoH_v2", ctypes.byref(out), address, 4)
        return out.value

    def now(self) -> int:
        return self.made("cuCtxGetCurrent")

    def function(self, name: str) -> int:
        out = ctypes.c_uint64()
        self("cuGetProcAddress_v2", name.encode(), ctypes.byref(out), 12000, 0, None)
        return out.value

    def pinned(self) -> int:
        """Pinned memory, taken and given back."""
        return self.code("cuMemFreeHost", self.made("cuMemHostAlloc", 1 << 20, 0))


class Later:
    """A thread with a context of its own that answers one expression at a time."""

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

    def result(self) -> object:
        assert self._answered.wait(20)
        return self._answer


def mappings(part: str) -> int:
    return sum(part in line for line in Path("/proc/self/maps").read_text().splitlines())


gpu = Program()
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
