"""What a guard hit is told with: whether nothing of its client runs, by two witnesses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mpsd import trackers
from mpsd.core import events as ev
from mpsd.linux import procfs
from mpsd.model import (
    Access,
    ClientId,
    ProcessInstance,
    TrackerBatch,
    UvmEvent,
    UvmFaultType,
    UvmReason,
)
from mpsd.trackers import Trackers
from mpsd.zones import layout
from mpsd.zones.book import Zones
from mpsd.zones.grants import ZoneLimits
from tests.support.guardzones import LedgerWriter

BASE, MIB = 0x1000_0000_0000, 1 << 20
ME = ProcessInstance(os.getpid(), procfs.start_ticks(os.getpid()))
CLIENT = ClientId("d1", ME)


class Queue:
    """A tracker that is readable when it has been given faults."""

    def __init__(self) -> None:
        self._eye = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: list[UvmEvent] = []

    def fault(self, address: int) -> None:
        now = 1 << 62
        self._events.append(
            UvmEvent(False, UvmFaultType.INVALID_PTE, Access.WRITE, UvmReason.UNKNOWN, address, now)
        )
        os.eventfd_write(self._eye, 1)

    def fileno(self) -> int:
        return self._eye

    def report_serviced(self) -> None: ...

    def drain(self) -> TrackerBatch:
        os.eventfd_read(self._eye)
        events, self._events = tuple(self._events), []
        return TrackerBatch(events, 0)

    def close(self) -> None:
        os.close(self._eye)


class Stand:
    """A client with one zone at BASE, whose ledger says that it launched once, and that this has ended."""

    def __init__(self) -> None:
        self.told: list[ev.GuardHit] = []
        self.answer = True
        self.looks = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.writer, self.queue = LedgerWriter(), Queue()
        self.writer.zone(0, layout.Kind.MANAGED, layout.Role.GUARD, BASE, BASE + MIB)
        self.writer.launched("wild")
        self.writer.head("settled", 1)
        self.zones = Zones(ZoneLimits())
        assert self.zones.join(ME, 0, ("GPU-0",), os.dup(self.writer.fd)) is not None
        self.trackers = Trackers(self._hear, self.zones, self._quiet)
        self.trackers.add(CLIENT, self.queue)

    def _hear(self, event: ev.Event) -> None:
        assert isinstance(event, ev.GuardHit), event
        self.told.append(event)

    async def _quiet(self, process: ProcessInstance) -> bool:
        self.looks += 1
        assert process == ME
        await self.go_on.wait()
        return self.answer

    async def hit(self, count: int = 1) -> list[bool]:
        """One more hit, and until `count` are told."""
        self.queue.fault(BASE)
        async with asyncio.timeout(10):
            while len(self.told) < count:
                await asyncio.sleep(0.001)
        return [event.idle for event in self.told]

    def close(self) -> None:
        self.trackers.remove(CLIENT)
        self.zones.close()
        self.queue.close()
        self.writer.close()


def run(test: Callable[[Stand], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        stand = Stand()
        try:
            await test(stand)
        finally:
            stand.close()

    asyncio.run(whole())


@pytest.mark.parametrize("quiet", [True, False])
def test_what_a_ledger_says_of_idleness_counts_only_when_the_work_agrees(quiet: bool) -> None:
    async def test(stand: Stand) -> None:
        stand.answer = quiet
        assert await stand.hit() == [quiet]

    run(test)


def test_where_the_ledger_says_that_something_runs_nobody_looks() -> None:
    async def test(stand: Stand) -> None:
        stand.writer.launched("wild")
        assert await stand.hit() == [False]
        assert stand.looks == 0

    run(test)


def test_what_is_launched_during_the_look_is_believed() -> None:
    async def test(stand: Stand) -> None:
        stand.go_on.clear()
        stand.queue.fault(BASE)
        while not stand.looks:
            await asyncio.sleep(0)
        stand.writer.launched("wild")
        stand.go_on.set()
        assert await stand.hit(2) == [False, False]

    run(test)


def test_hits_during_the_look_are_told_after_it_and_the_next_ones_need_no_look() -> None:
    async def test(stand: Stand) -> None:
        stand.go_on.clear()
        for _ in range(3):
            stand.queue.fault(BASE)
            await asyncio.sleep(2 * trackers.CALM_S)
        assert stand.told == []
        stand.go_on.set()
        # Three or fewer batches: those that were under way are told with what the look found.
        async with asyncio.timeout(10):
            while sum(event.count for event in stand.told) < 3:
                await asyncio.sleep(0.001)
        assert all(event.idle for event in stand.told)
        assert await stand.hit(len(stand.told) + 1) == [True] * (len(stand.told) - 1) + [False]
        assert stand.looks == 1

    run(test)
