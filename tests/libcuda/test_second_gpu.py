"""A program that has two GPUs and uses only the second; the stand-in driver runs alone in its process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.alone import Alone
from tests.support.libcudas import Libraries
from tests.support.moving import Said, open_post


class Program(Alone):
    def move(self, in_flight: str) -> Said:
        there = self.stand_by()
        self._gate.let(0)
        assert self.ask(in_flight) == "0"
        return self.lose(there)


@pytest.fixture
def program(libraries: Libraries) -> Iterator[Program]:
    with (
        tempfile.TemporaryDirectory(prefix="mpsd-fo-", dir="/tmp") as folder,
        open_post(Path(folder)) as post,
    ):
        devices = {"MPSD_STANDIN_DEVICES": "2", "MPSD_TEST_DEVICE": "1"}
        made = Program(libraries, post, Path(folder), "moving.py", **devices)
        try:
            yield made
        finally:
            made.process.kill()
            made.process.communicate()


def test_what_was_in_flight_is_done_again(program: Program) -> None:
    assert program.ask("gpu.made('cuCtxGetDevice')") == "1"
    program.ask("m = gpu.memory(8 << 20)")
    for moves in (1, 2):
        assert program.move("gpu.run('add', m, 8, 1)").text == ""
        assert program.ask("gpu.sync(), gpu.word(m)") == f"(0, {moves})"
    assert program.end() == ""


def test_what_another_gpus_context_once_saved_keeps_nobody_from_launching(program: Program) -> None:
    """Snapshots of another GPU's context do not block later launches, although its stream cannot be used
    for them."""
    program.ask("m = gpu.memory(8 << 20)")
    add = "gpu.run('add', m, 8, 1), gpu.sync()"
    assert [program.ask(add) for _ in range(2)] == ["(0, 0)"] * 2
    program.ask("own = gpu.context; gpu.context = gpu.made('cuDevicePrimaryCtxRetain', 0); gpu.current()")
    program.ask("s = gpu.stream(); gpu.code('cuMemsetD32Async', m, 2, 8, s)")
    program.ask("gpu.context = own; gpu.current()")
    assert [program.ask(add) for _ in range(2)] == ["(0, 0)"] * 2
