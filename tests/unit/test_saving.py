"""When the state file is written: before its content is shown, and not while clients move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mpsd.os.quietperiod import QUIET_S, QuietPeriod
from mpsd.records.statefile import StateFile
from mpsd.records.statewriter import StateSaver

DEADLINE_S = 10.0
KIND, LEVEL = "a test's", 1


class Setup:
    """A state of one number, a clock, and the file."""

    def __init__(self, path: Path) -> None:
        self.path, self.time, self.number = path, 1.0, 0
        self.calm = QuietPeriod(lambda: self.time)
        self.saving = StateSaver(StateFile(path, KIND, LEVEL), lambda: {"number": self.number}, self.calm)

    def change(self) -> None:
        self.number += 1
        self.saving.soon()

    def written(self) -> int | None:
        found = StateFile(self.path, KIND, LEVEL).load()
        return found["number"] if found else None


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Setup], Awaitable[None]]], None]:
    async def within(test: Callable[[Setup], Awaitable[None]]) -> None:
        await asyncio.wait_for(test(Setup(tmp_path / "state")), DEADLINE_S)

    return lambda test: asyncio.run(within(test))


Run = Callable[[Callable[[Setup], Awaitable[None]]], None]


def test_many_changes_of_one_turn_are_written_once_after_it(run: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.change()
        setup.change()
        assert setup.written() is None
        await asyncio.sleep(0)
        assert setup.written() == 2

    run(test)


def test_what_is_shown_has_been_written(run: Run) -> None:
    """Otherwise a daemon killed right after an answer would leave a file that is older than the answer."""

    async def test(setup: Setup) -> None:
        setup.change()
        setup.saving.shown()
        assert setup.written() == 1
        # An unchanged state is not written again.
        setup.path.unlink()
        setup.saving.shown()
        await asyncio.sleep(0)
        assert setup.written() is None

    run(test)


def test_what_is_shown_waits_for_no_file_while_programs_move(run: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.calm.begin()
        setup.change()
        setup.saving.shown()
        await asyncio.sleep(0)
        assert setup.written() is None
        # An operation with a lasting effect writes the state in any case.
        assert setup.saving.pending() == "" and setup.written() == 1
        setup.change()
        setup.time += QUIET_S
        setup.saving.shown()
        assert setup.written() == 2

    run(test)


def test_what_cannot_be_written_is_told(run: Run) -> None:
    async def test(setup: Setup) -> None:
        setup.path.mkdir()
        setup.change()
        assert str(setup.path) in setup.saving.pending()
        setup.path.rmdir()
        setup.change()
        assert setup.saving.pending() == "" and setup.written() == 2

    run(test)
