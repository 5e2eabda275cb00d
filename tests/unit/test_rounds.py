"""The once-a-second work: what each round does, and that no failure of one ends the rest."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from mpsd import rounds
from mpsd.core import events as ev
from mpsd.core.state import Policy, Slot, State
from mpsd.layout import Layout
from mpsd.rounds import FLUSH_EVERY, LIST_EVERY, MODE_EVERY, TRIM_EVERY, Rounds
from mpsd.text import SILENT_GUARD


class Spy:
    """Stands for every part: notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.leases: dict[Any, Any] = {}
        self.problem = ""
        self.domains: tuple[str, ...] = ()

    def check_identities(self) -> None:
        self.asked.append("identities")

    def refresh(self, processes: object) -> None:
        self.asked.append("refresh")

    def retry(self) -> None:
        self.asked.append("retry")

    def names(self) -> tuple[str, ...]:
        return self.domains

    async def list_clients(self, domain: str) -> None:
        self.asked.append(("list", domain))

    def look_around(self) -> None:
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

    def look_around(self) -> None:
        self.asked.append("memory")

    def close(self) -> None:
        self.asked.append("closed")


class Machine:
    def __init__(self, base: Path) -> None:
        self.spy = spy = Spy()
        self.space = 1 << 30
        self.exclusive = False
        self.posted: list[ev.Event] = []
        self.problems: list[str] = []
        self.layout = Layout(base / "r", base / "l", base / "s")
        (self.layout.run_dir / "s").mkdir(parents=True)
        self.layout.log_dir.mkdir()
        self.layout.log_space = lambda: self.space  # type: ignore[method-assign]
        self.state = State(Policy(), slots={"s": Slot("s", ("GPU-a",), None)})
        part: Any = spy
        memory: Any = Memory(spy.asked)
        self.rounds = Rounds(
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
            lambda: self.problems,
        )

    def _exclusive(self, gpus: Sequence[str]) -> bool:
        assert gpus == ("GPU-a",)
        return self.exclusive

    def round(self, number: int) -> list[Any]:
        async def scenario() -> None:
            await self.rounds.look_around(number)
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
    assert machine.round(1) == ["identities", "orphans", "refresh", "memory"]


def test_what_could_not_be_written_is_tried_again(machine: Machine) -> None:
    machine.spy.problem = "full"
    assert machine.round(1).count("retry") == 3


def test_what_degrades_the_daemon_is_in_its_log_when_it_comes_and_when_it_goes(machine: Machine) -> None:
    """And once, also where its numbers change, but for what is so on a healthy node."""
    with structlog.testing.capture_logs() as logged:
        for seen in ([], ["3 lines lost", SILENT_GUARD], ["4 lines lost", "full"], ["full"], []):
            machine.problems = seen
            machine.round(1)
    assert [(entry["event"], entry["reason"], entry["log_level"]) for entry in logged] == [
        ("degraded", "3 lines lost", "warning"),
        ("degraded", "full", "warning"),
        ("no longer degraded", "4 lines lost", "info"),
        ("no longer degraded", "full", "info"),
    ]


def test_a_path_that_could_not_be_led_elsewhere_is_led_there_later(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.state = replace(machine.state, slots={"s": Slot("s", ("GPU-a",), None, active="d2")})
    machine.layout.switch("s", "d1")
    with monkeypatch.context() as full:
        full.setattr(machine.layout, "switch", _no_room)
        machine.round(1)
    assert machine.layout.leads_to("s") == "d1"
    (problem,) = machine.rounds.problems()
    assert "does not lead to d2: No space left on device" in problem
    machine.round(2)
    assert machine.layout.leads_to("s") == "d2"
    assert machine.rounds.problems() == []


def _no_room(slot: str, domain: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_now_and_then_the_servers_lists_are_compared(machine: Machine) -> None:
    machine.spy.domains = ("d1", "d2")
    asked = machine.round(LIST_EVERY)
    assert [a for a in asked if a[0] in ("list", "ask")] == [
        (what, domain) for domain in ("d1", "d2") for what in ("list", "ask")
    ]


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
                await machine.rounds.look_around(number)
                await asyncio.sleep(0)
        assert asked.count("refresh") == 3
        assert asked.count(("list", "d1")) == 1, "it is asked once at a time"
        answer.set()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
        await machine.rounds.look_around(3 * LIST_EVERY)
        machine.rounds.close()

    asyncio.run(scenario())
    assert ("ask", "d1") in asked


def test_on_a_full_disk_they_are_compared_each_time_and_it_is_said(machine: Machine) -> None:
    machine.spy.domains = ("d1",)
    machine.space = 0
    assert ("list", "d1") in machine.round(1)
    assert any("is full" in text for text in machine.rounds.problems())
    machine.space = 1 << 30
    machine.round(2)
    assert machine.rounds.problems() == []


def test_logs_are_trimmed_now_and_then(machine: Machine) -> None:
    assert ("trim", 77) in machine.round(TRIM_EVERY)


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
    assert any("not empty" in text for text in machine.rounds.problems())
    assert (default / "control").exists()


def test_a_round_that_fails_is_not_the_last(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ROUND_S", 0.0)
    seen: list[int] = []

    async def scenario() -> None:
        done = asyncio.Event()

        async def look(self: Rounds, number: int) -> None:
            seen.append(number)
            if number == 3:
                done.set()
            raise RuntimeError("this one")

        monkeypatch.setattr(Rounds, "look_around", look)
        running = asyncio.create_task(machine.rounds.run())
        async with asyncio.timeout(20):
            await done.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    assert seen == [1, 2, 3]
