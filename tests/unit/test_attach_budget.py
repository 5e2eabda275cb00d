"""The budget of descriptors under lives of clients: never exceeded, and whole again at the end."""

from __future__ import annotations

import asyncio
import random
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import GpuError, NotReadyError, StoreError
from mpsd.base.model import ClientId, ProcessInstance
from mpsd.clients import attach as attach_module
from mpsd.clients import pins as pins_module
from mpsd.clients.attach import PROBE_DESCRIPTORS, Attacher
from mpsd.clients.endofwork import WorkWatch
from mpsd.clients.pins import NO_DESCRIPTOR
from mpsd.core import events as ev
from mpsd.fdstore.queue import LeaseStore
from mpsd.gpu.base import AddressSpace
from mpsd.os import processes
from mpsd.os.descriptors import DescriptorBudget, Purpose
from tests.unit.test_attach import FakeSpace, FakeStore, NoView

DEADLINE_S = 20.0
STEPS = 60


class View(NoView):
    fds: Mapping[str, int] = {"areas": 0, "mem": 0}


class Views:
    def open(self, process: ProcessInstance, pidfd: int) -> View:
        return View()

    def adopt(self, process: ProcessInstance, fds: Mapping[str, int]) -> View:
        return View()


COST = PROBE_DESCRIPTORS
"""va, mm, tracker, notes; two of a view and its mappings; copies of five."""


class Driver:
    """A UVM driver with a script: an outcome for each probe, the number of spaces at the end of it."""

    def __init__(self) -> None:
        self.script: list[str] = []
        self.hanging = threading.Event()

    def open(self, process: ProcessInstance, pidfd: int) -> Sequence[AddressSpace]:
        match self.script.pop(0) if self.script else "one":
            case "early":
                raise NotReadyError("no address space yet")
            case "error":
                raise GpuError("no such ioctl")
            case "descriptors":
                raise OSError("too many open files")
            case "hang":
                assert self.hanging.wait(DEADLINE_S)
                return [self._space()]
            case "two":
                return [self._space(), self._space()]
            case _:
                return [self._space()]

    def adopt(self, fds: Mapping[str, int]) -> AddressSpace:
        raise GpuError("no lease")

    def _space(self) -> FakeSpace:
        space = FakeSpace()
        space.closing.set()
        return space


@dataclass
class Play:
    """An attacher under a small budget. It stands in for core: each noticed process is attached."""

    capacity: int
    said: list[ev.Event] = field(default_factory=list)
    leased: set[ClientId] = field(default_factory=set)
    spaces: dict[ProcessInstance, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = DescriptorBudget(self.capacity, reserve=0)
        self.driver, self.store = Driver(), FakeStore()
        self.work = WorkWatch(Views(), 0.01, self.post)
        self.front = LeaseStore(self.store, budget=self.budget)
        self.attacher = Attacher(self.driver, self.work, self.front, self.post, budget=self.budget)

    def post(self, event: ev.Event) -> None:
        self.said.append(event)
        if isinstance(event, ev.ClientNoticed):
            self.attach(event.facts.instance)
        elif isinstance(event, ev.ClientAttached):
            self.leased |= {
                ClientId("d1", event.process, event.space + number) for number in range(event.spaces)
            }
        elif isinstance(event, ev.ClientDied):
            self.end(event.process)

    def attach(self, process: ProcessInstance) -> None:
        self.spaces[process] = self.spaces.get(process, 0) + 10
        self.attacher.attach("d1", process, self.spaces[process])

    def end(self, process: ProcessInstance) -> None:
        for client in [c for c in self.leased if c.process == process]:
            self.leased.discard(client)
            self.attacher.release(client)
        self.attacher.forget(process)

    def failed(self) -> list[str]:
        return [e.reason for e in self.said if isinstance(e, ev.AttachFailed)]

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait, and do meanwhile what the daemon does once a second."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                assert 0 <= self.budget.left <= self.capacity
                self.attacher.lease_waiting()
                await asyncio.sleep(0.001)

    async def empty(self) -> None:
        """End every client; the budget must be whole again."""
        self.driver.hanging.set()
        self.store.answers.set()
        for process in [pin.process.instance for pin in self.attacher.pins]:
            self.end(process)
        await self.until(lambda: self.budget.left == self.capacity)

    async def close(self) -> None:
        self.driver.hanging.set()
        self.store.answers.set()
        await self.attacher.attachments_done()
        self.attacher.close()
        await self.work.close()
        await self.front.close(10, end=False)


def play(capacity: int, scenario: Callable[[Play], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        site = Play(capacity)
        try:
            await scenario(site)
            await site.empty()
        finally:
            await site.close()
        bugs = [e for e in site.said if isinstance(e, ev.Counted) and "internal_errors" in e.counters]
        assert not bugs

    asyncio.run(run())


@pytest.fixture
def children() -> Iterator[list[ProcessInstance]]:
    started = [subprocess.Popen(["sleep", "300"]) for _ in range(4)]
    yield [processes.facts(child.pid).instance for child in started]
    for child in started:
        child.kill()
        child.wait()


def test_a_leased_client_costs_as_much_as_is_open(children: list[ProcessInstance]) -> None:
    async def scenario(site: Play) -> None:
        site.attacher.notice("d1", children[0].pid)
        await site.until(lambda: site.leased)
        assert site.budget.taken(Purpose.CLIENT) == 1
        assert site.budget.taken(Purpose.LEASE) == COST

    play(100, scenario)


def test_a_client_that_does_not_fit_is_told_of_once_and_leased_when_another_one_exits(
    children: list[ProcessInstance],
) -> None:
    async def scenario(site: Play) -> None:
        for process in children[:2]:
            site.attacher.notice("d1", process.pid)
        await site.until(lambda: site.leased and site.failed())
        assert site.failed() == [NO_DESCRIPTOR] and len(site.leased) == 1
        assert site.attacher.conditions() == [Condition(Code.CLIENTS_WAITING, count=1)]
        first = next(iter(site.leased)).process
        site.end(first)
        await site.until(lambda: site.leased)
        assert first not in {c.process for c in site.leased}
        assert site.failed() == [NO_DESCRIPTOR] and not site.attacher.conditions()

    play(COST + 2, scenario)


def test_a_client_with_more_address_spaces_than_fit_waits_until_they_do(
    children: list[ProcessInstance],
) -> None:
    async def scenario(site: Play) -> None:
        site.driver.script = ["one", "two"]
        site.attacher.notice("d1", children[0].pid)
        await site.until(lambda: site.leased)
        site.attacher.notice("d1", children[1].pid)
        await site.until(site.failed)
        assert site.failed() == [NO_DESCRIPTOR]
        assert site.budget.taken(Purpose.LEASE) == COST, "nothing of it is held"
        # The first of these probes may come while a part of the other lease is still charged.
        site.driver.script = ["two"] * 50
        site.end(children[0])
        await site.until(lambda: len(site.leased) == 2)

    play(2 * COST, scenario)


def test_a_process_without_a_descriptor_for_its_pin_is_missed(children: list[ProcessInstance]) -> None:
    async def scenario(site: Play) -> None:
        site.attacher.notice("d1", children[0].pid)
        assert site.said == [ev.Counted({"clients_missed": 1})]
        assert site.attacher.pinned(children[0]) is None

    play(0, scenario)


def test_listed_clients_without_a_pin_are_counted_once_each_until_a_list_lacks_them(
    children: list[ProcessInstance],
) -> None:
    def unpinned(site: Play) -> list[int]:
        return [e.count for e in site.said if isinstance(e, ev.ClientsUnpinned)]

    async def scenario(site: Play) -> None:
        pids = [process.pid for process in children]
        # A log line is only a claim.
        site.attacher.notice("d1", pids[0])
        assert unpinned(site) == []
        for _ in range(3):
            site.attacher.listed("d1", pids)
            for pid in pids:
                site.attacher.notice("d1", pid, listed=True)
        assert unpinned(site)[-1] == len(pids)
        assert site.said.count(ev.Counted({"clients_missed": 1})) == len(pids)
        site.attacher.listed("d1", pids[1:])
        assert unpinned(site)[-1] == len(pids) - 1
        # A list of another domain says nothing about this one.
        site.attacher.listed("d2", ())
        assert unpinned(site)[-1] == len(pids) - 1
        # The next notice finds space.
        site.budget.capacity = site.capacity = 100
        site.attacher.notice("d1", pids[1], listed=True)
        assert unpinned(site)[-1] == len(pids) - 2
        await site.until(lambda: site.leased)
        site.attacher.listed("d1", ())
        assert unpinned(site)[-1] == 0

    play(0, scenario)


def test_refused_pids_are_few_whatever_a_log_names(
    children: list[ProcessInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins_module, "MAX_UNPINNED", 2)
    monkeypatch.setattr(pins_module, "MAX_UNPINNED_DOMAINS", 2)

    async def scenario(site: Play) -> None:
        for domain in ("d1", "d2", "d3"):
            for process in children:
                site.attacher.notice(domain, process.pid)
        assert {d: len(pids) for d, pids in site.attacher.pins._unpinned.items()} == {"d2": 2, "d3": 2}
        # The server's word counts beyond that.
        for process in children:
            site.attacher.notice("d3", process.pid, listed=True)
        assert site.said[-1] == ev.ClientsUnpinned("d3", len(children))

    play(0, scenario)


def test_a_probe_that_hangs_is_charged_until_its_thread_has_ended(
    children: list[ProcessInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_module, "PROBE_DEADLINE_S", 0.05)

    async def scenario(site: Play) -> None:
        site.driver.script = ["hang"]
        site.attacher.notice("d1", children[0].pid)
        await site.until(site.failed)
        assert site.budget.taken(Purpose.LEASE) == COST
        site.driver.hanging.set()
        await site.until(lambda: not site.budget.taken(Purpose.LEASE))

    play(100, scenario)


def test_a_cancelled_probe_is_charged_until_its_thread_has_ended(children: list[ProcessInstance]) -> None:
    async def scenario(site: Play) -> None:
        site.driver.script = ["hang"]
        site.attacher.notice("d1", children[0].pid)
        await site.until(lambda: site.budget.taken(Purpose.LEASE))
        pin = site.attacher.pins.get(children[0])
        assert pin is not None
        for task in tuple(pin.attaching):
            task.cancel()
        await site.until(lambda: not pin.attaching)
        assert site.budget.taken(Purpose.LEASE) == COST
        site.driver.hanging.set()
        await site.until(lambda: not site.budget.taken(Purpose.LEASE))

    play(100, scenario)


def test_copies_that_the_store_has_not_taken_yet_are_charged_until_they_are_closed(
    children: list[ProcessInstance],
) -> None:
    async def scenario(site: Play) -> None:
        site.store.answers.clear()
        for process in children[:3]:
            site.attacher.notice("d1", process.pid)
        # One of them is being stored, the others wait.
        await site.until(lambda: len(site.leased) == 3)
        for process in children[:3]:
            site.end(process)
        await site.until(lambda: site.budget.taken(Purpose.LEASE) <= 3 * 5)
        assert site.budget.taken(Purpose.LEASE) >= 5, "the copy for the request that hangs is open"

    play(100, scenario)


def test_a_lease_that_the_store_refused_is_charged_once(
    children: list[ProcessInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(site: Play) -> None:
        refused: list[str] = []

        def refuse(name: str, fds: Sequence[int]) -> None:
            refused.append(name)
            raise StoreError("full")

        monkeypatch.setattr(site.store, "put", refuse)
        monkeypatch.setattr(site.store, "remove", lambda name: None)
        site.attacher.notice("d1", children[0].pid)
        await site.until(lambda: site.leased and refused)
        assert site.budget.taken(Purpose.LEASE) == COST
        assert "full" in site.front.conditions()[0].detail, "a full store is shown"

    play(100, scenario)


def test_only_processes_whose_user_may_be_there_are_pinned_unless_the_server_lists_them(
    children: list[ProcessInstance],
) -> None:
    async def scenario(site: Play) -> None:
        site.attacher.pins._may_join = lambda domain, uid: False
        site.attacher.notice("d1", children[0].pid)
        assert site.said == [ev.ForeignNoticed("d1")] and not site.budget.taken(Purpose.CLIENT)
        site.attacher.notice("d1", children[0].pid, listed=True)
        await site.until(lambda: site.leased)
        # A pin for another domain does not make it a client of this one.
        site.attacher.notice("d2", children[0].pid)
        assert site.said[-1] == ev.ForeignNoticed("d2")

    play(100, scenario)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_the_budget_is_whole_again(
    seed: int, children: list[ProcessInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attach, exec, fail, hang, exit and a store that stops, in any order."""
    monkeypatch.setattr(attach_module, "PROBE_DEADLINE_S", 0.02)
    dice = random.Random(seed)
    outcomes = ["one", "one", "two", "early", "error", "descriptors", "hang"]

    async def scenario(site: Play) -> None:
        for _ in range(STEPS):
            process = dice.choice(children)
            pin = site.attacher.pins.get(process)
            match dice.choice(["notice", "notice", "attach", "end", "exec", "store", "hang", "wait"]):
                case "notice":
                    site.driver.script.append(dice.choice(outcomes))
                    site.attacher.notice("d1", process.pid)
                case "attach" if pin is not None:
                    site.attach(process)
                case "end":
                    site.end(process)
                case "exec" if pin is not None:
                    pin.exec_count += 1
                    site.end(process)
                    site.attacher.notice("d1", process.pid)
                case "store" if site.store.answers.is_set():
                    site.store.answers.clear()
                case "store":
                    site.store.answers.set()
                case "hang":
                    site.driver.hanging.set()
                    await asyncio.sleep(0)
                    site.driver.hanging.clear()
                case _:
                    site.attacher.lease_waiting()
            assert 0 <= site.budget.left <= site.capacity
            await asyncio.sleep(dice.choice([0, 0.002]))

    play(40, scenario)
