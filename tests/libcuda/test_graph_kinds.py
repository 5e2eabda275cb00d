"""Nodes that record events, wait for them, call the host, or write words; attributes; copies of graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_graph_nodes import EXACT, launched, start
from tests.libcuda.test_graphs import BEGIN, MODES, end
from tests.support import moving
from tests.support.gate import Gate
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

ADDED = {
    "host": ("b = nodes.host(g, lambda: ran.append(1), [a])", "ran", "[1]"),
    "any host": (
        "b = nodes.any(g, nodes.params(HOST, host=nodes.calling(lambda: ran.append(1))), [a])",
        "ran",
        "[1]",
    ),
    "word": ("b = nodes.write(g, n, 7, [a])", "gpu.word(n)", "7"),
    "any word": (
        "b = nodes.any(g, nodes.params(kinds.MEMORY, memory=nodes.writing(n, 7)), [a])",
        "gpu.word(n)",
        "7",
    ),
    "record": ("b = nodes.record(g, e, [a])", "gpu.code('cuEventSynchronize', e)", "0"),
    "any record": (
        "b = nodes.any(g, nodes.params(kinds.EVENT_RECORD, event=e), [a])",
        "gpu.code('cuEventSynchronize', e)",
        "0",
    ),
    "wait": ("b = nodes.wait(g, e, [a])", "gpu.code('cuEventQuery', e)", "0"),
    "any wait": (
        "b = nodes.any(g, nodes.params(kinds.WAIT_EVENT, event=e), [a])",
        "gpu.code('cuEventQuery', e)",
        "0",
    ),
}
"""By kind: how it is added behind the node a, what then tells that it ran, and the answer."""

BECOMES = {
    "host": ("HostNodeSetParams", "ctypes.byref(nodes.calling(lambda: ran.append(2)))", "ran", "[1, 2]"),
    "word": ("BatchMemOpNodeSetParams", "ctypes.byref(nodes.writing(n, 8))", "gpu.word(n)", "8"),
    "record": ("EventRecordNodeSetEvent", "f", "gpu.code('cuEventSynchronize', f)", "0"),
    "wait": ("EventWaitNodeSetEvent", "f", "gpu.code('cuEventQuery', f)", "0"),
}


def begin(ask: Program) -> None:
    start(ask)
    ask("ran = []; e, f = (gpu.made('cuEventCreate', 0) for _ in 'ef'); g = nodes.graph()")
    ask("a = nodes.add(g, 'add', m, 8, 1)")


@MODES
@pytest.mark.parametrize("kind", ADDED)
def test_a_node_is_there_after_the_move(
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    mode: int,
    kind: str,
) -> None:
    line = post.greet(mode)
    begin(ask)
    adds, seen, answer = ADDED[kind]
    ask(f"{adds}; c = nodes.add(g, 'add', m, 8, 10, after=[b]); x = nodes.executable(g)")
    stand_by(line, second, copies)
    assert launched(ask)[0] == 11
    assert ask(seen) == answer
    break_domain(domain)
    assert move(line).text == ""
    ask("ran.clear(); gpu.run('fill', n, 8, 0); gpu.sync()")
    assert launched(ask)[0] == 22
    assert ask(seen) == answer
    # Another one can be added there.
    ask(f"y = nodes.executable(g); {adds}; z = nodes.executable(g)")
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text == ""
    assert [launched(ask, of)[0] for of in "yz"] == [33, 44]
    assert (
        ask("nodes.type(b) == nodes.type(c), nodes.before(b) == [a], len(nodes.of(g))") == "(False, True, 4)"
    )
    assert line.is_silent()
    assert ask.end() == ""


@MODES
@pytest.mark.parametrize("of", ["g", "x"])
@pytest.mark.parametrize("kind", BECOMES)
def test_a_node_is_what_it_was_changed_to(
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    mode: int,
    kind: str,
    of: str,
) -> None:
    line = post.greet(mode)
    begin(ask)
    ask(f"{ADDED[kind][0]}; x = nodes.executable(g)")
    stand_by(line, second, copies)
    assert launched(ask)[0] == 1
    call, value, seen, answer = BECOMES[kind]
    change = f"gpu.code('cuGraph{'Exec' if of == 'x' else ''}{call}', {'x, ' if of == 'x' else ''}b, {value})"
    for generation, (home, away) in enumerate(((domain, second), (second, third)), 1):
        if generation == 2:
            stand_by(line, away, copies, generation)
            # A change to what it is already, in another instance than the first.
            assert ask(change) == "0"
        elif kind != "host" or of == "g":
            assert ask(change) == "0"
        else:
            assert ask(change) == "0"
        break_domain(home)
        assert move(line, generation).text == ""
    if of == "g":
        ask("x = nodes.executable(g)")
    assert launched(ask)[0] == 2
    assert ask(seen) == answer
    assert line.is_silent()
    assert ask.end() == ""


CAPTURED = {
    "host": ("gpu.host('a', stream=s)", "gpu.ran", "[('a', 0)]"),
    "word": ("gpu.code('cuStreamWriteValue32_v2', s, n, 7, 0)", "gpu.word(n)", "7"),
    "record": ("gpu.code('cuEventRecordWithFlags', e, s, 1)", "gpu.code('cuEventSynchronize', e)", "0"),
    "wait": ("gpu.code('cuStreamWaitEvent', s, e, 1)", "gpu.code('cuEventQuery', e)", "0"),
}


@MODES
@pytest.mark.parametrize("during", [True, False], ids=["moved in the capture", "moved after it"])
@pytest.mark.parametrize("kind", CAPTURED)
def test_what_is_captured_is_there_after_the_move(
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    mode: int,
    kind: str,
    during: bool,
) -> None:
    line = post.greet(mode)
    start(ask)
    ask("e = gpu.made('cuEventCreate', 0)")
    does, seen, answer = CAPTURED[kind]
    stand_by(line, second, copies)
    assert ask(BEGIN) == "None"
    assert ask(f"gpu.run('add', m, 8, 1, stream=s), {does}") == "(0, 0)"
    if during:
        break_domain(domain)
        assert move(line).text == ""
    assert ask("gpu.run('add', m, 8, 10, stream=s)") == "0"
    end(ask)
    assert launched(ask)[0] == 11
    assert ask(seen) == answer
    home, away, generation = (second, third, 2) if during else (domain, second, 1)
    if during:
        stand_by(line, away, copies, generation)
    break_domain(home)
    assert move(line, generation).text == ""
    ask("gpu.ran.clear(); gpu.run('fill', n, 8, 0); gpu.sync()")
    assert launched(ask)[0] == 22
    assert ask(seen) == answer
    assert ask("len(nodes.of(g))") == "3"
    assert line.is_silent()
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("lets", range(0, 8, 2))
@pytest.mark.parametrize("kind", ["record", "wait", "word"])
def test_a_launch_in_flight_is_done_again(
    domain: Domain, second: Domain, gate: Gate, post: Post, ask: Program, copies: Path, kind: str, lets: int
) -> None:
    line = post.greet(moving.EXACT)
    begin(ask)
    ask(f"{ADDED[kind][0]}; c = nodes.copy(g, n, m, 32, [b]); d = nodes.add(g, 'add', m, 8, 10, after=[c])")
    ask("x = nodes.executable(g); o = gpu.stream()")
    stand_by(line, second, copies)
    gate.let(lets)
    assert ask("[gpu.code('cuGraphLaunch', x, s) for _ in range(2)]") == "[0, 0]"
    # Work of another stream behind an event that the graph records.
    if kind == "record":
        assert ask("gpu.code('cuStreamWaitEvent', o, e, 0), gpu.run('add', n, 8, 100, stream=o)") == "(0, 0)"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m), gpu.word(n)") == f"(0, 22, {112 if kind == 'record' else 12})"
    assert ask.end() == ""


@EXACT
def test_what_an_event_of_a_graph_has_told_is_not_undone_silently(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """The program knows by the event that a part of the graph has run, and the rest is in flight."""
    line = post.greet(moving.EXACT)
    begin(ask)
    ask("b = nodes.record(g, e, [a]); c = nodes.add(g, 'long', m, 8, 10, after=[b]); x = nodes.executable(g)")
    stand_by(line, second, copies)
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.code('cuEventSynchronize', e)") == "(0, 0)"
    break_domain(domain)
    assert move(line).text == "an event that a graph records"
    assert ask("gpu.sync(), gpu.sync()") == "(719, 0)"
    assert "an event that a graph records" in ask.end()


@EXACT
def test_a_host_callback_of_a_graph_runs_once_for_each_launch(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A launch in flight with a host callback is lost, and said so: the callback may have run."""
    line = post.greet(moving.EXACT)
    begin(ask)
    ask("b = nodes.host(g, lambda: ran.append(1), [a]); c = nodes.add(g, 'long', m, 8, 10, after=[b])")
    ask(
        "x = nodes.executable(g); y = nodes.graph(); nodes.host(y, lambda: ran.append(2));"
        " y = nodes.executable(y)"
    )
    stand_by(line, second, copies)
    assert ask("gpu.code('cuGraphLaunch', x, s)") == "0"
    break_domain(domain)
    assert move(line).text == "a graph with host callbacks"
    assert ask("gpu.sync(), ran in ([], [1]), ran.clear()") == "(719, True, None)"
    assert ask("gpu.code('cuGraphLaunch', y, s), gpu.sync(), ran") == "(0, 0, [2])"
    assert "a graph with host callbacks" in ask.end()


@MODES
def test_a_driver_instance_stays_while_it_runs_a_callback_of_a_graph(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    """A callback of a lost launch goes on in an instance that was left; its code stays until it returns."""
    line = post.greet(mode)
    begin(ask)
    ask("import threading; began, go = threading.Event(), threading.Event()")
    ask("b = nodes.host(g, lambda: (began.set(), go.wait(), ran.append(1)), [a]); x = nodes.executable(g)")
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.code('cuGraphLaunch', x, s), began.wait()") == "(0, True)"
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text == ("mode keep" if mode == moving.KEEP else "a graph with host callbacks")
    # One instance is in use and a thread is inside another, so the next standby takes a third.
    stand_by(line, third, copies, 3)
    assert ask("[mappings(f'libcuda-{number}.so.1') > 0 for number in range(3)]") == "[True, True, True]"
    ask("given = kinds.HostParams(); went = go.set()")
    assert ask("gpu.sync() in (0, 719), gpu.sync()") == "(True, 0)"
    ask("c = nodes.calling(ran.clear); h = nodes.any(g, nodes.params(HOST, host=c), [a])")
    same = "(given.fn, given.userData) == (c.fn, c.userData)"
    assert ask(f"gpu.code('cuGraphHostNodeGetParams', h, ctypes.byref(given)), {same}") == "(0, True)"
    ask.end()


@MODES
def test_a_callback_of_a_graph_may_not_call_the_driver(post: Post, ask: Program, mode: int) -> None:
    post.greet(mode)
    begin(ask)
    ask("b = nodes.host(g, lambda: ran.append(gpu.sync()), [a]); x = nodes.executable(g)")
    assert launched(ask)[0] == 1
    assert ask("ran") == "[800]"
    assert ask.end() == ""


@MODES
def test_attributes_of_kernel_nodes(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    start(ask)
    ask("g = nodes.graph(); a, b, c = (nodes.add(g, 'add', m, 8, 1) for _ in 'abc')")
    assert ask("nodes.attribute(a, kinds.PRIORITY, 2), nodes.attribute(b, kinds.PRIORITY)") == "(2, 0)"
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    assert ask("[nodes.attribute(each, kinds.PRIORITY) for each in (a, b, c)]") == "[2, 0, 0]"
    assert ask("nodes.attribute(a, kinds.COOPERATIVE, 1)") == "1"
    assert ask("gpu.code('cuGraphKernelNodeCopyAttributes', b, a)") == "0"
    assert ask("nodes.become(a, nodes.kernel('add', m, 8, 2))") == "0"
    ask("d = nodes.add(g, 'add', m, 8, 10); nodes.attribute(d, kinds.PRIORITY, 5); x = nodes.executable(g)")
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text == ""
    each = "(nodes.attribute(each, kinds.PRIORITY), nodes.attribute(each, kinds.COOPERATIVE))"
    asked = f"[{each} for each in (a, b, c, d)]"
    assert ask(asked) == "[(2, 1), (2, 1), (0, 0), (5, 0)]"
    assert launched(ask) == (14, 0)
    assert line.is_silent()
    assert ask.end() == ""


@MODES
def test_attributes_of_captured_kernels(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    """A captured graph is captured again with them, as XLA sets priorities."""
    line = post.greet(mode)
    start(ask)
    assert ask(f"{BEGIN}, gpu.run('add', m, 8, 1, stream=s), gpu.run('add', m, 8, 2, stream=s)") == (
        "(None, 0, 0)"
    )
    end(ask)
    ask("a, b = nodes.of(g)")
    assert ask("nodes.attribute(a, kinds.PRIORITY, 3), nodes.attribute(a, kinds.COOPERATIVE, 1)") == "(3, 1)"
    ask("x = nodes.executable(g)")
    asked = "[(nodes.attribute(of, kinds.PRIORITY), nodes.attribute(of, kinds.COOPERATIVE)) for of in (a, b)]"
    for generation, (home, away) in enumerate(((domain, second), (second, third)), 1):
        stand_by(line, away, copies, generation)
        break_domain(home)
        assert move(line, generation).text == ""
        assert ask(asked) == "[(3, 1), (0, 0)]"
        assert launched(ask) == (3 * generation, 0)
    assert line.is_silent()
    assert ask.end() == ""


@MODES
def test_what_a_captured_kernel_has_of_its_stream(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    """A captured graph that becomes nodes keeps attributes that the driver took from elsewhere."""
    line = post.greet(mode)
    start(ask)
    assert (
        ask(f"{BEGIN}, gpu.run('add', m, 8, 1, stream=s), gpu.run('add', m, 8, 2, stream=s)")
        == "(None, 0, 0)"
    )
    end(ask)
    ask(
        "a, b = nodes.of(g); nodes.attribute(a, kinds.PRIORITY, 3);"
        " c = nodes.add(g, 'add', n, 8, 5, after=[b])"
    )
    ask("x = nodes.executable(g)")
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    assert (
        ask("[nodes.attribute(each, kinds.PRIORITY) for each in (a, b, c)], nodes.before(b) == [a]")
        == "([3, 0, 0], True)"
    )
    assert launched(ask) == (3, 5)
    assert line.is_silent()
    assert ask.end() == ""


@MODES
@pytest.mark.parametrize("captured", [True, False])
def test_a_copy_of_a_graph(
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    mode: int,
    captured: bool,
) -> None:
    line = post.greet(mode)
    start(ask)
    if captured:
        assert (
            ask(f"{BEGIN}, gpu.run('add', m, 8, 1, stream=s), gpu.run('add', n, 8, 2, stream=s)")
            == "(None, 0, 0)"
        )
        end(ask)
        ask("a, b = nodes.of(g)")
    else:
        ask(
            "g = nodes.graph(); a = nodes.add(g, 'add', m, 8, 1); b = nodes.add(g, 'add', n, 8, 2, after=[a])"
        )
    ask("c = nodes.clone(g); d = nodes.cloned(b, c)")
    assert ask(
        "d != b, nodes.become(d, nodes.kernel('add', n, 8, 20)), nodes.before(d) == [nodes.cloned(a, c)]"
    ) == ("(True, 0, True)")
    ask("x, y = nodes.executable(g), nodes.executable(c)")
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    assert [launched(ask, of) for of in "xy"] == [(1, 2), (2, 22)]
    assert ask("nodes.cloned(b, c) == d, len(nodes.of(c))") == "(True, 2)"
    ask(
        "h = nodes.clone(c); nodes.add(h, 'add', m, 8, 100, after=[nodes.cloned(d, h)]);"
        " z = nodes.executable(h)"
    )
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text == ""
    assert [launched(ask, of) for of in "xyz"] == [(3, 24), (4, 44), (105, 64)]
    assert ask("[gpu.code('cuGraphDestroy', of) for of in (g, c, h)]") == "[0, 0, 0]"
    assert line.is_silent()
    assert ask.end() == ""


NAMED = {
    "nodes.any(g, nodes.params(kinds.SIGNAL))": "an external semaphore node in a graph",
    "gpu.made('cuGraphAddMemFreeNode', g, None, 0, m)": "cuGraphAddMemFreeNode",
}


@MODES
@pytest.mark.parametrize("call", NAMED)
def test_a_kind_that_is_not_followed_is_named_and_works(
    post: Post, ask: Program, mode: int, call: str
) -> None:
    line = post.greet(mode)
    start(ask)
    ask("g = nodes.graph(); a = nodes.add(g, 'add', m, 8, 1)")
    ask(call)
    assert line.hear(moving.OPAQUE).text == NAMED[call]
    ask("x = nodes.executable(g)")
    assert launched(ask) == (1, 0)
    assert ask("len(nodes.of(g))") == "2"
    ask.end()


@MODES
def test_calls_of_older_versions(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    start(ask)
    ask("older = lambda call, *given, of: gpu.code(call, *given, ctypes.byref(nodes.kernel(*of)))")
    ask("g = nodes.graph(); o, x, result = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int()")
    add = "older('cuGraphAddKernelNode', ctypes.byref(o), g, None, ctypes.c_size_t(0), of=('add', m, 8, 1))"
    instantiate = "gpu.code('cuGraphInstantiate_v2', ctypes.byref(x), g, None, None, ctypes.c_size_t(0))"
    assert ask(f"{add}, {instantiate}") == "(0, 0)"
    ask("a = o.value; x = x.value")
    stand_by(line, second, copies)
    assert launched(ask) == (1, 0)
    break_domain(domain)
    assert move(line).text == ""
    assert launched(ask) == (2, 0)
    assert ask("older('cuGraphExecKernelNodeSetParams', x, a, of=('add', m, 8, 10))") == "0"
    assert launched(ask) == (12, 0)
    assert ask("older('cuGraphKernelNodeSetParams', a, of=('add', m, 8, 100))") == "0"
    assert ask("gpu.code('cuGraphExecUpdate', x, g, None, ctypes.byref(result)), result.value") == "(0, 0)"
    assert launched(ask) == (112, 0)
    assert line.is_silent()
    assert ask.end() == ""


PROGRAMMATIC = "(ctypes.c_uint8 * 8)(1, 0, 1)"
"""CUgraphEdgeData of a programmatic edge from port 1."""


@MODES
def test_edges_with_data(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    start(ask)
    ask("g = nodes.graph(); a, b, c = (nodes.add(g, 'add', m, 8, n) for n in (1, 2, 4))")
    ask("first, then = ((ctypes.c_uint64 * 1)(of) for of in (a, b))")
    edges = f"gpu.code('cuGraphAddDependencies_v2', g, first, then, {PROGRAMMATIC}, 1)"
    assert ask(edges) == "0"
    ask("h = nodes.params(KERNEL, kernel=nodes.kernel('add', m, 8, 8))")
    added = f"(ctypes.c_uint64 * 1)(b), {PROGRAMMATIC}, ctypes.c_size_t(1), ctypes.byref(h)"
    ask(f"d = gpu.made('cuGraphAddNode_v2', g, {added}); x = nodes.executable(g)")
    for generation, (home, away) in enumerate(((domain, second), (second, third)), 1):
        stand_by(line, away, copies, generation)
        break_domain(home)
        assert move(line, generation).text == ""
        assert launched(ask) == (15 * generation, 0)
        assert ask("[nodes.data(each) for each in (b, c, d)]") == "[[(1, 0, 1)], [], [(1, 0, 1)]]"
    parts = edges.replace("AddDependencies", "RemoveDependencies")
    assert ask(f"{parts}, nodes.before(b)") == "(0, [])"
    assert line.is_silent()
    assert ask.end() == ""
