"""Clients of the fail-over measurements: survivors with two driver instances.

Instance A is the ordinary libcuda in the domain of the environment, instance B another libcuda in the domain
of `pipe`. Each speaks as clients/roles.py does; timestamps are CLOCK_MONOTONIC seconds.
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

from faultinject.campaigns.measure.clients.roles import commands, emit
from faultinject.campaigns.measure.clients.zones import uvm_descriptors
from faultinject.campaigns.measure.failover import offender, secondinstance
from faultinject.campaigns.measure.failover.copyengine import Engine, ToHost
from faultinject.campaigns.measure.failover.cutoff import cut_off
from faultinject.programs.devices.instance import (
    GRANULE,
    NOT_READY,
    DriverInstances,
    Shared,
    now,
    original_driver,
)

# Offsets in the shared memory; behind the counters of the first three is the GPU's time of the last step.
LONG, QUEUE, COPIED, FROM_HOST, WITHIN, STOP = 0, 64, 128, 192, 256, 4096
READ = 320
STAMPED = {"long kernel": LONG, "queued kernels": QUEUE, "copies": COPIED}
ENGINES = {"copies from the host": FROM_HOST, "copies within": WITHIN}
WORDS = STAMPED | ENGINES
TO_HOST = "copies to the host"
LONG_NS, SHORT_NS = 8_000_000_000, 100_000


class Instances:
    """Both driver instances, started, with the same memory mapped in each."""

    def __init__(self, cubin: str, folder: str, pipe: str) -> None:
        self.a = original_driver()
        before = descriptors()
        self.stamps: dict[str, Any] = {"A": self.a.start(Path(cubin))}
        self.descriptors_of_a = descriptors() - before
        instances_of_b = DriverInstances(Path(folder))
        self.b = instances_of_b.start(1, Path(pipe), Path(cubin))
        self.stamps["B"] = instances_of_b.notes
        self.shared = Shared(self.a, self.b)
        self.b.current()
        self.scratch = self.b.alloc(4096)

    def clock_offset_s(self) -> tuple[float, float]:
        """Return GPU time minus CLOCK_MONOTONIC, and its possible error; seconds."""
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
        """Run one kernel on instance B; return when it was done, and its code."""
        self.b.current()
        code = self.b.prepare("increment", self.scratch + 128, 1)() or self.b.code("cuStreamSynchronize", 0)
        return {"done": now(), "code": code}


def descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


class Reader:
    """Reads the shared counters through instance B, repeatedly, until told to stop."""

    def __init__(self, instances: Instances) -> None:
        self._driver, self._address = instances.b, instances.shared.other
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
    """Instance A's reports of its own end: the first time and code of each way to query it."""

    def __init__(self) -> None:
        self.first: dict[str, list[float | int]] = {}

    def note(self, name: str, code: int) -> None:
        if code not in (0, NOT_READY):
            self.first.setdefault(name, [now(), code])


class Writer:
    """Work on instance A that writes into the shared memory: a long kernel, queued kernels, copies."""

    def __init__(self, instances: Instances, *, blocked: bool, to_host: bool = False) -> None:
        self.instances, self.signs = instances, Signs()
        self.ended = threading.Event()
        a, base = instances.a, instances.shared.one
        a.current()
        self._streams = [a.stream() for _ in range(3)]
        private, stop = a.alloc(4096), base + STOP
        long, queue, instances_of_b = self._streams
        self._long = a.prepare("pulse", base + LONG, LONG_NS, stop, stream=long)
        self._short = a.prepare("pulse", base + QUEUE, SHORT_NS, stop, stream=queue)
        self._source = a.prepare("pulse", private, SHORT_NS, stop, stream=instances_of_b)
        self._copy = ("cuMemcpyDtoDAsync_v2", base + COPIED, private, 16, instances_of_b)
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
        """Stop calling instance A; return whether all calls came back within 50 ms."""
        self.ended.set()
        end = now() + 0.05
        for thread in self._threads:
            thread.join(max(0.0, end - now()))
        return not any(thread.is_alive() for thread in self._threads)

    def _feed(self, name: str, submit: Callable[[], int], ahead: int) -> None:
        """Keep between `ahead` and twice as many submissions of 100 us in the queue."""
        self.instances.a.current()
        for _ in range(ahead):
            self.signs.note(name, submit())
        while not self.ended.wait(ahead / 10_000) and name not in self.signs.first:
            for _ in range(ahead):
                self.signs.note(name, submit())

    def _feed_kernels(self) -> None:
        self._feed("launch", self._short, 256)

    def _feed_copies(self) -> None:
        self._feed("copy", lambda: self._source() or self.instances.a.code(*self._copy), 128)

    def _poll(self) -> None:
        self.instances.a.current()
        while not self.ended.wait(0.0003) and "query" not in self.signs.first:
            for stream in self._streams:
                self.signs.note("query", self.instances.a.code("cuStreamQuery", stream))

    def _wait(self) -> None:
        self.instances.a.current()
        self.signs.note("blocked sync", self.instances.a.code("cuCtxSynchronize"))


def close_descriptors(instances: Instances) -> int:
    """Replace every device descriptor of instance A by /dev/null; return how many."""
    null, closed = os.open("/dev/null", os.O_RDWR), 0
    for fd in instances.descriptors_of_a:
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia"):
                os.dup2(null, fd, inheritable=False)
                closed += 1
        except OSError:
            continue
    return closed


def end_by(means: str, writer: Writer) -> dict[str, Any]:
    """Try to end all writing of instance A at once; return its times and its code."""
    instances, row = writer.instances, {"means": means, "began": now()}
    if means == "unmap":
        instances.a.current()
        row["code"] = instances.a.code("cuMemUnmap", instances.shared.one, GRANULE)
    elif means == "reset":
        row["threads out"] = writer.stop()
        row["stopped"] = now()
        row["code"] = instances.a.code("cuDevicePrimaryCtxReset_v2", 0)
    elif means == "close":
        row["closed"] = close_descriptors(instances)
    elif means == "cut":
        fds = [fd for fd in uvm_descriptors() if fd in instances.descriptors_of_a]
        return row | cut_off(fds, instances.shared.one, GRANULE)
    row["ended"] = now()
    return row


def _wait_for_work(reader: Reader, timeout_s: float = 3) -> bool:
    end = now() + timeout_s
    while now() < end and not all(reader.values.values()):
        time.sleep(0.001)
    return all(reader.values.values())


def writer(cubin: str, folder: str, pipe: str, means: str = "none") -> None:
    """Write through A, read through B. On "switch" end A's work by `means`; on "finish" report."""
    sys.setswitchinterval(0.0002)
    instances = Instances(cubin, folder, pipe)
    offset, error = instances.clock_offset_s()
    work = Writer(instances, blocked=means == "none", to_host=means == "cut")
    reader, lines = Reader(instances), commands()
    emit("ready", pid=os.getpid(), stamps=instances.stamps)
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
    instances.b.current()
    instances.b.write_u32(instances.shared.other + STOP, 1)
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
    """Launches, synchronises in four ways in turn, and counts the successes."""

    WAYS = ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuMemcpyDtoH_v2")

    def __init__(self, instances: Instances) -> None:
        a = self._a = instances.a
        a.current()
        self._word = instances.shared.one
        self._event = a.made("cuEventCreate", 2)
        self._spin = a.prepare("spin", 150_000)
        self._step = a.prepare("increment", self._word, 1)
        self._seen = ctypes.c_uint32()
        self.successes = self.wrong_reads = 0
        self.by_way = dict.fromkeys(self.WAYS, 0)
        self.last_success = 0.0
        self.end: dict[str, Any] = {}
        self.stopped = threading.Event()

    def _wait(self, call: str) -> int:
        a = self._a
        if call == "cuCtxSynchronize":
            return a.code(call)
        if call == "cuStreamSynchronize":
            return a.code(call, 0)
        if call == "cuEventSynchronize":
            return a.code("cuEventRecord", self._event, 0) or a.code(call, self._event)
        code = a.code(call, ctypes.byref(self._seen), self._word, 4)
        self.wrong_reads += code == 0 and self._seen.value != self.successes + 1
        return code

    def run(self) -> None:
        self._a.current()
        while not self.stopped.is_set():
            call = self.WAYS[self.successes % 4]
            code = self._spin() or self._step()
            where = "launch" if code else call
            code = code or self._wait(call)
            if code:
                self.end = {"at": now(), "code": code, "where": where}
                return
            self.successes += 1
            self.by_way[call] += 1
            self.last_success = now()


def loop(cubin: str, folder: str, pipe: str) -> None:
    """Count synchronisations on A. On "switch" run a kernel on B; on "finish" compare with memory."""
    sys.setswitchinterval(0.0002)
    instances = Instances(cubin, folder, pipe)
    work, lines = Loop(instances), commands()
    thread = threading.Thread(target=work.run, daemon=True)
    instances.first_kernel()
    emit("ready", pid=os.getpid(), stamps=instances.stamps)
    lines.get()
    thread.start()
    emit("working")
    line = lines.get()
    switched: dict[str, Any] = {}
    if line == "switch":
        switched = instances.first_kernel()
        line = lines.get()
    work.stopped.set()
    thread.join(0.3)
    instances.b.current()
    emit(
        "told", successes=work.successes, by_way=work.by_way, wrong_reads=work.wrong_reads, end=work.end,
        last_success=work.last_success, in_memory=instances.b.read_u64(instances.shared.other) & 0xFFFFFFFF,
        switched=switched,
    )  # fmt: skip
    os._exit(0)


ROLES: dict[str, Callable[..., None]] = {
    "writer": writer,
    "loop": loop,
    "offender": offender.offender,
    "once": secondinstance.try_technique,
}
