"""A program whose context is lost while the daemon is dead or silent moves by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.libcuda.test_blame import OTHERS, OWN, code_of, gate, in_flight, kept
from tests.libcuda.test_failover import Program, break_domain, copies, post, stand_by, started
from tests.support import moving
from tests.support.gate import Gate
from tests.support.libcudas import Libraries
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["backend", "copies", "domain", "gate", "kept", "post", "second", "third"]
IN_TURN = 2
SOON, LATE, NEVER = "100", "3000", "60000"
LATE_S = 2.4
"""Beyond the 2 s for which a daemon that has read of the loss may think, and before the rescue."""


@pytest.fixture
def ask(
    request: pytest.FixtureRequest,
    libraries: Libraries,
    domain: Domain,
    post: Post,
    gate: Gate,
    tmp_path: Path,
    kept: Path,
) -> Iterator[Program]:
    """The gate is there before the driver looks for it."""
    extra = {
        "MPSD_FAILOVER": "exact",
        "MPSD_STANDIN_MANAGER": str(tmp_path / "asked"),
        "MPSD_STANDIN_EXCEPTION": str(kept),
        "rescue_ms": getattr(request, "param", SOON),
    }
    with started(libraries, domain, post, **extra) as program:
        yield program


@pytest.fixture
def line(ask: Program, gate: Gate, second: Domain, post: Post, copies: Path) -> Line:
    """The program has a kernel in flight that adds 1 to m, and a standby context."""
    made = post.greet(moving.EXACT, look=2)
    in_flight(made, ask, gate, second, copies)
    return made


def fault(domain: Domain, ask: Program, kept: Path, whose: int) -> None:
    """Fault the domain. `whose`: what the program finds of it."""
    kept.write_text(f"{code_of(ask) + (0x40 if whose == OWN else 1 << 40):x}")
    break_domain(domain)


def restarted(post: Post) -> Iterator[Post]:
    post.path.unlink()
    again = Post(post.path)
    try:
        yield again
    finally:
        again.close()


@pytest.fixture
def later(line: Line, domain: Domain, ask: Program, kept: Path, post: Post) -> Iterator[Post]:
    """The daemon died before a fault in the program's own code, and starts when the program has moved."""
    post.close()
    fault(domain, ask, kept, OWN)
    ask.tell("gpu.sync()")
    assert ask.process.stderr is not None
    assert "failed over without mpsd" in ask.process.stderr.readline()
    yield from restarted(post)


def connected(later: Post, generation: int) -> Line:
    """Accept the program at a new daemon. It lives in the standby domain by now."""
    found = later.accept()
    assert found.hear(moving.HELLO).generation == generation
    found.mode = moving.EXACT
    return found


def test_without_a_daemon_a_program_that_denies_the_fault_goes_on_in_its_standby_context(
    line: Line, domain: Domain, ask: Program, kept: Path, post: Post
) -> None:
    post.close()
    fault(domain, ask, kept, OTHERS)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 1)"
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 2)"
    assert "failed over without mpsd" in ask.end()


def test_a_daemon_that_reads_nothing_is_as_good_as_none_and_learns_of_the_move_later(
    line: Line, domain: Domain, ask: Program, kept: Path
) -> None:
    fault(domain, ask, kept, OTHERS)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 1)"
    line.say(moving.MOVE, 1, again=IN_TURN)
    said = line.hear(moving.OWN_ERROR, moving.DONE, moving.MOVED)
    while said.kind != moving.MOVED:
        said = line.hear(moving.OWN_ERROR, moving.DONE, moving.MOVED)
    assert (said.generation, said.values[5]) == (1, 0)


@pytest.mark.parametrize("ask", [LATE], indirect=True)
def test_a_daemon_that_connects_late_has_its_own_time_to_answer(
    line: Line, domain: Domain, ask: Program, kept: Path, post: Post
) -> None:
    """The program holds the error back for longer than it would have without that daemon."""
    post.close()
    fault(domain, ask, kept, OTHERS)
    ask.tell("gpu.sync(), gpu.word(m)")
    time.sleep(LATE_S)
    for again in restarted(post):
        # It reads nothing. Where this comes too late the program has moved already.
        again.accept()
        assert ask.answer() == "(0, 1)"


def test_a_suspect_waits_for_the_next_daemon_and_for_a_domain_of_its_own(
    later: Post, third: Domain, ask: Program, copies: Path
) -> None:
    line = connected(later, 1)
    line.say(moving.WELCOME, look=2)
    assert line.hear(moving.LOOKED).values[0] == OWN
    said = line.hear(moving.MOVED)
    assert said.generation == 1 and said.values[5]
    stand_by(line, third, copies, 2)
    line.say(moving.MOVE, 2, again=IN_TURN)
    # What it finds now is about a context that is well.
    line.hear(moving.LOOKED)
    assert line.hear(moving.MOVED).values[5]
    line.say(moving.TURN, 2)
    assert line.hear(moving.DONE).text == ""
    assert ask.answer() == "0"
    assert ask("gpu.word(m)") == "1"


def test_a_daemon_of_an_earlier_release_has_no_turn_for_it(later: Post, ask: Program) -> None:
    line = connected(later, 1)
    line.say(moving.WELCOME, look=1)
    assert ask.answer() == "719"
    assert line.is_silent()


@pytest.mark.parametrize("whose", [OWN, OTHERS])
def test_a_daemon_that_dies_before_its_turn_costs_a_program_nothing(
    line: Line, domain: Domain, ask: Program, kept: Path, post: Post, whose: int
) -> None:
    """A program that denies the fault goes on then, and another one waits for the next daemon."""
    fault(domain, ask, kept, whose)
    line.say(moving.MOVE, 1, again=IN_TURN)
    while line.hear(moving.OWN_ERROR, moving.LOOKED, moving.MOVED).kind != moving.MOVED:
        pass
    post.close()
    if whose == OTHERS:
        assert ask("gpu.sync(), gpu.word(m)") == "(0, 1)"
        return
    ask.tell("gpu.sync()")
    for again in restarted(post):
        line = connected(again, 1)
        line.say(moving.WELCOME, look=2)
        assert line.hear(moving.LOOKED).values[0] == OWN
        assert line.hear(moving.MOVED).values[5]
        line.say(moving.TURN, 1)
        line.hear(moving.DONE)
        assert ask.answer() == "0"


@pytest.mark.parametrize("ask", [NEVER], indirect=True)
def test_a_daemon_that_has_heard_of_the_error_and_moves_nobody_leaves_it_to_the_program(
    line: Line, domain: Domain, ask: Program, kept: Path
) -> None:
    fault(domain, ask, kept, OTHERS)
    reading = threading.Thread(target=read_all, args=(line,))
    reading.start()
    assert ask("gpu.sync()") == "700"
    ask.process.kill()
    reading.join()


def read_all(line: Line) -> None:
    try:
        while line.hear(*range(1, 17)):
            pass
    except Exception:
        return
