"""The per-thread default stream continues in another driver instance."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_graphs import MODES
from tests.support import moving
from tests.support.gate import Gate
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second"]

EXACT = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)
PER_THREAD = 2
MANY_THREADS = 300
"""More threads than the library has per-stream logs."""


def helpers(ask: Program) -> None:
    """Define own(), `add` on the per-thread default stream, and look() and put() likewise."""
    ask("own = lambda n, value: gpu.own('cuLaunchKernel_ptsz', n, value)")
    ask("out = (ctypes.c_uint32 * 4)()")
    ask("look = lambda n: (gpu.code('cuMemcpyDtoH_v2_ptds', out, n, 16), out[0])")


@MODES
def test_each_thread_goes_on_in_its_own_stream(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    helpers(ask)
    ask("m, n = gpu.memory(4 << 20), gpu.memory(4 << 20); later = Later(gpu); gpu.sync()")
    assert ask("own(m, 1), gpu.run('add', m, 8, 2, stream=2)") == "(0, 0)"
    ask("later.start('own(n, 10), gpu.run(\"add\", n, 8, 20, stream=2), look(n)')")
    assert ask("later.result(), look(m), gpu.sync()") == "((0, 0, (0, 30)), (0, 3), 0)"
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    assert ask("own(m, 4), gpu.code('cuStreamSynchronize_ptsz', 0), look(m)") == "(0, 0, (0, 7))"
    ask("later.start('own(n, 40), look(n)')")
    assert ask("later.result()") == "(0, (0, 70))"
    assert (
        ask("gpu.code('cuMemsetD32_v2_ptds', m, 9, 8), gpu.code('cuMemcpyDtoD_v2_ptds', n, m, 32)")
        == "(0, 0)"
    )
    assert ask("look(n), gpu.code('cuStreamQuery', 2)") == "((0, 9), 0)"
    assert line.unsure == []
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("lets", range(0, 12, 2))
def test_what_was_in_flight_in_them_is_done_again(
    domain: Domain, second: Domain, gate: Gate, post: Post, ask: Program, copies: Path, lets: int
) -> None:
    line = post.greet(moving.EXACT)
    helpers(ask)
    ask("m, n = gpu.memory(4 << 20), gpu.memory(4 << 20); later = Later(gpu); gpu.sync()")
    stand_by(line, second, copies)
    assert ask("own(m, 1), look(m)") == "(0, (0, 1))"
    gate.let(lets)
    assert ask("own(m, 2), own(m, 4)") == "(0, 0)"
    # Kernels beside the others, then a copy behind the legacy stream's waits, which include all of them.
    ask("later.start('own(n, 8), own(n, 16), gpu.run(\"copy\", n + 64, m, 4)')")
    assert ask("later.result()") == "(0, 0, 0)"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("look(m), look(n), look(n + 64)") == "((0, 7), (0, 24), (0, 7))"
    assert line.unsure == []
    assert ask.end() == ""


@EXACT
def test_it_is_captured_and_waited_for_by_its_name(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    helpers(ask)
    ask("m = gpu.memory(4 << 20); e = gpu.made('cuEventCreate', 2); g = ctypes.c_uint64(); gpu.sync()")
    assert ask("gpu.code('cuStreamBeginCapture_v2_ptsz', 0, 2), own(m, 1)") == "(0, 0)"
    ask("status = ctypes.c_int(0)")
    assert ask("gpu.code('cuStreamIsCapturing', 2, ctypes.byref(status)), status.value") == "(0, 1)"
    assert ask("gpu.code('cuStreamEndCapture', 2, ctypes.byref(g))") == "0"
    ask("x = gpu.made('cuGraphInstantiateWithFlags', g.value, 0)")
    assert ask("gpu.code('cuGraphLaunch_ptsz', x, 0), gpu.code('cuEventRecord_ptsz', e, 0)") == "(0, 0)"
    assert ask("gpu.code('cuEventSynchronize', e), look(m)") == "(0, (0, 1))"
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.code('cuGraphLaunch', x, 2), gpu.host('f', stream=2), look(m)") == "(0, 0, (0, 2))"
    assert ask("gpu.sync(), gpu.ran") == "(0, [('f', 0)])"
    assert ask.end() == ""


@EXACT
def test_it_ends_with_its_thread(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    helpers(ask)
    ask("m = gpu.memory(4 << 20); gpu.sync()")
    stand_by(line, second, copies)
    ask("work = lambda: (gpu.current(), own(m, 1), gpu.code('cuStreamSynchronize', 2))")
    ask("def each(): import threading; t = threading.Thread(target=work); t.start(); t.join()")
    ask(f"for _ in range({MANY_THREADS}): each()")
    assert ask("look(m)") == f"(0, {MANY_THREADS})"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("each(), look(m)") == f"(None, (0, {MANY_THREADS + 1}))"
    assert line.unsure == []
    assert ask.end() == ""
