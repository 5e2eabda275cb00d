"""Clients of the fail-over measurements: survivors with two copies of the driver.

Copy A is the ordinary libcuda in the domain of the environment, copy B a second one in the domain of
`pipe`. Each speaks as faultinject.measure.client does; stamps are CLOCK_MONOTONIC seconds.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from faultinject.measure import failover_copies, failover_offender, failover_shared
from faultinject.measure.client import commands, emit
from faultinject.measure.failover_cut import cut_off
from faultinject.measure.failover_driver import (
    GRANULE,
    NOT_READY,
    Copies,
    Shared,
    first,
    now,
)
from faultinject.measure.failover_engine import Engine, ToHost
from faultinject.measure.zone_calls import uvm_descriptors

# Offsets in the shared memory; behind the counters of the first three is the GPU's time of the last step.
LONG, QUEUE, COPIED, FROM_HOST, WITHIN, STOP = 0, 64, 128, 192, 256, 4096
READ = 320
STAMPED = {"long kernel": LONG, "queued kernels": QUEUE, "copies": COPIED}
ENGINES = {"copies from the host": FROM_HOST, "copies within": WITHIN}
WORDS = STAMPED | ENGINES
TO_HOST = "copies to the host"
LONG_NS, SHORT_NS = 8_000_000_000, 100_000


class Twins:
    """Both copies, started, with the same memory mapped in each."""

    def __init__(self, cubin: str, folder: str, pipe: str) -> None:
        self.a = first()
        before = descriptors()
        self.stamps: dict[str, Any] = {"A": self.a.start(Path(cubin))}
        self.descriptors_of_a = descriptors() - before
        copies = Copies(Path(folder))
        self.b = copies.start(1, Path(pipe), Path(cubin))
        self.stamps["B"] = copies.notes
        self.shared = Shared(self.a, self.b)
        self.b.current()
        self.scratch = self.b.alloc(4096)

    def clock_offset_s(self) -> tuple[float, float]:
        """GPU time minus CLOCK_MONOTONIC, and how far off that can be; seconds."""
        self.b.current()
        pulse = self.b.prepare("pulse", self.scratch, 1, self.scratch + 64)
        found = []
        for _ in range(30):
            began = now()
            pulse()
            self.b.sync()
            ended = now()
            gpu = self.b.read_u64(self.scratch + 8) / 1e9
            found.append(((ended - began) / 2, gpu - (began + ended) / 2))
        error, offset = min(found)
        return offset, error

    def first_kernel(self) -> dict[str, Any]:
        """Run one kernel on copy B; when it was done, and its code."""
        self.b.current()
        code = self.b.prepare("increment", self.scratch + 128, 1)() or self.b.code("cuStreamSynchronize", 0)
        return {"done": now(), "code": code}


def descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


class Reader:
    """Reads the shared counters through copy B, over and over, until told to stop."""

    def __init__(self, twins: Twins) -> None:
        self._driver, self._address = twins.b, twins.shared.other
        self.values = dict.fromkeys(WORDS, 0)
        self.before = dict.fromkeys(WORDS, 0.0)  # the last read that began while more was to come
        self.seen = dict.fromkeys(WORDS, 0.0)  # the end of the first read with the final value
        self.gpu_ns = dict.fromkeys(WORDS, 0)  # when the GPU last counted, by its own clock
        self.reads, self.longest, self.code = 0, 0.0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2)

    def _run(self) -> None:
        self._driver.current()
        out = ctypes.create_string_buffer(READ)
        words = ctypes.cast(out, ctypes.POINTER(ctypes.c_uint64))
        read = self._driver.library.cuMemcpyDtoH_v2
        arguments = (out, ctypes.c_uint64(self._address), ctypes.c_uint64(READ))
        last = now()
        while not self._stop.is_set():
            began = now()
            self.code = read(*arguments)
            ended = now()
            if self.code:
                return
            self.reads += 1
            self.longest = max(self.longest, ended - began)
            for name, offset in WORDS.items():
                value = words[offset // 8]
                if value != self.values[name]:
                    self.values[name], self.before[name], self.seen[name] = value, last, ended
                    self.gpu_ns[name] = words[offset // 8 + 1]
            last = began


class Signs:
    """What copy A says about its own end: the first time and code of each way to ask."""

    def __init__(self) -> None:
        self.first: dict[str, list[float | int]] = {}

    def note(self, name: str, code: int) -> None:
        if code not in (0, NOT_READY):
            self.first.setdefault(name, [now(), code])


class Writer:
    """Work on copy A that writes into the shared memory: a long kernel, queued kernels, copies."""

    def __init__(self, twins: Twins, *, blocked: bool, to_host: bool = False) -> None:
        self.twins, self.signs = twins, Signs()
        self.ended = threading.Event()
        a, base = twins.a, twins.shared.one
        a.current()
        self._streams = [a.stream() for _ in range(3)]
        private, stop = a.alloc(4096), base + STOP
        long, queue, copies = self._streams
        self._long = a.prepare("pulse", base + LONG, LONG_NS, stop, stream=long)
        self._short = a.prepare("pulse", base + QUEUE, SHORT_NS, stop, stream=queue)
        self._source = a.prepare("pulse", private, SHORT_NS, stop, stream=copies)
        self._copy = ("cuMemcpyDtoDAsync_v2", base + COPIED, private, 16, copies)
        engines = [Engine(a, base + at, from_host=at == FROM_HOST) for at in ENGINES.values()]
        self._streams += [engine.stream for engine in engines]
        jobs: list[Callable[[], None]] = [self._feed_kernels, self._feed_copies, self._poll]
        jobs += [partial(self._feed, "large copy", engine.submit, 64) for engine in engines]
        self.to_host = ToHost(a, base) if to_host else None
        if self.to_host:
            self._streams.append(self.to_host.stream)
            jobs.append(partial(self._feed, "copy to the host", self.to_host.submit, 64))
        jobs += [self._wait] if blocked else []
        self._threads = [threading.Thread(target=job, daemon=True) for job in jobs]

    def start(self) -> None:
        self.signs.note("first launch", self._long())
        if self.to_host:
            self.to_host.start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """No more calls into copy A; whether all of them came back within 50 ms."""
        self.ended.set()
        end = now() + 0.05
        for thread in self._threads:
            thread.join(max(0.0, end - now()))
        return not any(thread.is_alive() for thread in self._threads)

    def _feed(self, name: str, submit: Callable[[], int], ahead: int) -> None:
        """Keep between `ahead` and twice as many submissions of 100 us in the queue."""
        self.twins.a.current()
        for _ in range(ahead):
            self.signs.note(name, submit())
        while not self.ended.wait(ahead / 10_000) and name not in self.signs.first:
            for _ in range(ahead):
                self.signs.note(name, submit())

    def _feed_kernels(self) -> None:
        self._feed("launch", self._short, 256)

    def _feed_copies(self) -> None:
        self._feed("copy", lambda: self._source() or self.twins.a.code(*self._copy), 128)

    def _poll(self) -> None:
        self.twins.a.current()
        while not self.ended.wait(0.0003) and "query" not in self.signs.first:
            for stream in self._streams:
                self.signs.note("query", self.twins.a.code("cuStreamQuery", stream))

    def _wait(self) -> None:
        self.twins.a.current()
        self.signs.note("blocked sync", self.twins.a.code("cuCtxSynchronize"))


def close_descriptors(twins: Twins) -> int:
    """Put /dev/null in the place of every device descriptor of copy A; how many."""
    null, closed = os.open("/dev/null", os.O_RDWR), 0
    for fd in twins.descriptors_of_a:
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia"):
                os.dup2(null, fd, inheritable=False)
                closed += 1
        except OSError:
            continue
    return closed


def end_by(means: str, writer: Writer) -> dict[str, Any]:
    """Try to end all writing of copy A at once; when it began and came back, and what it said."""
    twins, row = writer.twins, {"means": means, "began": now()}
    if means == "unmap":
        twins.a.current()
        row["code"] = twins.a.code("cuMemUnmap", twins.shared.one, GRANULE)
    elif means == "reset":
        row["threads out"] = writer.stop()
        row["stopped"] = now()
        row["code"] = twins.a.code("cuDevicePrimaryCtxReset_v2", 0)
    elif means == "close":
        row["closed"] = close_descriptors(twins)
    elif means == "cut":
        fds = [fd for fd in uvm_descriptors() if fd in twins.descriptors_of_a]
        return row | cut_off(fds, twins.shared.one, GRANULE)
    row["ended"] = now()
    return row


def _wait_for_work(reader: Reader, timeout_s: float = 3) -> bool:
    end = now() + timeout_s
    while now() < end and not all(reader.values.values()):
        time.sleep(0.001)
    return all(reader.values.values())


def writer(cubin: str, folder: str, pipe: str, means: str = "none") -> None:
    """Writes through A, reads through B. On "switch" ends A's work by `means`; on "finish" tells all."""
    sys.setswitchinterval(0.0002)
    twins = Twins(cubin, folder, pipe)
    offset, error = twins.clock_offset_s()
    work = Writer(twins, blocked=means == "none", to_host=means == "cut")
    reader, lines = Reader(twins), commands()
    emit("ready", pid=os.getpid(), stamps=twins.stamps)
    lines.get()
    reader.start()
    work.start()
    emit("working", moving=_wait_for_work(reader))
    ended: dict[str, Any] = {}

    def act() -> None:
        ended.update(end_by(means, work))

    line = lines.get()
    if line == "switch":
        threading.Thread(target=act, daemon=True).start()
        line = lines.get()
    reader.stop()
    work.ended.set()
    twins.b.current()
    twins.b.write_u32(twins.shared.other + STOP, 1)
    last = {name: reader.gpu_ns[name] / 1e9 - offset for name in STAMPED}
    # No stamp of the GPU's: it was not before the last look that began while more was to come.
    last |= {name: reader.before[name] for name in ENGINES}
    values, before, seen = dict(reader.values), dict(reader.before), dict(reader.seen)
    if work.to_host:
        work.to_host.stop()
        values[TO_HOST], seen[TO_HOST] = work.to_host.copies, work.to_host.seen
        last[TO_HOST] = before[TO_HOST] = work.to_host.before
    emit(
        "told", values=values, before=before, after=seen, written=last,
        clock_error_ms=round(error * 1e3, 4), reads=reader.reads, read_code=reader.code,
        longest_read_ms=round(reader.longest * 1e3, 2), signs=work.signs.first, ended=ended,
    )  # fmt: skip
    os._exit(0)


class Loop:
    """Launches, synchronises in turn in four ways, and counts what was said to be done."""

    WAYS = ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuMemcpyDtoH_v2")

    def __init__(self, twins: Twins) -> None:
        a = self._a = twins.a
        a.current()
        self._word = twins.shared.one
        self._event = a.made("cuEventCreate", 2)
        self._spin = a.prepare("spin", 150_000)
        self._step = a.prepare("increment", self._word, 1)
        self._seen = ctypes.c_uint32()
        self.successes = self.wrong_reads = 0
        self.by_way = dict.fromkeys(self.WAYS, 0)
        self.last_success = 0.0
        self.end: dict[str, Any] = {}
        self.stopped = threading.Event()

    def _wait(self, way: str) -> int:
        a = self._a
        if way == "cuCtxSynchronize":
            return a.code(way)
        if way == "cuStreamSynchronize":
            return a.code(way, 0)
        if way == "cuEventSynchronize":
            return a.code("cuEventRecord", self._event, 0) or a.code(way, self._event)
        code = a.code(way, ctypes.byref(self._seen), self._word, 4)
        self.wrong_reads += code == 0 and self._seen.value != self.successes + 1
        return code

    def run(self) -> None:
        self._a.current()
        while not self.stopped.is_set():
            way = self.WAYS[self.successes % 4]
            code = self._spin() or self._step()
            where = "launch" if code else way
            code = code or self._wait(way)
            if code:
                self.end = {"at": now(), "code": code, "where": where}
                return
            self.successes += 1
            self.by_way[way] += 1
            self.last_success = now()


def loop(cubin: str, folder: str, pipe: str) -> None:
    """Counts successful syncs on A; on "switch" runs a kernel on B; on "finish" compares with memory."""
    sys.setswitchinterval(0.0002)
    twins = Twins(cubin, folder, pipe)
    work, lines = Loop(twins), commands()
    thread = threading.Thread(target=work.run, daemon=True)
    twins.first_kernel()
    emit("ready", pid=os.getpid(), stamps=twins.stamps)
    lines.get()
    thread.start()
    emit("working")
    line = lines.get()
    switched: dict[str, Any] = {}
    if line == "switch":
        switched = twins.first_kernel()
        line = lines.get()
    work.stopped.set()
    thread.join(0.3)
    twins.b.current()
    emit(
        "told", successes=work.successes, by_way=work.by_way, wrong_reads=work.wrong_reads, end=work.end,
        last_success=work.last_success, in_memory=twins.b.read_u64(twins.shared.other) & 0xFFFFFFFF,
        switched=switched,
    )  # fmt: skip
    os._exit(0)


ROLES: dict[str, Callable[..., None]] = {
    "writer": writer,
    "loop": loop,
    "offender": failover_offender.offender,
    "once": failover_copies.once,
    "many": failover_copies.many,
    "cycles": failover_copies.cycles,
    "host": failover_shared.host,
    "graph": failover_shared.graph,
    "window": failover_shared.window,
}
