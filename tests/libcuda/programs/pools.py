"""A random program with stream-ordered allocations, run by tests/libcuda/test_pools_random.py.

Each line of its input is a program, as for epochs.py: a JSON object with steps and stops. Before each step it
prints the step's number, and where the test asked for it waits for a line. At the end it prints what the
program has seen, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

from faultinject.programs.devices.instance import Driver

IMAGE = b"standin module\nkernel add add 0\nkernel copy copy 0\nkernel late add 2000\n"
SIZES = (600, 1000, 40_000, 3 << 20, (3 << 20) - 5000, 4 << 20)
SLOTS, STREAMS, WORDS, MOST_SEEN = 4, 3, 4, 64
NON_BLOCKING, DISABLE_TIMING = 1, 2
THRESHOLD, FOREVER = 4, 2**64 - 1


class Program(Driver):
    """Slots with an allocation or none, and for each the stream of its last operation."""

    def __init__(self) -> None:
        super().__init__(ctypes.CDLL("libcuda.so.1"))
        self("cuInit", 0)
        self.context = self.made("cuDevicePrimaryCtxRetain", 0)
        self.current()
        module = self.made("cuModuleLoadData", IMAGE)
        for name in ("add", "copy", "late"):
            self.functions[name] = self.made("cuModuleGetFunction", module, name.encode())
        self.streams = [
            0,
            self.made("cuStreamCreate", NON_BLOCKING),
            self.made("cuStreamCreate", NON_BLOCKING),
        ]
        self.events = [self.made("cuEventCreate", DISABLE_TIMING) for _ in range(STREAMS)]
        self.pool = self.made("cuDeviceGetDefaultMemPool", 0)
        self.results = self.made("cuMemAlloc_v2", MOST_SEEN * 16)
        self.slots: list[int] = [0] * SLOTS
        self.last = [0] * SLOTS
        self.count = 0

    def begin(self) -> None:
        self.count = 0
        self("cuMemsetD8_v2", self.results, 0, MOST_SEEN * 16)
        self.hold(1)

    def hold(self, value: int) -> None:
        """Keep free memory in the pool, or release it in the next wait."""
        given = ctypes.c_uint64(FOREVER if value % 2 else 0)
        self("cuMemPoolSetAttribute", self.pool, THRESHOLD, ctypes.byref(given))

    def turn(self, slot: int, stream: int) -> None:
        """Order the stream's next operation after the last operation on the slot."""
        before, self.last[slot] = self.last[slot], stream
        if before != stream:
            self("cuEventRecord", self.events[before], self.streams[before])
            self("cuStreamWaitEvent", self.streams[stream], self.events[before], 0)

    def run(self, kernel: str, stream: int, to: int, *values: int) -> None:
        held: list[Any] = [ctypes.c_uint64(to), *map(ctypes.c_uint64, values)]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        self("cuLaunchKernel", self.functions[kernel], *[1] * 6, 0, self.streams[stream], pointers, None)

    def allocate(self, stream: int, slot: int, value: int) -> None:
        size = SIZES[value % len(SIZES)]
        self.slots[slot] = self.made("cuMemAllocAsync", size, self.streams[stream])
        self.last[slot] = stream
        self("cuMemsetD32Async", self.slots[slot], value, WORDS, self.streams[stream])

    def free(self, stream: int, slot: int) -> None:
        self.turn(slot, stream)
        self("cuMemFreeAsync", self.slots[slot], self.streams[stream])
        self.slots[slot] = 0

    def see(self, stream: int, slot: int) -> None:
        self.turn(slot, stream)
        self.run("copy", stream, self.results + 16 * self.count, self.slots[slot], WORDS)
        self.count += 1

    def step(self, what: str, stream: int, one: int, two: int, value: int) -> None:
        if what == "alloc":
            if self.slots[one]:
                self.free(two % STREAMS, one)
            self.allocate(stream, one, value)
        elif what == "wait":
            self("cuStreamSynchronize", self.streams[stream])
        elif what == "wait_all":
            self("cuCtxSynchronize")
        elif what == "hold":
            self.hold(value)
        elif not self.slots[one]:
            pass
        elif what == "free":
            self.free(stream, one)
        elif what == "again":
            self("cuCtxSynchronize")
            self("cuMemFree_v2", self.slots[one])
            self.slots[one] = 0
        elif what in ("add", "late"):
            self.turn(one, stream)
            self.run(what, stream, self.slots[one], WORDS, value)
        elif what == "see":
            self.see(stream, one)
        elif what == "copy" and self.slots[two] and one != two:
            self.turn(one, stream)
            self.turn(two, stream)
            self.run("copy", stream, self.slots[one], self.slots[two], WORDS)

    def end(self) -> list[int]:
        for slot in range(SLOTS):
            if self.slots[slot]:
                self.see(slot % STREAMS, slot)
                self.free(slot % STREAMS, slot)
        self("cuCtxSynchronize")
        seen = (ctypes.c_uint32 * (4 * self.count))()
        if self.count:
            self("cuMemcpyDtoH_v2", seen, self.results, 16 * self.count)
        return list(seen)


def say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def run(program: Program, steps: list[Any], stops: list[int]) -> None:
    program.begin()
    for number, step in enumerate(steps):
        say(str(number))
        if number in stops:
            sys.stdin.readline()
        program.step(*step)
    say("end")
    if len(steps) in stops:
        sys.stdin.readline()
    say(json.dumps(program.end()))


gpu = Program()
say(str(os.getpid()))
for line in sys.stdin:
    asked = json.loads(line)
    run(gpu, asked["steps"], asked["stops"])
