"""Which questions a driver instance asks the resource manager about its lost context, and which
descriptors it leaves open after unloading.

The stand-in asks as the driver does (MPSD_STANDIN_MANAGER).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move, next_gate
from tests.libcuda.test_failover import Program, break_domain, copies, offer, post, stand_by, started
from tests.support import moving
from tests.support.gate import Gate
from tests.support.libcudas import Libraries
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["backend", "copies", "domain", "gate", "next_gate", "post", "second", "third"]

DEVICES = 2  # of each instance of the stand-in
READ, CLEAR = "83de030c", "83de0310"
IN_TURN = 2


def both_twice(outcome: str) -> list[str]:
    return [f"{command} {outcome}" for command in (READ, CLEAR)] * 2


@pytest.fixture
def asked(tmp_path: Path) -> Callable[[], list[str]]:
    """Return the commands that the driver instances sent, each with its outcome."""
    path = tmp_path / "asked"
    return lambda: path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def ask(
    libraries: Libraries, domain: Domain, post: Post, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Program]:
    """Start the program. Parameter: milliseconds to wait for the daemon's command; the default outlasts a
    test."""
    extra = {"MPSD_FAILOVER": "exact", "MPSD_STANDIN_MANAGER": str(tmp_path / "asked")}
    extra["autopsy_ms"] = getattr(request, "param", "60000")
    with started(libraries, domain, post, **extra) as program:
        yield program


def opened(program: Program) -> Counter[str]:
    """Count the program's open descriptors by kind. `/dev/null` stands for a stand-in device; commands
    arrive by pipe."""
    seen: Counter[str] = Counter()
    for entry in Path(f"/proc/{program.process.pid}/fd").iterdir():
        # The descriptor may have been closed since the listing.
        with contextlib.suppress(FileNotFoundError):
            seen[os.readlink(entry).partition(":[")[0]] += 1
    return seen


@pytest.mark.parametrize("lazy", [False, True])
def test_who_is_moved_asks_nothing_of_its_lost_context(
    domain: Domain,
    second: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    asked: Callable[[], list[str]],
    lazy: bool,
) -> None:
    line = post.greet(moving.EXACT, lazy=lazy)
    assert ask("m = gpu.memory(8 << 20)") == "None"
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    until(lambda: len(asked()) == len(both_twice("refused")))
    assert asked() == both_twice("refused")
    assert ask("[gpu.run('add', m, 8, 5), gpu.sync(), gpu.word(m)]") == "[0, 0, 5]"
    # Without a daemon no move follows, so the current driver instance may ask about its lost context.
    post.close()
    break_domain(second)
    until(lambda: len(asked()) == 2 * len(both_twice("looked")))
    assert asked() == both_twice("refused") + both_twice("looked")
    assert ask.end() == ""


def lose(domain: Domain, second: Domain, post: Post, ask: Program, copies: Path) -> Line:
    """Give the program a standby in `second` and lose its context."""
    line = post.greet(moving.EXACT)
    assert ask("m = gpu.memory(8 << 20)") == "None"
    stand_by(line, second, copies)
    break_domain(domain)
    return line


@pytest.mark.parametrize("ask", ["10"], indirect=True)
def test_who_is_not_moved_in_time_learns_what_happened(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, asked: Callable[[], list[str]]
) -> None:
    """The query to the driver proceeds when the daemon sends no command within the wait."""
    line = lose(domain, second, post, ask, copies)
    until(lambda: len(asked()) == len(both_twice("looked")))
    assert asked() == both_twice("looked")
    move(line)
    assert ask("[gpu.run('add', m, 8, 5), gpu.sync(), gpu.word(m)]") == "[0, 0, 5]"
    assert ask.end() == ""


def test_who_is_left_behind_lets_the_others_go_first(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, asked: Callable[[], list[str]]
) -> None:
    """A program told to stand down waits four times as long; here a move command arrives within that time."""
    line = lose(domain, second, post, ask, copies)
    line.say(moving.STAND_DOWN, 1, planned=True)
    # The server enters FAULT before the program is told.
    until(lambda: ask("gpu.sync() != 0") == "True")
    assert asked() == []
    line.say(moving.STANDBY, 2, second.environment["CUDA_MPS_PIPE_DIRECTORY"], str(copies))
    while line.hear(moving.READY, moving.OWN_ERROR).kind != moving.READY:
        pass
    move(line, 2)
    until(lambda: len(asked()) == len(both_twice("refused")))
    assert asked() == both_twice("refused")
    assert ask.end() == ""


@pytest.fixture
def replayer(
    libraries: Libraries, domain: Domain, post: Post, tmp_path: Path, gate: Gate, next_gate: Gate
) -> Iterator[Program]:
    """Start a program whose calls query the cause of a lost context themselves, and wait for the daemon for
    longer than a test lasts."""
    extra = {"MPSD_FAILOVER": "exact", "MPSD_STANDIN_MANAGER": str(tmp_path / "asked")}
    extra |= {"MPSD_STANDIN_CALLERS_ASK": "1", "autopsy_ms": "60000", "patience_ms": "600000"}
    with started(libraries, domain, post, **extra) as program:
        yield program


@pytest.mark.parametrize("waits", [False, True])
def test_a_fault_during_a_replay_does_not_keep_the_program_from_its_next_domain(
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    replayer: Program,
    gate: Gate,
    next_gate: Gate,
    copies: Path,
    asked: Callable[[], list[str]],
    waits: bool,
) -> None:
    """The thread that replays also hears the daemon, so no query of the cause may wait for the daemon's
    message while that thread calls the driver. `waits`: a thread of the program calls the driver as well."""
    line = post.greet(moving.EXACT)
    assert replayer("m = gpu.memory(8 << 20)") == "None"
    stand_by(line, second, copies)
    assert replayer("[gpu.run('add', m, 8, 5), gpu.sync()]") == "[0, 0]"
    gate.let(0)
    assert replayer("gpu.run('add', m, 8, 1)") == "0"
    next_gate.let(0)
    break_domain(domain)
    assert move(line, again=IN_TURN).values[5]
    if waits:
        replayer.tell("gpu.sync()")
    line.say(moving.TURN, 1)
    until(line.is_read)
    break_domain(second)
    until(asked)
    offer(line, third, copies, 2)
    while line.hear(moving.READY, moving.DONE, moving.OWN_ERROR).kind != moving.READY:
        pass
    move(line, 2)
    if waits:
        assert replayer.answer() == "0"
    assert replayer("[gpu.sync(), gpu.word(m)]") == "[0, 6]"
    assert replayer.end() == ""


def test_a_copy_that_is_unloaded_leaves_nothing_open(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    assert ask("m = gpu.memory(8 << 20)") == "None"
    first = opened(ask)
    assert first["/dev/null"] == DEVICES
    # A descriptor of the program itself, numbered between those of the driver instances.
    assert ask("own = os.eventfd(7)") == "None"
    seen = []
    for number in range(1, 7):
        stand_by(line, second if number % 2 else domain, copies, number)
        # The driver instance that the program left is unloaded after the next standby is ready.
        until(lambda number=number: opened(ask)["/dev/null"] == DEVICES * min(number + 1, 3))
        seen.append(opened(ask))
        move(line, number, planned=True)
    standby = seen[0] - first
    assert standby["/dev/null"] == DEVICES and standby["pipe"] >= 4 and standby["socket"] >= 3
    assert standby["anon_inode"] == 2
    # From then on there are three instances: the original, the current and the standby.
    assert seen[1]["/dev/null"] == 3 * DEVICES
    assert seen[1:] == [seen[1]] * 5
    assert ask("os.eventfd_read(own)") == "7"
    assert ask("[gpu.run('add', m, 8, 5), gpu.sync(), gpu.word(m)]") == "[0, 0, 5]"
    assert ask.end() == ""


def test_a_thread_that_waits_in_a_copy_that_is_unloaded_ends(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A thread that waits inside a driver instance ends before the instance's descriptors and code are
    gone."""
    line = post.greet(moving.EXACT)
    assert ask("m = gpu.memory(8 << 20); threads = lambda: len(os.listdir('/proc/self/task'))") == "None"
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    stand_by(line, third, copies, 2)
    before = int(ask("threads()"))
    break_domain(second)
    move(line, 2)
    # The unloading waits for the thread's end and frees the slot for the next instance.
    stand_by(line, third, copies, 3)
    until(lambda: int(ask("threads()")) <= before)
    assert ask("[gpu.run('add', m, 8, 5), gpu.sync(), gpu.word(m)]") == "[0, 0, 5]"
    assert ask.end() == ""


def test_copies_of_another_folder_are_told_from_those_in_use(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, tmp_path: Path
) -> None:
    line = post.greet(moving.EXACT)
    assert ask("m = gpu.memory(8 << 20)") == "None"
    stand_by(line, second, copies)
    move(line, planned=True)
    # The daemon has restarted with another setting.
    other = shutil.copytree(copies, tmp_path / "other")
    for number in (2, 3, 4):
        stand_by(line, second if number % 2 else domain, other, number)
        until(lambda: opened(ask)["/dev/null"] == 3 * DEVICES)
        move(line, number, planned=True)
    assert ask("[gpu.run('add', m, 8, 5), gpu.sync(), gpu.word(m)]") == "[0, 0, 5]"
    assert ask.end() == ""


def test_what_a_copy_has_exported_is_not_taken_for_its_own(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """An exported descriptor's number is reused by the program's own device file, which must stay open."""
    line = post.greet(moving.EXACT)
    stand_by(line, second, copies)
    move(line, planned=True)
    assert ask("m = gpu.memory(8 << 20)") == "None"
    stand_by(line, domain, copies, 2)
    assert ask("own = [os.open(os.devnull, os.O_RDWR) for _ in range(16)]") == "None"
    move(line, 2, planned=True)
    # The instances that exported and imported the descriptor are unloaded now.
    for number in (3, 4):
        stand_by(line, second if number % 2 else domain, copies, number)
        move(line, number, planned=True)
    stand_by(line, second, copies, 5)
    assert ask("{os.fstat(fd).st_rdev for fd in own} == {os.stat(os.devnull).st_rdev}") == "True"
    assert ask("[gpu.run('add', m, 8, 5), gpu.sync(), gpu.word(m)]") == "[0, 0, 5]"
    assert ask.end() == ""
