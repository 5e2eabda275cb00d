"""Captures into graphs of the program's own continue in another driver instance."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_graph_nodes import launched, start
from tests.libcuda.test_graphs import MODES, RELAXED
from tests.support import moving
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

END = "gpu.code('cuStreamEndCapture', s, ctypes.byref(o)), o.value == g"
ADD_M, ADD_N = "gpu.run('add', m, 8, 1, stream=s)", "gpu.run('add', n, 8, 10, stream=s)"


def begin(ask: Program, after: str = "") -> None:
    ask(f"o = ctypes.c_uint64(); given = [{after}]; l = (ctypes.c_uint64 * len(given))(*given)")
    assert (
        ask(f"gpu.code('cuStreamBeginCaptureToGraph', s, g, l, None, ctypes.c_size_t(len(given)), {RELAXED})")
        == "0"
    )


@MODES
@pytest.mark.parametrize("done", range(4))
def test_a_capture_into_an_empty_graph(
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    mode: int,
    done: int,
) -> None:
    """The graph is then used as XLA uses it: as a child of a graph that is built node by node."""
    line = post.greet(mode)
    start(ask)
    stand_by(line, second, copies)
    ask("g = nodes.graph()")
    steps = [lambda: begin(ask), *(lambda step=step: check(ask, step) for step in (ADD_M, ADD_N))]
    for step in steps[:done]:
        step()
    break_domain(domain)
    assert move(line).text in ("", "mode keep")
    for step in steps[done:]:
        step()
    assert ask(END) == "(0, True)"
    ask("p = nodes.graph(); a = nodes.set(p, m, 5, 8); c = nodes.child(p, g, [a]); x = nodes.executable(p)")
    assert launched(ask) == (6, 10)
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text in ("", "mode keep")
    assert launched(ask) == (6, 20)
    ask("b = nodes.add(p, 'add', m, 8, 100, after=[c]); y = nodes.executable(p)")
    assert launched(ask, "y") == (106, 30)
    assert ask("gpu.code('cuGraphDestroy', g), gpu.code('cuGraphDestroy', p)") == "(0, 0)"
    assert line.is_silent()
    assert ask.end() == ""


def check(ask: Program, step: str) -> None:
    assert ask(step) == "0"


@MODES
@pytest.mark.parametrize("done", range(4))
def test_a_capture_behind_nodes_of_a_graph(
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
    start(ask)
    stand_by(line, second, copies)
    ask("g = nodes.graph(); a = nodes.set(g, m, 5, 8); b = nodes.copy(g, n, m, 32, [a])")
    steps = [lambda: begin(ask, "b"), *(lambda step=step: check(ask, step) for step in (ADD_M, ADD_N))]
    for step in steps[:done]:
        step()
    break_domain(domain)
    assert move(line).text in ("", "mode keep")
    for step in steps[done:]:
        step()
    assert ask(END) == "(0, True)"
    ask("x = nodes.executable(g)")
    assert launched(ask) == (6, 15)
    edges = "[sorted(nodes.of(g).index(b) for b in nodes.before(a)) for a in nodes.of(g)]"
    assert ask(edges) == "[[], [0], [1], [2]]"
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text in ("", "mode keep")
    assert launched(ask) == (6, 15)
    assert ask(edges) == "[[], [0], [1], [2]]"
    # What was captured is changed as any node, in the graph and in what was instantiated.
    assert ask("nodes.change(x, nodes.of(g)[2], nodes.kernel('add', m, 8, 2))") == "0"
    assert ask("nodes.become(nodes.of(g)[3], nodes.kernel('add', n, 8, 20))") == "0"
    ask("nodes.add(g, 'add', m, 8, 100, after=[nodes.of(g)[3]]); y = nodes.executable(g)")
    assert [launched(ask, of) for of in "xy"] == [(7, 15), (106, 25)]
    assert line.is_silent()
    assert ask.end() == ""


@MODES
@pytest.mark.parametrize("call", ["kernel", "edge", "no edge", "no node"])
def test_a_captured_graph_that_is_changed_by_hand(
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    mode: int,
    call: str,
) -> None:
    line = post.greet(mode)
    start(ask)
    ask("g = 0")
    assert ask(f"gpu.code('cuStreamBeginCapture_v2', s, {RELAXED}), {ADD_M}, {ADD_N}") == "(0, 0, 0)"
    assert ask("gpu.code('cuMemcpyDtoDAsync_v2', n, m, ctypes.c_size_t(32), s)") == "0"
    ask("o = ctypes.c_uint64(); gpu('cuStreamEndCapture', s, ctypes.byref(o)); g = o.value")
    ask("a, b, c = nodes.of(g); y = nodes.executable(g)")
    stand_by(line, second, copies)
    changes = {
        "kernel": ("nodes.add(g, 'add', n, 8, 100, after=[c]) > 0", "True", (1, 101)),
        "edge": ("nodes.depend(g, [a], [c])", "0", (1, 1)),
        "no edge": ("nodes.part(g, [b], [c]), nodes.depend(g, [a], [c])", "(0, 0)", (1, 1)),
        "no node": ("gpu.code('cuGraphDestroyNode', b), nodes.depend(g, [a], [c])", "(0, 0)", (1, 1)),
    }
    step, answer, first = changes[call]
    assert ask(step) == answer
    ask("x = nodes.executable(g)")
    assert launched(ask) == first
    for generation, (home, away) in enumerate(((domain, second), (second, third)), 1):
        if generation > 1:
            stand_by(line, away, copies, generation)
        break_domain(home)
        assert move(line, generation).text in ("", "mode keep")
        assert launched(ask) == (first[0] + generation, first[1] + generation)
    # Another graph than the one that was instantiated before.
    assert launched(ask, "y") == (4, 4)
    assert ask("nodes.change(y, c, nodes.copying_of(m, n, 32)), len(nodes.of(g))") == (
        f"(0, {4 if call == 'kernel' else 2 if call == 'no node' else 3})"
    )
    assert line.is_silent()
    assert ask.end() == ""


@MODES
def test_a_capture_into_a_graph_that_fails(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    """What the driver leaves in such a graph is unknown; a program that does not use it is protected."""
    line = post.greet(mode)
    start(ask)
    ask("g = nodes.graph(); t = gpu.made('cuStreamCreate', 1); e = gpu.made('cuEventCreate', 0)")
    stand_by(line, second, copies)
    begin(ask)
    assert (
        ask(f"{ADD_M}, gpu.code('cuEventRecord', e, s), gpu.code('cuStreamWaitEvent', t, e, 0)")
        == "(0, 0, 0)"
    )
    assert ask("gpu.run('add', n, 8, 10, stream=t)") == "0"
    assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(o))") == "904"
    assert line.is_silent()
    break_domain(domain)
    assert move(line).text in ("", "mode keep")
    assert ask("gpu.code('cuGraphDestroy', g)") == "0"
    ask("g = nodes.graph()")
    begin(ask)
    assert ask(ADD_M) == "0"
    assert ask(END) == "(0, True)"
    ask("x = nodes.executable(g)")
    assert launched(ask) == (1, 0)
    assert line.is_silent()
    assert ask.end() == ""


@MODES
def test_a_failed_capture_into_a_graph_is_named_when_it_is_used(post: Post, ask: Program, mode: int) -> None:
    line = post.greet(mode)
    start(ask)
    ask("g = nodes.graph(); t = gpu.made('cuStreamCreate', 1); e = gpu.made('cuEventCreate', 0)")
    begin(ask)
    assert (
        ask(f"{ADD_M}, gpu.code('cuEventRecord', e, s), gpu.code('cuStreamWaitEvent', t, e, 0)")
        == "(0, 0, 0)"
    )
    assert ask("gpu.run('add', n, 8, 10, stream=t)") == "0"
    assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(o))") == "904"
    ask("x = nodes.executable(g)")
    assert line.hear(moving.OPAQUE).text == "a graph from an untracked API call"
    ask.end()


@MODES
def test_two_threads_capture_into_their_graphs(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    """One more thread captures into a stream that has joined, in the instance after the move too."""
    line = post.greet(mode)
    start(ask)
    ask("g, h = nodes.graph(), nodes.graph(); t, u = (gpu.made('cuStreamCreate', 1) for _ in 'tu')")
    ask("e = gpu.made('cuEventCreate', 0); later = Later(gpu); o = ctypes.c_uint64()")
    stand_by(line, second, copies)
    begin(ask)
    into = f"gpu.code('cuStreamBeginCaptureToGraph', u, h, None, None, ctypes.c_size_t(0), {RELAXED})"
    ask(f"later.start({into!r})")
    assert ask("later.result()") == "0"
    assert (
        ask(f"{ADD_M}, gpu.code('cuEventRecord', e, s), gpu.code('cuStreamWaitEvent', t, e, 0)")
        == "(0, 0, 0)"
    )
    ask("later.start(\"gpu.run('add', n, 8, 10, stream=t), gpu.run('add', m, 8, 100, stream=u)\")")
    assert ask("later.result()") == "(0, 0)"
    break_domain(domain)
    assert move(line).text in ("", "mode keep")
    ask("later.start(\"gpu.run('add', n, 8, 20, stream=t), gpu.run('add', m, 8, 200, stream=u)\")")
    assert ask("later.result()") == "(0, 0)"
    assert ask("gpu.code('cuEventRecord', e, t), gpu.code('cuStreamWaitEvent', s, e, 0)") == "(0, 0)"
    assert ask(END) == "(0, True)"
    ask("later.start(\"gpu.code('cuStreamEndCapture', u, ctypes.byref(o)), o.value == h\")")
    assert ask("later.result()") == "(0, True)"
    ask("x, y = nodes.executable(g), nodes.executable(h)")
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text in ("", "mode keep")
    assert [launched(ask, of) for of in "xy"] == [(1, 30), (301, 30)]
    assert line.is_silent()
    assert ask.end() == ""
