"""A cuda-bindings program: allocations of all sizes, kernels in two streams, copies between them."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from typing import Any

from cuda.bindings import driver

from faultinject.programs.devices.nvidia import checked
from faultinject.programs.workloads.bindings.primary import image_for, use_primary_context

STANDIN_IMAGE = b"standin module\nkernel fill fill 0\n"
PIECES, LARGEST, THREADS = 24, 8 << 20, 256
UNIT, PER_STEP, UNTIMED = "pieces", PIECES, ""


class Pieces:
    """Buffers that kernels fill and that are copied into one another."""

    def __init__(self, seed: int, image: bytes) -> None:
        self.device = use_primary_context()
        self.module = checked(driver.cuModuleLoadData(image))
        self.fill = checked(driver.cuModuleGetFunction(self.module, b"fill"))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.streams = [checked(driver.cuStreamCreate(flags)) for _ in range(2)]
        self.random = random.Random(seed)
        # Sizes are drawn once: a program's memory does not change while it is timed.
        self.words = [
            self.random.randrange(64, LARGEST // 4 >> self.random.randrange(12)) for _ in range(PIECES)
        ]
        self.at = [self._new(words) for words in self.words]
        checked(driver.cuCtxSynchronize())

    def _new(self, words: int) -> int:
        at = int(checked(driver.cuMemAlloc(words * 4)))
        checked(driver.cuMemsetD32(at, 0, words))
        return at

    def _launch(self, number: int, value: int, stream: Any) -> None:
        words = self.words[number]
        arguments = (
            (self.at[number], words // 2, value),
            (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32),
        )
        grid = min(1024, -(-words // THREADS))
        checked(driver.cuLaunchKernel(self.fill, grid, 1, 1, THREADS, 1, 1, 0, stream, arguments, 0))

    def step(self) -> None:
        for number in range(PIECES):
            self._launch(number, self.random.getrandbits(32), self.streams[number % 2])
        checked(driver.cuCtxSynchronize())
        for number in range(PIECES):
            into = (number + 1) % PIECES
            size = min(self.words[number], self.words[into] // 2) * 4
            half = self.words[into] // 2 * 4
            checked(driver.cuMemcpyDtoD(self.at[into] + half, self.at[number], size))
        checked(driver.cuCtxSynchronize())

    def results(self) -> Iterator[bytes]:
        for at, words in zip(self.at, self.words, strict=True):
            data = bytearray(words * 4)
            checked(driver.cuMemcpyDtoH(data, at, len(data)))
            base, size = checked(driver.cuMemGetAddressRange(at))
            yield bytes(data)
            yield f"{int(base) == at} {size}".encode()

    def close(self) -> None:
        for at in self.at:
            checked(driver.cuMemFree(at))
        checked(driver.cuDevicePrimaryCtxRelease(self.device))


def start(seed: int, backend: str) -> Pieces:
    return Pieces(seed, image_for(backend, STANDIN_IMAGE))
