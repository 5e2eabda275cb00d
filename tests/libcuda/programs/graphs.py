"""A program that changes and launches graphs, run by tests/libcuda/test_graph_random.py, which moves it.

Each line of its input has actions of tests/support/randomgraphs.py, and the numbers of those before which
it waits for a line. It prints each action's number before it, and the words of its buffers at the end.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from faultinject.programs.devices.instance import Driver
from tests.support.nodes import MEMORY, MEMSET, Nodes
from tests.support.randomgraphs import BUFFERS, WORDS

IMAGE = b"standin module\nkernel add add 0\nkernel fill fill 0\nkernel copy copy 0\n"
SIZE = 4 * WORDS
RELAXED, NON_BLOCKING = 2, 1
COPY = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)


class Program(Driver):
    def __init__(self) -> None:
        super().__init__(ctypes.CDLL("libcuda.so.1"))
        self("cuInit", 0)
        self.context = self.made("cuDevicePrimaryCtxRetain", 0)
        self.current()
        module = self.made("cuModuleLoadData", IMAGE)
        for name in ("add", "fill", "copy"):
            self.functions[name] = self.made("cuModuleGetFunction", module, name.encode())
        self.stream = self.made("cuStreamCreate", NON_BLOCKING)
        self.event = self.made("cuEventCreate", 0)
        self.buffers = [self.made("cuMemAlloc_v2", 4 << 20) for _ in range(BUFFERS)]

    def begin(self) -> None:
        self.nodes = Nodes(self)
        self.graphs: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.executables: dict[int, int] = {}
        for buffer in self.buffers:
            self("cuMemsetD8_v2", buffer, 0, 4 << 20)

    def end(self) -> list[int]:
        self("cuCtxSynchronize")
        words = (ctypes.c_uint32 * WORDS)()
        seen: list[int] = []
        for buffer in self.buffers:
            self("cuMemcpyDtoH_v2", words, buffer, SIZE)
            seen += words
        for made in self.executables.values():
            self("cuGraphExecDestroy", made)
        for graph in self.graphs.values():
            self("cuGraphDestroy", graph)
        return seen

    def kernel(self, kind: str, one: int, two: int, value: int) -> Any:
        if kind != "copy":
            return self.nodes.kernel(kind, self.buffers[one], WORDS, value)
        return self.nodes.kernel("copy", self.buffers[one], self.buffers[two], WORDS, kinds=COPY)

    def graph(self, graph: int) -> None:
        self.graphs[graph] = self.nodes.graph()

    def node(self, graph: int, node: int, kind: str, which: list[int], after: list[int]) -> None:
        of, behind = self.graphs[graph], [self.handles[each] for each in after]
        nodes = self.nodes
        adds: dict[str, Callable[[], int]] = {
            "set": lambda: nodes.set(of, self.buffers[which[0]], which[2], 3, behind),
            "memcpy": lambda: nodes.copy(of, self.buffers[which[0]], self.buffers[which[1]], SIZE, behind),
            "word": lambda: nodes.write(of, self.buffers[which[0]], which[2], behind),
            "empty": lambda: nodes.empty(of, behind),
            "record": lambda: nodes.record(of, self.event, behind),
            "wait": lambda: nodes.wait(of, self.event, behind),
            "child": lambda: nodes.child(of, self.graphs[which[0]], behind),
        }
        add = adds.get(kind, lambda: nodes.add_kernel(of, self.kernel(kind, *which), behind))
        self.handles[node] = add()

    def edge(self, graph: int, first: int, then: int) -> None:
        assert self.nodes.depend(self.graphs[graph], [self.handles[first]], [self.handles[then]]) == 0

    def part(self, graph: int, first: int, then: int) -> None:
        assert self.nodes.part(self.graphs[graph], [self.handles[first]], [self.handles[then]]) == 0

    def drop(self, graph: int, node: int) -> None:
        self("cuGraphDestroyNode", self.handles.pop(node))

    def become(self, graph: int, node: int, kind: str, which: list[int]) -> None:
        call, params = {
            "set": ("Memset", lambda: self.nodes.setting(self.buffers[which[0]], which[2], 3)),
            "word": ("BatchMemOp", lambda: self.nodes.writing(self.buffers[which[0]], which[2])),
        }.get(kind, ("Kernel", lambda: self.kernel(kind, *which)))
        version = "_v2" if call == "Kernel" else ""
        self(f"cuGraph{call}NodeSetParams{version}", self.handles[node], ctypes.byref(params()))

    def change(self, executable: int, node: int, kind: str, which: list[int]) -> None:
        params = {
            "set": lambda: self.nodes.params(
                MEMSET, set=self.nodes.setting(self.buffers[which[0]], which[2], 3)
            ),
            "word": lambda: self.nodes.params(
                MEMORY, memory=self.nodes.writing(self.buffers[which[0]], which[2])
            ),
        }.get(kind, lambda: self.kernel(kind, *which))
        assert self.nodes.change(self.executables[executable], self.handles[node], params()) == 0

    def captured(self, kind: str, which: list[int]) -> None:
        one, two, value = which
        if kind == "set":
            self("cuMemsetD32Async", self.buffers[one], value, 3, self.stream)
        elif kind == "memcpy":
            self("cuMemcpyDtoDAsync_v2", self.buffers[one], self.buffers[two], SIZE, self.stream)
        elif kind == "word":
            self("cuStreamWriteValue32_v2", self.stream, self.buffers[one], value, 0)
        else:
            given = ctypes.cast(self.kernel(kind, *which).kernelParams, ctypes.POINTER(ctypes.c_void_p))
            self("cuLaunchKernel", self.functions[kind], *[1] * 6, 0, self.stream, given, None)

    def begin_capture(self, graph: int, after: list[int]) -> None:
        of, behind = (
            self.graphs[graph],
            (ctypes.c_uint64 * len(after))(*(self.handles[each] for each in after)),
        )
        self.before = set(self.nodes.of(of))
        self("cuStreamBeginCaptureToGraph", self.stream, of, behind, None, len(after), RELAXED)

    def end_capture(self, graph: int, made: list[int]) -> None:
        found = ctypes.c_uint64()
        self("cuStreamEndCapture", self.stream, ctypes.byref(found))
        assert found.value == self.graphs[graph]
        left = set(self.nodes.of(found.value)) - self.before
        assert len(left) == len(made)
        # They form a chain.
        for number in made:
            (self.handles[number],) = (node for node in left if not left & set(self.nodes.before(node)))
            left.remove(self.handles[number])

    def clone(self, graph: int, copy: int, numbers: list[tuple[int, int]]) -> None:
        self.graphs[copy] = self.nodes.clone(self.graphs[graph])
        for number, copied in numbers:
            self.handles[copied] = self.nodes.cloned(self.handles[number], self.graphs[copy])

    def exec(self, executable: int, graph: int) -> None:
        self.executables[executable] = self.nodes.executable(self.graphs[graph])

    def update(self, executable: int, graph: int) -> None:
        assert self.nodes.update(self.executables[executable], self.graphs[graph]) == (0, 0)

    def launch(self, executable: int) -> None:
        self("cuGraphLaunch", self.executables[executable], self.stream)

    def sync(self) -> None:
        self("cuStreamSynchronize", self.stream)


NAMES = {"begin": "begin_capture", "end": "end_capture"}


def say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def run(program: Program, actions: list[list[Any]], stops: list[int]) -> None:
    program.begin()
    for number, (what, *given) in enumerate([*actions, ["sync"]]):
        say(str(number))
        if number in stops:
            sys.stdin.readline()
        getattr(program, NAMES.get(what, what))(*given)
    say(json.dumps(program.end()))


gpu = Program()
say(str(os.getpid()))
for line in sys.stdin:
    asked = json.loads(line)
    run(gpu, asked["actions"], asked["stops"])
