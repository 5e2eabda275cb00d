"""Captures that span several streams: a stream joins by waiting for an event recorded in another stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_graphs import BEGIN, MODES, RELAXED, end
from tests.support.moving import KEEP as KEEPS
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "post", "second", "third"]

FORK = (
    "gpu.run('add', m, 8, 1, stream=s)",
    "gpu.code('cuEventRecord', e, s)",
    "gpu.code('cuStreamWaitEvent', t, e, 0)",
    "gpu.run('copy', n, m, 8, stream=t)",
    "gpu.run('add', m, 8, 10, stream=s)",
    "gpu.code('cuEventRecord', f, t)",
    "gpu.code('cuStreamWaitEvent', s, f, 0)",
    "gpu.run('add', n, 8, 100, stream=s)",
)
"""The kernel between two additions to m makes n 100 more than m."""
LAUNCH = "gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m), gpu.word(n)"
EDGES = "[sorted(nodes.of(g).index(b) for b in nodes.before(a)) for a in nodes.of(g)]"
CAPTURED = "[(gpu.code('cuStreamIsCapturing', of, ctypes.byref(status)), status.value) for of in (s, t)]"
END = "gpu.code('cuStreamEndCapture', {}, ctypes.byref(ctypes.c_uint64()))"


def start(ask: Program) -> None:
    ask("m, n = (gpu.memory(4 << 20) for _ in 'mn'); s, t = (gpu.made('cuStreamCreate', 1) for _ in 'st')")
    ask("e, f = (gpu.made('cuEventCreate', 0) for _ in 'ef'); status = ctypes.c_int(); gpu.sync()")


@MODES
@pytest.mark.parametrize("done", range(len(FORK) + 1))
def test_a_forked_capture_that_a_move_overtakes_is_the_same_graph(
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
    assert ask(BEGIN) == "None"
    for step in FORK[:done]:
        assert ask(step) == "0"
    break_domain(domain)
    assert move(line).text in ("", "mode keep")
    assert ask(CAPTURED) == repr([(0, 1), (0, int(done >= 3))])
    for step in FORK[done:]:
        assert ask(step) == "0"
    end(ask)
    assert ask(CAPTURED) == "[(0, 0), (0, 0)]"
    assert ask(EDGES) == "[[], [0], [0], [1, 2]]"
    assert ask(LAUNCH) == "(0, 0, 11, 101)"
    # The graph is built from the recorded capture; none of its work is in flight.
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text in ("", "mode keep")
    assert ask(EDGES) == "[[], [0], [0], [1, 2]]"
    assert ask(LAUNCH) == "(0, 0, 22, 112)"
    assert ask.end() == ""


@MODES
@pytest.mark.parametrize("joined", [True, False])
def test_a_stream_that_goes_in_a_capture_of_another_one_has_done_its_part(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int, joined: bool
) -> None:
    """A destroyed stream leaves the capture, and its handle, soon reused by another stream, is not part of
    it."""
    line = post.greet(mode)
    start(ask)
    stand_by(line, second, copies)
    assert ask(BEGIN) == "None"
    at = 7 if joined else 6
    for step in (*FORK[:at], "gpu.code('cuStreamDestroy_v2', t)"):
        assert ask(step) == "0"
    break_domain(domain)
    assert move(line).text in ("", "mode keep")
    for step in FORK[at:]:
        assert ask(step) == "0"
    end(ask)
    assert ask(LAUNCH) == "(0, 0, 11, 101)"
    assert ask.end() == ""


WRONG = {
    "unjoined": (FORK[:5], END.format("s"), 904),
    "unmatched": (FORK, END.format("t"), 903),
    "merged": (
        (*FORK[:6], f"gpu.code('cuStreamBeginCapture_v2', u, {RELAXED})"),
        "gpu.code('cuStreamWaitEvent', u, f, 0)",
        902,
    ),
    "from outside": (
        FORK,
        "gpu.code('cuEventRecord', f, u) or gpu.code('cuStreamWaitEvent', t, f, 0)",
        905,
    ),
}
"""By the wrong operation: the operation, the call that then fails, and its error code."""


@MODES
@pytest.mark.parametrize("moved", [True, False], ids=["moved", "at home"])
@pytest.mark.parametrize("what", WRONG)
def test_what_may_not_be_fails_as_at_home(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int, moved: bool, what: str
) -> None:
    """Forbidden operations fail as without the proxy, and the next capture works."""
    line = post.greet(mode)
    start(ask)
    ask("u, v = (gpu.made('cuStreamCreate', 1) for _ in 'uv')")
    stand_by(line, second, copies)
    assert ask(BEGIN) == "None"
    before, wrong, code = WRONG[what]
    for step in before:
        assert ask(step) == "0"
    if moved:
        break_domain(domain)
        assert move(line).text in ("", "mode keep")
    assert ask(wrong) == str(code)
    if what != "unjoined":
        records = "gpu.code('cuEventRecord', f, s), gpu.code('cuEventRecordWithFlags', e, s, 1)"
        assert ask(records) == "(901, 901)"
        # The refused record left the event unchanged.
        assert ask("gpu.code('cuStreamWaitEvent', v, f, 0)") == ("0" if what == "from outside" else "901")
        assert ask(f"gpu.run('add', m, 8, 1, stream=t), {END.format('s')}") == "(901, 901)"
    if what == "merged":
        assert ask(END.format("u")) == "901"
    assert ask(CAPTURED) == "[(0, 0), (0, 0)]"
    assert ask(BEGIN) == "None"
    for step in FORK:
        assert ask(step) == "0"
    end(ask)
    assert ask(LAUNCH) == "(0, 0, 11, 101)"
    ask.end()


KEEP = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "keep"}], indirect=True)
WAITS = {
    "one stream": ("gpu.run('add', m, 8, 1, stream=s)",),
    "a wait for it": (
        "gpu.run('add', m, 8, 1, stream=s)",
        "gpu.code('cuEventRecord', e, s)",
        "gpu.code('cuStreamWaitEvent', t, e, 0)",
    ),
    "another's work behind it": (
        "gpu.run('add', m, 8, 1, stream=s)",
        "gpu.code('cuEventRecord', e, s)",
        "gpu.code('cuStreamWaitEvent', t, e, 0)",
        "gpu.run('add', m, 8, 1, stream=t)",
    ),
}


@KEEP
@pytest.mark.parametrize("captured", [(), FORK], ids=["no capture", "forked"])
@pytest.mark.parametrize("what", WAITS)
def test_a_stream_that_only_waited_for_another_leaves_a_wait_for_that_one_a_proof(
    domain: Domain,
    second: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    captured: tuple[str, ...],
    what: str,
) -> None:
    """A program that waited for the only stream with work is not told that work may be missing."""
    line = post.greet(KEEPS)
    # Allocate without any call that waits implicitly: no copy and no filled buffer.
    ask("m, n = (gpu.made('cuMemAlloc_v2', ctypes.c_size_t(4 << 20)) for _ in 'mn')")
    ask("s, t = (gpu.made('cuStreamCreate', 1) for _ in 'st')")
    ask("e, f = (gpu.made('cuEventCreate', 0) for _ in 'ef')")
    stand_by(line, second, copies)
    if captured:
        assert ask(BEGIN) == "None"
        for step in captured:
            assert ask(step) == "0"
        end(ask)
        assert ask("gpu.code('cuGraphLaunch', x, s)") == "0"
    for step in WAITS[what]:
        assert ask(step) == "0"
    assert ask("gpu.code('cuStreamSynchronize', s)") == "0"
    is_proven = what != "another's work behind it"
    break_domain(domain)
    assert move(line).text == ("" if is_proven else "mode keep")
    waits = "gpu.code('cuStreamSynchronize', s), gpu.code('cuStreamSynchronize', s)"
    assert ask(waits) == ("(0, 0)" if is_proven else "(719, 0)")
    ask.end()
