"""Graph nodes and edges at boundary cases: nothing is lost, created twice, or changed in the wrong place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_graph_nodes import EXACT, launched, start
from tests.libcuda.test_graphs import BEGIN, MODES, end
from tests.libcuda.test_overtaken import begin_move, next_gate
from tests.support import moving
from tests.support.gate import ANY, NODE, UNMAP, Gate
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "next_gate", "post", "second", "third"]

SIGNAL = "an external semaphore node in a graph"
OTHER_KIND = "a graph node of an untracked type"


def begin_signal_node(ask: Program, gate: Gate) -> None:
    """Hold a thread of the program in the driver, where it adds a node of a kind that is not tracked."""
    gate.keep(NODE)
    ask("later.start('nodes.signal(g)')")
    until(lambda: gate.kept() == NODE)


def capture(ask: Program, *does: str) -> None:
    assert ask(BEGIN) == "None"
    assert ask(", ".join(does)) == ("0" if len(does) == 1 else repr((0,) * len(does)))
    end(ask)


@pytest.mark.parametrize(
    "call",
    [
        "'cuGraphCreate', None, 0",
        "'cuGraphInstantiateWithFlags', None, g, 0",
        "'cuStreamEndCapture', s, None",
    ],
)
def test_the_driver_answers_who_names_no_place(post: Post, ask: Program, call: str) -> None:
    post.greet(moving.KEEP)
    start(ask)
    ask("g = nodes.graph()")
    assert ask(f"gpu.code({call})") == "1"
    assert ask.end() == ""


@pytest.mark.parametrize(
    "call",
    [
        "gpu.code('cuGraphInstantiateWithFlags', ctypes.byref(o), 0, 0)",
        "gpu.code('cuGraphAddMemsetNode', ctypes.byref(o), g, None, 0, ctypes.byref(clear), None)",
        "gpu.code('cuGraphAddEmptyNode', ctypes.byref(o), g, None, 1)",
        "gpu.code('cuGraphAddKernelNode_v2', ctypes.byref(o), g, None, 0, ctypes.byref(k))",
    ],
    ids=["instantiate nothing", "no context", "no dependencies", "no function"],
)
def test_a_call_that_fails_says_nothing(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, call: str
) -> None:
    line = post.greet(moving.EXACT)
    start(ask)
    ask("g = nodes.graph(); o = ctypes.c_uint64(); k = nodes.kernel('add', m, 8, 1); k.func = 0")
    ask("clear = nodes.setting(m, 1, 8)")
    assert ask(call) in ("1", "400")
    ask("a = nodes.add(g, 'add', m, 8, 1); b = nodes.add(g, 'fill', n, 8, 2, after=[a])")
    ask("x = nodes.executable(g)")
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    assert launched(ask) == (1, 2)
    assert line.unsure == []
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize(
    "call",
    [
        "gpu.code('cuGraphAddKernelNode_v2', ctypes.byref(o), g, None, 0, None)",
        "gpu.code('cuGraphAddMemsetNode', ctypes.byref(o), g, None, 0, None, None)",
        "gpu.code('cuGraphKernelNodeSetParams_v2', a, None)",
        "gpu.code('cuGraphExecKernelNodeSetParams_v2', x, a, None)",
    ],
    ids=["kernel", "memset", "node", "executable graph"],
)
def test_what_is_not_given_is_missing_in_any_copy(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, call: str
) -> None:
    line = post.greet(moving.EXACT)
    start(ask)
    ask("g = nodes.graph(); o = ctypes.c_uint64(); a = nodes.add(g, 'add', m, 8, 1); x = nodes.executable(g)")
    assert ask(call) == "1"
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    assert ask(call) == "1"
    assert launched(ask) == (1, 0)
    assert line.is_silent()
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("is_moved", [False, True])
def test_changed_after_an_update_from_another_graph(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, is_moved: bool
) -> None:
    """A change after an update from another graph with another node order is ambiguous, so the program is
    not carried over."""
    line = post.greet(moving.EXACT)
    start(ask)
    ask("f = nodes.graph(); b = nodes.add(f, 'add', n, 8, 10); a = nodes.add(f, 'add', m, 8, 1)")
    assert ask("nodes.depend(f, [a], [b])") == "0"
    ask("y = nodes.executable(f)")
    capture(ask, "gpu.run('add', m, 8, 1, stream=s)", "gpu.run('add', n, 8, 10, stream=s)")
    assert ask("nodes.update(y, g)") == "(0, 0)"
    stand_by(line, second, copies)
    if is_moved:
        break_domain(domain)
        assert move(line).text == ""
        assert launched(ask, "y") == (1, 10)
    said = ask("nodes.change(y, b, nodes.kernel('add', n, 8, 20))")
    assert line.hear(moving.OPAQUE).text == OTHER_KIND
    assert said == ("801" if is_moved else "0")
    assert launched(ask, "y") == ((2, 20) if is_moved else (1, 20))
    ask.end()


@EXACT
def test_changed_there_by_the_nodes_of_another_graph(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A change addressed by the nodes of another graph is ambiguous too."""
    line = post.greet(moving.EXACT)
    start(ask)
    ask("g = nodes.graph(); a = nodes.add(g, 'add', m, 8, 1); nodes.add(g, 'add', n, 8, 10, after=[a])")
    ask("x = nodes.executable(g)")
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    assert launched(ask) == (1, 10)
    ask("f = nodes.graph(); c = nodes.add(f, 'add', n, 8, 10); d = nodes.add(f, 'add', m, 8, 1)")
    assert ask("nodes.depend(f, [d], [c]), nodes.update(x, f)") == "(0, (0, 0))"
    assert ask("nodes.change(x, c, nodes.kernel('add', n, 8, 20))") == "801"
    assert line.hear(moving.OPAQUE).text == OTHER_KIND
    assert launched(ask) == (2, 20)
    ask.end()


def test_beside_a_node_of_another_kind(post: Post, ask: Program) -> None:
    """In a program that is not carried over, nodes may depend on any node."""
    line = post.greet(moving.KEEP)
    start(ask)
    ask("g = nodes.graph(); h = nodes.signal(g)")
    assert line.hear(moving.OPAQUE).text == SIGNAL
    ask("a = nodes.add(g, 'add', m, 8, 1, after=[h]); b = nodes.add(g, 'add', m, 8, 2)")
    assert ask("nodes.depend(g, [b], [a])") == "0"
    ask("x = nodes.executable(g)")
    assert launched(ask) == (3, 0)
    assert ask("len(nodes.of(g))") == "3"
    assert ask.end() == ""


@MODES
def test_a_graph_launched_in_a_capture(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    """A graph launched in a capture keeps its state at that time, and no thread waits for itself."""
    line = post.greet(mode)
    start(ask)
    ask("f = nodes.graph(); a = nodes.add(f, 'add', m, 8, 1); y = nodes.executable(f)")
    capture(ask, "gpu.code('cuGraphLaunch', y, s)", "gpu.run('add', n, 8, 10, stream=s)")
    assert ask("nodes.change(y, a, nodes.kernel('add', m, 8, 100))") == "0"
    stand_by(line, second, copies)
    assert launched(ask) == (1, 10)
    break_domain(domain)
    assert move(line).text == ""
    assert launched(ask) == (2, 20)
    assert launched(ask, "y") == (102, 20)
    assert ask.end() == ""


def test_a_node_is_added_once_where_a_move_does_not_come_about(
    domain: Domain, second: Domain, gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.KEEP)
    start(ask)
    ask("g = nodes.graph(); later, other = Later(gpu), Later(gpu)")
    stand_by(line, second, copies)
    gate.let(0)
    assert ask("gpu.run('add', n, 8, 1)") == "0"
    gate.keep(NODE)
    ask("later.start(\"nodes.add(g, 'add', m, 8, 1)\")")
    until(lambda: gate.kept() == NODE)
    # The move begins, so other calls block, and waits for the open call until its time limit.
    line.say(moving.MOVE, 1, planned=True)
    until(lambda: ask("(other.start('gpu.now()'), other.comes_back())[1]") == "False")
    gate.keep(0)
    assert line.hear(moving.STAYED).generation == 1
    gate.let(ANY)
    ask("later.result()")
    assert ask("len(nodes.of(g))") == "1"
    ask("x = nodes.executable(g)")
    assert launched(ask) == (1, 1)
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("captured", [False, True])
def test_a_memset_of_the_hosts_memory_is_not_done_again(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, captured: bool
) -> None:
    line = post.greet(moving.EXACT)
    start(ask)
    ask("h = gpu.made('cuMemHostAlloc', 1 << 20, 0); w = ctypes.c_uint32.from_address(h); o = gpu.stream()")
    if captured:
        capture(ask, "gpu.code('cuMemsetD32Async', h, 7, 8, s)")
        assert ask("gpu.sync()") == "0"
    else:
        ask("g = nodes.graph(); nodes.set(g, h, 7, 8); x = nodes.executable(g)")
    stand_by(line, second, copies)
    assert ask("gpu.run('long', m, 8, 1, stream=o), gpu.code('cuGraphLaunch', x, s)") == "(0, 0)"
    assert ask("gpu.code('cuStreamSynchronize', s), w.value") == "(0, 7)"
    ask("w.value = 5")
    break_domain(domain)
    assert "a graph with copies from or to the host" in move(line).text
    assert ask("w.value") == "5"
    ask.end()


def test_a_copy_from_a_variable_is_told(post: Post, ask: Program) -> None:
    line = post.greet(moving.KEEP)
    start(ask)
    ask("v = gpu.variable('table'); gpu.put(v, 3); g = nodes.graph(); nodes.copy(g, n, v, 16)")
    assert line.hear(moving.OPAQUE).text != ""
    ask("x = nodes.executable(g)")
    assert launched(ask) == (0, 3)
    assert ask.end() == ""


@EXACT
def test_a_node_of_another_kind_that_a_move_overtakes_is_refused(
    domain: Domain, second: Domain, gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    start(ask)
    ask("g = nodes.graph(); later = Later(gpu)")
    stand_by(line, second, copies)
    begin_signal_node(ask, gate)
    break_domain(domain)
    # Memory is unmapped before the instance is left; only then is it known that the call had no effect.
    assert move(line).text == ""
    gate.keep(0)
    assert "801" in ask("later.result()")
    assert ask("nodes.of(g)") == "[]"
    ask.end()


@EXACT
def test_a_node_of_another_kind_that_is_made_while_a_move_begins_keeps_the_program_where_it_is(
    domain: Domain, second: Domain, gate: Gate, next_gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT, lazy=True)
    start(ask)
    ask("g = nodes.graph(); later = Later(gpu)")
    stand_by(line, second, copies)
    begin_signal_node(ask, gate)
    begin_move(line, next_gate)
    gate.keep(0)
    assert ask("later.result() is None") == "False"
    next_gate.keep(0)
    assert "that fail-over cannot preserve" in line.hear(moving.STAYED).text
    assert len(ask("nodes.of(g)")) > len("[]")
    assert line.hear(moving.OPAQUE).text != ""
    assert ask.end() == ""


@EXACT
def test_a_node_of_another_kind_that_is_made_while_the_old_copy_is_fenced_is_refused(
    domain: Domain, second: Domain, gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    """A node of an untracked kind added while the old instance is fenced is refused; work in flight is not
    lost."""
    line = post.greet(moving.EXACT)
    start(ask)
    ask("g = nodes.graph(); later = Later(gpu)")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    begin_signal_node(ask, gate)
    gate.keep(NODE | UNMAP)
    line.say(moving.MOVE, 1, again=1)
    until(lambda: gate.kept() == UNMAP)
    gate.keep(UNMAP)
    gate.keep(0)
    assert line.hear(moving.MOVED, moving.STAYED).kind == moving.MOVED
    assert "801" in ask("later.result()")
    assert ask("nodes.of(g)") == "[]"
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 1)"
    ask.end()


@EXACT
def test_what_is_not_followed_and_called_while_a_move_is_on_is_refused_after_it(
    domain: Domain, second: Domain, next_gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT, lazy=True)
    start(ask)
    ask("later = Later(gpu)")
    stand_by(line, second, copies)
    begin_move(line, next_gate)
    ask("later.start('gpu.code(\"cuIpcCloseMemHandle\", 0)')")
    next_gate.keep(0)
    assert line.hear(moving.MOVED, moving.STAYED).kind == moving.MOVED
    assert ask("later.result()") == "801"
    assert line.hear(moving.OPAQUE).text != ""
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("how", ["update", "change", "become"])
def test_memory_that_went_before_the_graph_was_changed(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, how: str
) -> None:
    """A CUgraphExec with freed memory is instantiated only once it has new parameters."""
    line = post.greet(moving.EXACT)
    start(ask)
    ask("p, q = gpu.memory(4 << 20), gpu.memory(4 << 20); gpu.run('fill', q, 8, 3); gpu.sync()")
    ask("g = nodes.graph(); b = nodes.copy(g, n, p, 32); x = nodes.executable(g)")
    ask("f = nodes.graph(); nodes.copy(f, n, q, 32)")
    stand_by(line, second, copies)
    assert launched(ask) == (0, 0)
    assert ask("gpu.code('cuMemFree_v2', p)") == "0"
    break_domain(domain)
    assert move(line).text == ""
    if how == "update":
        assert ask("nodes.update(x, f)") == "(0, 0)"
    elif how == "become":
        given = "b, ctypes.byref(nodes.copying(n, q, 32))"
        assert ask(f"gpu.code('cuGraphMemcpyNodeSetParams', {given})") == "0"
        assert ask("nodes.update(x, g)") == "(0, 0)"
    else:
        given = "x, b, ctypes.byref(nodes.copying(n, q, 32)), gpu.context"
        assert ask(f"gpu.code('cuGraphExecMemcpyNodeSetParams', {given})") == "0"
    assert launched(ask) == (0, 3)
    assert ask.end() == ""


def test_many_nodes_come_after_what_was_made_later(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    start(ask)
    ask("g = nodes.graph(); l = [nodes.add(g, 'add', m, 8, 1)] + [nodes.empty(g) for _ in range(300)]")
    assert ask("nodes.depend(g, l[1:], l[:-1])") == "0"
    ask("e = nodes.set(g, m, 5, 8); x = nodes.depend(g, [e], [l[-1]]), nodes.executable(g)")
    ask("x = x[1]")
    stand_by(line, second, copies)
    assert launched(ask) == (6, 0)
    break_domain(domain)
    assert move(line).text == ""
    assert launched(ask) == (6, 0)
    assert ask.end() == ""
