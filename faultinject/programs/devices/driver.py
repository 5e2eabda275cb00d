"""The driver for a ctypes program: the libcuda.so.1 that the loader finds, with or without the proxy."""

from __future__ import annotations

import ctypes
from typing import Any

from faultinject.programs.devices.base import DeviceError

_SUFFIXED = frozenset(
    {
        "cuMemAlloc",
        "cuMemFree",
        "cuMemGetInfo",
        "cuMemsetD8",
        "cuMemcpyHtoD",
        "cuMemcpyDtoH",
        "cuMemcpyDtoD",
        "cuDevicePrimaryCtxRelease",
    }
)
"""Functions for which the cuda.h name means the second version."""


class Driver:
    """The first GPU's primary context, current in this thread. Every call raises DeviceError."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError(100, f"no CUDA driver: {error}") from error
        self.call("cuInit", 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function by its name in cuda.h."""
        code = getattr(self._library, f"{name}_v2" if name in _SUFFIXED else name)(*arguments)
        if code:
            raise DeviceError(code, name)

    def alloc(self, size: int) -> int:
        """Allocate `size` bytes of device memory."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def memory_info(self) -> tuple[int, int]:
        """Return the free bytes of the GPU's memory, and all of them."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def free(self, address: int) -> None:
        self.call("cuMemFree", ctypes.c_uint64(address))

    def set(self, address: int, value: int, size: int) -> None:
        self.call("cuMemsetD8", ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(size))

    def write(self, address: int, data: bytes) -> None:
        self.call("cuMemcpyHtoD", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def read(self, address: int, size: int) -> bytes:
        """Wait for all launches, then copy."""
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw

    def copy(self, to: int, source: int, size: int) -> None:
        self.call("cuMemcpyDtoD", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size))

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")

    def close(self) -> None:
        self.call("cuDevicePrimaryCtxRelease", 0)
