"""Mode `exact`: a thread of the proxy submits launches to the driver while the program continues."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from mpsd_libcuda.stats import read_stats
from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.gate import LAUNCH, NO_LAUNCH, Gate
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second"]

RELAY = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact", "relay": "always"}], indirect=True)
UNTIL_IT_IS = "all(gpu.run('add', m, 8, 1) == 0 for _ in range(100))"


def relayed(ask: Program) -> int:
    stats = read_stats(ask.process.pid)
    assert stats is not None
    return stats.relayed


def awake(post: Post, ask: Program) -> Line:
    """Return a connection when launches of `add` are left to the relay thread; m is not 0."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")

    def is_awake() -> bool:
        assert ask(UNTIL_IT_IS) == "True"
        return relayed(ask) > 0

    until(is_awake)
    # The program's thread submits the first launch of an epoch, since it saves the written buffer.
    assert ask("gpu.sync(), gpu.code('cuMemsetD8_v2', m, 0, 8 << 20)") == "(0, 0)"
    return line


def one_is_on_its_way(gate: Gate, ask: Program, others: int) -> None:
    """Hold the relay thread in the driver with one launch and `others` waiting. m becomes 2 + others."""
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    gate.keep(LAUNCH)
    assert ask(f"[gpu.run('add', m, 8, 1) for _ in range({1 + others})]") == str([0] * (1 + others))
    until(lambda: gate.kept() == LAUNCH)


@RELAY
def test_a_wait_comes_behind_what_was_left_to_it(post: Post, ask: Program) -> None:
    awake(post, ask)
    before = relayed(ask)
    for number in range(1, 31):
        assert ask("[gpu.run('add', m, 8, 1) for _ in range(10)], gpu.sync()") == f"({[0] * 10}, 0)"
        assert ask("gpu.word(m)") == str(10 * number)
    assert relayed(ask) - before >= 30 * 8
    assert ask.end() == ""


@RELAY
@pytest.mark.parametrize(
    ("does", "found"),
    [
        ("gpu.code('cuMemsetD32Async', m, 7, 8, 0), gpu.sync(), gpu.word(m)", "(0, 0, 7)"),
        ("gpu.code('cuMemcpyDtoDAsync_v2', m + 64, m, 4, 0), gpu.sync(), gpu.word(m + 64)", "(0, 0, 20)"),
        ("gpu.word(m)", "20"),
    ],
)
def test_what_is_given_next_comes_behind_it(
    gate: Gate, post: Post, ask: Program, does: str, found: str
) -> None:
    awake(post, ask)
    before = relayed(ask)
    one_is_on_its_way(gate, ask, 18)
    ask.tell(does)
    assert relayed(ask) == before
    gate.keep(0)
    assert ask.answer() == found
    assert ask.end() == ""


@RELAY
@pytest.mark.parametrize("planned", [False, True])
def test_a_move_does_what_was_left_to_it(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, planned: bool
) -> None:
    """A move carries out launches that were left to the relay, while the driver holds the first of them."""
    line = awake(post, ask)
    stand_by(line, second, copies)
    one_is_on_its_way(gate, ask, 18)
    if planned:
        # The move blocks calls by now, including the relay's.
        line.say(moving.MOVE, 1, planned=True, again=1)
        until(line.is_read)
        gate.keep(0)
        assert line.hear(moving.MOVED).text == ""
    else:
        break_domain(domain)
        assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 20)"
    gate.keep(0)
    before = relayed(ask)

    def serves_again() -> bool:
        assert ask("all(gpu.run('add', m, 8, 0) == 0 for _ in range(20))") == "True"
        return relayed(ask) > before

    until(serves_again)
    assert ask("gpu.sync(), gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 0, 21)"
    assert ask.end() == ""


@RELAY
def test_what_the_driver_refuses_while_a_move_is_on_is_done_again(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = awake(post, ask)
    stand_by(line, second, copies)
    one_is_on_its_way(gate, ask, 8)
    gate.keep(LAUNCH | NO_LAUNCH)
    break_domain(domain)
    line.say(moving.MOVE, 1, again=1)
    until(line.is_read)
    gate.keep(NO_LAUNCH)
    assert line.hear(moving.MOVED).text == ""
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 10)"
    assert ask.end() == ""


@RELAY
def test_what_the_driver_refuses_late_the_next_wait_says(gate: Gate, post: Post, ask: Program) -> None:
    awake(post, ask)
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.run('add', m, 8, 1)") == "(0, 0, 0)"
    gate.keep(NO_LAUNCH)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    ask.tell("gpu.sync(), gpu.sync(), gpu.word(m)")
    assert ask.answer() == "(719, 0, 2)"
    gate.keep(0)
    assert "refused a launch (error 2) after the call had returned" in ask.end()


@RELAY
def test_a_launch_of_another_shape_is_refused_at_once(post: Post, ask: Program) -> None:
    """A launch with more shared memory than available is refused at once."""
    awake(post, ask)
    assert ask("gpu.run('add', m, 8, 1), gpu.run('add', m, 8, 1, shared=1 << 20)") == "(0, 1)"
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 1)"
    assert ask.end() == ""


@RELAY
def test_a_thread_with_no_context_is_told_at_once(post: Post, ask: Program) -> None:
    awake(post, ask)
    assert ask("gpu.run('add', m, 8, 1), gpu.code('cuCtxSetCurrent', None)") == "(0, 0)"
    assert ask("gpu.run('add', m, 8, 1)") == "201"
    assert ask("gpu.current(), gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(None, 0, 0, 2)"
    assert ask.end() == ""


@RELAY
def test_what_a_kernel_may_take_is_asked_anew_when_it_was_set(post: Post, ask: Program) -> None:
    """A changed limit of dynamic shared memory applies to later launches: 64 KiB first, then less."""
    awake(post, ask)
    limit = "gpu.code('cuFuncSetAttribute', gpu.functions['add'], 8, {})"
    run = "gpu.run('add', m, 8, 1, shared=64 << 10)"
    assert ask(f"{limit.format(64 << 10)}, {run}, {run}, {run}, gpu.sync()") == "(0, 0, 0, 0, 0)"
    assert ask(f"{limit.format(1024)}, {run}, gpu.sync(), gpu.word(m)") == "(0, 1, 0, 3)"
    assert ask.end() == ""


@RELAY
@pytest.mark.parametrize("others", [0, 8])
def test_what_is_set_holds_for_later_launches_alone(
    gate: Gate, post: Post, ask: Program, others: int
) -> None:
    awake(post, ask)
    one_is_on_its_way(gate, ask, others)
    ask.tell("gpu.code('cuFuncSetAttribute', gpu.functions['add'], 8, 1024), gpu.sync(), gpu.word(m)")
    assert ask.process.stdout is not None
    assert not select.select([ask.process.stdout], [], [], 0.2)[0]
    gate.keep(0)
    assert ask.answer() == f"(0, 0, {2 + others})"
    assert ask.end() == ""


@RELAY
def test_a_program_may_end_with_launches_that_nobody_waits_for(gate: Gate, post: Post, ask: Program) -> None:
    """A program may exit with unsubmitted launches, without waiting for a driver that blocks one of them."""
    awake(post, ask)
    one_is_on_its_way(gate, ask, 8)
    assert ask.end() == ""


@RELAY
@pytest.mark.parametrize("others", [0, 8])
def test_when_the_mode_ends_nothing_comes_before_what_was_left_to_it(
    gate: Gate, post: Post, ask: Program, others: int
) -> None:
    line = awake(post, ask)
    one_is_on_its_way(gate, ask, others)
    line.mode = moving.KEEP
    line.say(moving.WELCOME)
    until(line.is_read)
    ask.tell("gpu.code('cuMemsetD32Async', m, 3, 8, 0), gpu.sync(), gpu.word(m)")
    assert ask.process.stdout is not None
    assert not select.select([ask.process.stdout], [], [], 0.2)[0]
    gate.keep(0)
    assert ask.answer() == "(0, 0, 3)"
    assert ask.end() == ""


@RELAY
def test_when_the_mode_ends_the_program_can_still_be_moved(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = awake(post, ask)
    stand_by(line, second, copies)
    one_is_on_its_way(gate, ask, 8)
    line.mode = moving.KEEP
    line.say(moving.WELCOME)
    break_domain(domain)
    assert move(line).kind == moving.MOVED
    gate.keep(0)
    # The program is told that results may be missing.
    assert ask("gpu.sync(), gpu.sync()") == "(719, 0)"
    assert "may be missing" in ask.end()


@pytest.mark.parametrize(
    "ask",
    [
        {"MPSD_FAILOVER": "exact", "relay": "off"},
        {"MPSD_FAILOVER": "exact", "relay": "always", "CUDA_LAUNCH_BLOCKING": "1"},
    ],
    indirect=True,
    ids=["off", "launches are to wait"],
)
def test_there_may_be_none(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    assert ask(UNTIL_IT_IS + ", gpu.sync(), gpu.word(m)") == "(True, 0, 100)"
    assert relayed(ask) == 0
    assert ask.end() == ""


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact", "relay": "on"}], indirect=True)
def test_what_is_none_of_its_words_is_told(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    assert "MPSD_DEBUG: relay=on is not one of auto, off, always: using auto" in ask.end()
