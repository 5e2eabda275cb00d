"""Node parameters of cuda.h for ctypes, and graphs built node by node."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from faultinject.programs.devices.instance import Driver
from tests.support.rows import DEVICE, Box, box

KERNEL, MEMCPY, MEMSET, HOST, GRAPH, EMPTY, WAIT_EVENT, EVENT_RECORD, SIGNAL = range(9)
ALLOCATE, FREE, MEMORY, CONDITIONAL = range(10, 14)
"""CUgraphNodeType."""

IF, WHILE, SWITCH = range(3)
"""CUgraphConditionalNodeType."""

PRIORITY, COOPERATIVE = 8, 2
"""Numbers of CUkernelNodeAttrID whose value is one word."""
WRITE_32 = 2
"""CU_STREAM_MEM_OP_WRITE_VALUE_32."""

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_WORD = ctypes.c_uint32
_HANDLE = ctypes.c_uint64


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = [
        ("func", _HANDLE),
        ("grid", _WORD * 3),
        ("block", _WORD * 3),
        ("shared", _WORD),
        ("kernelParams", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", _HANDLE),
        ("ctx", _HANDLE),
    ]


class SetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS, and behind it the context of the newer structure."""

    _fields_ = [
        ("dst", _HANDLE),
        ("pitch", ctypes.c_size_t),
        ("value", _WORD),
        ("elementSize", _WORD),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("ctx", _HANDLE),
    ]


class CopyParams(ctypes.Structure):
    """CUDA_MEMCPY_NODE_PARAMS."""

    _fields_ = [("flags", ctypes.c_int), ("reserved", ctypes.c_int), ("ctx", _HANDLE), ("box", Box)]


class HostParams(ctypes.Structure):
    """CUDA_HOST_NODE_PARAMS."""

    _fields_ = [("fn", ctypes.c_void_p), ("userData", ctypes.c_void_p)]


class MemoryOp(ctypes.Structure):
    """CUstreamBatchMemOpParams."""

    _fields_ = [
        ("operation", ctypes.c_int),
        ("address", _HANDLE),
        ("value", _HANDLE),
        ("flags", _WORD),
        ("alias", _HANDLE),
        ("rest", _HANDLE),
    ]


class MemoryParams(ctypes.Structure):
    """CUDA_BATCH_MEM_OP_NODE_PARAMS."""

    _fields_ = [("ctx", _HANDLE), ("count", _WORD), ("each", ctypes.c_void_p), ("flags", _WORD)]


class ConditionalParams(ctypes.Structure):
    """CUDA_CONDITIONAL_NODE_PARAMS."""

    _fields_ = [
        ("handle", _HANDLE),
        ("type", ctypes.c_int),
        ("size", _WORD),
        ("bodies", ctypes.POINTER(_HANDLE)),
        ("ctx", _HANDLE),
    ]


class ChildParams(ctypes.Structure):
    """CUDA_CHILD_GRAPH_NODE_PARAMS."""

    _fields_ = [("graph", _HANDLE), ("ownership", ctypes.c_int)]


class _Union(ctypes.Union):
    _fields_ = [
        ("kernel", KernelParams),
        ("set", SetParams),
        ("copy", CopyParams),
        ("graph", _HANDLE),
        ("host", HostParams),
        ("event", _HANDLE),
        ("memory", MemoryParams),
        ("conditional", ConditionalParams),
        ("child", ChildParams),
        ("bytes", ctypes.c_char * 232),
    ]


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("reserved0", ctypes.c_int * 3),
        ("is_", _Union),
        ("reserved2", ctypes.c_longlong),
    ]


class UpdateInfo(ctypes.Structure):
    """CUgraphExecUpdateResultInfo."""

    _fields_ = [("result", ctypes.c_int), ("errorNode", _HANDLE), ("errorFromNode", _HANDLE)]


class Instantiation(ctypes.Structure):
    """CUDA_GRAPH_INSTANTIATE_PARAMS."""

    _fields_ = [("flags", _HANDLE), ("stream", _HANDLE), ("node", _HANDLE), ("result", ctypes.c_int)]


ADD = (_HANDLE, _HANDLE, _WORD)
"""Parameters of the stand-in's add and fill kernels: address, number of words, value."""


CONDITION = (_HANDLE, _HANDLE, _WORD)
"""Parameters of the stand-in's condition kernel: handle, address, value."""


class Nodes:
    """Graphs of one driver. Calls raise DriverError unless they return the driver's code."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._held: list[object] = []

    def graph(self) -> int:
        return self._driver.made("cuGraphCreate", 0)

    def kernel(
        self, name: str, *values: int, library: bool = False, kinds: Sequence[type[Any]] = ADD
    ) -> KernelParams:
        """One block of one thread."""
        held = [kind(value) for kind, value in zip(kinds, values, strict=True)]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        self._held += [held, pointers]
        handle = {"kern" if library else "func": self._driver.functions[name]}
        ones = (_WORD * 3)(1, 1, 1)
        return KernelParams(grid=ones, block=ones, kernelParams=ctypes.addressof(pointers), **handle)

    def add(
        self, graph: int, name: str, *values: int, after: Sequence[int] = (), library: bool = False
    ) -> int:
        return self.add_kernel(graph, self.kernel(name, *values, library=library), after)

    def add_kernel(self, graph: int, kernel: KernelParams, after: Sequence[int] = ()) -> int:
        return self._new("cuGraphAddKernelNode_v2", graph, after, ctypes.byref(kernel))

    def set(self, graph: int, address: int, value: int, words: int, after: Sequence[int] = ()) -> int:
        given = ctypes.byref(self.setting(address, value, words))
        return self._new("cuGraphAddMemsetNode", graph, after, given, self._driver.context)

    @staticmethod
    def setting(address: int, value: int, words: int) -> SetParams:
        return SetParams(dst=address, value=value, elementSize=4, width=words, height=1)

    def copy(self, graph: int, to: int, source: int, size: int, after: Sequence[int] = ()) -> int:
        given = ctypes.byref(self.copying(to, source, size))
        return self._new("cuGraphAddMemcpyNode", graph, after, given, self._driver.context)

    @staticmethod
    def copying(to: int, source: int, size: int) -> Box:
        return box((DEVICE, to, 0), (DEVICE, source, 0), size, 1, 1)

    def copying_of(self, to: int, source: int, size: int) -> NodeParams:
        return self.params(
            MEMCPY, copy=CopyParams(ctx=self._driver.context, box=self.copying(to, source, size))
        )

    def child(self, graph: int, child: int, after: Sequence[int] = ()) -> int:
        return self._new("cuGraphAddChildGraphNode", graph, after, child)

    def empty(self, graph: int, after: Sequence[int] = ()) -> int:
        return self._new("cuGraphAddEmptyNode", graph, after)

    def any(self, graph: int, params: NodeParams, after: Sequence[int] = ()) -> int:
        handles = (_HANDLE * len(after))(*after)
        return self._driver.made("cuGraphAddNode_v2", graph, handles, None, len(after), ctypes.byref(params))

    @staticmethod
    def params(kind: int, **given: object) -> NodeParams:
        return NodeParams(type=kind, is_=_Union(**given))

    def host(self, graph: int, does: Callable[[], object], after: Sequence[int] = ()) -> int:
        """Add a host callback."""
        return self.any(graph, self.params(HOST, host=self.calling(does)), after)

    def signal(self, graph: int, after: Sequence[int] = ()) -> int:
        """Add a node that signals no external semaphore: a kind that is not followed."""
        return self.any(graph, self.params(SIGNAL), after)

    def calling(self, does: Callable[[], object]) -> HostParams:
        function = _FUNCTION(lambda _: does() and None)
        self._held.append(function)
        return HostParams(fn=ctypes.cast(function, ctypes.c_void_p).value)

    def record(self, graph: int, event: int, after: Sequence[int] = ()) -> int:
        return self._new("cuGraphAddEventRecordNode", graph, after, event)

    def wait(self, graph: int, event: int, after: Sequence[int] = ()) -> int:
        return self._new("cuGraphAddEventWaitNode", graph, after, event)

    def writing(self, address: int, value: int) -> MemoryParams:
        """Return the memory operation that writes one word."""
        each = (MemoryOp * 1)(MemoryOp(operation=WRITE_32, address=address, value=value))
        self._held.append(each)
        return MemoryParams(ctx=self._driver.context, count=1, each=ctypes.addressof(each))

    def write(self, graph: int, address: int, value: int, after: Sequence[int] = ()) -> int:
        return self._new("cuGraphAddBatchMemOpNode", graph, after, ctypes.byref(self.writing(address, value)))

    def attribute(self, node: int, which: int, value: int | None = None) -> int:
        """Return an attribute of a kernel node, after setting it if a value is given."""
        found = (_WORD * 16)(value or 0)
        if value is not None:
            self._driver("cuGraphKernelNodeSetAttribute", node, which, found)
        self._driver("cuGraphKernelNodeGetAttribute", node, which, found)
        return found[0]

    def clone(self, graph: int) -> int:
        return self._driver.made("cuGraphClone", graph)

    def cloned(self, node: int, clone: int) -> int:
        return self._driver.made("cuGraphNodeFindInClone", node, clone)

    def depend(self, graph: int, first: Sequence[int], then: Sequence[int]) -> int:
        handles = [(_HANDLE * len(each))(*each) for each in (first, then)]
        return self._driver.code("cuGraphAddDependencies_v2", graph, *handles, None, len(first))

    def handle(self, graph: int, default: int = 0, flags: int = 1) -> int:
        """Create a handle of a conditional node."""
        return self._driver.made(
            "cuGraphConditionalHandleCreate", graph, self._driver.context, default, flags
        )

    def condition(self, graph: int, handle: int, at: int, less: int = 0, after: Sequence[int] = ()) -> int:
        """Add a kernel that subtracts from the word and sets the condition to the result."""
        kernel = self.kernel("condition", handle, at, less, kinds=CONDITION)
        return self.add_kernel(graph, kernel, after)

    def conditional(
        self, graph: int, handle: int, kind: int, size: int = 1, after: Sequence[int] = ()
    ) -> tuple[int, list[int]]:
        """Add a conditional node; return it and its graphs."""
        given = ConditionalParams(handle=handle, type=kind, size=size, ctx=self._driver.context)
        params = self.params(CONDITIONAL, conditional=given)
        made = self.any(graph, params, after)
        return made, [params.is_.conditional.bodies[i] for i in range(size)]

    def moved(self, graph: int, child: int, after: Sequence[int] = ()) -> int:
        """Add a child graph that the node takes over."""
        return self.any(graph, self.params(GRAPH, child=ChildParams(graph=child, ownership=1)), after)

    def part(self, graph: int, first: Sequence[int], then: Sequence[int]) -> int:
        handles = [(_HANDLE * len(each))(*each) for each in (first, then)]
        return self._driver.code("cuGraphRemoveDependencies_v2", graph, *handles, None, len(first))

    def executable(self, graph: int) -> int:
        return self._driver.made("cuGraphInstantiateWithFlags", graph, 0)

    def uploaded(self, graph: int, stream: int) -> int:
        """Instantiate a graph with the upload flag and a stream."""
        given = Instantiation(flags=2, stream=stream, result=-1)
        made = self._driver.made("cuGraphInstantiateWithParams", graph, ctypes.byref(given))
        assert given.result == 0
        return made

    def change(self, executable: int, node: int, params: KernelParams | NodeParams) -> int:
        call = "Kernel" if isinstance(params, KernelParams) else ""
        return self._driver.code(
            f"cuGraphExec{call}NodeSetParams{'_v2' if call else ''}", executable, node, ctypes.byref(params)
        )

    def update(self, executable: int, graph: int) -> tuple[int, int]:
        info = UpdateInfo(result=-1)
        return self._driver.code("cuGraphExecUpdate_v2", executable, graph, ctypes.byref(info)), info.result

    def become(self, node: int, params: KernelParams) -> int:
        return self._driver.code("cuGraphKernelNodeSetParams_v2", node, ctypes.byref(params))

    def of(self, graph: int) -> list[int]:
        return self._list("cuGraphGetNodes", graph)

    def before(self, node: int) -> list[int]:
        count = ctypes.c_size_t()
        self._driver("cuGraphNodeGetDependencies_v2", node, None, None, ctypes.byref(count))
        found = (_HANDLE * count.value)()
        self._driver("cuGraphNodeGetDependencies_v2", node, found, None, ctypes.byref(count))
        return list(found)

    def data(self, node: int) -> list[tuple[int, int, int]]:
        """Return the data of the edges to a node: ports and type."""
        count = ctypes.c_size_t(32)
        found, data = (_HANDLE * 32)(), (ctypes.c_uint8 * (8 * 32))()
        self._driver("cuGraphNodeGetDependencies_v2", node, found, data, ctypes.byref(count))
        return [(data[8 * i], data[8 * i + 1], data[8 * i + 2]) for i in range(count.value)]

    def type(self, node: int) -> int:
        found = ctypes.c_int()
        self._driver("cuGraphNodeGetType", node, ctypes.byref(found))
        return found.value

    def function(self, node: int) -> int:
        found = KernelParams()
        self._driver("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(found))
        return int(found.func or found.kern)

    def _list(self, name: str, of: int) -> list[int]:
        count = ctypes.c_size_t()
        self._driver(name, of, None, ctypes.byref(count))
        found = (_HANDLE * count.value)()
        self._driver(name, of, found, ctypes.byref(count))
        return list(found)

    def _new(self, name: str, graph: int, after: Sequence[int], *params: object) -> int:
        handles = (_HANDLE * len(after))(*after)
        return self._driver.made(name, graph, handles, len(after), *params)
