"""A capture that a move overtakes keeps its identifier and the events that belong to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_graphs import BEGIN, MODES, RELAXED, capture, end
from tests.support import moving
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "post", "second", "third"]


@MODES
@pytest.mark.parametrize("then", ["'cuEventRecord', e, t", "'cuEventDestroy_v2', e"], ids=["again", "gone"])
def test_an_event_that_has_left_a_capture_stays_out_of_it(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int, then: str
) -> None:
    """A stream that waits for such an event later does not join the continued capture."""
    line = post.greet(mode)
    ask("m = gpu.memory(4 << 20); s, t = (gpu.made('cuStreamCreate', 1) for _ in 'st')")
    ask("e = gpu.made('cuEventCreate', 0); gpu.sync()")
    stand_by(line, second, copies)
    assert ask(BEGIN) == "None"
    assert ask("gpu.run('add', m, 8, 1, stream=s), gpu.code('cuEventRecord', e, s)") == "(0, 0)"
    assert ask("gpu.code('cuEventSynchronize', e)") == "907"
    assert ask(f"gpu.code({then})") == "0"
    if "Destroy" in then:
        ask("was = e; e = gpu.made('cuEventCreate', 0)")
    break_domain(domain)
    assert move(line).text in ("", "mode keep")
    # In mode `keep`, a wait for the work in flight reports once that it may be lost.
    waited = 719 if mode == moving.KEEP and "Record" in then else 0
    assert ask("gpu.code('cuEventSynchronize', e)") == str(waited)
    assert ask("gpu.run('add', m, 8, 10, stream=s)") == "0"
    end(ask)
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)") == "(0, 0, 11)"
    assert bool(ask.end()) == bool(waited)


INFO = """info = lambda of: (lambda status, its: (gpu.code('cuStreamGetCaptureInfo_v3', of,
    ctypes.byref(status), ctypes.byref(its), None, None, None, None), status.value, its.value))(
    ctypes.c_int(), ctypes.c_uint64())"""


@MODES
def test_a_capture_is_the_same_one_to_the_program(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    """A capture keeps its identifier, which PyTorch uses to assign allocations to graphs; no later capture
    reuses it."""
    line = post.greet(mode)
    ask("m = gpu.memory(4 << 20); s, t = (gpu.made('cuStreamCreate', 1) for _ in 'st'); gpu.sync()")
    ask(INFO.replace("\n", " "))
    numbers = []

    def number(of: str) -> str:
        code, status, its = ask(f"info({of})").strip("()").split(", ")
        assert (code, status) == ("0", "1")
        return its

    for generation, (home, away) in enumerate(((domain, second), (second, third)), 1):
        stand_by(line, away, copies, generation)
        capture(ask)
        assert ask(BEGIN) == "None"
        assert ask("gpu.run('add', m, 8, 1, stream=s)") == "0"
        assert ask(f"gpu.code('cuStreamBeginCapture_v2', t, {RELAXED})") == "0"
        before = [number("s"), number("t")]
        assert not {*numbers} & {*before} and len({*before}) == 2
        break_domain(home)
        assert move(line, generation).text in ("", "mode keep")
        assert [number("s"), number("t")] == before
        numbers += before
        end(ask)
        assert ask("gpu.code('cuStreamEndCapture', t, ctypes.byref(ctypes.c_uint64()))") == "0"
        assert ask("info(s)[:2]") == "(0, 0)"
    assert ask.end() == ""
