"""Lazy standby contexts, created during the move, and event times from before a move."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_failover import LAZY, Program, ask, break_domain, copies, move, post, stand_by
from tests.support import moving
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "post", "second"]

# A standby that is not created yet has no server.
DOMAINS_ARE_NEW = True


@pytest.mark.parametrize(
    ("ask", "is_lazy"),
    [({}, True), (LAZY, True), ({"standby": "eager"}, False)],
    indirect=["ask"],
    ids=["by the daemon's word", "by the environment", "not by the environment"],
)
def test_a_lazy_standby_is_made_in_the_move(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, is_lazy: bool
) -> None:
    line = post.greet(lazy=True)
    ask("m = gpu.memory(8 << 20); gpu.sync()")
    stand_by(line, second, copies)
    assert (second.say("get_server_list") == "") == is_lazy
    assert ask("mappings('libcuda-0') > 0") == str(not is_lazy)
    # A lazy standby has no memory to release when memory runs out.
    if is_lazy:
        assert ask("gpu.code('cuMemAlloc_v2', ctypes.byref(ctypes.c_uint64()), 1 << 50)") == "2"
    ask("late = gpu.memory(4 << 20); gpu.sync()")
    break_domain(domain)
    move(line)
    assert second.say("get_server_list") != ""
    assert ask("[gpu.run('add', late, 8, 1), gpu.sync(), gpu.word(m), gpu.word(late)]") == "[0, 0, 0, 1]"
    assert ask.end() == ""


@pytest.mark.parametrize("ask", [LAZY], indirect=True)
def test_a_lazy_standby_that_cannot_be_made_leaves_the_error(
    domain: Domain, post: Post, ask: Program, copies: Path, tmp_path: Path
) -> None:
    line = post.greet()
    ask("m = gpu.memory(8 << 20); gpu.sync()")
    line.say(moving.STANDBY, 1, str(tmp_path / "nobody"), str(copies))
    assert line.hear(moving.READY).generation == 1
    break_domain(domain)
    said = line.move(1)
    assert said.kind == moving.STAYED and said.text
    until(lambda: ask("gpu.sync()") == "700")
    assert ask.end() == ""


@pytest.mark.parametrize("ask", [{}, {"MPSD_FAILOVER": "keep"}], indirect=True, ids=["exact", "keep"])
def test_events_of_before_a_move_have_times_after_it(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask("a, b, c, d = (gpu.made('cuEventCreate', 0) for _ in range(4)); n = gpu.made('cuEventCreate', 2)")
    ask("import time; began = time.monotonic()")
    assert ask("[gpu.timed(a), gpu.timed(b), gpu.timed(n), gpu.sync()]") == "[0, 0, 0, 0]"
    before = float(ask("gpu.elapsed(a, b)"))
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    assert ask("gpu.timed(c)") == "0"
    for pair in ("a, b", "a, c"):
        took, since = (float(ask(f"gpu.elapsed({pair})")), float(ask("time.monotonic() - began")) * 1e3)
        assert before <= took <= since
    assert float(ask("gpu.elapsed(c, a)")) < 0
    # As without a move: an event never recorded, and an event without timing.
    assert ask("gpu.elapsed(a, d)") == ask("gpu.elapsed(c, n)") == "cuEventElapsedTime: 400"
    assert ask("[gpu.timed(a), gpu.elapsed(c, a) >= 0]") == "[0, True]"
