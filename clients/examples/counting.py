#!/usr/bin/env python3
"""A counter in GPU memory that counts lines of input: an unmodified program, without any use of mpsd.

    mpsd-run python counting.py     # press Enter as often as you like; Ctrl-D ends it

With fail-over the count continues when its MPS server is killed or its domain is drained. The program needs
the CUDA driver and the standard library.
"""

from __future__ import annotations

import ctypes
import sys


class Gpu:
    """The first GPU's primary context, and a number in GPU memory."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SystemExit(f"counting: no CUDA driver: {error}") from None
        context, self._at = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(self._at), ctypes.c_size_t(4))
        self._call("cuMemsetD32_v2", self._at, 0, ctypes.c_size_t(1))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise SystemExit(f"counting: {name} failed with CUDA error {status}")

    def number(self) -> int:
        found = ctypes.c_uint32()
        self._call("cuMemcpyDtoH_v2", ctypes.byref(found), self._at, ctypes.c_size_t(4))
        return found.value

    def put(self, number: int) -> None:
        given = ctypes.c_uint32(number)
        self._call("cuMemcpyHtoD_v2", self._at, ctypes.byref(given), ctypes.c_size_t(4))


def main() -> None:
    gpu = Gpu()
    for _ in sys.stdin:
        gpu.put(gpu.number() + 1)
        print(gpu.number(), flush=True)


if __name__ == "__main__":
    main()
