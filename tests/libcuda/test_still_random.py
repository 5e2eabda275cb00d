"""Random programs that mostly read large memory and rarely write it, moved with a read list.

The stand-in driver runs alone in its process. A model says what is in memory after each step.
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.libcuda.test_exact_random import examples
from tests.libcuda.test_still import LAUNCH, MIB, QUIET, WROTE
from tests.support import moving
from tests.support.alone import Alone, OneAtATime
from tests.support.libcudas import Libraries
from tests.support.moving import Post
from tests.support.simnode import until

LARGE, SMALL = (0, 1), (2, 3)
SIZES = (8, 6, 4, 4)
"""Sizes of the buffers in MiB."""
Step = tuple[str, int, int, int]


class Program(Alone):
    """Run moving.py with four buffers, two of them large; eight words of each are compared."""

    def __init__(self, libraries: Libraries, extra: Mapping[str, str], post: Post, folder: Path) -> None:
        super().__init__(libraries, post, folder, "moving.py", **extra)
        self.ask(LAUNCH)
        self.ask(f"m = [gpu.memory(size << 20) for size in {SIZES}]; out = (ctypes.c_uint32 * 8)()")
        self.ask("look = lambda at: gpu.code('cuMemcpyDtoH_v2', ctypes.byref(out), at, 32) or list(out)")
        assert self.ask(f"gpu.code('cuMemsetD8_v2', m[0], 0, {8 * MIB})") == "0"

    def do(self, steps: Sequence[Step]) -> None:
        done = ", ".join(map(code_of, steps))
        assert self.ask(f"{{{done or 0}}}") == "{0}"

    def look(self) -> list[list[int]]:
        return list(ast.literal_eval(self.ask("[look(at) for at in m]")))

    def move(self, in_flight: Sequence[Step], lets: int) -> moving.Said:
        """Move with this work in flight, after the GPU has executed at most `lets` of its operations and
        snapshots."""
        there = self.stand_by()
        self._gate.let(lets)
        self.do(in_flight)
        # Each step is at least one operation.
        until(lambda: self._gate.left() <= max(lets - len(in_flight), 0))
        return self.lose(there)


def code_of(step: Step) -> str:
    what, large, small, value = step
    read = f"go('copy', m[{small}], m[{large}], 8)"
    return {
        "read": read,
        "rest": f"*({read} or gpu.sync() for _ in range({QUIET + 1}))",
        "add": f"gpu.run('add', m[{large}], 8, {value})",
        "write": f"go('copy', m[{large}], m[{small}], 8)",
        "within": f"go('copy', m[{large}], m[{large}] + {MIB}, 8)",
        "put": f"gpu.put(m[{large}], *range({value}, {value} + 8))",
        "set": f"gpu.code('cuMemsetD32Async', m[{large}], {value}, 8, 0)",
        "wait": "gpu.sync()",
    }[what]


WAITS = {"rest", "wait", "put"}


def does(step: Step, words: list[list[int]]) -> None:
    what, large, small, value = step
    if what in ("read", "rest"):
        words[small] = words[large]
    elif what == "add":
        words[large] = [word + value for word in words[large]]
    elif what == "write":
        words[large] = words[small]
    elif what == "within":
        words[large] = [0] * 8
    elif what == "put":
        words[large] = list(range(value, value + 8))
    elif what == "set":
        words[large] = [value] * 8


STEP = st.tuples(
    st.sampled_from(["read", "read", "rest", "add", "add", "write", "within", "put", "set", "wait"]),
    st.sampled_from(LARGE),
    st.sampled_from(SMALL),
    st.integers(1, 1000),
)
"""A step: the kind, a large buffer, a small buffer and a number."""


@contextmanager
def programs_with(libraries: Libraries, **extra: str) -> Iterator[OneAtATime[Program]]:
    with tempfile.TemporaryDirectory(prefix="mpr-", dir="/tmp") as folder:
        programs = OneAtATime(Path(folder), partial(Program, libraries, extra))
        try:
            yield programs
        finally:
            programs.kill()


def validate(libraries: Libraries, reads: Path, *steps: Step) -> None:
    """Write the read list of a validated run of these steps."""
    with programs_with(libraries, MPSD_FAILOVER="validate", MPSD_FAILOVER_READS=str(reads)) as programs:
        program = programs.one()
        program.do([("put", 0, 2, 5), ("read", 0, 2, 0), *steps])
        assert "validated: " in program.end()


@dataclass
class Moves:
    programs: OneAtATime[Program]
    told: int = 0


@pytest.fixture(scope="module", params=[1, 0], ids=["right", "misread"])
def moves(
    request: pytest.FixtureRequest, libraries: Libraries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Moves]:
    """Move programs with a correct list, or with a list that takes `add`, which added 0, for a reading
    kernel."""
    reads = tmp_path_factory.mktemp("reads") / "reads"
    validate(libraries, reads, ("add", 0, 2, request.param))
    with programs_with(libraries, MPSD_FAILOVER_READS=str(reads)) as programs:
        moves = Moves(programs)
        yield moves
        if request.param:
            assert programs.one().end() == ""
        # The wrong list was detected at least once: moves do rely on the list.
        assert (moves.told == 0) == bool(request.param)


@pytest.mark.timeout(600)
@examples(16)
@given(
    steps=st.lists(STEP, min_size=1, max_size=5),
    last=st.lists(STEP.filter(lambda step: step[0] not in WAITS), min_size=1, max_size=4),
    lets=st.integers(0, 14),
)
@example(steps=[("rest", 0, 2, 0)], last=[("add", 0, 2, 5)], lets=1)
def test_what_is_read_is_as_without_a_fault(
    moves: Moves, steps: list[Step], last: list[Step], lets: int
) -> None:
    """Reads match a run without a fault; with a wrong list, the program may be told that they might not."""
    program = moves.programs.one()
    try:
        words = program.look()
        steps = [("rest", 0, 2, 0), ("rest", 1, 3, 0), *steps]
        program.do([*steps, ("wait", 0, 2, 0)])
        said = program.move(last, lets)
        for step in [*steps, *last]:
            does(step, words)
        if said.text:
            assert said.text == WROTE
            moves.told += 1
            moves.programs.kill()
            return
        assert program.look() == words
    except BaseException:
        moves.programs.kill()
        raise
