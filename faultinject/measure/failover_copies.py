"""Clients that load copies of libcuda: in each way, many, and again into a domain after a fault.

Each finding is an event "row" as it comes, so that a crash loses only what follows; "told" is the end.
"""

from __future__ import annotations

import _ctypes
import os
import sys
from pathlib import Path
from typing import Any

from faultinject.measure.client import emit
from faultinject.measure.failover_driver import Copies, Driver, DriverError, Shared, first, ms, now
from faultinject.measure.nvml import Nvml

MANY = 8
CYCLES = 4


class Usage:
    """What this process takes: memory in KiB, descriptors, threads, the GPU's memory in MiB."""

    def __init__(self) -> None:
        self._nvml = Nvml()
        self._last = self.now()

    def now(self) -> dict[str, int]:
        fields = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
        )
        return {
            "VmRSS KiB": int(fields["VmRSS"].split()[0]),
            "RssAnon KiB": int(fields["RssAnon"].split()[0]),
            "VmSize MiB": int(fields["VmSize"].split()[0]) >> 10,
            "threads": int(fields["Threads"]),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
            "GPU MiB": self._nvml.used_mib(),
        }

    def growth(self) -> dict[str, int]:
        """Since the last call."""
        seen, before = self.now(), self._last
        self._last = seen
        return {name: seen[name] - before[name] for name in seen}


def works(driver: Driver) -> str:
    """Whether a kernel of this copy runs; "ok" or what failed."""
    try:
        driver.current()
        word = driver.alloc(4096)
        driver.launch("increment", word, 1)
        driver.sync()
        return "ok" if driver.read_u64(word) == 1 else "wrong result"
    except DriverError as error:
        return str(error)


def row(what: str, **fields: Any) -> None:
    emit("row", what=what, **fields)


def unload(driver: Driver, path: str) -> dict[str, Any]:
    """dlclose, and whether the file is still mapped; a crash is told by the missing answer."""
    began = now()
    _ctypes.dlclose(driver.library._handle)  # type: ignore[attr-defined,unused-ignore]
    took = ms(began, now())
    return {"dlclose ms": took, "still mapped": path in Path("/proc/self/maps").read_text()}


def reset(driver: Driver) -> dict[str, Any]:
    driver.current()
    began = now()
    code = driver.code("cuDevicePrimaryCtxReset_v2", 0)
    return {"reset code": code, "reset ms": ms(began, now())}


def many(cubin: str, folder: str, pipe: str) -> None:
    """Copies one after another, all alive; then each is reset and unloaded; then two more."""
    usage = Usage()
    a = first()
    times = a.start(Path(cubin))
    row("the process's own libcuda", **times, works=works(a), growth=usage.growth())
    copies, made = Copies(Path(folder)), []
    for number in range(1, MANY + 1):
        try:
            driver = copies.start(number, Path(pipe), Path(cubin))
        except (OSError, DriverError) as error:
            row(f"copy {number}", failed=str(error), growth=usage.growth())
            break
        made.append((number, driver))
        row(f"copy {number}", **copies.notes, works=works(driver), growth=usage.growth())
    row("all copies at once", works=[works(driver) for _, driver in made], own=works(a))
    for number, driver in made:
        found = reset(driver)
        row(f"reset of copy {number}", **found, growth=usage.growth())
    for number, driver in made:
        row(f"about to unload copy {number}")
        found = unload(driver, f"renamed-{number}.so")
        row(f"unloaded copy {number}", **found, growth=usage.growth())
    row("own libcuda after all unloads", works=works(a))
    for number in (MANY + 1, MANY + 2):
        try:
            driver = copies.start(number, Path(pipe), Path(cubin))
            row(f"copy {number}", **copies.notes, works=works(driver), growth=usage.growth())
        except (OSError, DriverError) as error:
            row(f"copy {number}", failed=str(error), growth=usage.growth())
    emit("told")
    sys.stdin.readline()
    os._exit(0)


def until_error(driver: Driver, timeout_s: float = 2) -> int:
    """Launch and synchronise until the copy says an error; its code, 0 if none came."""
    driver.current()
    step = driver.prepare("spin", 100_000)
    end = now() + timeout_s
    while now() < end:
        code = step() or driver.code("cuCtxSynchronize")
        if code:
            return code
    return 0


def cycles(cubin: str, folder: str, pipe: str) -> None:
    """The same domain again and again: a copy in it dies of a neighbour, is reset, a new one begins."""
    usage = Usage()
    own_pipe = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    copies, driver, dead = Copies(Path(folder)), first(), []
    driver.start(Path(cubin))
    standby = copies.start(1, Path(pipe), Path(cubin))
    row("own libcuda and a standby copy", works=[works(driver), works(standby)], growth=usage.growth())
    for number in range(2, CYCLES + 2):
        emit(f"armed {number - 1}")
        sys.stdin.readline()
        code = until_error(driver)
        found = reset(driver)
        dead.append((number - 1, driver))
        row(f"fault {number - 1}", code=code, **found, standby=works(standby), growth=usage.growth())
        emit(f"was reset {number - 1}")
        sys.stdin.readline()
        try:
            driver = copies.start(number, own_pipe, Path(cubin))
        except (OSError, DriverError) as error:
            row(f"copy {number} in the same domain", failed=str(error), growth=usage.growth())
            break
        row(f"copy {number} in the same domain", **copies.notes, works=works(driver), growth=usage.growth())
    for number, gone in dead[1:]:
        row(f"about to unload faulted copy {number}")
        row(f"unloaded faulted copy {number}", **unload(gone, f"renamed-{number}.so"), growth=usage.growth())
    row("in the end", works=[works(driver), works(standby)])
    emit("told")
    sys.stdin.readline()
    os._exit(0)


def once(cubin: str, folder: str, pipe: str, how: str) -> None:
    """Both copies, the second one made in this way (`nothing`: unchanged); what it took, and worked."""
    a = first()
    row: dict[str, Any] = {"how": how, "A": a.start(Path(cubin))}
    copies = Copies(Path(folder))
    try:
        b: Driver = copies.load(1, Path(pipe), how)
        row |= copies.notes | {"counts after dlopen": copies.helper.counts()}
        row |= copies.helper.within(Path(pipe), 1, lambda: b.start(Path(cubin)))
        shared = Shared(a, b)
        b.current()
        b.launch("increment", shared.other, 1)
        b.sync()
        a.current()
        a.launch("increment", shared.one, 1)
        a.sync()
        row["both wrote"] = a.read_u64(shared.one) == 2
    except (DriverError, OSError) as error:
        row["failed"] = str(error)
    row["counts"] = copies.helper.counts()
    sockets = Path("/proc/net/unix").read_text().splitlines()
    row["sockets"] = [line.split()[-1] for line in sockets if f"-{os.getpid()}" in line and "@" in line]
    emit("told", **row, pid=os.getpid())
    sys.stdin.readline()
    os._exit(0)
