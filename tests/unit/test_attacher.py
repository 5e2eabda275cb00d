"""Pins and trackers: a number that is used again, and a source that has died."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from mpsd import procs
from mpsd.attacher import Attacher, Pin
from mpsd.core import events as ev
from mpsd.errors import GpuError, NotReadyError
from mpsd.fdstore import DescriptorStore
from mpsd.gpu.base import AddressSpace
from mpsd.model import ClientId, ProcessInstance, TrackerBatch
from mpsd.workwatch import WorkWatch


class NoUvm:
    def open(self, process: ProcessInstance, pidfd: int) -> Sequence[AddressSpace]:
        raise NotReadyError("not yet")

    def adopt(self, fds: Mapping[str, int]) -> AddressSpace:
        raise NotImplementedError


class DeadTracker:
    def __init__(self) -> None:
        self.readable, self._writer = os.pipe()
        os.write(self._writer, b"x")
        self.drains = 0

    def fileno(self) -> int:
        return self.readable

    def drain(self) -> TrackerBatch:
        self.drains += 1
        raise GpuError("gone")

    def close(self) -> None:
        os.close(self.readable)
        os.close(self._writer)


class Space:
    fds: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.tracker = DeadTracker()

    def track(self) -> DeadTracker:
        return self.tracker


def _attacher(told: list[ev.Event]) -> Attacher:
    return Attacher(NoUvm(), cast(WorkWatch, None), cast(DescriptorStore, None), told.append)


def test_a_pid_used_again_while_its_old_life_is_held_is_a_client_of_its_own() -> None:
    async def run() -> None:
        told: list[ev.Event] = []
        attacher = _attacher(told)
        me = procs.facts(os.getpid()).instance
        before = ProcessInstance(me.pid, me.start_ticks - 1)
        # A dead client's pin: the kernel has given its number away since.
        attacher._pins[before] = Pin(procs.Pinned(before, os.pidfd_open(me.pid)), None)
        assert attacher.notice("d1", me.pid)
        assert attacher.pinned(me) is not None
        assert isinstance(told[0], ev.ClientNoticed) and told[0].facts.instance == me
        attacher.close()

    asyncio.run(run())


def test_a_tracker_that_fails_is_read_no_more() -> None:
    async def run() -> None:
        told: list[ev.Event] = []
        attacher = _attacher(told)
        space = Space()
        attacher._track(ClientId("d1", ProcessInstance(1, 1), 0), cast(Any, space))
        await asyncio.sleep(0.02)
        assert space.tracker.drains == 1
        assert told == [ev.Counted({"trackers_lost": 1})]
        space.tracker.close()

    asyncio.run(run())
