"""When the state file is written: before what is in it is shown, and not while programs move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mpsd.calm import CALM_S, Calm
from mpsd.saving import Saving
from mpsd.statefile import StateFile

DEADLINE_S = 10.0
KIND, LEVEL = "a test's", 1


class Desk:
    """A state of one number, a clock, and the file."""

    def __init__(self, path: Path) -> None:
        self.path, self.time, self.number = path, 1.0, 0
        self.calm = Calm(lambda: self.time)
        self.saving = Saving(StateFile(path, KIND, LEVEL), lambda: {"number": self.number}, self.calm)

    def change(self) -> None:
        self.number += 1
        self.saving.soon()

    def written(self) -> int | None:
        found = StateFile(self.path, KIND, LEVEL).load()
        return found["number"] if found else None


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Desk], Awaitable[None]]], None]:
    async def within(test: Callable[[Desk], Awaitable[None]]) -> None:
        await asyncio.wait_for(test(Desk(tmp_path / "state")), DEADLINE_S)

    return lambda test: asyncio.run(within(test))


Run = Callable[[Callable[[Desk], Awaitable[None]]], None]


def test_many_changes_of_one_turn_are_written_once_after_it(run: Run) -> None:
    async def test(desk: Desk) -> None:
        desk.change()
        desk.change()
        assert desk.written() is None
        await asyncio.sleep(0)
        assert desk.written() == 2

    run(test)


def test_what_is_shown_has_been_written(run: Run) -> None:
    """Else a daemon that is killed right after an answer leaves a file that knows less than was told."""

    async def test(desk: Desk) -> None:
        desk.change()
        desk.saving.shown()
        assert desk.written() == 1
        # What has not changed is not written again.
        desk.path.unlink()
        desk.saving.shown()
        await asyncio.sleep(0)
        assert desk.written() is None

    run(test)


def test_what_is_shown_waits_for_no_file_while_programs_move(run: Run) -> None:
    async def test(desk: Desk) -> None:
        desk.calm.begin()
        desk.change()
        desk.saving.shown()
        await asyncio.sleep(0)
        assert desk.written() is None
        # What is to be done for good is written all the same.
        assert desk.saving.pending() == "" and desk.written() == 1
        desk.change()
        desk.time += CALM_S
        desk.saving.shown()
        assert desk.written() == 2

    run(test)


def test_what_cannot_be_written_is_told(run: Run) -> None:
    async def test(desk: Desk) -> None:
        desk.path.mkdir()
        desk.change()
        assert str(desk.path) in desk.saving.pending()
        desk.path.rmdir()
        desk.change()
        assert desk.saving.pending() == "" and desk.written() == 2

    run(test)
