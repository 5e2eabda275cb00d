"""Functions that a program finds by other ways than their names are carried over too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "post", "second", "third"]

MODES = pytest.mark.parametrize(
    ("ask", "mode"), [({"MPSD_FAILOVER": "exact"}, moving.EXACT), ({}, moving.KEEP)], indirect=["ask"]
)


@MODES
@pytest.mark.parametrize("way", ["listed", "library_listed", "private", "library_private"])
def test_a_function_is_carried_over_however_it_was_found(
    way: str, mode: int, domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(mode)
    ask("m = gpu.memory(8 << 20)")
    assert ask(f"gpu.found('add', {way!r})") == "0"
    # cuda.h: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
    assert ask(f"gpu.code('cuFuncSetAttribute', gpu.functions[{way!r}], 8, 4096)") == "0"
    adds = f"[gpu.run({way!r}, m, 4, 1), gpu.sync(), gpu.word(m)]"
    assert ask(adds) == "[0, 0, 1]"
    stand_by(line, second, copies)
    for count, (home, away) in enumerate(((domain, third), (second, None)), 1):
        break_domain(home)
        said = line.move(count, again=1)
        assert (said.kind, said.text) == (moving.MOVED, ""), said
        assert ask(adds) == f"[0, 0, {count + 1}]"
        if away:
            stand_by(line, away, copies, 2)
    assert ask.end() == ""


@MODES
def test_a_list_that_is_asked_for_after_a_move_gives_names_that_the_program_can_use(
    mode: int, domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(mode)
    ask("m = gpu.memory(8 << 20); gpu.sync()")
    stand_by(line, second, copies)
    break_domain(domain)
    assert line.move(1, again=1).kind == moving.MOVED
    ask("gpu.found('add', 'listed')")
    assert ask("[gpu.run('listed', m, 4, 1), gpu.sync(), gpu.word(m)]") == "[0, 0, 1]"


def test_what_is_asked_for_by_name_is_loaded_before_the_move(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A function found by name is loaded before the move; listing a module's functions loads none of them."""
    line = post.greet()
    assert ask("(gpu.found('fill', 'listed'), gpu.memory(600) > 0)") == "(0, True)"
    is_loaded = "[gpu.made('cuFuncIsLoaded', gpu.functions[way]) for way in ('add', 'listed')]"
    assert ask(is_loaded) == "[0, 0]"
    stand_by(line, second, copies)
    break_domain(domain)
    assert line.move(1).kind == moving.MOVED
    assert ask(is_loaded) == "[1, 0]"
