"""Leases of unknown domains: which are held, which are probed, and when they are released."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import pytest

from mpsd.base.conditions import Code, Condition
from mpsd.base.model import ClientId, ProcessInstance
from mpsd.clients.guardnotes import GuardNotes
from mpsd.clients.lease import RetainedLease
from mpsd.clients.orphans import Orphans
from mpsd.fdstore.queue import LeaseStore
from mpsd.os import processes as procs
from mpsd.os.descriptors import DescriptorBudget, Purpose
from tests.unit.test_attach import FakeStore, FakeUvm
from tests.unit.test_endofwork import A_KERNEL, View, until


class Setup:
    """`present`: whether the kept set belongs to the program that runs now."""

    def __init__(self) -> None:
        self.uvm, self.store = FakeUvm(), FakeStore()
        self.front = LeaseStore(self.store)
        self.views: dict[ProcessInstance, View] = {}
        self.present = True
        self.left = ""
        self.budget = DescriptorBudget(100, reserve=0)
        self.orphans = Orphans(self.uvm, self, 0.001, self.front, self.budget)

    def taken(self) -> tuple[int, int]:
        """Return the descriptors that leases and processes of domains take."""
        return self.budget.taken(Purpose.LEASE), self.budget.taken(Purpose.DOMAIN)

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


def kept(client: ClientId) -> RetainedLease:
    guard = GuardNotes.create()
    fds = {"va": os.dup(guard.fd), "guard": guard.fd}
    return RetainedLease(str(client), fds)


def with_setup(play: Callable[[Setup], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        setup = Setup()
        try:
            await play(setup)
        finally:
            for space in setup.uvm.spaces:
                space.closing.set()
            await setup.orphans.close()
            await setup.front.close(10, end=False)

    asyncio.run(run())


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def shown(setup: Setup) -> Sequence[int]:
    return [row["pid"] for row in setup.orphans.rows()]


def test_living_orphans_are_looked_at_in_each_round(child: subprocess.Popen[bytes]) -> None:
    async def play(setup: Setup) -> None:
        process = procs.facts(child.pid).instance
        setup.take(ClientId("d1", process))
        view = setup.views[process]
        assert setup.taken() == (3, 1), "two descriptors and the pin; one process of the domain"
        assert setup.orphans.conditions() == [Condition(Code.LEASES_HELD, "d1", count=1)]
        for _ in range(3):
            before = view.refreshed

            def looked_at(before: int = before) -> bool:
                # If the last probe has not ended, this round begins none.
                setup.orphans.check_all()
                return view.refreshed > before

            await until(looked_at)
        view.left = A_KERNEL
        child.kill()
        child.wait()
        setup.orphans.check_all()
        assert shown(setup) == [child.pid]
        await until(lambda: view.looks)
        view.left = ""
        await until(lambda: not len(setup.orphans))
        for space in setup.uvm.spaces:
            space.closing.set()
        await until(lambda: setup.taken() == (0, 1))

    with_setup(play)


def test_what_is_not_understood_is_held_as_long_as_its_domain(child: subprocess.Popen[bytes]) -> None:
    async def play(setup: Setup) -> None:
        ends = []
        for name, domain in (("lease.d1.new", "d1"), ("other", None)):
            reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            ends.append(reader)
            setup.store.names.add(name)
            setup.front._held.add(name)
            setup.orphans.hold(name, [writer], domain, [procs.Pinned.open(child.pid)] if domain else [])
        setup.orphans.check_all()
        assert len(setup.orphans) == 2
        assert setup.orphans.conditions() == [Condition(Code.SETS_HELD, count=2)]
        with pytest.raises(BlockingIOError):
            os.read(ends[0], 1)
        child.kill()
        child.wait()
        setup.orphans.check_all()
        await until(lambda: setup.store.names == {"other"})
        assert os.read(ends[0], 1) == b"", "it is closed"
        assert setup.taken() == (1, 0), "that of the other set"
        assert len(setup.orphans) == 1
        for end in ends:
            os.close(end)

    with_setup(play)


def test_what_was_kept_of_a_program_before_an_exec_is_watched(child: subprocess.Popen[bytes]) -> None:
    async def play(setup: Setup) -> None:
        setup.present, setup.left = False, A_KERNEL
        process = procs.facts(child.pid).instance
        setup.take(ClientId("d1", process))
        assert shown(setup) == [child.pid]
        setup.views[process].left = ""
        await until(lambda: not len(setup.orphans))

    with_setup(play)


def test_whose_they_are_is_told_from_the_first_to_their_close(child: subprocess.Popen[bytes]) -> None:
    """This holds before the death is noticed: its memory on the GPU still exists."""

    async def play(setup: Setup) -> None:
        process = procs.facts(child.pid).instance
        setup.take(ClientId("d1", process))
        child.kill()
        child.wait()
        assert setup.orphans.holders() == [(process, os.getuid(), False)]
        setup.orphans.check_all()
        await until(lambda: not len(setup.orphans))
        assert setup.orphans.holders() == [(process, os.getuid(), False)]
        setup.uvm.spaces[0].closing.set()
        await until(lambda: not setup.orphans.holders())

    with_setup(play)
