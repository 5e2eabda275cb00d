"""Graphs that a program builds and changes node by node are the same in another driver instance."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_graphs import BEGIN, MODES, NON_BLOCKING, end
from tests.support import moving
from tests.support.gate import NODE, Gate
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

EXACT = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)
LAUNCH = "gpu.code('cuGraphLaunch', x, s)"


def start(ask: Program) -> None:
    assert ask(
        f"m, n = gpu.memory(4 << 20), gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', {NON_BLOCKING})"
    )
    assert ask("gpu.sync()") == "0"


def build(ask: Program) -> None:
    """Build x: m becomes 5, then 6; n becomes m, plus 10 by a child graph; at last m grows by 100."""
    ask("c = nodes.graph(); nodes.add(c, 'add', n, 8, 10)")
    ask("g = nodes.graph(); a = nodes.set(g, m, 5, 8); b = nodes.add(g, 'add', m, 8, 1, after=[a])")
    ask("e = nodes.empty(g, [b]); d = nodes.copy(g, n, m, 32, [e]); h = nodes.child(g, c, [d])")
    ask("z = nodes.add(g, 'add', m, 8, 100, after=[h, d]); x = nodes.executable(g)")


def launched(ask: Program, of: str = "x") -> tuple[int, int]:
    assert ask(f"gpu.code('cuGraphLaunch', {of}, s), gpu.sync()") == "(0, 0)"
    return int(ask("gpu.word(m)")), int(ask("gpu.word(n)"))


@MODES
def test_a_graph_of_nodes_is_there_after_the_move(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    start(ask)
    build(ask)
    stand_by(line, second, copies)
    assert launched(ask) == (106, 16)
    break_domain(domain)
    assert move(line).text == ""
    assert launched(ask) == (106, 16)
    # The nodes keep their virtual handles, and can still be changed and extended.
    assert ask("sorted(nodes.of(g)) == sorted([a, b, e, d, h, z])") == "True"
    ask("kinds = [MEMSET, KERNEL, EMPTY, MEMCPY, GRAPH, KERNEL]")
    assert ask("[nodes.type(each) for each in (a, b, e, d, h, z)] == kinds") == "True"
    assert ask("nodes.before(z) == [h, d], nodes.before(a)") == "(True, [])"
    assert ask("nodes.function(b) == gpu.functions['add']") == "True"
    assert ask("nodes.become(b, nodes.kernel('add', m, 8, 2))") == "0"
    ask("y = nodes.executable(g); l = nodes.add(g, 'add', m, 8, 1000, after=[z]); w = nodes.executable(g)")
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text == ""
    assert [launched(ask, of) for of in "xyw"] == [(106, 16), (107, 17), (1107, 17)]
    assert ask("sorted(nodes.of(g)) == sorted([a, b, e, d, h, z, l])") == "True"
    for of in "xyw":
        assert ask(f"gpu.code('cuGraphExecDestroy', {of})") == "0"
    assert ask("gpu.code('cuGraphDestroy', g), gpu.code('cuGraphDestroy', c)") == "(0, 0)"
    assert ask.end() == ""


@MODES
def test_an_executable_graph_is_what_it_was_changed_to(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    start(ask)
    build(ask)
    stand_by(line, second, copies)
    assert ask("nodes.change(x, b, nodes.kernel('add', m, 8, 3))") == "0"
    assert launched(ask) == (108, 18)
    break_domain(domain)
    assert move(line).text == ""
    # Change nodes before and after the move; the CUgraph itself stays as it was.
    assert ask("nodes.change(x, z, nodes.kernel('add', m, 8, 200))") == "0"
    assert launched(ask) == (208, 18)
    ask("f = nodes.graph(); nodes.add(f, 'add', n, 8, 20)")
    assert ask("nodes.change(x, h, nodes.params(GRAPH, graph=f))") == "0"
    assert ask("nodes.change(x, a, nodes.params(MEMSET, set=nodes.setting(m, 50, 8)))") == "0"
    assert launched(ask) == (253, 73)
    ask("y = nodes.executable(g)")
    assert ask("nodes.change(y, b, nodes.kernel('add', m, 8, 4))") == "0"
    assert launched(ask, "y") == (109, 19)
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text == ""
    assert [launched(ask, of) for of in "xy"] == [(253, 73), (109, 19)]
    # Update the whole CUgraphExec; an update that does not fit changes nothing.
    assert ask("nodes.update(y, g)") == "(0, 0)"
    assert ask("nodes.update(x, c)[0] != 0") == "True"
    assert [launched(ask, of) for of in "xy"] == [(253, 73), (106, 16)]
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("lets", range(0, 15, 3))
def test_each_launch_is_done_again_as_what_it_was(
    domain: Domain, second: Domain, gate: Gate, post: Post, ask: Program, copies: Path, lets: int
) -> None:
    line = post.greet(moving.EXACT)
    start(ask)
    ask("g = nodes.graph(); b = nodes.add(g, 'add', m, 8, 1); d = nodes.copy(g, n, m, 32, [b])")
    ask("x = nodes.executable(g)")
    stand_by(line, second, copies)
    gate.let(lets)
    assert ask(LAUNCH) == "0"
    assert ask("nodes.change(x, b, nodes.kernel('add', m, 8, 10))") == "0"
    assert ask(LAUNCH) == "0"
    assert ask("nodes.become(b, nodes.kernel('add', m, 8, 100)), nodes.update(x, g)") == "(0, (0, 0))"
    assert ask(LAUNCH) == "0"
    assert ask("nodes.change(x, d, nodes.params(MEMSET, set=nodes.setting(n, 7, 8)))") != "0"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m), gpu.word(n)") == "(0, 111, 111)"
    assert launched(ask) == (211, 211)
    assert ask.end() == ""


@EXACT
def test_nodes_may_be_made_in_any_order(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Nodes may be created in any order, here the last one first."""
    line = post.greet(moving.EXACT)
    start(ask)
    ask("g = nodes.graph(); d = nodes.copy(g, n, m, 32); b = nodes.add(g, 'add', m, 8, 1)")
    ask("a = nodes.set(g, m, 5, 8)")
    assert ask("nodes.depend(g, [a, b], [b, d])") == "0"
    assert ask("y = nodes.any(g, nodes.params(KERNEL, kernel=nodes.kernel('add', n, 8, 9)), [d])") == "None"
    ask("x = nodes.uploaded(g, s)")
    stand_by(line, second, copies)
    assert launched(ask) == (6, 15)
    assert ask("gpu.run('fill', m, 8, 77), gpu.run('fill', n, 8, 77), gpu.sync()") == "(0, 0, 0)"
    assert ask(f"gpu.run('late', m, 8, 1), {LAUNCH}") == "(0, 0)"
    break_domain(domain)
    assert move(line).text == ""
    assert launched(ask) == (6, 15)
    assert (
        ask("sorted(nodes.of(g)) == sorted([d, b, a, y]), nodes.before(d) == [b], nodes.executable(g) != 0")
        == "(True, True, True)"
    )
    assert ask.end() == ""


@MODES
def test_what_was_captured_may_be_changed_by_its_nodes(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    start(ask)
    assert ask(BEGIN) == "None"
    assert ask("gpu.run('add', m, 8, 1, stream=s), gpu.run('add', n, 8, 10, stream=s)") == "(0, 0)"
    end(ask)
    ask("a, b = nodes.of(g)")
    assert ask("nodes.change(x, b, nodes.kernel('add', n, 8, 20))") == "0"
    stand_by(line, second, copies)
    assert launched(ask) == (1, 20)
    break_domain(domain)
    assert move(line).text == ""
    assert launched(ask) == (2, 40)
    assert ask("nodes.change(x, a, nodes.kernel('add', m, 8, 2)), nodes.of(g) == [a, b]") == "(0, True)"
    assert launched(ask) == (4, 60)
    assert ask("nodes.become(a, nodes.kernel('add', m, 8, 100)), nodes.update(x, g)") == "(0, (0, 0))"
    assert launched(ask) == (104, 70)
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text == ""
    assert launched(ask) == (204, 80)
    assert ask("gpu.code('cuGraphDestroy', g), gpu.code('cuGraphExecDestroy', x)") == "(0, 0)"
    assert ask.end() == ""


@EXACT
def test_what_a_kernel_of_a_library_does_in_a_graph(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    start(ask)
    assert ask("gpu.found('add', 'library listed')") == "0"
    ask(
        "g = nodes.graph(); a = nodes.add(g, 'library listed', m, 8, 1, library=True);"
        " x = nodes.executable(g)"
    )
    stand_by(line, second, copies)
    assert launched(ask) == (1, 0)
    break_domain(domain)
    assert move(line).text == ""
    assert launched(ask) == (2, 0)
    assert ask("nodes.function(a) == gpu.functions['library listed']") == "True"
    assert ask.end() == ""


@MODES
def test_a_node_of_another_kind_is_named_and_the_program_stays(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    start(ask)
    ask("g = nodes.graph()")
    # These calls fail and create no node.
    assert "1" in ask("nodes.any(g, nodes.params(HOST))")
    assert "1" in ask("nodes.copy(g, 0, 0, 16)")
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    ask("a = nodes.add(g, 'add', m, 8, 1); x = nodes.executable(g)")
    assert launched(ask) == (1, 0)
    assert "801" in ask("nodes.signal(g)")
    assert line.hear(moving.OPAQUE).text == "an external semaphore node in a graph"
    assert ask.end() == ""


CALLS = {
    "make a graph": ("nodes.graph()", 0),
    "add a kernel": ("nodes.add(g, 'add', m, 8, 1000, after=[z])", 1000),
    "add a graph": ("nodes.child(g, more, after=[z])", 1000),
    "an edge": ("nodes.depend(g, [a], [z])", 0),
    "a kernel becomes another": ("nodes.become(z, nodes.kernel('add', m, 8, 1100))", 1000),
    "instantiate": ("nodes.executable(g)", 0),
    "a kernel of an executable graph": ("nodes.change(x, z, nodes.kernel('add', m, 8, 1100))", 1000),
    "an executable graph becomes another": ("nodes.update(x, other)", 1000),
}
"""By the call that a move overtakes: the call, and how much more m is after it."""


@EXACT
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_a_move_overtakes_is_made_once(
    domain: Domain,
    second: Domain,
    third: Domain,
    gate: Gate,
    post: Post,
    ask: Program,
    copies: Path,
    call: str,
) -> None:
    line = post.greet(moving.EXACT)
    start(ask)
    build(ask)
    ask("other, first, last, y = g, a, z, x")
    build(ask)
    assert ask("nodes.become(last, nodes.kernel('add', m, 8, 1100))") == "0"
    ask("more = nodes.graph(); nodes.add(more, 'add', m, 8, 1000); later = Later(gpu)")
    stand_by(line, second, copies)
    before = ask("mappings('mpsd-standin-vmm')")
    gate.keep(NODE)
    expression, added = CALLS[call]
    ask(f"later.start({expression!r})")
    until(lambda: gate.kept() == NODE)
    break_domain(domain)
    line.say(moving.MOVE, 1, again=1)
    until(lambda: ask("mappings('mpsd-standin-vmm')") != before)
    gate.keep(0)
    assert line.hear(moving.MOVED, moving.STAYED).kind == moving.MOVED
    made = ask("later.result()")
    of = "x" if "executable" in call else made if call == "instantiate" else "nodes.executable(g)"
    ask(f"w = {of}")
    assert ask("len(nodes.of(g))") == ("7" if call.startswith("add") else "6")
    assert [launched(ask, each) for each in "wy"] == [(106 + added, 16), (106, 16)]
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text == ""
    assert [launched(ask, each) for each in "wy"] == [(106 + added, 16), (106, 16)]
    assert ask.end() == ""
