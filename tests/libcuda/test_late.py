"""A program waits for the next standby when the context is lost before that standby is ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "post", "second", "third"]

pytestmark = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)


def lose_twice(domain: Domain, second: Domain, post: Post, ask: Program, copies: Path) -> Line:
    """Move the program to `second`, lose that domain too, and start a wait for work in flight."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); gpu.sync(); later = Later(gpu); go = threading.Event()")
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    break_domain(second)
    ask("later.start('next(code for code in iter(gpu.sync, None) if code or go.is_set())')")
    assert line.hear(moving.OWN_ERROR).values[0] != 0
    assert ask("go.set(), later.comes_back()") == "(None, False)"
    return line


def test_it_goes_on_in_the_standby_that_comes(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = lose_twice(domain, second, post, ask, copies)
    stand_by(line, third, copies, 2)
    move(line, 2)
    until(lambda: ask("later.comes_back()") == "True")
    assert ask("later.result()") == "0"
    assert ask("gpu.run('add', m, 8, 4), gpu.sync(), gpu.word(m)") == "(0, 0, 5)"
    assert ask.end() == ""


@pytest.mark.parametrize("generation", [0, 2])
def test_it_has_its_error_at_once_where_none_comes(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, generation: int
) -> None:
    """The program gets its error at once if no standby comes, whether or not one was ready."""
    line = lose_twice(domain, second, post, ask, copies)
    if generation:
        stand_by(line, third, copies, generation)
    line.say(moving.STAND_DOWN, generation, planned=True)
    until(lambda: ask("later.comes_back()") == "True")
    assert ask("later.result()") == "700"
