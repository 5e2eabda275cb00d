"""Random programs, moved between any two calls and inside waits, see the same results as without a fault."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import moving
from tests.support.alone import Alone, OneAtATime
from tests.support.gate import Gate
from tests.support.libcudas import DEADLINE_S, Libraries
from tests.support.long import of
from tests.support.moving import Post

WORDS = 6
WAITING = {
    "graph",
    "forked",
    "nodes",
    "in",
    "out",
    "out_now",
    "look",
    "wait",
    "wait_event",
    "wait_all",
    "again",
    "in_pinned",
}
WAITING |= {"host_same", "host_small", "host_seen"}
ROWS = {"rows_set", "rows_copy", "rows_box"}
WAITING_ROWS = {"rows_in", "rows_out", "rows_out_now", "rows_look", "rows_in_pinned", "peer"}
WAITING_MAPPED = {"again", "swap"}
OF_LARGE = {"in_pinned", "rows_in_pinned", "host", "host_same", "host_twice"}
Step = tuple[str, int, int, int, int]

MAPPED = (0, 2)
"""Buffers that the program maps itself, if it maps any."""

LARGE = (0, 2, 3)
"""Buffers that are large enough for a large copy."""


def model(steps: Sequence[Step], mapped: Sequence[int] = ()) -> list[int]:
    """Compute what the program of epochs.py sees."""
    buffers = [[0] * WORDS for _ in range(4)]
    seen: list[int] = []
    hosted = 0
    for what, _, one, two, value in steps:
        words = buffers[one]
        if what == "add":
            words[:4] = [word + value for word in words[:4]]
        elif what == "fill":
            words[:4] = [value] * 4
        elif what == "copy":
            words[:4] = buffers[two][:4]
        elif what == "sum":
            words[4:6] = [sum(buffers[two][:4]), 0]
        elif what == "set":
            words[:3] = [value] * 3
        elif what in ("in", "in_pinned"):
            words[:4] = [value + n for n in range(4)]
            if what == "in_pinned":
                words[4:6] = [0, 0]
        elif what == "peer":
            words[:4] = buffers[two][:4]
        elif what == "rows_set":
            words[:2] = words[4:] = [value] * 2
        elif what in ("rows_copy", "rows_box"):
            words[:2], words[4:] = buffers[two][:2], buffers[two][4:]
        elif what == "rows_in":
            words[:2], words[4:] = [value, value + 1], [value + 2, value + 3]
        elif what == "rows_in_pinned":
            words[:] = [*(value + n for n in range(4)), 0, 0]
        elif what in ("rows_out", "rows_out_now", "rows_look"):
            seen += [*words[:2], 7, *words[4:]]
        elif what in ("out", "out_now"):
            seen += words[:4]
        elif what == "look":
            seen.append(words[value % 4])
        elif what in ("host", "host_same", "host_small"):
            words[:4] = [word + value for word in words[:4]]
        elif what == "host_twice":
            buffers[two][:4] = [word + value for word in words[:4]]
            words[:4] = [word + (1 if two == one else 2) * value for word in words[:4]]
            hosted += 1
        elif what == "host_seen":
            seen += [word + value for word in words[:4]]
        elif what == "graph":
            words[:4] = [word + 2 * value for word in words[:4]]
            buffers[two][:4] = words[:4]
        elif what == "forked":
            for _ in range(2):
                words[:4] = [word + value for word in words[:4]]
                buffers[two][:4] = [word + value for word in words[:4]]
        elif what == "nodes":
            words[:4] = [word + 4 * value for word in words[:4]]
            buffers[two][:4] = words[:4]
        elif what == "again":
            words[:] = [0] * WORDS
        elif what == "swap" and one in mapped:
            words[3:] = [0] * 3
        hosted += what.startswith("host")
    return [*seen, *(word for words in buffers for word in words), *range(hosted), 0]


class Moved(Alone):
    """Run epochs.py and move it from one domain to the next."""

    def __init__(self, libraries: Libraries, post: Post, folder: Path) -> None:
        super().__init__(libraries, post, folder, "epochs.py")

    def _until(self, line: str) -> None:
        while self._line() != line:
            pass

    def move(self, there: Gate, more: int | None = None, *, ahead: bool = False) -> moving.Said:
        said = self.lose(there) if more is None else self.leave(there, more, ahead=ahead)
        assert said.text == "", said
        return said

    def run(
        self,
        steps: Sequence[Step],
        at: int,
        lets: int,
        *,
        inside: bool,
        mapped: Sequence[int] = (),
        more: int | None = None,
        ahead: bool = False,
    ) -> list[int]:
        """Return what the program sees when it is moved before or (`inside`) during step `at`.

        The GPU has executed `lets` operations since the last wait, and executes `more` while the old
        context is cut off. `ahead`: the replay is submitted to the next context meanwhile.
        """
        # Kill a program that hangs, so that reading from it ends.
        watch = threading.Timer(DEADLINE_S, self.process.kill)
        watch.start()
        try:
            return self._run(steps, at, lets, inside, mapped, more, ahead)
        finally:
            watch.cancel()

    def _run(
        self,
        steps: Sequence[Step],
        at: int,
        lets: int,
        inside: bool,
        mapped: Sequence[int],
        more: int | None,
        ahead: bool,
    ) -> list[int]:
        there = self.stand_by()
        held = at
        while held and steps[held - 1][0] not in WAITING | WAITING_ROWS | WAITING_MAPPED:
            held -= 1
        stops = [held] if inside else [held, *([at] if at > held else [])]
        self._tell(json.dumps({"steps": steps, "stops": stops, "mapped": mapped}))
        self._until(str(held) if held < len(steps) else "end")
        self._gate.let(lets)
        name = str(at) if at < len(steps) else "end"
        if inside or at > held:
            self._tell("go")
        if at > held:
            self._until(name)
        self.move(there, more, ahead=ahead)
        if not inside:
            self._tell("go")
        while not (line := self._line()).startswith("["):
            pass
        return list(map(int, json.loads(line)))

    def run_twice(self, steps: Sequence[Step], at: int, held: int, lets: int, lets_again: int) -> list[int]:
        """Run as run(), but lose the next context too, after its GPU has executed `lets_again` operations."""
        there = self.stand_by()
        self._tell(json.dumps({"steps": steps, "stops": [held, at], "mapped": []}))
        self._until(str(held))
        self._gate.let(lets)
        self._tell("go")
        self._until(str(at))
        there.let(lets_again)
        self.move(there)
        self.move(self.stand_by())
        self._tell("go")
        while not (line := self._line()).startswith("["):
            pass
        return list(map(int, json.loads(line)))


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


KINDS = {"add", "fill", "copy", "sum", "set", "host", "host_twice"} | WAITING


def steps(kinds: set[str]) -> st.SearchStrategy[list[Step]]:
    streams, values = st.integers(0, 3), st.integers(1, 1000)
    many = kinds & OF_LARGE
    buffers = st.integers(0, 3)
    step = st.tuples(st.sampled_from(sorted(kinds - many)), streams, buffers, buffers, values)
    large = st.tuples(st.sampled_from(sorted(many)), streams, st.sampled_from(LARGE), buffers, values)
    return st.lists(st.one_of(step, step, step, large), min_size=2, max_size=9)


def examples(count: int) -> settings:
    return settings(
        max_examples=of(1500, count),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


LETS = st.lists(st.integers(0, 12), min_size=11, max_size=11)


@pytest.mark.timeout(1200)
@examples(5)
@given(steps=steps(KINDS), lets=LETS)
def test_what_is_seen_is_as_without_a_fault(programs: Programs, steps: list[Step], lets: list[int]) -> None:
    move_everywhere(programs, steps, lets)


@pytest.mark.timeout(1200)
@examples(4)
@given(steps=steps(ROWS | WAITING_ROWS | {"add", "copy", "wait", "again"}), lets=LETS)
def test_rows_are_as_without_a_fault(programs: Programs, steps: list[Step], lets: list[int]) -> None:
    move_everywhere(programs, steps, lets)


@pytest.mark.timeout(1200)
@examples(4)
@given(
    steps=steps(WAITING_MAPPED | {"grow"} | {"add", "copy", "sum", "set", "out", "in_pinned", "wait"}),
    lets=LETS,
)
def test_what_the_program_maps_itself_is_as_without_a_fault(
    programs: Programs, steps: list[Step], lets: list[int]
) -> None:
    move_everywhere(programs, steps, lets, MAPPED)


@pytest.mark.timeout(1200)
@examples(5)
@given(
    steps=steps({"add", "fill", "copy", "sum", "set", "host", "wait", "rows_set", "rows_copy"}),
    # The snapshots and their completion marks have executed.
    lets=st.lists(st.integers(2, 6), min_size=11, max_size=11),
    more=LETS,
)
def test_what_the_old_context_still_does_while_it_is_cut_off_is_undone_too(
    programs: Programs, steps: list[Step], lets: list[int], more: list[int]
) -> None:
    move_everywhere(programs, steps, lets, more=more)


@pytest.mark.parametrize("more", range(0, 10, 3))
def test_it_is_given_to_the_next_one_meanwhile(programs: Programs, more: int) -> None:
    steps: list[Step] = [("add", 0, 0, 0, 5), ("wait_all", 0, 0, 0, 0)]
    steps += [("add", 0, 0, 0, 3), ("add", 0, 0, 0, 4), ("sum", 0, 1, 0, 0)]
    # Run the snapshot of the buffer, its completion mark and an event record.
    found = programs.one().run(steps, 4, 3, inside=False, more=more, ahead=True)
    assert found == model(steps)


def test_functions_of_the_host_that_run_while_the_old_context_is_cut_off_have_run(programs: Programs) -> None:
    steps: list[Step] = [
        ("host", 2, 0, 2, 319),
        ("host", 0, 0, 2, 380),
        ("sum", 1, 1, 0, 0),
        ("set", 0, 0, 0, 3),
    ]
    for lets in range(1, 8, of(2, 3)):
        for more in of((3, 9), (3,)):
            move_everywhere(programs, steps, [lets] * 5, more=[more] * 5)


def move_everywhere(
    programs: Programs,
    steps: list[Step],
    lets: list[int],
    mapped: Sequence[int] = (),
    more: Sequence[int] | None = None,
) -> None:
    expected = model(steps, mapped)
    for at in range(len(steps) + 1):
        for inside in (False, True):
            if inside and at < len(steps) and steps[at][0] not in WAITING | WAITING_ROWS | WAITING_MAPPED:
                continue
            still = None if more is None else more[at]
            found = programs.one().run(steps, at, lets[at], inside=inside, mapped=mapped, more=still)
            assert found == expected, (at, inside)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("value", [4, 5], ids=["callback", "function"])
def test_functions_of_the_host_work_on_what_is_copied_out_and_in(programs: Programs, value: int) -> None:
    """Host callbacks work on copied data when the program is moved at any operation or inside a wait."""
    kinds = "host host host_twice host_seen host_small host_small host_same copy add host_same"
    streams = (1, 1, 2, 0, 0, 1, 0, 2, 0, 1)
    steps: list[Step] = [("fill", 0, 0, 0, 7), ("wait_all", 0, 0, 0, 0)]
    steps += [(kind, stream, 0, 3, value) for kind, stream in zip(kinds.split(), streams, strict=True)]
    # The copied data is used before it is overwritten.
    steps[9] = ("copy", 2, 3, 0, value)
    for at, inside in ((5, False), (5, True), (7, True), (8, True), (11, True), (12, False), (12, True)):
        for lets in range(0, 24, of(3 if at == 5 else 4, 8)):
            found = programs.one().run(steps, at, lets, inside=inside)
            assert found == model(steps), (at, inside, lets)


@pytest.mark.parametrize("lets_again", of([0, 2, 4, 6, 8, 10], [0, 4, 8]))
def test_a_fault_while_it_is_done_again(programs: Programs, lets_again: int) -> None:
    adds: list[Step] = [("add", stream, buffer, 0, 3) for stream, buffer in ((0, 0), (1, 1), (1, 0), (2, 3))]
    steps: list[Step] = [("add", 0, 0, 0, 5), ("wait_all", 0, 0, 0, 0), *adds, ("look", 0, 0, 0, 0)]
    for lets in range(0, 14, of(3, 6)):
        found = programs.one().run_twice(steps, len(steps) - 1, 2, lets, lets_again)
        assert found == model(steps), lets


@pytest.mark.parametrize("first", ["set", "in", "rows_set"])
def test_what_is_written_in_part_before_it_is_written_whole(programs: Programs, first: str) -> None:
    for buffer in (0, 2):
        steps: list[Step] = [("fill", 0, buffer, 0, 7), ("wait_all", 0, 0, 0, 0), (first, 1, buffer, 0, 5)]
        steps += [("add", 1, buffer, 0, 3), ("look", 0, 1, 0, 0)]
        for lets in range(0, 14, of(2, 4)):
            found = programs.one().run(steps, len(steps) - 1, lets, inside=False)
            assert found == model(steps), (buffer, lets)


def test_what_is_behind_a_function_that_did_not_run_has_not_ended(programs: Programs) -> None:
    """Work behind a host callback that did not run counts as unfinished; stream order proves the work
    before it."""
    steps: list[Step] = [("add", 0, 0, 0, 13), ("host", 3, 0, 0, 1), ("host_same", 0, 0, 0, 1)]
    steps.append(("host", 0, 0, 0, 42))
    for lets in range(0, 24, of(1, 3)):
        found = programs.one().run(steps, len(steps), lets, inside=False)
        assert found == model(steps), lets
