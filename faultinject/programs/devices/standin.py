"""The stand-in driver for a program: libcuda.so.1 by ctypes, with or without the proxy.

Its kernels are functions of the driver; their duration shows in their stream alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from faultinject.programs.devices.base import NOT_SUPPORTED, Access, DeviceError
from faultinject.programs.devices.driver import Driver

IMAGE = (
    b"standin module\nkernel store store 0\nkernel fill fill 0\nkernel add add 0\nkernel sum sum 0\n"
    b"kernel trap trap 0\n"
)
UNMAPPED = 0x7E0000000000
WORD = 4
CAPTURE_THREAD_LOCAL = 1


class StandinDevice:
    """A Device on the stand-in driver: the zone kinds, traps and out-of-bounds stores."""

    def __init__(self) -> None:
        self._driver = Driver()
        module = ctypes.c_void_p()
        self._driver.call("cuModuleLoadData", ctypes.byref(module), IMAGE)
        self._module = module
        self._scratch = self.alloc(64)
        self.on_mps: bool | None = None

    def _launch(self, name: str, *arguments: Any, stream: ctypes.c_void_p | None = None) -> None:
        function = ctypes.c_void_p()
        self._driver.call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        self._driver.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, places, None)

    def alloc(self, size: int) -> int:
        return self._driver.alloc(size)

    def free(self, address: int) -> None:
        self._driver.free(address)

    def write(self, address: int, data: bytes) -> None:
        self._driver.write(address, data)

    def read(self, address: int, size: int) -> bytes:
        return self._driver.read(address, size)

    def increment(self, address: int, words: int) -> None:
        self._launch("add", ctypes.c_uint64(address), ctypes.c_uint64(words), ctypes.c_uint32(1))

    def access_range(
        self, access: Access, address: int, span: int, seconds: float, *, fill: bool = False
    ) -> None:
        at, words = ctypes.c_uint64(address), ctypes.c_uint64(span // WORD)
        match access:
            case "store" if span == WORD:
                self._launch("store", at, ctypes.c_uint32(1))
            case "store":
                self._launch("fill", at, words, ctypes.c_uint32(1))
            case "load":
                self._launch("sum", ctypes.c_uint64(self._scratch), at, words)
            case "atomic":
                # It has no atomics; a word that is read and written is the nearest.
                self._launch("add", at, words, ctypes.c_uint32(1))

    def busy(self, seconds: float, *, fill: bool = False) -> None:
        raise DeviceError(NOT_SUPPORTED, "kernels of the stand-in driver do not last")

    def endless(self, *, fill: bool = False) -> None:
        raise DeviceError(NOT_SUPPORTED, "kernels of the stand-in driver end")

    def preload_kernel(self, kind: str) -> None:
        stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
        self._driver.call("cuStreamCreate", ctypes.byref(stream), 1)
        self._driver.call("cuStreamBeginCapture_v2", stream, CAPTURE_THREAD_LOCAL)
        self._launch(kind, *self._arguments(kind, 0), stream=stream)
        self._driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))

    @staticmethod
    def _arguments(kind: str, stray: int) -> tuple[Any, ...]:
        """Return the parameters of the kernel with the kind's name."""
        if kind not in ("store", "trap"):
            raise DeviceError(NOT_SUPPORTED, f"{kind} is for the other devices")
        return () if kind == "trap" else (ctypes.c_uint64(stray or UNMAPPED), ctypes.c_uint32(1))

    def commit(self, kind: str, fire: Callable[[], None], stray: int = 0) -> None:
        arguments = self._arguments(kind, stray)
        fire()
        self._launch(kind, *arguments)
        self.synchronize()

    def free_bytes(self) -> int | None:
        return self._driver.memory_info()[0]

    def synchronize(self) -> None:
        self._driver.synchronize()

    def close(self) -> None:
        self._driver.close()
