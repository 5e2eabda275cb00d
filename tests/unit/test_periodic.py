"""The work of each second: each round does its parts, and a failure of one part does not end the rest."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpsd.base.conditions import Code, Condition
from mpsd.config.layout import Layout
from mpsd.core import events as ev
from mpsd.core.state import Domain, DomainState, Policy, Slot, State
from mpsd.daemon import periodic
from mpsd.daemon.periodic import FLUSH_EVERY, LIST_EVERY, MODE_EVERY, TRIM_EVERY, PeriodicChecks
from mpsd.records.conditionlog import ConditionLog


class Spy:
    """Stands in for every part and notes the calls it gets."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.leases: dict[Any, Any] = {}
        self.problem = ""
        self.domains: tuple[str, ...] = ()
        self.unsure: tuple[str, ...] = ()

    def check_identities(self) -> None:
        self.asked.append("identities")

    def lease_waiting(self) -> None:
        self.asked.append("waiting")

    def refresh(self, processes: object) -> None:
        self.asked.append("refresh")

    def retry(self) -> None:
        self.asked.append("retry")

    def names(self) -> tuple[str, ...]:
        return self.domains

    def check_logs(self, *, disk_full: bool) -> Sequence[str]:
        return self.domains if disk_full else self.unsure

    async def list_clients(self, domain: str) -> None:
        self.asked.append(("list", domain))

    def check_all(self) -> None:
        self.asked.append("orphans")

    def sync(self) -> None:
        self.asked.append("sync")

    def ask(self, domain: str) -> None:
        self.asked.append(("ask", domain))

    def trim_logs(self, limit: int) -> None:
        self.asked.append(("trim", limit))


class Memory:
    def __init__(self, asked: list[Any]) -> None:
        self.asked = asked

    def check_all(self) -> None:
        self.asked.append("memory")

    def conditions(self) -> list[Condition]:
        return []

    def close(self) -> None:
        self.asked.append("closed")


class Paths:
    def __init__(self, asked: list[Any]) -> None:
        self.asked = asked

    async def check_all(self) -> None:
        self.asked.append("paths")

    def conditions(self) -> list[Condition]:
        return []


class Machine:
    def __init__(self, base: Path) -> None:
        self.spy = spy = Spy()
        self.space = 1 << 30
        self.exclusive = False
        self.posted: list[ev.Event] = []
        self.conditions: list[Condition] = []
        self.told: list[tuple[Condition, bool]] = []
        self.layout = Layout(base / "r", base / "l", base / "s")
        (self.layout.run_dir / "s").mkdir(parents=True)
        self.layout.log_dir.mkdir()
        self.layout.log_space = lambda: self.space  # type: ignore[method-assign]
        self.state = State(Policy(), slots={"s": Slot("s", ("GPU-a",), None)})
        part: Any = spy
        memory: Any = Memory(spy.asked)
        paths: Any = Paths(spy.asked)
        self.rounds = PeriodicChecks(
            part,
            part,
            part,
            memory,
            [part, part, part],
            part,
            self.layout,
            lambda: self.state,
            self.posted.append,
            self._exclusive,
            spy.list_clients,
            "slot",
            base / "default",
            77,
            lambda: self.conditions,
            paths,
            ConditionLog(lambda condition, begins: self.told.append((condition, begins))),
        )

    def _exclusive(self, gpus: Sequence[str]) -> bool:
        assert gpus == ("GPU-a",)
        return self.exclusive

    def round(self, number: int) -> list[Any]:
        async def scenario() -> None:
            await self.rounds.check_all(number)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others)

        self.spy.asked.clear()
        asyncio.run(scenario())
        return list(self.spy.asked)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_ordinary_round_asks_no_control_daemon(machine: Machine) -> None:
    machine.spy.domains = ("d1",)
    assert machine.round(1) == ["identities", "waiting", "orphans", "refresh", "memory", "paths"]


def test_what_could_not_be_written_is_tried_again(machine: Machine) -> None:
    machine.spy.problem = "full"
    assert machine.round(1).count("retry") == 3


def test_conditions_are_compared_each_round(machine: Machine) -> None:
    first, changed = (Condition(Code.LEASES_NOT_STORED, detail="full", count=n) for n in (3, 4))
    for seen in ([], [first], [changed], []):
        machine.conditions = seen
        machine.round(1)
    assert machine.told == [(first, True), (changed, False)]


def test_a_path_that_could_not_be_led_elsewhere_is_led_there_later(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.state = replace(machine.state, slots={"s": Slot("s", ("GPU-a",), None, active="d2")})
    machine.layout.switch("s", "d1")
    with monkeypatch.context() as full:
        full.setattr(machine.layout, "switch", _no_room)
        machine.round(1)
    assert machine.layout.domain_of_slot("s") == "d1"
    why = "domain d2: No space left on device"
    assert machine.rounds.conditions() == [Condition(Code.PATH_NOT_SWITCHED, "s", why)]
    machine.round(2)
    assert machine.layout.domain_of_slot("s") == "d2"
    assert machine.rounds.conditions() == []


def test_a_reserve_that_cannot_be_made_is_told(machine: Machine) -> None:
    machine.layout.create_reserve = lambda: "full"  # type: ignore[method-assign]
    machine.round(1)
    assert machine.rounds.conditions() == [Condition(Code.NO_RESERVE, str(machine.layout.run_dir), "full")]


def _no_room(slot: str, domain: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_now_and_then_the_servers_lists_are_compared(machine: Machine) -> None:
    machine.spy.domains = ("d1", "d2")
    asked = machine.round(LIST_EVERY)
    assert [a for a in asked if a[0] in ("list", "ask")] == [
        (what, domain) for domain in ("d1", "d2") for what in ("list", "ask")
    ]


def test_they_are_compared_in_each_round_while_a_process_of_another_user_may_be_a_client(
    machine: Machine,
) -> None:
    now = time.monotonic()
    domain = Domain("d1", "s", ("GPU-a",), None, DomainState.ACTIVE, now, foreign=(now, now))
    machine.state = replace(machine.state, domains={"d1": domain})
    for number in (1, 2):
        machine.spy.asked.clear()
        assert ("list", "d1") in machine.round(number)
    machine.state = replace(machine.state, domains={"d1": replace(domain, foreign=None)})
    machine.spy.asked.clear()
    assert ("list", "d1") not in machine.round(3)


def test_a_server_that_does_not_answer_holds_up_no_other_work(machine: Machine) -> None:
    machine.spy.domains = ("d1",)
    asked = machine.spy.asked

    async def scenario() -> None:
        answer = asyncio.Event()

        async def hangs(domain: str) -> None:
            asked.append(("list", domain))
            await answer.wait()

        machine.rounds.list_clients = hangs
        async with asyncio.timeout(20):
            for number in (LIST_EVERY, LIST_EVERY + 1, 2 * LIST_EVERY):
                await machine.rounds.check_all(number)
                await asyncio.sleep(0)
        assert asked.count("refresh") == 3
        assert asked.count(("list", "d1")) == 1, "it is asked once at a time"
        answer.set()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
        await machine.rounds.check_all(3 * LIST_EVERY)
        machine.rounds.close()

    asyncio.run(scenario())
    assert ("ask", "d1") in asked


def test_on_a_full_disk_they_are_compared_each_time_and_it_is_said(machine: Machine) -> None:
    machine.spy.domains = ("d1",)
    machine.space = 0
    assert ("list", "d1") in machine.round(1)
    assert [c.code for c in machine.rounds.conditions()] == [Code.LOG_DISK_FULL]
    machine.space = 1 << 30
    machine.round(2)
    assert machine.rounds.conditions() == []


def test_of_domains_with_an_unreliable_log_the_clients_are_listed_each_second(machine: Machine) -> None:
    machine.spy.domains, machine.spy.unsure = ("d1", "d2"), ("d2",)
    asked = machine.round(1)
    assert [a for a in asked if a[0] in ("list", "ask")] == [("list", "d2"), ("ask", "d2")]
    assert machine.round(LIST_EVERY).count(("list", "d2")) == 1
    machine.spy.unsure = ()
    assert ("list", "d2") not in machine.round(2)


def test_a_slow_round_of_all_domains_does_not_delay_those_with_an_unreliable_log(machine: Machine) -> None:
    machine.spy.domains = ("d1",)
    asked = machine.spy.asked

    async def scenario() -> None:
        answer = asyncio.Event()

        async def hangs(domain: str) -> None:
            asked.append(("list", domain))
            if domain == "d1":
                await answer.wait()

        machine.rounds.list_clients = hangs
        async with asyncio.timeout(20):
            await machine.rounds.check_all(LIST_EVERY)
            machine.spy.unsure = ("d2",)
            await machine.rounds.check_all(LIST_EVERY + 1)
            await asyncio.sleep(0)
            assert ("list", "d2") in asked
            answer.set()
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    asyncio.run(scenario())


@pytest.mark.parametrize("quiet", [False, True])
def test_a_server_that_does_not_answer_delays_the_list_of_no_other_domain(
    machine: Machine, quiet: bool
) -> None:
    """A user can stop the servers of all own domains."""
    stopped = tuple(f"d{n}" for n in range(8))
    machine.spy.domains = (*stopped, "d9")
    machine.spy.unsure = machine.spy.domains if quiet else ()
    first = 1 if quiet else LIST_EVERY
    asked = machine.spy.asked

    async def scenario() -> None:
        answer, listed = asyncio.Event(), asyncio.Event()

        async def hangs(domain: str) -> None:
            asked.append(("list", domain))
            if domain in stopped:
                await answer.wait()
            else:
                listed.set()

        machine.rounds.list_clients = hangs
        async with asyncio.timeout(20):
            for number in (first, 2 * first):
                listed.clear()
                await machine.rounds.check_all(number)
                await listed.wait()
                await asyncio.sleep(0)
            answer.set()
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    asyncio.run(scenario())
    assert [asked.count(("list", d)) for d in machine.spy.domains] == [1] * 8 + [2]
    assert [asked.count(("ask", d)) for d in machine.spy.domains] == [1] * 8 + [2]


def test_logs_are_trimmed_now_and_then(machine: Machine) -> None:
    assert ("trim", 77) in machine.round(TRIM_EVERY)
    assert ("trim", 77) not in machine.round(1)
    machine.spy.unsure = ("d1",)
    assert ("trim", 77) in machine.round(1), "a flooded log would fill the disk"


def test_what_was_written_is_flushed_now_and_then(machine: Machine) -> None:
    assert machine.round(FLUSH_EVERY).count("sync") == 3


def test_a_change_of_compute_mode_is_told_once_it_differs(machine: Machine) -> None:
    machine.round(MODE_EVERY)
    assert machine.posted == []
    machine.exclusive = True
    machine.round(MODE_EVERY)
    assert machine.posted == [ev.ModeSeen("s", True)]


def test_the_default_path_is_claimed_and_what_stands_there_is_left(machine: Machine, tmp_path: Path) -> None:
    default = tmp_path / "default"
    machine.round(1)
    assert not default.exists()
    target = machine.layout.slot_path("slot")
    target.mkdir()
    machine.round(2)
    assert default.resolve() == target
    default.unlink()
    default.mkdir()
    (default / "control").touch()
    machine.round(3)
    (found,) = machine.rounds.conditions()
    assert found.code is Code.DEFAULT_PATH and "not empty" in found.detail
    assert (default / "control").exists()


def test_a_round_that_fails_is_not_the_last(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "ROUND_S", 0.0)
    seen: list[int] = []

    async def scenario() -> None:
        done = asyncio.Event()

        async def look(self: PeriodicChecks, number: int) -> None:
            seen.append(number)
            if number == 3:
                done.set()
            raise RuntimeError("this one")

        monkeypatch.setattr(PeriodicChecks, "check_all", look)
        running = asyncio.create_task(machine.rounds.run())
        async with asyncio.timeout(20):
            await done.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    assert seen == [1, 2, 3]
