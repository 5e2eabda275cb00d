"""Measuring clients: `python -m faultinject.campaigns.measure.clients.roles ROLE CUBIN [ARGUMENT...]`.

A client speaks JSON lines on stdout ({"ev": ..., "t": CLOCK_MONOTONIC seconds, ...}) and takes commands as
lines on stdin.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from faultinject.campaigns.measure.clients.cuda import Cuda, CudaError, pointer_to

STARTED = time.monotonic()
COUNTER, COUNTER_2, STOP = 0, 64, 4096


def emit(ev: str, **fields: Any) -> None:
    print(json.dumps({"ev": ev, "t": time.monotonic()} | fields), flush=True)


def commands() -> queue.Queue[str]:
    """Lines of stdin as they come; "" at the end of input."""
    lines: queue.Queue[str] = queue.Queue()

    def pump() -> None:
        for line in sys.stdin:
            lines.put(line.strip())
        lines.put("")

    threading.Thread(target=pump, daemon=True).start()
    return lines


def send_fd(path: str, fd: int) -> None:
    """Serve one descriptor to every process that connects, without end (daemon thread)."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)

    def serve() -> None:
        while True:
            peer, _ = listener.accept()
            with peer:
                socket.send_fds(peer, [b"x"], [fd])

    threading.Thread(target=serve, daemon=True).start()


def receive_fd(path: str) -> int:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        return socket.recv_fds(peer, 1, 1)[1][0]


class Survivor:
    """Increments a word and checks it, round after round; optionally watches a shared counter."""

    def __init__(self, cuda: Cuda, shared: int) -> None:
        self.cuda, self.shared = cuda, shared
        self.word = cuda.alloc(4096)
        self.rounds = 0
        self.longest = 0.0
        self._last = (0, 0)
        self._changed = 0.0
        self._moving = False

    def round(self) -> None:
        began = time.monotonic()
        self.cuda.launch("increment", self.word, 1)
        seen = int.from_bytes(self.cuda.read(self.word, 4), "little")
        took = time.monotonic() - began
        self.rounds += 1
        self.longest = max(self.longest, took)
        if took > 0.008:
            emit("stall", ms=round(took * 1e3, 1), at=began)
        if seen != self.rounds & 0xFFFFFFFF:
            emit("wrong", seen=seen, rounds=self.rounds)
            self.rounds = seen

    def watch_counters(self) -> None:
        """Say when the shared counters begin to move and when they last moved."""
        data = self.cuda.read(self.shared, 72)
        now = time.monotonic()
        seen = (int.from_bytes(data[:8], "little"), int.from_bytes(data[64:72], "little"))
        if seen != self._last:
            if not self._moving:
                emit("moving", at=now)
            self._last, self._changed, self._moving = seen, now, True
        elif self._moving and now - self._changed > 0.25:
            emit("still", last=self._changed, counters=seen)
            self._moving = False

    def run(self, lines: queue.Queue[str]) -> None:
        while True:
            self.round()
            if self.shared:
                for _ in range(8):
                    self.watch_counters()
            else:
                time.sleep(0.002)
            try:
                command = lines.get_nowait()
            except queue.Empty:
                continue
            if command in ("stop", ""):
                emit("survived", rounds=self.rounds, longest_ms=round(self.longest * 1e3, 2))
                return
            if command == "report":
                emit("alive", rounds=self.rounds, longest_ms=round(self.longest * 1e3, 2))
                self.longest = 0.0
            elif command.startswith("flag"):
                self.cuda.write(self.shared + STOP, int(command[4:]).to_bytes(4, "little"))
                emit("flagged")


def survivor(cubin: str, path: str = "") -> None:
    """A client that checks every result. With `path`: makes shared memory and serves it there."""
    cuda = Cuda(cubin)
    shared = 0
    if path:
        handle, fd = cuda.create_shareable()
        shared = cuda.map(handle)
        cuda("cuMemsetD8", shared, 0, 2 << 20)
        cuda.sync()
        send_fd(path, fd)
    worker = Survivor(cuda, shared)
    worker.round()
    emit("ready", pid=os.getpid(), stamps=cuda.stamps, started=STARTED)
    try:
        worker.run(commands())
    except CudaError as error:
        emit("error", code=error.code, text=str(error), rounds=worker.rounds)
        time.sleep(0.2)
        os._exit(7)


class Work:
    """Counting kernels of one shape; `kept` holds the objects that must stay alive."""

    def __init__(self, cuda: Cuda, shared: int, seconds: float) -> None:
        self._cuda = cuda
        self._counters = (shared + COUNTER, shared + COUNTER_2)
        self._stop = shared + STOP
        self._ns = int(seconds * 1e9)
        self.retained: list[Any] = []

    def _count(self, share: float, *, stream: Any = 0, second: bool = False, grid: int = 1) -> None:
        ns = int(self._ns * share)
        counter = self._counters[second]
        block = 1 if grid == 1 else 256
        self._cuda.launch("count", counter, ns, self._stop, grid=grid, block=block, stream=stream)

    def _row(self, *shares: float) -> None:
        for share in shares:
            self._count(share)

    def _stream(self) -> Any:
        self.retained.append(self._cuda.stream())
        return self.retained[-1]

    def start(self, variant: str) -> None:
        shapes: dict[str, Callable[[], None]] = {
            "idle": lambda: None,
            "single": lambda: self._count(1),
            "queued": lambda: self._row(0.5, 0.25, 0.25),
            "many": lambda: self._row(*[1 / 40] * 40),
            "behind": lambda: self._row(1, 0.001),
            "fill": lambda: self._count(1, grid=132 * 8),
            "two_streams": self._two_streams,
            "streams": self._streams,
            "graph": lambda: self._graph(self._line),
            "fork": lambda: self._graph(self._fork),
            "warm": self._warm,
            "copies": self._copies,
        }
        shapes[variant]()

    def _two_streams(self) -> None:
        self._count(0.5, stream=self._stream())
        self._count(1, stream=self._stream(), second=True)

    def _streams(self) -> None:
        for index in range(16):
            self._count((index + 1) / 16, stream=self._stream())

    def _graph(self, fill: Callable[[Any], None]) -> None:
        cuda, stream = self._cuda, self._stream()
        mode = cuda.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        cuda("cuStreamBeginCapture", stream, mode)
        fill(stream)
        graph = cuda("cuStreamEndCapture", stream)
        executable = cuda("cuGraphInstantiate", graph, 0)
        cuda("cuGraphLaunch", executable, stream)
        self.retained += [graph, executable]

    def _line(self, stream: Any) -> None:
        for _ in range(3):
            self._count(1 / 3, stream=stream)

    def _fork(self, stream: Any) -> None:
        cuda, other = self._cuda, self._stream()
        events = [cuda("cuEventCreate", 2) for _ in range(2)]
        cuda("cuEventRecord", events[0], stream)
        cuda("cuStreamWaitEvent", other, events[0], 0)
        self._count(0.5, stream=stream)
        self._count(1, stream=other, second=True)
        cuda("cuEventRecord", events[1], other)
        cuda("cuStreamWaitEvent", stream, events[1], 0)
        self.retained += events

    def _warm(self) -> None:
        scratch, streams = self._cuda.alloc(4096), [self._stream() for _ in range(4)]
        for index in range(5000):
            self._cuda.launch("increment", scratch + 256 * (index % 4), 1, stream=streams[index % 4])
        self._cuda.sync()
        self._count(1)

    def _copies(self) -> None:
        """About a second and a half of copies over the bus, then one short kernel."""
        size = 1 << 30
        host = int(self._cuda("cuMemHostAlloc", size, 0))
        device, stream = self._cuda.alloc(size), self._stream()
        for _ in range(64):
            self._cuda("cuMemcpyHtoDAsync", device, host, size, stream)
        self._count(1, stream=stream)


def worker(cubin: str, path: str, ballast_mib: str = "0") -> None:
    """A client that dies on command: "VARIANT SECONDS END", END being none, exit, segfault, clean."""
    cuda = Cuda(cubin)
    shared = cuda.map(cuda.import_shareable(receive_fd(path)))
    size = int(ballast_mib) << 20
    ballast = (cuda.alloc(size), bytearray(b"\1") * size) if size else None
    cuda.launch("increment", cuda.alloc(4096), 1)
    cuda.sync()
    emit("ready", pid=os.getpid(), ballast=bool(ballast))
    variant, seconds, end = sys.stdin.readline().split()
    work = Work(cuda, shared, float(seconds))
    work.start(variant)
    emit("launched", kept=len(work.retained))
    sys.stdin.readline()
    if end == "exit":
        os._exit(0)
    if end == "segfault":
        ctypes.string_at(0)


def starter(cubin: str, rounds: str = "150") -> None:
    """A client that stamps its own start and then checks `rounds` results."""
    cuda = Cuda(cubin)
    work = Survivor(cuda, 0)
    work.round()
    emit("ready", pid=os.getpid(), started=STARTED, first_kernel=time.monotonic(), stamps=cuda.stamps)
    for _ in range(int(rounds)):
        work.round()
    emit("checked", rounds=work.rounds, longest_ms=round(work.longest * 1e3, 2))
    sys.stdin.readline()


UNMAPPED = 0x7E00_0000_0000


def use_after_unmap(cuda: Cuda) -> None:
    handle, _ = cuda.create_shareable()
    address = cuda.map(handle)
    cuda.launch("store", address)
    cuda.sync()
    cuda("cuMemUnmap", address, 2 << 20)
    cuda.launch("store", address)


def pbdma(cuda: Cuda) -> None:
    handle, _ = cuda.create_shareable()
    address = cuda.map(handle)
    stream = cuda.stream()
    cuda.launch("spin", 400_000_000, stream=stream)
    cuda("cuStreamWriteValue32", stream, address, 1, 0)
    cuda("cuMemUnmap", address, 2 << 20)


def fault(cuda: Cuda, kind: str) -> None:
    """Cause a fault of this kind, asynchronously."""
    scratch = cuda.alloc(1 << 20)
    simple: dict[str, tuple[str, tuple[int, ...]]] = {
        "store": ("store", (UNMAPPED,)),
        "load": ("load", (UNMAPPED, scratch)),
        "atomic": ("atomic", (UNMAPPED,)),
        "null": ("store", (0,)),
        "noncanonical": ("store", (0xDEAD_0000_0000_0000,)),
        "misaligned": ("misaligned", (scratch,)),
        "shared_window": ("shared_window", (0x00F0_0000,)),
        "local_window": ("local_window", (0x00F0_0000,)),
        "trap": ("trap", ()),
        "breakpoint": ("breakpoint", ()),
        "stack_overflow": ("stack_overflow", (100_000, scratch)),
        "wild_call": ("wild_call", (UNMAPPED,)),
        "wild_call_low": ("wild_call", (0x10,)),
        "assert": ("assertion", (1,)),
    }
    if kind in simple:
        kernel, values = simple[kind]
        cuda.launch(kernel, *values)
    elif kind == "read_only":
        cuda.launch("store", cuda.map(cuda.create_shareable()[0], writable=False))
    elif kind == "use_after_unmap":
        use_after_unmap(cuda)
    elif kind == "pbdma":
        pbdma(cuda)
    elif kind.endswith("_running"):
        cuda.launch("spin", 3_000_000_000, grid=132, block=256)
    elif kind == "endless":
        cuda.launch("forever", scratch, grid=132, block=256)


def offender(cubin: str, kind: str) -> None:
    """Fault on command, then stay until told to go (or die in the way that `kind` names)."""
    cuda = Cuda(cubin)
    cuda.launch("increment", cuda.alloc(4096), 1)
    cuda.sync()
    emit("ready", pid=os.getpid())
    sys.stdin.readline()
    try:
        fault(cuda, kind)
        emit("fired")
        if kind.endswith(("_running", "_idle")):
            time.sleep(0.1)
            emit("dying")
            ways_to_end: dict[str, Callable[[], object]] = {
                "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "exit": lambda: os._exit(0),
                "segfault": lambda: ctypes.string_at(0),
            }
            ways_to_end[kind.split("_")[0]]()
        if kind == "clean_exit":
            return
        cuda.sync()
        emit("sync_ok")
    except CudaError as error:
        emit("error", code=error.code, text=str(error))
    sys.stdin.readline()
    os._exit(5)


def bench(cubin: str) -> None:
    """On each line of stdin: the time of 300 kernels that write 256 MiB, and of 2000 tiny ones."""
    cuda = Cuda(cubin)
    words = 64 << 20
    address = cuda.alloc(words * 4)
    emit("ready", pid=os.getpid())
    for _ in sys.stdin:
        result = {}
        for name, count, size in (("large", 300, words), ("tiny", 2000, 1)):
            times = []
            for _ in range(count):
                began = time.monotonic()
                cuda.launch("fill", address, size, 7, grid=132 * 8 if size > 1 else 1, block=256)
                cuda.sync()
                times.append((time.monotonic() - began) * 1e6)
            times.sort()
            result[f"{name}_us_median_p99"] = [
                round(times[count // 2], 1),
                round(times[count * 99 // 100], 1),
            ]
        emit("timed", **result)


def memory(cubin: str, *_: str) -> None:
    """Make CUDA memory calls on command and answer with their results (for hostguard.py)."""
    from faultinject.campaigns.measure.clients import memory as memory_calls

    memory_calls.serve(Cuda(cubin), emit, pointer_to)


def zones(cubin: str, *_: str) -> None:
    """Lay zones of managed memory beside a buffer and access them (for zones.py)."""
    from faultinject.campaigns.measure.clients import zones as zone_calls

    zone_calls.serve(Cuda(cubin), emit)


def failover(cubin: str, role: str, *arguments: str) -> None:
    """Run a process with two driver instances, or a neighbour of one (for failover/question.py)."""
    from faultinject.campaigns.measure.failover import survivors

    survivors.ROLES[role](cubin, *arguments)


ROLES: dict[str, Callable[..., None]] = {
    "survivor": survivor,
    "worker": worker,
    "starter": starter,
    "offender": offender,
    "memory": memory,
    "zones": zones,
    "bench": bench,
    "failover": failover,
}

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        ROLES[sys.argv[1]](*sys.argv[2:])
    except CudaError as failure:
        emit("failed", code=failure.code, text=str(failure))
        os._exit(6)
