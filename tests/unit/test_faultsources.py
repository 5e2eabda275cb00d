"""Sources of fault signs that are missing or that end while mpsd runs."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import GpuError
from mpsd.base.model import KernelXid
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.daemon.faultsources import FaultSources


class Source:
    """A source with something to read, which fails when it is read."""

    overruns = 0

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.write(self.writer, b"x")

    def fileno(self) -> int:
        return self.reader

    def drain(self) -> list[Any]:
        raise GpuError("NVML is gone")

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


class Backend:
    """`xids`: the source of Xids, or the error to raise. `kernel_log`: None without one."""

    def __init__(self, xids: Source | GpuError, kernel_log: Source | None) -> None:
        self.devices = self
        self.xids, self.kernel_log = xids, kernel_log

    def watch_xids(self) -> Source:
        if isinstance(self.xids, GpuError):
            raise self.xids
        return self.xids


def conditions(backend: Any, wanted: int) -> list[Condition]:
    """Return the conditions as soon as there are as many as wanted."""

    async def run() -> list[Condition]:
        sources = FaultSources(backend, [], lambda event: None)
        try:
            async with asyncio.timeout(20):
                while len(sources.conditions) < wanted:
                    await asyncio.sleep(0.001)
            return sources.conditions
        finally:
            sources.close()

    return asyncio.run(run())


def test_missing_sources_are_conditions() -> None:
    assert conditions(Backend(GpuError("no driver"), None), 2) == [
        Condition(Code.XIDS_NOT_SEEN, detail="no driver"),
        Condition(Code.KERNEL_LOG_NOT_READ),
    ]


def test_a_source_that_ends_is_told_once() -> None:
    lost = Condition(Code.SIGNS_LOST, detail="NVML is gone")
    assert conditions(Backend(Source(), Source()), 2) == [lost, lost]


class KernelLog(Source):
    """A kernel log with one Xid in it, before which lines were lost."""

    def drain(self) -> list[KernelXid]:
        self.overruns = 1
        return [KernelXid("0000:01:00.0", 13, None, "", "an Xid", 1)] if drained(self.reader) else []


def drained(reader: int) -> bytes:
    try:
        return os.read(reader, 1)
    except BlockingIOError:
        return b""


def test_the_kernel_log_is_read_at_once_before_an_event_that_needs_it() -> None:
    seen: list[ev.Event] = []

    async def run() -> None:
        sources = FaultSources(Backend(GpuError("no driver"), KernelLog()), [], seen.append)  # type: ignore[arg-type]
        try:
            assert seen == [mev.KernelLogFollowed(True)]
            sources.read_kernel_log()
            assert [type(e) for e in seen[1:]] == [ev.KernelXidSeen, mev.KernelLogFollowed]
            sources.read_kernel_log()
            assert len(seen) == 3
        finally:
            sources.close()
        sources.read_kernel_log()

    asyncio.run(run())


def test_a_lost_kernel_log_is_read_no_more() -> None:
    seen: list[ev.Event] = []

    async def run() -> list[Condition]:
        sources = FaultSources(Backend(GpuError("no driver"), Source()), [], seen.append)  # type: ignore[arg-type]
        try:
            sources.read_kernel_log()
            sources.read_kernel_log()
            return sources.conditions
        finally:
            sources.close()

    assert [c.code for c in asyncio.run(run())] == [Code.XIDS_NOT_SEEN, Code.SIGNS_LOST]
    assert seen == [mev.KernelLogFollowed(True), mev.KernelLogFollowed(False)]


class Overrun(Source):
    """A kernel log that loses lines and then ends."""

    def drain(self) -> list[Any]:
        self.overruns += 1
        return super().drain()


def test_a_log_that_ends_after_it_lost_lines_is_not_read() -> None:
    seen: list[ev.Event] = []

    async def run() -> None:
        sources = FaultSources(Backend(GpuError("no driver"), Overrun()), [], seen.append)  # type: ignore[arg-type]
        sources.read_kernel_log()
        sources.close()

    asyncio.run(run())
    assert seen == [mev.KernelLogFollowed(True), mev.KernelLogFollowed(False)]
