"""Random graphs, changed and launched, give the same bytes when moved between any two calls."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.libcuda.test_exact_random import examples
from tests.support.alone import Alone, OneAtATime
from tests.support.libcudas import DEADLINE_S, Libraries
from tests.support.moving import Post
from tests.support.randomgraphs import STEPS, Action, Drawn, resolve


class Moved(Alone):
    """Run graphs.py and move it from one domain to the next."""

    def __init__(self, libraries: Libraries, post: Post, folder: Path) -> None:
        super().__init__(libraries, post, folder, "graphs.py")

    def run(self, actions: list[Action], at: int, lets: int) -> list[int]:
        """Return the words at the end when the program is moved before action `at`.

        The GPU has executed `lets` operations since the last wait.
        """
        # Kill a program that hangs, so that reading from it ends.
        watch = threading.Timer(DEADLINE_S, self.process.kill)
        watch.start()
        try:
            return self._run(actions, at, lets)
        finally:
            watch.cancel()

    def _run(self, actions: list[Action], at: int, lets: int) -> list[int]:
        there = self.stand_by()
        held = at
        while held and actions[held - 1][0] != "sync":
            held -= 1
        self._tell(json.dumps({"actions": actions, "stops": sorted({held, at})}))
        self._until(held)
        self._gate.let(lets)
        if at > held:
            self._tell("go")
            self._until(at)
        said = self.lose(there)
        assert said.text == "", said
        self._tell("go")
        while not (line := self._line()).startswith("["):
            pass
        assert self._line_to.is_silent(), self._line_to.hear()
        return list(map(int, json.loads(line)))

    def _until(self, action: int) -> None:
        while self._line() != str(action):
            pass


Programs = OneAtATime[Moved]


@pytest.fixture(scope="module")
def programs(libraries: Libraries) -> Iterator[Programs]:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as folder:
        programs = Programs(Path(folder), partial(Moved, libraries))
        try:
            yield programs
            programs.end()
        finally:
            programs.kill()


def drawn() -> st.SearchStrategy[list[Drawn]]:
    number = st.integers(0, 40)
    step = st.tuples(st.sampled_from(STEPS), st.integers(0, 2), number, number, st.integers(1, 1000))
    return st.lists(step, min_size=6, max_size=24)


@pytest.mark.timeout(1200)
@examples(6)
@given(steps=drawn(), lets=st.integers(0, 12))
def test_graphs_are_as_without_a_move(programs: Programs, steps: list[Drawn], lets: int) -> None:
    actions, words = resolve(steps)
    for at in range(len(actions) + 1):
        assert programs.one().run(actions, at, (lets + at) % 13) == words, at
