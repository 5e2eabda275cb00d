"""Laying the guard around a client with a scripted address space."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from mpsd.base.errors import GpuError
from mpsd.base.model import ClientId, GuardClass
from mpsd.clients.guard import Guards
from mpsd.clients.guardnotes import GuardNotes
from mpsd.clients.guardplan import GRANULE, Range
from mpsd.core import events as ev
from mpsd.gpu.base import Tracker
from mpsd.os import processes, procfs

STALE = Range(3 << 40, GRANULE, GuardClass.LOW)
NEVER_LAID = Range(4 << 40, GRANULE, GuardClass.LOW)


class Space:
    """An address space that refuses overlaps of the same base, and to unmap a range that is not mapped."""

    fds: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.laid: dict[int, int] = {}

    def track(self) -> Tracker:
        raise GpuError("none here")

    def map_sparse(self, base: int, length: int, gpu_uuid: str) -> None:
        if base in self.laid:
            raise GpuError("in use")
        self.laid[base] = length

    def unmap_sparse(self, base: int, length: int) -> None:
        if self.laid.get(base) != length:
            raise GpuError("no such range")
        del self.laid[base]

    def close(self) -> None: ...


def followed(kinds: set[GuardClass], space: Space, notes: GuardNotes) -> tuple[list[str], list[ev.Event]]:
    """Return what is shown of this process as a client after one round of its guard, and the events."""

    async def run() -> tuple[list[str], list[ev.Event]]:
        said: list[ev.Event] = []
        guards = Guards(kinds, 1024, 0.01, said.append)
        client = ClientId("d1", processes.facts(os.getpid()).instance, 0)
        guards.add(client, space, ["GPU-0"], notes, os.getuid())
        follower = asyncio.create_task(guards.follow())
        async with asyncio.timeout(10):
            while not guards.shown(client) and (kinds or space.laid):
                await asyncio.sleep(0.001)
            shown = guards.shown(client)
            await guards.remove(client)
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        return shown, said

    return asyncio.run(run())


def test_a_range_may_be_laid_while_a_client_is_shown() -> None:
    """The client's thread lays the range, and the loop does not wait for it."""

    class Beside:
        """A range that adds another laid range when its length is read."""

        kind = GuardClass.LOW

        def __init__(self, laid: set[Any]) -> None:
            self._laid = laid

        @property
        def length(self) -> int:
            self._laid.add(STALE)
            return GRANULE

    async def run() -> None:
        guards = Guards({GuardClass.LOW}, 1024, 0.01, lambda _: None)
        client = ClientId("d1", processes.facts(os.getpid()).instance, 0)
        guards.add(client, Space(), ["GPU-0"], GuardNotes.create(), os.getuid())
        laid: set[Any] = guards._guarded[client].laid
        laid.update((Beside(laid), Beside(laid)))
        assert guards.shown(client) == ["guard:low 0 MiB (silent)"]
        assert STALE in laid
        await guards.remove(client)

    asyncio.run(run())


def inherited(space: Space) -> GuardNotes:
    """Return the notes of a daemon that died after it had noted one range and before it laid it."""
    notes = GuardNotes.create()
    for noted in (STALE, NEVER_LAID):
        notes.add(noted)
    space.map_sparse(STALE.base, STALE.length, "GPU-0")
    return notes


def test_what_an_earlier_daemon_laid_goes_before_anything_is_laid() -> None:
    space = Space()
    notes = inherited(space)
    shown, said = followed({GuardClass.LOW}, space, notes)
    assert any(text.startswith("guard:low") for text in shown)
    assert STALE.base not in space.laid
    assert {(r.base, r.length) for r in notes.ranges()} == set(space.laid.items())
    assert not said
    notes.close()


def test_it_goes_too_where_no_guard_is_wanted() -> None:
    space = Space()
    notes = inherited(space)
    assert followed(set(), space, notes) == ([], [])
    assert not space.laid and not notes.ranges()
    notes.close()


def test_of_a_client_with_too_many_mappings_nothing_is_guarded_and_that_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(procfs, "MAPS_LIMIT", 1)
    space, notes = Space(), GuardNotes.create()
    shown, _ = followed({GuardClass.LOW, GuardClass.FILE}, space, notes)
    assert shown == ["guard lost: more than 1 mappings"]
    assert not space.laid
    notes.close()


def test_a_client_whose_mappings_cannot_be_read_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    real = procfs.map_lines

    def hangs(pid: int, below: int | None = None) -> procfs.MapLines:
        assert pid == os.getpid() or free.wait(10)
        return real(pid, below)

    monkeypatch.setattr(procfs, "map_lines", hangs)

    async def run() -> None:
        guards = Guards({GuardClass.LOW}, 1024, 0.01, lambda event: None)
        hung = ClientId("d1", processes.facts(os.getppid()).instance, 0)
        me = ClientId("d1", processes.facts(os.getpid()).instance, 0)
        notes = [GuardNotes.create(), GuardNotes.create()]
        for client, own in zip((hung, me), notes, strict=True):
            guards.add(client, Space(), ["GPU-0"], own, 7)
        follower = asyncio.create_task(guards.follow())
        async with asyncio.timeout(10):
            while not guards.shown(me):
                await asyncio.sleep(0.001)
            assert not guards.shown(hung)
            free.set()
            for client in (hung, me):
                await guards.remove(client)
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        for own in notes:
            own.close()

    asyncio.run(run())
