"""A cuda-bindings program: kernels, copies and captured graphs in three streams that wait for each other.

Words are counted up in place and handed from one buffer to the next, so a piece of work that is missing,
comes twice or comes too early changes every result after it.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from faultinject.programs.device_nvidia import CUBIN, checked

STANDIN_IMAGE = b"standin module\nkernel fill fill 0\nkernel increment add 0\n"
WORDS, THREADS, ROUNDS = 1 << 20, 256, 8
UNIT, PER_STEP, UNTIMED = "rounds", ROUNDS, ""


class Pipeline:
    """first -> middle -> last -> first; what is beside it belongs to the first stream's order alone."""

    def __init__(self, seed: int, image: bytes, words: int) -> None:
        checked(driver.cuInit(0))
        self.device = checked(driver.cuDeviceGet(0))
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(self.device))))
        module = checked(driver.cuModuleLoadData(image))
        self.fill = checked(driver.cuModuleGetFunction(module, b"fill"))
        self.increment = checked(driver.cuModuleGetFunction(module, b"increment"))
        self.words, self.bytes = words, words * 4
        self.random = random.Random(seed)
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.streams = [checked(driver.cuStreamCreate(flags)) for _ in range(3)]
        untimed = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.events = [checked(driver.cuEventCreate(untimed)) for _ in range(3)]
        self.first, self.middle, self.last, self.beside = (self._new() for _ in range(4))
        checked(driver.cuCtxSynchronize())
        self.graphs = [self._captured(1, self._count_on), self._captured(2, self._hand_on)]

    def _new(self) -> int:
        at = int(checked(driver.cuMemAlloc(self.bytes)))
        checked(driver.cuMemsetD32(at, 0, self.words))
        return at

    def _launch(self, function: Any, at: int, words: int, value: int, stream: Any) -> None:
        # `increment` takes two of these on a GPU, and its step as the third on the stand-in.
        arguments = ((at, words, value), (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32))
        grid = min(1024, -(-words // THREADS))
        checked(driver.cuLaunchKernel(function, grid, 1, 1, THREADS, 1, 1, 0, stream, arguments, 0))

    def _captured(self, number: int, work: Callable[[Any], None]) -> Any:
        stream = self.streams[number]
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCapture(stream, mode))
        work(stream)
        graph = checked(driver.cuStreamEndCapture(stream))
        executable = checked(driver.cuGraphInstantiate(graph, 0))
        checked(driver.cuGraphDestroy(graph))
        return executable

    def _count_on(self, stream: Any) -> None:
        self._launch(self.increment, self.middle, self.words // 2, 1, stream)
        checked(driver.cuMemcpyDtoDAsync(self.last, self.middle, self.bytes, stream))
        for _ in range(3):
            self._launch(self.increment, self.last, self.words // 4, 1, stream)

    def _hand_on(self, stream: Any) -> None:
        checked(driver.cuMemcpyDtoDAsync(self.first, self.last, self.bytes, stream))
        self._launch(self.increment, self.first, self.words, 1, stream)

    def _then(self, number: int, before: Any, after: Any) -> None:
        checked(driver.cuEventRecord(self.events[number], before))
        checked(driver.cuStreamWaitEvent(after, self.events[number], 0))

    def step(self) -> None:
        one, two, three = self.streams
        for _ in range(ROUNDS):
            self._launch(self.increment, self.first, self.words, 1, one)
            self._then(0, one, two)
            checked(driver.cuMemcpyDtoDAsync(self.middle, self.first, self.bytes, two))
            checked(driver.cuGraphLaunch(self.graphs[0], two))
            self._launch(self.fill, self.beside, self.words, self.random.getrandbits(32), one)
            self._then(1, two, three)
            checked(driver.cuGraphLaunch(self.graphs[1], three))
            self._then(2, three, one)
        checked(driver.cuStreamSynchronize(one))

    def results(self) -> Iterator[bytes]:
        for at in (self.first, self.middle, self.last, self.beside):
            data = bytearray(self.bytes)
            checked(driver.cuMemcpyDtoH(data, at, len(data)))
            yield bytes(data)

    def close(self) -> None:
        for graph in self.graphs:
            checked(driver.cuGraphExecDestroy(graph))
        for at in (self.first, self.middle, self.last, self.beside):
            checked(driver.cuMemFree(at))
        checked(driver.cuDevicePrimaryCtxRelease(self.device))


def start(seed: int, backend: str) -> Pipeline:
    if backend == "simulated":
        return Pipeline(seed, STANDIN_IMAGE, WORDS >> 6)
    return Pipeline(seed, Path(os.environ[CUBIN]).read_bytes(), WORDS)
