"""Buffers that are usually written after a wait are saved together at the first write, by the kind of
work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.gate import Gate
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second"]

MIB = 1 << 20
MANY = 8
STEP = "{gpu.run('add', m, 8, 1) for m in many}"
LOOK = "{gpu.run('fill', one, 8, 3)}"
AFTER_LOOKING = "{gpu.run('fill', one, 8, 3), *(gpu.run('add', m, 8, 1) for m in many)}"
KINDS = 80
"""More kinds of work than the proxy distinguishes at a time."""
GRAPH = """graph = lambda m: (gpu.code('cuStreamBeginCapture_v2', s, 2), gpu.run('add', m, 8, 1, stream=s),
  gpu.code('cuStreamEndCapture', s, ctypes.byref(g)), gpu.made('cuGraphInstantiateWithFlags', g.value, 0))[3]
""".replace("\n", " ")
FIRST = 2
"""Operations that the GPU gets with the first kernel: the snapshot and the kernel."""


def begun(post: Post, ask: Program, second: Domain, copies: Path) -> Line:
    line = post.greet(moving.EXACT)
    ask(f"many = [gpu.memory({2 * MIB}) for _ in range({MANY})]; one = gpu.memory({2 * MIB})")
    ask("wait = lambda: gpu.code('cuStreamSynchronize', 0)")
    assert ask("{gpu.put(m, 0) for m in (one, *many)}") == "{0}"
    stand_by(line, second, copies)
    return line


def saved(last: str, ask: Program, line: Line, domain: Domain, gate: Gate) -> int:
    """Lose the context with this work in flight after its first write and snapshot; return the number of
    restored bytes."""
    gate.let(0)
    assert ask(last) == "{0}"
    gate.let(FIRST)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    said = move(line)
    assert said.text == ""
    return said.values[3]


@EXACT
@pytest.mark.parametrize(
    "last, mib, sums",
    [(STEP, MANY * 2, 3), (LOOK, 2, 2)],
    ids=["a step", "a look"],
)
def test_each_kind_of_work_saves_what_it_is_about_to_write_at_once(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path,
    last: str, mib: int, sums: int,
) -> None:  # fmt: skip
    """Each kind of work, a step or a check between steps, saves at once the buffers that it is about to
    write."""
    line = begun(post, ask, second, copies)
    for _ in range(2):
        assert ask(f"{STEP}, wait(), {LOOK}, wait()") == "({0}, 0, {0}, 0)"
    assert saved(last, ask, line, domain, gate) == mib * MIB
    assert ask("gpu.sync(), {gpu.word(m) for m in many}, gpu.word(one)") == f"(0, {{{sums}}}, 3)"
    assert ask.end() == ""


@EXACT
def test_what_begins_alike_and_goes_on_otherwise_is_right_all_the_same(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = begun(post, ask, second, copies)
    for _ in range(2):
        assert ask(f"{LOOK}, wait(), {AFTER_LOOKING}, wait()") == "({0}, 0, {0}, 0)"
    assert saved(LOOK, ask, line, domain, gate) == (MANY + 1) * 2 * MIB
    assert ask("gpu.sync(), {gpu.word(m) for m in many}, gpu.word(one)") == "(0, {2}, 3)"
    assert ask.end() == ""


@EXACT
def test_of_more_kinds_than_are_told_apart_none_saves_for_another(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask(f"many = [gpu.memory({2 * MIB}) for _ in range({KINDS})]; s = gpu.made('cuStreamCreate', 1)")
    ask(f"g = ctypes.c_uint64(); {GRAPH}")
    ask("launch = lambda graph: gpu.code('cuGraphLaunch', graph, s)")
    ask("wait = lambda: gpu.code('cuStreamSynchronize', s); graphs = [graph(m) for m in many]")
    assert ask("{gpu.put(m, 0) for m in many}") == "{0}"
    stand_by(line, second, copies)
    for _ in range(2):
        assert ask("{(launch(graph), wait()) for graph in graphs}") == "{(0, 0)}"
    assert saved("{launch(graphs[-1])}", ask, line, domain, gate) == 2 * MIB
    assert ask("gpu.sync(), [gpu.word(m) for m in many]") == f"(0, {[2] * (KINDS - 1) + [3]})"
    assert ask.end() == ""
