"""The common parts of the cuda-bindings programs that count words up in four buffers."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from typing import Any

from cuda.bindings import driver

from faultinject.programs.devices.nvidia import checked
from faultinject.programs.workloads.bindings.primary import image_for, use_primary_context

STANDIN_IMAGE = b"standin module\nkernel fill fill 0\nkernel increment add 0\n"
WORDS, THREADS = 1 << 20, 256


def image_and_words(backend: str) -> tuple[bytes, int]:
    """The module with the kernels, and the number of 4-byte words of a buffer."""
    return image_for(backend, STANDIN_IMAGE), WORDS >> 6 if backend == "simulated" else WORDS


class Counting:
    """A primary context, the kernels, events, and buffers of zeros."""

    def __init__(self, seed: int, image: bytes, words: int, events: int) -> None:
        self.device = use_primary_context()
        self.context = checked(driver.cuCtxGetCurrent())
        self.module = checked(driver.cuModuleLoadData(image))
        self.fill = checked(driver.cuModuleGetFunction(self.module, b"fill"))
        self.increment = checked(driver.cuModuleGetFunction(self.module, b"increment"))
        self.words, self.bytes = words, words * 4
        self.random = random.Random(seed)
        untimed = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.events = [checked(driver.cuEventCreate(untimed)) for _ in range(events)]
        self.first, self.middle, self.last, self.beside = (self._new() for _ in range(4))
        checked(driver.cuCtxSynchronize())

    def _new(self) -> int:
        at = int(checked(driver.cuMemAlloc(self.bytes)))
        checked(driver.cuMemsetD32(at, 0, self.words))
        return at

    @staticmethod
    def _stream() -> Any:
        return checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    @staticmethod
    def _blocks(words: int) -> int:
        return min(1024, -(-words // THREADS))

    @staticmethod
    def _arguments(at: int, words: int, value: int) -> tuple[tuple[int, ...], tuple[type, ...]]:
        # `increment` takes two of these on a GPU, and its step as the third on the stand-in.
        return (at, words, value), (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32)

    def _launch(self, function: Any, at: int, words: int, value: int, stream: Any) -> None:
        shape, arguments = (self._blocks(words), 1, 1, THREADS, 1, 1), self._arguments(at, words, value)
        checked(driver.cuLaunchKernel(function, *shape, 0, stream, arguments, 0))

    def _then(self, number: int, before: Any, after: Any) -> None:
        checked(driver.cuEventRecord(self.events[number], before))
        checked(driver.cuStreamWaitEvent(after, self.events[number], 0))

    def results(self) -> Iterator[bytes]:
        for at in (self.first, self.middle, self.last, self.beside):
            data = bytearray(self.bytes)
            checked(driver.cuMemcpyDtoH(data, at, len(data)))
            yield bytes(data)

    def close(self) -> None:
        for at in (self.first, self.middle, self.last, self.beside):
            checked(driver.cuMemFree(at))
        checked(driver.cuDevicePrimaryCtxRelease(self.device))
