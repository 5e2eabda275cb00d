"""Graphs that belong to a node: those of conditional nodes, and child graphs moved into their node."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_graph_nodes import EXACT, launched, start
from tests.libcuda.test_graphs import MODES, RELAXED
from tests.support import moving
from tests.support.gate import Gate
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

LOOP = (
    "g = nodes.graph(); h = nodes.handle(g)",
    "a = nodes.condition(g, h, n)",
    "c, (b,) = nodes.conditional(g, h, kinds.WHILE, after=[a])",
    "d = nodes.add(b, 'add', m, 1, 10)",
    "e = nodes.condition(b, h, n, 1, [d])",
    "z = nodes.add(g, 'add', m, 1, 1, after=[c])",
    "x = nodes.executable(g)",
)
"""Add 10 to m as often as n says, and then 1; n becomes 0."""


def begin(ask: Program) -> None:
    start(ask)
    ask("times = lambda count: gpu.put(n, count); o = gpu.stream()")


def loop(ask: Program, count: int, of: str = "x") -> int:
    assert ask(f"times({count})") == "0"
    return launched(ask, of)[0]


@MODES
@pytest.mark.parametrize("done", range(len(LOOP) + 1))
def test_a_loop_that_a_move_overtakes_at_any_call(
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    mode: int,
    done: int,
) -> None:
    line = post.greet(mode)
    begin(ask)
    stand_by(line, second, copies)
    for step in LOOP[:done]:
        ask(step)
    break_domain(domain)
    assert move(line).text in ("", "mode keep")
    for step in LOOP[done:]:
        ask(step)
    assert loop(ask, 3) == 31
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text in ("", "mode keep")
    assert loop(ask, 2) == 52
    # The body can be changed and extended there, in the graph and in what was instantiated.
    assert ask("nodes.change(x, d, nodes.kernel('add', m, 1, 100))") == "0"
    assert ask("nodes.change(x, e, nodes.kernel('condition', h, n, 1, kinds=kinds.CONDITION))") == "0"
    ask("f = nodes.add(b, 'add', m, 1, 1000, after=[d]); y = nodes.executable(g)")
    assert [loop(ask, 2, of) for of in "xy"] == [253, 2274]
    assert ask("nodes.of(b) == [d, e, f], nodes.type(c), nodes.before(c) == [a]") == "(True, 13, True)"
    assert ask("gpu.code('cuGraphDestroy', g)") == "0"
    assert line.is_silent()
    assert ask.end() == ""


@MODES
@pytest.mark.parametrize("kind", ["IF", "SWITCH"])
def test_one_of_several_graphs(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int, kind: str
) -> None:
    """One body is captured, as XLA does, and has a conditional node of its own."""
    line = post.greet(mode)
    begin(ask)
    ask("g = nodes.graph(); h = nodes.handle(g); a = nodes.condition(g, h, n)")
    ask(f"c, (b, d) = nodes.conditional(g, h, kinds.{kind}, 2, [a])")
    ask("nodes.add(d, 'add', m, 1, 100); o = ctypes.c_uint64()")
    capture = f"gpu.code('cuStreamBeginCaptureToGraph', s, b, None, None, ctypes.c_size_t(0), {RELAXED})"
    assert ask(f"{capture}, gpu.run('add', m, 1, 1, stream=s)") == "(0, 0)"
    assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(o)), o.value == b") == "(0, True)"
    ask(
        "k = nodes.handle(d); i = nodes.condition(d, k, n);"
        " _, (j,) = nodes.conditional(d, k, kinds.IF, after=[i])"
    )
    ask("nodes.add(j, 'add', m, 1, 1000); x = nodes.executable(g)")
    stand_by(line, second, copies)
    took = {"IF": [100, 101], "SWITCH": [1, 1101]}[kind]
    found = [loop(ask, 0), loop(ask, 1)]
    assert found == took
    break_domain(domain)
    assert move(line).text == ""
    assert [loop(ask, 0), loop(ask, 1)] == [took[1] + each for each in took]
    assert ask("y = nodes.executable(g)") == "None"
    assert loop(ask, 2, "y") == 2 * took[1] + (1 if kind == "IF" else 0)
    assert line.is_silent()
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("lets", range(0, 12, 2))
def test_a_loop_in_flight_is_done_again(
    domain: Domain, second: Domain, gate: Gate, post: Post, ask: Program, copies: Path, lets: int
) -> None:
    """Also as what it was, when the CUgraphExec was changed since."""
    line = post.greet(moving.EXACT)
    begin(ask)
    for step in LOOP:
        ask(step)
    ask("times(3)")
    stand_by(line, second, copies)
    gate.let(lets)
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.run('fill', n, 1, 2, stream=s)") == "(0, 0)"
    assert (
        ask("nodes.change(x, d, nodes.kernel('add', m, 1, 100)), gpu.code('cuGraphLaunch', x, s)") == "(0, 0)"
    )
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m), gpu.word(n)") == "(0, 232, 0)"
    assert ask.end() == ""


def test_a_handle_that_no_kernel_is_given_is_named(post: Post, ask: Program) -> None:
    """A kernel may find it in memory, where it would be that of another driver instance."""
    line = post.greet(moving.KEEP)
    begin(ask)
    ask("g = nodes.graph(); h = nodes.handle(g, 1); c, (b,) = nodes.conditional(g, h, kinds.IF)")
    ask("nodes.add(b, 'add', m, 1, 1); x = nodes.executable(g)")
    assert line.hear(moving.OPAQUE).text == "a handle of a conditional node that no kernel's parameters have"
    assert launched(ask)[0] == 1
    ask.end()


@MODES
@pytest.mark.parametrize("done", range(5))
def test_a_child_graph_that_is_moved_into_its_node(
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    mode: int,
    done: int,
) -> None:
    line = post.greet(mode)
    begin(ask)
    stand_by(line, second, copies)
    steps = (
        "f = nodes.graph(); a = nodes.add(f, 'add', m, 8, 1)",
        "g = nodes.graph(); d = nodes.set(g, m, 5, 8); c = nodes.moved(g, f, [d])",
        "b = nodes.add(f, 'add', n, 8, 10, after=[a])",
        "x = nodes.executable(g)",
    )
    for step in steps[:done]:
        ask(step)
    break_domain(domain)
    assert move(line).text in ("", "mode keep")
    for step in steps[done:]:
        ask(step)
    assert launched(ask) == (6, 10)
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text in ("", "mode keep")
    assert launched(ask) == (6, 20)
    assert (
        ask(
            "nodes.change(x, b, nodes.kernel('add', n, 8, 20)), nodes.become(a, nodes.kernel('add', m, 8, 2))"
        )
        == "(0, 0)"
    )
    ask("y = nodes.executable(g)")
    assert [launched(ask, of) for of in "xy"] == [(6, 40), (7, 50)]
    assert ask("nodes.of(f) == [a, b], gpu.code('cuGraphDestroy', g)") == "(True, 0)"
    # Its handles have ended with the graph.
    assert ask("f = nodes.graph(); nodes.of(f)") == "None" and ask("nodes.of(f)") == "[]"
    assert line.is_silent()
    assert ask.end() == ""


@MODES
def test_a_copy_has_what_a_moved_child_graph_was(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    begin(ask)
    ask("f = nodes.graph(); a = nodes.add(f, 'add', m, 8, 1); g = nodes.graph(); nodes.moved(g, f)")
    ask("k = nodes.clone(g); p = nodes.graph(); nodes.child(p, g)")
    assert ask("nodes.become(a, nodes.kernel('add', m, 8, 10))") == "0"
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    ask("x, y, z = nodes.executable(g), nodes.executable(k), nodes.executable(p)")
    assert [launched(ask, of)[0] for of in "xyz"] == [10, 11, 12]
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text == ""
    assert [launched(ask, of)[0] for of in "xyz"] == [22, 23, 24]
    assert line.is_silent()
    assert ask.end() == ""
