"""Mode `exact`: the move command itself starts a participant's turn of serial replay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate, lost_in_flight, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.gate import ANY, LAUNCH_FAILED, Gate, gate_of
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second"]


@pytest.fixture
def there(second: Domain) -> Iterator[Gate]:
    """Return the gate of the domain that the program moves to."""
    with gate_of(second) as made:
        yield made


@EXACT
def test_a_program_that_is_told_so_has_its_turn_as_soon_as_it_has_moved(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = lost_in_flight(domain, gate, second, post, ask, copies)
    said = move(line, again=3)
    assert (said.text, said.values[4]) == ("", 1) and said.values[5] > 1
    done = line.hear(moving.DONE)
    assert (done.generation, done.text, done.values[:2]) == (1, "", (8 << 20, 1))
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 6)"
    assert ask.end() == ""


@EXACT
def test_a_fence_that_comes_late_ends_no_turn(
    domain: Domain, gate: Gate, second: Domain, there: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = lost_in_flight(domain, gate, second, post, ask, copies)
    there.let(0)
    began = time.monotonic()
    assert move(line, again=3).values[5] > 1
    line.say(moving.FENCED, 1)
    until(line.is_read)
    # The program watches replayed work for one second.
    assert line.is_silent() or time.monotonic() > began + 1
    there.let(ANY)
    assert line.hear(moving.DONE).values[:2] == (8 << 20, 1)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 6)"
    assert ask.end() == ""


@EXACT
def test_it_needs_no_daemon_for_that_any_more(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = lost_in_flight(domain, gate, second, post, ask, copies)
    line.say(moving.MOVE, 1, again=3)
    line.close()
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 6)"
    assert ask.end() == ""


def lose_at(does: str, domain: Domain, gate: Gate, line: Line, ask: Program) -> int:
    """Lose the context with this work in flight; return what the program reports about new kernels after
    the move."""
    gate.let(0)
    assert ask(does) == "0"
    break_domain(domain)
    new = move(line, again=3).values[5]
    assert line.hear(moving.DONE).text == ""
    return new


@EXACT
@pytest.mark.parametrize(
    ("does", "is_kernel"),
    [("gpu.run('add', m, 8, 1)", True), ("gpu.code('cuMemsetD8Async', m, 1, 8, 0)", False)],
    ids=["a kernel", "no kernel"],
)
def test_it_says_for_how_long_no_kernel_was_new(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path,
    does: str, is_kernel: bool,
) -> None:  # fmt: skip
    """The program reports for how long no kernel was new at the time that its calls were held."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    began = time.monotonic()
    new = lose_at(does, domain, gate, line, ask)
    assert 2 <= new <= 2 + (time.monotonic() - began) * 1e3 if is_kernel else new == 1
    assert ask.end() == ""


@EXACT
def test_what_ran_before_is_not_new_because_a_module_was_unloaded(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    first = time.monotonic()
    stand_by(line, second, copies)
    ask("other = gpu.made('cuModuleLoadData', IMAGE); gpu('cuModuleUnload', other)")
    again = time.monotonic()
    new = lose_at("gpu.run('add', m, 8, 1)", domain, gate, line, ask)
    assert new - 2 >= int((again - first) * 1e3)
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("is_lost", [False, True], ids=["ends", "faults"])
def test_work_that_outlasts_its_turn_is_said_to_run_on_until_it_has_ended(
    domain: Domain,
    gate: Gate,
    second: Domain,
    there: Gate,
    post: Post,
    ask: Program,
    copies: Path,
    is_lost: bool,
) -> None:
    """The next participant is not blamed for work of an earlier turn that still runs."""
    line = lost_in_flight(domain, gate, second, post, ask, copies)
    there.let(0)
    assert move(line, again=3).values[5] > 1
    assert line.hear(moving.DONE).values[:3] == (8 << 20, 1, 1)
    if is_lost:
        there.break_context()
        assert line.hear(moving.OWN_ERROR).values[0] == LAUNCH_FAILED
        return
    there.let(ANY)
    assert line.hear(moving.DONE).values[:3] == (8 << 20, 1, 0)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 6)"
    assert ask.end() == ""


@EXACT
def test_what_was_done_again_has_ended_though_what_the_program_does_next_runs(
    domain: Domain, gate: Gate, second: Domain, there: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); n = gpu.memory(8 << 20); t = gpu.made('cuStreamCreate', 1)")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 5), gpu.sync()") == "(0, 0)"
    gate.let(3)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    break_domain(domain)
    there.let(0)
    assert move(line, again=3).values[5] > 1
    # New work goes to another stream while the gate holds the replay.
    assert ask("gpu.run('long', n, 8, 1, stream=t)") == "0"
    there.let(ANY)
    done = line.hear(moving.DONE)
    if done.values[2]:
        done = line.hear(moving.DONE)
    assert done.values[:3] == (8 << 20, 1, 0)
    # The kernel takes half a minute, so it still runs.
    assert ask("gpu.code('cuStreamQuery', t)") == "600"
