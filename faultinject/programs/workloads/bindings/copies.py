"""A cuda-bindings program of small copies, within the GPU and to the host, of every size and alignment."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator

from cuda.bindings import driver

from faultinject.programs.devices.nvidia import checked
from faultinject.programs.workloads.bindings.primary import image_for, use_primary_context

STANDIN_IMAGE = b"standin module\nkernel fill fill 0\n"
PIECES, PIECE, THREADS = 4, 3 << 20, 256
COPIES, TO_HOST = 200, 8
"""Copies of a step, and how many of them are to the host."""
LEAST, MOST = 1, 300_000
UNIT, PER_STEP, UNTIMED = "copies", COPIES, ""


class Copies:
    """Memory that a kernel fills in each step, and that is copied into itself in parts."""

    def __init__(self, seed: int, image: bytes) -> None:
        self.device = use_primary_context()
        self.module = checked(driver.cuModuleLoadData(image))
        self.fill = checked(driver.cuModuleGetFunction(self.module, b"fill"))
        self.random = random.Random(seed)
        self.at = [int(checked(driver.cuMemAlloc(PIECE))) for _ in range(PIECES)]
        for number, at in enumerate(self.at):
            checked(driver.cuMemsetD32(at, number, PIECE // 4))
        self.seen = hashlib.sha256()

    def _launch(self, at: int) -> None:
        """Return words that differ, counted up from one of its own."""
        words, value = self.random.randrange(1, 4096), self.random.getrandbits(32)
        arguments = ((at, words, value), (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32))
        checked(driver.cuLaunchKernel(self.fill, 16, 1, 1, THREADS, 1, 1, 0, 0, arguments, 0))

    def _size(self) -> int:
        """Draw as many sizes of some bytes as of some thousands; with any alignment, or the usual one."""
        size = int(LEAST * (MOST / LEAST) ** self.random.random())
        return max(1, size // 16 * 16) if self.random.random() < 0.5 else size

    def _place(self, size: int) -> int:
        offset = self.random.randrange(PIECE - size)
        return offset // 16 * 16 if self.random.random() < 0.5 else offset

    def step(self) -> None:
        for number in range(COPIES):
            to, source = self.random.sample(self.at, 2)
            if self.random.random() < 0.2:
                self._launch(to + self.random.randrange(64) * 4)
            size = self._size()
            source += self._place(size)
            if number % TO_HOST:
                checked(driver.cuMemcpyDtoDAsync(to + self._place(size), source, size, 0))
                continue
            read = bytearray(size)
            checked(driver.cuMemcpyDtoHAsync(read, source, size, 0))
            checked(driver.cuStreamSynchronize(0))
            self.seen.update(read)
        checked(driver.cuCtxSynchronize())

    def results(self) -> Iterator[bytes]:
        yield self.seen.digest()
        for at in self.at:
            data = bytearray(PIECE)
            checked(driver.cuMemcpyDtoH(data, at, PIECE))
            yield bytes(data)

    def close(self) -> None:
        for at in self.at:
            checked(driver.cuMemFree(at))
        checked(driver.cuDevicePrimaryCtxRelease(self.device))


def start(seed: int, backend: str) -> Copies:
    return Copies(seed, image_for(backend, STANDIN_IMAGE))
