"""Random programs that read large memory for long and write it now and then, moved with such a list.

On the stand-in driver, alone in its process. A model says what is in memory after each step.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.libcuda.test_exact_random import examples
from tests.libcuda.test_still import LAUNCH, MIB, QUIET, WROTE
from tests.support import moving
from tests.support.gate import ANY, Gate
from tests.support.libcudas import PROGRAMS, ROOT, Libraries
from tests.support.moving import Post

DEADLINE_S = 60
LARGE, SMALL = (0, 1), (2, 3)
SIZES = (8, 6, 4, 4)
"""Of the buffers, in MiB."""
Step = tuple[str, int, int, int]


class Program:
    """moving.py with four buffers of eight words that count, two of them large."""

    def __init__(self, libraries: Libraries, folder: Path, **extra: str) -> None:
        folder.mkdir()
        for number in range(2):
            shutil.copyfile(libraries.real, folder / f"libcuda-{number}.so.1")
        self._folder = folder
        self._post = Post(folder / "failover.sock")
        self._gate = Gate(folder / "0")
        self._generation = 0
        environment = libraries.environment(
            proxied=True,
            PYTHONPATH=f"{ROOT}:{ROOT / 'clients'}:{ROOT / 'clients' / 'libcuda'}",
            CUDA_MPS_PIPE_DIRECTORY=str(self._gate.folder),
            MPSD_VAULT="1",
            MPSD_FAILOVER="exact",
            MPSD_FAILOVER_SOCKET=str(self._post.path),
            MPSD_FAILOVER_SETTLE_MS="0",
            MPSD_FAILOVER_GIVE_BACK="0",
            **extra,
        )
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "moving.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == str(self.process.pid)
        self._line = self._post.greet(moving.EXACT)
        self.ask(LAUNCH)
        self.ask(f"m = [gpu.memory(size << 20) for size in {SIZES}]; out = (ctypes.c_uint32 * 8)()")
        self.ask("look = lambda at: gpu.code('cuMemcpyDtoH_v2', ctypes.byref(out), at, 32) or list(out)")
        assert self.ask(f"gpu.code('cuMemsetD8_v2', m[0], 0, {8 * MIB})") == "0"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, self.end()
        return line

    def ask(self, expression: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self._answer()

    def do(self, steps: Sequence[Step]) -> None:
        done = ", ".join(map(code_of, steps))
        assert self.ask(f"{{{done or 0}}}") == "{0}"

    def look(self) -> list[list[int]]:
        return list(ast.literal_eval(self.ask("[look(at) for at in m]")))

    def move(self, in_flight: Sequence[Step], lets: int) -> moving.Said:
        """While these are: the GPU has done so many operations of theirs and their saves'."""
        self._generation += 1
        there = Gate(self._folder / str(self._generation))
        self._line.say(moving.STANDBY, self._generation, str(there.folder), str(self._folder))
        said = self._line.hear(moving.READY, moving.UNREADY)
        assert (said.kind, said.text) == (moving.READY, "")
        self._gate.let(lets)
        self.do(in_flight)
        self._gate.break_context()
        said = self._line.move(self._generation, again=1)
        assert said.kind == moving.MOVED, said
        self._gate.close()
        self._gate = there
        return said

    def kill(self) -> None:
        """Also when it has ended."""
        self.process.kill()
        self.process.communicate()
        self._post.close()
        self._gate.close()

    def end(self) -> str:
        self._gate.let(ANY)
        try:
            _, said = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, said = self.process.communicate()
        return said


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
"""What, with which large and which small buffer, and a number."""


@contextmanager
def listed(libraries: Libraries, *steps: Step) -> Iterator[Path]:
    """What a validated run of these has seen."""
    with tempfile.TemporaryDirectory(prefix="mpr-", dir="/tmp") as folder:
        path = Path(folder) / "reads"
        validated = {"MPSD_FAILOVER_VALIDATE": "1", "MPSD_FAILOVER_READS": str(path)}
        program = Program(libraries, Path(folder) / "p", **validated)
        try:
            program.do([("put", 0, 2, 5), ("read", 0, 2, 0), *steps])
            assert "validated: " in program.end()
        finally:
            program.kill()
        yield path


class Programs:
    """One for all examples, and another one when it has died."""

    def __init__(self, libraries: Libraries, folder: Path, reads: Path) -> None:
        self._libraries, self._folder, self._reads = libraries, folder, reads
        self._all: list[Program] = []
        self.told = 0

    def one(self) -> Program:
        if not self._all or self._all[-1].process.poll() is not None:
            folder = self._folder / str(len(self._all))
            self._all.append(Program(self._libraries, folder, MPSD_FAILOVER_READS=str(self._reads)))
        return self._all[-1]

    def kill(self) -> None:
        for program in self._all:
            program.kill()


@pytest.fixture(scope="module", params=[1, 0], ids=["right", "misread"])
def programs(request: pytest.FixtureRequest, libraries: Libraries) -> Iterator[Programs]:
    """With a list that is right; or one that takes `add` for a kernel that only reads: it added 0."""
    with (
        listed(libraries, ("add", 0, 2, request.param)) as reads,
        tempfile.TemporaryDirectory(prefix="mpr-", dir="/tmp") as folder,
    ):
        programs = Programs(libraries, Path(folder), reads)
        try:
            yield programs
            if request.param:
                assert programs.one().end() == ""
            # With such a list it has come up: so there were moves in which something was relied on.
            assert (programs.told == 0) == bool(request.param)
        finally:
            programs.kill()


@pytest.mark.timeout(600)
@examples(40)
@given(
    steps=st.lists(STEP, min_size=1, max_size=5),
    last=st.lists(STEP.filter(lambda step: step[0] not in WAITS), min_size=1, max_size=4),
    lets=st.integers(0, 14),
)
def test_what_is_read_is_as_without_a_fault(
    programs: Programs, steps: list[Step], last: list[Step], lets: int
) -> None:
    """Or it is told that it may not be, where the list is wrong."""
    program = programs.one()
    try:
        words = program.look()
        steps = [("rest", 0, 2, 0), ("rest", 1, 3, 0), *steps]
        program.do([*steps, ("wait", 0, 2, 0)])
        said = program.move(last, lets)
        for step in [*steps, *last]:
            does(step, words)
        if said.text:
            assert said.text == WROTE
            programs.told += 1
            program.kill()
            return
        assert program.look() == words
    except BaseException:
        program.kill()
        raise
