"""Leases of unknown domains: what is held, what is looked at, and when it is given up."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import pytest

from mpsd import procs
from mpsd.guardnotes import GuardNotes
from mpsd.lease import Kept
from mpsd.leasestore import LeaseStore
from mpsd.model import ClientId, ProcessInstance
from mpsd.orphans import Orphans
from tests.unit.test_attacher import FakeStore, FakeUvm
from tests.unit.test_workwatch import A_KERNEL, View, until


class Desk:
    """`present`: whether what was kept is of the program that runs now."""

    def __init__(self) -> None:
        self.uvm, self.store = FakeUvm(), FakeStore()
        self.front = LeaseStore(self.store)
        self.views: dict[ProcessInstance, View] = {}
        self.present = True
        self.left = ""
        self.orphans = Orphans(self.uvm, self, 0.001, self.front)

    def open(self, process: ProcessInstance, pidfd: int) -> View:
        raise AssertionError("it is adopted")

    def adopt(self, process: ProcessInstance, fds: Mapping[str, int]) -> View:
        view = self.views[process] = View()
        view.left = self.left
        return view

    def is_present(self, process: ProcessInstance, fds: Mapping[str, int]) -> bool:
        return self.present

    def take(self, *clients: ClientId) -> None:
        processes = [procs.Pinned.open(os.getpid())]
        self.orphans.take("d1", processes, {c: kept(c) for c in clients})


def kept(client: ClientId) -> Kept:
    guard = GuardNotes.create()
    fds = {"va": os.dup(guard.fd), "guard": guard.fd}
    return Kept(str(client), fds)


def at_a_desk(play: Callable[[Desk], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        desk = Desk()
        try:
            await play(desk)
        finally:
            for space in desk.uvm.spaces:
                space.closing.set()
            await desk.orphans.close()
            await desk.front.close(10, end=False)

    asyncio.run(run())


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def shown(desk: Desk) -> Sequence[int]:
    return [row["pid"] for row in desk.orphans.rows()]


def test_living_orphans_are_looked_at_in_each_round(child: subprocess.Popen[bytes]) -> None:
    async def play(desk: Desk) -> None:
        process = procs.facts(child.pid).instance
        desk.take(ClientId("d1", process))
        view = desk.views[process]
        for _ in range(3):
            before = view.refreshed

            def looked_at(before: int = before) -> bool:
                # The last look may not have ended: then this round begins none.
                desk.orphans.look_around()
                return view.refreshed > before

            await until(looked_at)
        view.left = A_KERNEL
        child.kill()
        child.wait()
        desk.orphans.look_around()
        assert shown(desk) == [child.pid]
        await until(lambda: view.looks)
        view.left = ""
        await until(lambda: not len(desk.orphans))

    at_a_desk(play)


def test_what_is_not_understood_is_held_as_long_as_its_domain(child: subprocess.Popen[bytes]) -> None:
    async def play(desk: Desk) -> None:
        ends = []
        for name, domain in (("lease.d1.new", "d1"), ("other", None)):
            reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            ends.append(reader)
            desk.store.names.add(name)
            desk.front._held.add(name)
            desk.orphans.hold(name, [writer], domain, [procs.Pinned.open(child.pid)] if domain else [])
        desk.orphans.look_around()
        assert len(desk.orphans) == 2
        assert "2 set(s)" in " ".join(desk.orphans.problems())
        with pytest.raises(BlockingIOError):
            os.read(ends[0], 1)
        child.kill()
        child.wait()
        desk.orphans.look_around()
        await until(lambda: desk.store.names == {"other"})
        assert os.read(ends[0], 1) == b"", "it is closed"
        assert len(desk.orphans) == 1
        for end in ends:
            os.close(end)

    at_a_desk(play)


def test_what_was_kept_of_a_program_before_an_exec_is_watched(child: subprocess.Popen[bytes]) -> None:
    async def play(desk: Desk) -> None:
        desk.present, desk.left = False, A_KERNEL
        process = procs.facts(child.pid).instance
        desk.take(ClientId("d1", process))
        assert shown(desk) == [child.pid]
        desk.views[process].left = ""
        await until(lambda: not len(desk.orphans))

    at_a_desk(play)


def test_whose_they_are_is_told_from_the_first_to_their_close(child: subprocess.Popen[bytes]) -> None:
    """Also while nobody has seen that one has died: what it has on the GPU is there all the same."""

    async def play(desk: Desk) -> None:
        process = procs.facts(child.pid).instance
        desk.take(ClientId("d1", process))
        child.kill()
        child.wait()
        assert desk.orphans.holders() == [(process, os.getuid(), False)]
        desk.orphans.look_around()
        await until(lambda: not len(desk.orphans))
        assert desk.orphans.holders() == [(process, os.getuid(), False)]
        desk.uvm.spaces[0].closing.set()
        await until(lambda: not desk.orphans.holders())

    at_a_desk(play)
