"""Mode `exact`: a program that waits for its turn moves to a trial domain, replays there, and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, ask, gate, lost_in_flight, move
from tests.libcuda.test_failover import Program, copies, post, stand_by
from tests.support import moving
from tests.support.gate import Gate
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]
IN_TURN = 2


@pytest.fixture
def tried(
    domain: Domain, gate: Gate, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> Line:
    """The program waits for its turn in `second`, gets a context in `third` meanwhile, and moves there."""
    line = lost_in_flight(domain, gate, second, post, ask, copies)
    assert move(line, again=IN_TURN).values[5]
    ask.tell("gpu.sync()")
    stand_by(line, third, copies, 2)
    said = move(line, 2, again=IN_TURN)
    # It has done nothing in `second`.
    assert said.values[5] and (said.text, said.values[4]) == ("", 1)
    return line


@EXACT
def test_a_suspect_replays_in_its_trial_domain_alone(ask: Program, tried: Line) -> None:
    assert tried.is_silent()
    tried.say(moving.TURN, 2)
    done = tried.hear(moving.DONE)
    assert (done.generation, done.text, done.values[:2]) == (2, "", (8 << 20, 1))
    assert ask.answer() == "0"
    assert ask("gpu.word(m)") == "6"
    assert ask.end() == ""


@EXACT
def test_a_cleared_suspect_joins_the_others_where_it_was_before(
    ask: Program, second: Domain, copies: Path, tried: Line
) -> None:
    """Its new context there has the generation of its former one."""
    tried.say(moving.TURN, 2)
    tried.hear(moving.DONE)
    assert ask.answer() == "0"
    stand_by(tried, second, copies, 1)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    assert move(tried, 1, planned=True).values[5] == 0
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 8)"
    assert ask.end() == ""
