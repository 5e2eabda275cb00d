"""A cuda-bindings program: graphs made node by node, and changed, in the thread's default stream.

Words are counted up in place, by another number for each launch, and passed from one buffer to the next. A
launch that is lost, repeated, early, or as before a change alters every result after it. Of other work only
the last launch shows.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from faultinject.programs.devices.nvidia import checked
from faultinject.programs.workloads.bindings.counting import THREADS, Counting, image_and_words

ROUNDS = 8
UNIT, PER_STEP, UNTIMED = "rounds", ROUNDS, ""
OWN = driver.CUstream(driver.CU_STREAM_PER_THREAD)


class Nodes(Counting):
    """first -> middle -> last -> first, all but the last step in one graph with a child graph."""

    def __init__(self, seed: int, image: bytes, words: int) -> None:
        super().__init__(seed, image, words, events=2)
        self.stream = self._stream()
        self.graph = checked(driver.cuGraphCreate(0))
        self.changed = self._built()
        self.executable = checked(driver.cuGraphInstantiate(self.graph, 0))

    def _kernel(self, function: Any, at: int, words: int, value: int) -> Any:
        node = driver.CUDA_KERNEL_NODE_PARAMS()
        node.func = function
        node.gridDimX, node.gridDimY, node.gridDimZ = self._blocks(words), 1, 1
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
        """The nodes that change; later edges say part of their order."""
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
        """Change the graph for the next launch alone. The step of `count` shows in every later result."""
        counted = self._kernel(self.increment, self.middle, self.random.randrange(1, self.words), 1)
        checked(driver.cuGraphExecKernelNodeSetParams(self.executable, self.changed["count"], counted))
        clear, fill = self._clear(self.random.getrandbits(32)), self.random.getrandbits(32)
        checked(
            driver.cuGraphExecMemsetNodeSetParams(self.executable, self.changed["clear"], clear, self.context)
        )
        node = self._kernel(self.fill, self.beside, self.words // 2, fill)
        checked(driver.cuGraphExecKernelNodeSetParams(self.executable, self.changed["fill"], node))

    def step(self) -> None:
        for _ in range(ROUNDS):
            self._change()
            self._launch(self.increment, self.first, self.words, 1, OWN)
            checked(driver.cuGraphLaunch(self.executable, OWN))
            self._then(0, OWN, self.stream)
            checked(driver.cuMemcpyDtoDAsync(self.first, self.last, self.bytes, self.stream))
            self._then(1, self.stream, OWN)
        checked(driver.cuStreamSynchronize(OWN))

    def close(self) -> None:
        checked(driver.cuGraphExecDestroy(self.executable))
        checked(driver.cuGraphDestroy(self.graph))
        super().close()


def start(seed: int, backend: str) -> Nodes:
    return Nodes(seed, *image_and_words(backend))
