"""A random program, run by tests/libcuda/test_exact_random.py, which moves it while it runs.

Each line of its input is a program: a JSON list of steps. Before each step it prints the step's number,
and where the test asked for it waits for a line. At the end it prints what the program has seen, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from typing import Any

from faultinject.programs.devices.instance import Driver
from tests.support.nodes import Nodes
from tests.support.rows import DEVICE, HOST, UNIFIED, Plane, box, plane
from tests.support.segments import Segment

IMAGE = b"standin module\nkernel add add 0\nkernel fill fill 0\nkernel copy copy 0\nkernel sum sum 0\n"
SIZES = (8 << 20, 600, 4 << 20, 3 << 20)
# In large buffers the words lie on both sides of a page end, so that a part can be written first.
OFFSETS = [(2 << 20) - 12 if size > 2 << 20 else 0 for size in SIZES]
STREAMS = 4
PER_THREAD = 2  # CU_STREAM_PER_THREAD
WORDS = 6
HOSTED = 512 << 10  # in pinned memory: data of host callbacks, for each buffer and then for each step
HOST_BYTES = 128 << 10  # larger than copies that the proxy makes itself, so that nothing waits
KINDS = {"add": (8, 8, 4), "fill": (8, 8, 4), "copy": (8, 8, 8), "sum": (8, 8, 8)}
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
DEADLINE_S = 60
NON_BLOCKING, DISABLE_TIMING, RELAXED = 1, 2, 2
# Rows of two words: the first two of a buffer and the last two that are checked, without the words between.
WIDTH, PITCH, ROWS = 8, 16, 2


class Program(Driver):
    """Buffers, streams, and the order in which streams use a buffer."""

    def __init__(self) -> None:
        super().__init__(ctypes.CDLL("libcuda.so.1"))
        self("cuInit", 0)
        self.context = self.made("cuDevicePrimaryCtxRetain", 0)
        self.current()
        module = self.made("cuModuleLoadData", IMAGE)
        for name in KINDS:
            self.functions[name] = self.made("cuModuleGetFunction", module, name.encode())
        self.streams = [
            0,
            *(self.made("cuStreamCreate", NON_BLOCKING) for _ in range(STREAMS - 2)),
            PER_THREAD,
        ]
        self.events = [self.made("cuEventCreate", DISABLE_TIMING) for _ in range(STREAMS)]
        self.pinned = self.made("cuMemHostAlloc", 4 << 20, 0)
        self.buffers: list[int] = []
        self.segments: dict[int, Segment] = {}
        self.last: list[int] = []
        self.hosted: list[object] = []
        self.ran: list[int] = []

    def begin(self, mapped: list[int]) -> None:
        self.segments = {buffer: Segment(self) for buffer in mapped}
        self.buffers = [
            self.segments[buffer].buffer if buffer in mapped else self.allocated(buffer)
            for buffer in range(len(SIZES))
        ]
        self.last = [0] * len(SIZES)
        self.hosted, self.ran = [], []
        ctypes.memset(self.pinned + HOSTED, 0, 64 * len(SIZES))
        for buffer in range(len(SIZES)):
            self.clear(buffer)

    def allocated(self, buffer: int) -> int:
        return self.made("cuMemAlloc_v2", SIZES[buffer]) + OFFSETS[buffer]

    def clear(self, buffer: int) -> None:
        segment = self.segments.get(buffer)
        size = (len(segment.handles) - 1) * Segment.PIECE + 12 if segment else SIZES[buffer] - OFFSETS[buffer]
        self("cuMemsetD8_v2", self.buffers[buffer], 0, size)

    def free(self, buffer: int) -> None:
        segment = self.segments.get(buffer)
        if segment:
            segment.end()
        else:
            self("cuMemFree_v2", self.buffers[buffer] - OFFSETS[buffer])

    def end(self) -> list[int]:
        self("cuCtxSynchronize")
        words = [self.word(buffer, at) for buffer in range(len(SIZES)) for at in range(WORDS)]
        for buffer in range(len(SIZES)):
            self.free(buffer)
        # Each host callback ran once; memory that the program has overwritten since is unchanged.
        left = (ctypes.c_uint32 * (16 * len(SIZES))).from_address(self.pinned + HOSTED)
        return [*words, *sorted(self.ran), sum(left[8::16])]

    def word(self, buffer: int, at: int) -> int:
        out = ctypes.c_uint32()
        self.turn(buffer, 0)
        self("cuMemcpyDtoH_v2", ctypes.byref(out), self.buffers[buffer] + 4 * at, 4)
        return out.value

    def turn(self, buffer: int, stream: int) -> None:
        """Order the stream's next operation after the last operation on the buffer."""
        before, self.last[buffer] = self.last[buffer], stream
        if before != stream:
            self("cuEventRecord", self.events[before], self.streams[before])
            self("cuStreamWaitEvent", self.streams[stream], self.events[before], 0)

    def launch(self, kernel: str, stream: int, *values: int) -> None:
        kinds = [ctypes.c_uint64 if size == 8 else ctypes.c_uint32 for size in KINDS[kernel]]
        held = [kind(value) for kind, value in zip(kinds, values, strict=True)]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        self(
            "cuLaunchKernel",
            self.functions[kernel],
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            self.streams[stream],
            pointers,
            None,
        )

    def step(self, what: str, stream: int, one: int, two: int, value: int) -> list[int]:
        """Run one step; return what the program sees by it."""
        if what in ("add", "fill"):
            self.turn(one, stream)
            self.launch(what, stream, self.buffers[one], 4, value)
        elif what in ("copy", "sum"):
            self.turn(one, stream)
            self.turn(two, stream)
            self.launch(what, stream, self.buffers[one] + 16 * (what == "sum"), self.buffers[two], 4)
        elif what == "set":
            self.turn(one, stream)
            self("cuMemsetD32Async", self.buffers[one], value, 3, self.streams[stream])
        elif what == "in":
            self.turn(one, stream)
            source = (ctypes.c_uint32 * 4)(value, value + 1, value + 2, value + 3)
            self("cuMemcpyHtoDAsync_v2", self.buffers[one], source, 16, self.streams[stream])
            source[:] = [0] * 4
        elif what == "in_pinned":
            return self.in_pinned(stream, one, value)
        elif what == "out":
            self.turn(one, stream)
            seen = (ctypes.c_uint32 * 4).from_address(self.pinned)
            self("cuMemcpyDtoHAsync_v2", self.pinned, self.buffers[one], 16, self.streams[stream])
            self("cuStreamSynchronize", self.streams[stream])
            found, seen[:] = list(seen), [0] * 4
            return found
        elif what == "out_now":
            self.turn(one, stream)
            into = (ctypes.c_uint32 * 4)()
            self("cuMemcpyDtoHAsync_v2", into, self.buffers[one], 16, self.streams[stream])
            return list(into)
        elif what == "look":
            return [self.word(one, value % 4)]
        elif what == "wait":
            self("cuStreamSynchronize", self.streams[stream])
        elif what == "wait_event":
            self("cuEventRecord", self.events[stream], self.streams[stream])
            while self.code("cuEventQuery", self.events[stream]) == 600:
                pass
            self("cuEventSynchronize", self.events[stream])
        elif what == "wait_all":
            self("cuCtxSynchronize")
        elif what in ("host", "host_same", "host_small"):
            self.host(what, stream, one, value)
        elif what == "host_twice":
            self.host_twice(stream, one, two, value)
        elif what == "host_seen":
            return self.host_seen(stream, one, value)
        elif what == "graph":
            self.graph(max(1, stream), one, two, value)
        elif what == "forked":
            self.forked(max(1, stream), one, two, value)
        elif what == "nodes":
            self.made_of_nodes(stream, one, two, value)
        elif what == "peer":
            self.turn(one, 0)
            self.turn(two, 0)
            self("cuMemcpyPeer", self.buffers[one], self.context, self.buffers[two], self.context, 16)
        elif what.startswith("rows_"):
            return self.rows(what, stream, one, two, value)
        elif what == "again":
            self.free(one)
            if one in self.segments:
                self.segments[one] = Segment(self)
                self.buffers[one] = self.segments[one].buffer
            else:
                self.buffers[one] = self.allocated(one)
            self.last[one] = 0
            self.clear(one)
        elif what == "swap" and one in self.segments:
            self("cuCtxSynchronize")
            self.segments[one].swap()
        elif what == "grow" and one in self.segments and len(self.segments[one].handles) < Segment.MOST:
            self.segments[one].grow()
        return []

    def rows(self, what: str, stream: int, one: int, two: int, value: int) -> list[int]:
        native, here = self.streams[stream], (DEVICE, self.buffers[one], PITCH)
        if what != "rows_look":
            self.turn(one, stream)
        if what == "rows_set":
            self("cuMemsetD2D32Async", self.buffers[one], PITCH, value, WIDTH // 4, ROWS, native)
        elif what == "rows_copy":
            self.turn(two, stream)
            given = plane(here, (UNIFIED, self.buffers[two], PITCH), WIDTH, ROWS)
            self("cuMemcpy2DAsync_v2", ctypes.byref(given), native)
        elif what == "rows_box":
            self.turn(two, stream)
            # One plane for each row.
            of = (DEVICE, self.buffers[two], PITCH // 2)
            given_box = box((*here[:2], PITCH // 2), of, WIDTH, 1, ROWS, srcHeight=2, dstHeight=2)
            self("cuMemcpy3DAsync_v2", ctypes.byref(given_box), native)
        elif what == "rows_in":
            source = (ctypes.c_uint32 * 7)(0, value, value + 1, 0, value + 2, value + 3, 0)
            given = plane(here, (HOST, ctypes.addressof(source), 12), WIDTH, ROWS, srcXInBytes=4)
            self("cuMemcpy2DAsync_v2", ctypes.byref(given), native)
            source[:] = [0] * 7
        elif what == "rows_in_pinned":
            self.rows_in_pinned(stream, one, value)
        elif what == "rows_out":
            return self.rows_out("cuMemcpy2DAsync_v2", here, self.pinned, native)
        elif what == "rows_out_now":
            into = (ctypes.c_uint32 * 5)()
            return self.rows_out("cuMemcpy2DAsync_v2", here, ctypes.addressof(into), native)
        elif what == "rows_look":
            self.turn(one, 0)
            into = (ctypes.c_uint32 * 5)()
            return self.rows_out("cuMemcpy2DUnaligned_v2", here, ctypes.addressof(into))
        return []

    def rows_out(self, call: str, of: tuple[int, int, int], to: int, *stream: int) -> list[int]:
        """Copy rows to host rows of three words, of which the last stays unchanged."""
        words = (ctypes.c_uint32 * 5).from_address(to)
        words[:] = [7] * 5
        given: Plane = plane((UNIFIED, to, 12), of, WIDTH, ROWS)
        self(call, ctypes.byref(given), *stream)
        if to == self.pinned:
            self("cuStreamSynchronize", *stream)
        found, words[:] = list(words), [0] * 5
        return found

    def rows_in_pinned(self, stream: int, one: int, value: int) -> None:
        """Copy as in_pinned(), from every other 64 KiB of the pinned memory."""
        row = 64 << 10
        source = (ctypes.c_uint32 * (5 * row // 4)).from_address(self.pinned)
        source[:4] = [value, value + 1, value + 2, value + 3]
        given = plane((DEVICE, self.buffers[one], row), (HOST, self.pinned, 2 * row), row, 3)
        self("cuMemcpy2DAsync_v2", ctypes.byref(given), self.streams[stream])
        self("cuEventRecord", self.events[stream], self.streams[stream])
        self("cuEventSynchronize", self.events[stream])
        source[:4] = [0] * 4

    def graph(self, stream: int, one: int, two: int, value: int) -> None:
        """Capture a graph that adds and then copies; launch it twice."""
        self.turn(one, stream)
        self.turn(two, stream)
        native = self.streams[stream]
        self("cuStreamBeginCapture_v2", native, RELAXED)
        self.launch("add", stream, self.buffers[one], 4, value)
        self.launch("copy", stream, self.buffers[two], self.buffers[one], 4)
        self.launch_captured(native)

    def launch_captured(self, native: int) -> None:
        """End the capture in that stream and launch the graph twice."""
        graph = ctypes.c_uint64()
        self("cuStreamEndCapture", native, ctypes.byref(graph))
        executable = self.made("cuGraphInstantiateWithFlags", graph.value, 0)
        self("cuGraphDestroy", graph.value)
        self("cuGraphLaunch", executable, native)
        self("cuGraphLaunch", executable, native)
        self("cuGraphExecDestroy", executable)

    def forked(self, stream: int, one: int, two: int, value: int) -> None:
        """Capture a graph that adds, copies in another stream, and adds to the copy; launch it twice."""
        other = stream % (len(self.streams) - 1) + 1
        self.turn(one, stream)
        self.turn(two, stream)
        native, beside = self.streams[stream], self.streams[other]
        self("cuStreamBeginCapture_v2", native, RELAXED)
        self.launch("add", stream, self.buffers[one], 4, value)
        self("cuEventRecord", self.events[stream], native)
        self("cuStreamWaitEvent", beside, self.events[stream], 0)
        self.launch("copy", other, self.buffers[two], self.buffers[one], 4)
        self("cuEventRecord", self.events[other], beside)
        self("cuStreamWaitEvent", native, self.events[other], 0)
        self.launch("add", stream, self.buffers[two], 4, value)
        self.launch_captured(native)

    def made_of_nodes(self, stream: int, one: int, two: int, value: int) -> None:
        """Build a graph that adds and then copies, launch it, change it to add three times as much, and
        launch it again."""
        self.turn(one, stream)
        self.turn(two, stream)
        nodes = Nodes(self)
        graph = nodes.graph()
        adds = nodes.add(graph, "add", self.buffers[one], 4, value)
        nodes.copy(graph, self.buffers[two], self.buffers[one], 16, [adds])
        executable = nodes.executable(graph)
        self("cuGraphLaunch", executable, self.streams[stream])
        assert nodes.change(executable, adds, nodes.kernel("add", self.buffers[one], 4, 3 * value)) == 0
        self("cuGraphDestroy", graph)
        self("cuGraphLaunch", executable, self.streams[stream])
        self("cuGraphExecDestroy", executable)

    def call(self, stream: int, value: int, at: int, seen: threading.Event | None = None) -> None:
        """Add the value to four words of pinned memory in a host callback or a stream callback."""
        number = len(self.hosted)
        words = (ctypes.c_uint32 * 4).from_address(at)

        def run(status: int) -> None:
            words[:] = [(word + value) % 2**32 for word in words]
            self.ran.append(number + 1000 * status)
            if seen:
                seen.set()

        if value % 2:
            hosted = FUNCTION(lambda _: run(0))
            self("cuLaunchHostFunc", self.streams[stream], hosted, None)
        else:
            hosted = CALLBACK(lambda _stream, status, _: run(status))
            self("cuStreamAddCallback", self.streams[stream], hosted, None, 0)
        self.hosted.append(hosted)

    def host(self, what: str, stream: int, one: int, value: int) -> None:
        """Copy out, change the data in a host callback, and copy in again.

        The data lies at a place of the step's own, or at the buffer's place; earlier readers of that are
        waited for.
        """
        place = {"host": 5 + len(self.hosted), "host_same": 1 + one}.get(what)
        at, size = self.pinned + HOSTED + 64 * one, 16
        if place:
            at, size = self.pinned + HOSTED + HOST_BYTES * place, HOST_BYTES
        self.turn(one, stream)
        self("cuMemcpyDtoHAsync_v2", at, self.buffers[one], size, self.streams[stream])
        self.call(stream, value, at)
        self("cuMemcpyHtoDAsync_v2", self.buffers[one], at, size, self.streams[stream])

    def host_twice(self, stream: int, one: int, two: int, value: int) -> None:
        """Change the data in a host callback again after the GPU has read and used it."""
        at = self.pinned + HOSTED + HOST_BYTES * (5 + len(self.hosted))
        self.turn(one, stream)
        self.turn(two, stream)
        self("cuMemcpyDtoHAsync_v2", at, self.buffers[one], HOST_BYTES, self.streams[stream])
        self.call(stream, value, at)
        self("cuMemcpyHtoDAsync_v2", self.buffers[one], at, HOST_BYTES, self.streams[stream])
        self.launch("copy", stream, self.buffers[two], self.buffers[one], 4)
        self.call(stream, value, at)
        self("cuMemcpyHtoDAsync_v2", self.buffers[one], at, HOST_BYTES, self.streams[stream])

    def host_seen(self, stream: int, one: int, value: int) -> list[int]:
        """Only a host callback proves that the data is copied out; the memory then belongs to the program
        again."""
        at = self.pinned + HOSTED + 64 * one + 32
        seen = threading.Event()
        self.turn(one, stream)
        self("cuMemcpyDtoHAsync_v2", at, self.buffers[one], 16, self.streams[stream])
        self.call(stream, value, at, seen)
        assert seen.wait(DEADLINE_S)
        words = (ctypes.c_uint32 * 4).from_address(at)
        found, words[:] = list(words), [0] * 4
        return found

    def in_pinned(self, stream: int, one: int, value: int) -> list[int]:
        """Copy more than the proxy copies itself; the memory belongs to the program again when its event
        is reached."""
        count = (256 << 10) // 4
        self.turn(one, stream)
        source = (ctypes.c_uint32 * count).from_address(self.pinned)
        source[:4] = [value, value + 1, value + 2, value + 3]
        self("cuMemcpyHtoDAsync_v2", self.buffers[one], self.pinned, 4 * count, self.streams[stream])
        self("cuEventRecord", self.events[stream], self.streams[stream])
        self("cuEventSynchronize", self.events[stream])
        source[:4] = [0] * 4
        return []


def say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def run(program: Program, steps: list[Any], stops: list[int], mapped: list[int]) -> None:
    seen: list[int] = []
    program.begin(mapped)
    for number, step in enumerate(steps):
        say(str(number))
        if number in stops:
            sys.stdin.readline()
        seen += program.step(*step)
    say("end")
    if len(steps) in stops:
        sys.stdin.readline()
    seen += program.end()
    say(json.dumps(seen))


gpu = Program()
say(str(os.getpid()))
for line in sys.stdin:
    asked = json.loads(line)
    run(gpu, asked["steps"], asked["stops"], asked["mapped"])
