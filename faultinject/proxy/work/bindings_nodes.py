"""A cuda-bindings program: graphs made node by node, and changed, in the thread's default stream.

Words are counted up in place, how many is another number for each launch, and handed from one buffer to the
next: a launch that is missing, comes twice, too early, or as it was before a change alters every result after
it. Of what is beside them the last launch alone is seen.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from faultinject.programs.device_nvidia import CUBIN, checked

STANDIN_IMAGE = b"standin module\nkernel fill fill 0\nkernel increment add 0\n"
WORDS, THREADS, ROUNDS = 1 << 20, 256, 8
UNIT, PER_STEP, UNTIMED = "rounds", ROUNDS, ""
OWN = driver.CUstream(driver.CU_STREAM_PER_THREAD)


class Nodes:
    """first -> middle -> last -> first, all but the last step of it in one graph that has another in it."""

    def __init__(self, seed: int, image: bytes, words: int) -> None:
        checked(driver.cuInit(0))
        self.device = checked(driver.cuDeviceGet(0))
        self.context = checked(driver.cuDevicePrimaryCtxRetain(self.device))
        checked(driver.cuCtxSetCurrent(self.context))
        module = checked(driver.cuModuleLoadData(image))
        self.fill = checked(driver.cuModuleGetFunction(module, b"fill"))
        self.increment = checked(driver.cuModuleGetFunction(module, b"increment"))
        self.words, self.bytes = words, words * 4
        self.random = random.Random(seed)
        self.stream = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        untimed = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.events = [checked(driver.cuEventCreate(untimed)) for _ in range(2)]
        self.first, self.middle, self.last, self.beside = (self._new() for _ in range(4))
        checked(driver.cuCtxSynchronize())
        self.graph = checked(driver.cuGraphCreate(0))
        self.changed = self._built()
        self.executable = checked(driver.cuGraphInstantiate(self.graph, 0))

    def _new(self) -> int:
        at = int(checked(driver.cuMemAlloc(self.bytes)))
        checked(driver.cuMemsetD32(at, 0, self.words))
        return at

    def _arguments(self, at: int, words: int, value: int) -> tuple[tuple[int, ...], tuple[type, ...]]:
        # `increment` takes two of these on a GPU, and its step as the third on the stand-in.
        return (at, words, value), (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32)

    def _kernel(self, function: Any, at: int, words: int, value: int) -> Any:
        node = driver.CUDA_KERNEL_NODE_PARAMS()
        node.func = function
        node.gridDimX, node.gridDimY, node.gridDimZ = min(1024, -(-words // THREADS)), 1, 1
        node.blockDimX, node.blockDimY, node.blockDimZ = THREADS, 1, 1
        node.kernelParams = self._arguments(at, words, value)
        return node

    def _copy(self, into: int, source: int) -> Any:
        node = driver.CUDA_MEMCPY3D()
        node.srcMemoryType = node.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        node.srcDevice, node.dstDevice = source, into
        node.WidthInBytes, node.Height, node.Depth = self.bytes, 1, 1
        return node

    def _clear(self, value: int) -> Any:
        node = driver.CUDA_MEMSET_NODE_PARAMS()
        node.dst, node.value, node.elementSize = self.beside, value, 4
        node.width, node.height = self.words, 1
        return node

    def _added(self, graph: Any, after: list[Any], node: Any) -> Any:
        return checked(driver.cuGraphAddKernelNode(graph, after, len(after), node))

    def _built(self) -> dict[str, Any]:
        """The nodes that change; their order is said in part by edges that come later."""
        inner = checked(driver.cuGraphCreate(0))
        counts = self._added(inner, [], self._kernel(self.increment, self.last, self.words // 4, 1))
        self._added(inner, [counts], self._kernel(self.increment, self.last, self.words // 8, 1))
        handed = checked(
            driver.cuGraphAddMemcpyNode(
                self.graph, None, 0, self._copy(self.middle, self.first), self.context
            )
        )
        count = self._added(
            self.graph, [handed], self._kernel(self.increment, self.middle, self.words // 2, 1)
        )
        on = checked(
            driver.cuGraphAddMemcpyNode(
                self.graph, [count], 1, self._copy(self.last, self.middle), self.context
            )
        )
        child = checked(driver.cuGraphAddChildGraphNode(self.graph, None, 0, inner))
        checked(driver.cuGraphDestroy(inner))
        checked(driver.cuGraphAddDependencies(self.graph, [on], [child], None, 1))
        clear = checked(driver.cuGraphAddMemsetNode(self.graph, None, 0, self._clear(0), self.context))
        fill = self._added(self.graph, [clear], self._kernel(self.fill, self.beside, self.words // 2, 0))
        checked(driver.cuGraphAddEmptyNode(self.graph, [child, fill], 2))
        return {"clear": clear, "fill": fill, "count": count}

    def _change(self) -> None:
        """What the next launch is of, and no earlier one. How far `count` counts on is seen ever after."""
        counted = self._kernel(self.increment, self.middle, self.random.randrange(1, self.words), 1)
        checked(driver.cuGraphExecKernelNodeSetParams(self.executable, self.changed["count"], counted))
        clear, fill = self._clear(self.random.getrandbits(32)), self.random.getrandbits(32)
        checked(
            driver.cuGraphExecMemsetNodeSetParams(self.executable, self.changed["clear"], clear, self.context)
        )
        node = self._kernel(self.fill, self.beside, self.words // 2, fill)
        checked(driver.cuGraphExecKernelNodeSetParams(self.executable, self.changed["fill"], node))

    def _then(self, number: int, before: Any, after: Any) -> None:
        checked(driver.cuEventRecord(self.events[number], before))
        checked(driver.cuStreamWaitEvent(after, self.events[number], 0))

    def _count(self, stream: Any) -> None:
        grid = min(1024, -(-self.words // THREADS))
        arguments = self._arguments(self.first, self.words, 1)
        checked(driver.cuLaunchKernel(self.increment, grid, 1, 1, THREADS, 1, 1, 0, stream, arguments, 0))

    def step(self) -> None:
        for _ in range(ROUNDS):
            self._change()
            self._count(OWN)
            checked(driver.cuGraphLaunch(self.executable, OWN))
            self._then(0, OWN, self.stream)
            checked(driver.cuMemcpyDtoDAsync(self.first, self.last, self.bytes, self.stream))
            self._then(1, self.stream, OWN)
        checked(driver.cuStreamSynchronize(OWN))

    def results(self) -> Iterator[bytes]:
        for at in (self.first, self.middle, self.last, self.beside):
            data = bytearray(self.bytes)
            checked(driver.cuMemcpyDtoH(data, at, len(data)))
            yield bytes(data)

    def close(self) -> None:
        checked(driver.cuGraphExecDestroy(self.executable))
        checked(driver.cuGraphDestroy(self.graph))
        for at in (self.first, self.middle, self.last, self.beside):
            checked(driver.cuMemFree(at))
        checked(driver.cuDevicePrimaryCtxRelease(self.device))


def start(seed: int, backend: str) -> Nodes:
    if backend == "simulated":
        return Nodes(seed, STANDIN_IMAGE, WORDS >> 6)
    return Nodes(seed, Path(os.environ[CUBIN]).read_bytes(), WORDS)
