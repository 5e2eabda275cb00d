"""CUgraphExec objects are instantiated in the standby domain in advance, so no launch waits for one after
a move."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate, move, next_gate
from tests.libcuda.test_failover import Program, ask, break_domain, copies, is_ready, offer, post, stand_by
from tests.libcuda.test_graphs import NON_BLOCKING, capture
from tests.support import moving
from tests.support.gate import BEGIN_CAPTURE, END_CAPTURE, NODE, Gate
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "next_gate", "post", "second", "third"]

LAUNCH = "gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)"


def start(ask: Program) -> None:
    ask(f"m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', {NON_BLOCKING}); gpu.sync()")


def copy_to_the_host(ask: Program, next_gate: Gate) -> None:
    """Copy data to the host for the first time in a standby's life. It loads a function of the proxy and
    rehearses it with a graph node."""
    next_gate.keep(NODE)
    assert ask("gpu.word(m)") == "0"
    until(lambda: next_gate.kept() == NODE)
    next_gate.keep(0)


def leave(line: Line, domain: Domain, next_gate: Gate) -> None:
    """Move to a driver instance in which no thread reaches the end of a capture or of a node call."""
    next_gate.keep(BEGIN_CAPTURE | NODE)
    break_domain(domain)
    assert move(line).text == ""


@EXACT
@pytest.mark.parametrize("first", [True, False], ids=["before the standby", "after it"])
def test_it_is_not_captured_again_when_it_is_launched(
    domain: Domain, second: Domain, next_gate: Gate, post: Post, ask: Program, copies: Path, first: bool
) -> None:
    line = post.greet(moving.EXACT)
    start(ask)
    if first:
        capture(ask)
    stand_by(line, second, copies)
    copy_to_the_host(ask, next_gate)
    if not first:
        next_gate.keep(BEGIN_CAPTURE)
        capture(ask)
        until(lambda: next_gate.kept() == BEGIN_CAPTURE)
        # The gate at the beginning of a capture is passed; from now on hold at its end.
        next_gate.keep(END_CAPTURE)
        until(lambda: next_gate.kept() == END_CAPTURE)
        next_gate.keep(0)
        # The graph is stored before its thread reads the next command, whatever the command is.
        line.say(moving.TURN, 7)
        until(line.is_read)
    assert ask(LAUNCH) == "(0, 0, 11)"
    leave(line, domain, next_gate)
    assert ask(f"[{LAUNCH}]") == "[0, 0, 22]"
    assert ask("gpu.code('cuGraphExecDestroy', x), gpu.code('cuGraphDestroy', g)") == "(0, 0)"
    next_gate.keep(0)
    assert ask.end() == ""


@EXACT
def test_what_is_in_flight_is_done_again_with_it(
    domain: Domain, second: Domain, gate: Gate, next_gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    start(ask)
    capture(ask)
    stand_by(line, second, copies)
    gate.let(0)
    assert ask("[gpu.code('cuGraphLaunch', x, s) for _ in range(3)]") == "[0, 0, 0]"
    leave(line, domain, next_gate)
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 33]"
    next_gate.keep(0)
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("changes", [1, 9])
def test_one_that_was_changed_is_what_it_has_become(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, changes: int
) -> None:
    """A graph changed before, after or between moves is current; one that changes too often is
    instantiated on use."""
    line = post.greet(moving.EXACT)
    start(ask)
    ask("g = nodes.graph(); a = nodes.add(g, 'add', m, 8, 1); x = nodes.executable(g)")
    stand_by(line, second, copies)
    for number in range(changes):
        assert ask(f"nodes.change(x, a, nodes.kernel('add', m, 8, {number + 2}))") == "0"
    assert ask(LAUNCH) == f"(0, 0, {changes + 1})"
    break_domain(domain)
    assert move(line).text == ""
    assert ask(LAUNCH) == f"(0, 0, {2 * (changes + 1)})"
    assert ask("nodes.change(x, a, nodes.kernel('add', m, 8, 100))") == "0"
    assert ask(LAUNCH) == f"(0, 0, {2 * (changes + 1) + 100})"
    assert ask.end() == ""


@EXACT
def test_code_is_not_unloaded_under_it(
    domain: Domain, second: Domain, next_gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    start(ask)
    ask("later = Later(gpu); other = gpu.made('cuModuleLoadData', IMAGE)")
    capture(ask)
    next_gate.keep(BEGIN_CAPTURE)
    offer(line, second, copies)
    until(lambda: next_gate.kept() == BEGIN_CAPTURE)
    ask("later.start(\"gpu.code('cuModuleUnload', other)\")")
    assert ask("later.comes_back()") == "False"
    # Creating and launching objects does not wait for the thread that instantiates.
    assert ask(f"(gpu.made('cuStreamCreate', 0) > 0, {LAUNCH})") == "(True, 0, 0, 11)"
    next_gate.keep(0)
    assert ask("later.result()") == "0"
    line.hear(moving.READY)
    assert ask.end() == ""


@EXACT
def test_one_that_ends_meanwhile_is_nobodys(
    domain: Domain, second: Domain, third: Domain, next_gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    start(ask)
    ask("later = Later(gpu)")
    capture(ask)
    next_gate.keep(BEGIN_CAPTURE)
    offer(line, second, copies)
    until(lambda: next_gate.kept() == BEGIN_CAPTURE)
    ask("later.start(\"gpu.code('cuGraphExecDestroy', x)\")")
    next_gate.keep(0)
    assert ask("later.result()") == "0"
    line.hear(moving.READY)
    # Move to the second domain and back, and then once more.
    capture(ask)
    break_domain(domain)
    move(line)
    assert ask(LAUNCH) == "(0, 0, 11)"
    stand_by(line, third, copies, 2)
    break_domain(second)
    move(line, 2)
    assert ask(LAUNCH) == "(0, 0, 22)"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("first", [True, False], ids=["before the standby", "after it"])
def test_what_functions_need_is_there_before_they_are_launched(
    domain: Domain, second: Domain, next_gate: Gate, post: Post, ask: Program, copies: Path, first: bool
) -> None:
    """A graph made of the functions rehearses what the driver allocates at their first launch."""
    line = post.greet(moving.EXACT)
    start(ask)
    if not first:
        stand_by(line, second, copies)
    next_gate.keep(NODE)
    ask("later = gpu.made('cuModuleLoadData', IMAGE)")
    ask("gpu.functions['new'] = gpu.made('cuModuleGetFunction', later, b'add')")
    if first:
        offer(line, second, copies)
    until(lambda: next_gate.kept() == NODE)
    next_gate.keep(0)
    if first:
        is_ready(line)
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.run('new', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    assert ask.end() == ""
