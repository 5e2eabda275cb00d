"""Captured graphs, and a capture in progress, continue in another driver instance."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.gate import BEGIN_CAPTURE, CAPTURE_INFO, END_CAPTURE, Gate
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

MODES = pytest.mark.parametrize(
    ("ask", "mode"),
    [({"MPSD_FAILOVER": "exact"}, moving.EXACT), ({"MPSD_FAILOVER": "keep"}, moving.KEEP)],
    indirect=["ask"],
    ids=["exact", "keep"],
)
NON_BLOCKING, RELAXED = 1, 2
BEGIN = f"gpu('cuStreamBeginCapture_v2', s, {RELAXED})"


def capture(ask: Program) -> None:
    """Capture x: a graph that adds 1, then 10, to the same words."""
    assert ask(BEGIN) == "None"
    assert ask("gpu.run('add', m, 8, 1, stream=s), gpu.run('add', m, 8, 10, stream=s)") == "(0, 0)"
    end(ask)


def end(ask: Program) -> None:
    ask("g = ctypes.c_uint64(); gpu('cuStreamEndCapture', s, ctypes.byref(g)); g = g.value")
    ask("x = gpu.made('cuGraphInstantiateWithFlags', g, 0)")


@MODES
def test_a_graph_is_there_after_the_move(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    ask(f"m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', {NON_BLOCKING}); gpu.sync()")
    capture(ask)
    stand_by(line, second, copies)
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)") == "(0, 0, 11)"
    ask("n = ctypes.c_uint64(0)")
    assert ask("gpu.code('cuGraphGetNodes', g, None, ctypes.byref(n)), n.value") == "(0, 2)"
    assert ask("gpu.code('cuGraphDestroy', g)") == "0"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)") == "(0, 0, 22)"
    assert ask("gpu.code('cuGraphLaunch', x, 0), gpu.sync(), gpu.word(m)") == "(0, 0, 33)"
    # A graph captured in the new instance works too.
    capture(ask)
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)") == "(0, 0, 44)"
    assert ask("gpu.code('cuGraphExecDestroy', x), gpu.code('cuGraphDestroy', g)") == "(0, 0)"
    assert ask.end() == ""


@MODES
def test_a_capture_goes_on_in_the_next_copy(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    ask(f"m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', {NON_BLOCKING}); gpu.sync()")
    stand_by(line, second, copies)
    assert ask(BEGIN) == "None"
    assert ask("gpu.run('add', m, 8, 1, stream=s)") == "0"
    break_domain(domain)
    assert move(line).text == ""
    ask("status = ctypes.c_int(0)")
    assert ask("gpu.code('cuStreamIsCapturing', s, ctypes.byref(status)), status.value") == "(0, 1)"
    assert ask("gpu.run('add', m, 8, 10, stream=s)") == "0"
    end(ask)
    assert ask("gpu.word(m), gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)") == "(0, 0, 0, 11)"
    assert ask.end() == ""


PASSING = "[gpu.code('cuEventRecord', e, s) or gpu.code('cuEventDestroy_v2', e) for e in events({})]"
EVENTS = "events = lambda count: [gpu.made('cuEventCreate', 0) for _ in range(count)]"


@MODES
def test_events_that_have_gone_since_end_no_capture(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    """A capture survives events destroyed since, as with events destroyed right after a wait."""
    line = post.greet(mode)
    ask(f"m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', {NON_BLOCKING}); gpu.sync(); {EVENTS}")
    stand_by(line, second, copies)
    assert ask(BEGIN) == "None"
    assert ask(f"gpu.run('add', m, 8, 1, stream=s), {PASSING.format(1)}") == "(0, [0])"
    assert ask("gpu.run('add', m, 8, 10, stream=s)") == "0"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.run('add', m, 8, 100, stream=s)") == "0"
    end(ask)
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)") == "(0, 0, 111)"
    assert ask.end() == ""


@MODES
def test_a_capture_that_cannot_go_on_fails_and_says_so(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    """A capture that recreates too many destroyed events fails with an error; none of it runs, and the
    next capture works."""
    line = post.greet(mode)
    ask(f"m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', {NON_BLOCKING}); gpu.sync(); {EVENTS}")
    stand_by(line, second, copies)
    assert ask(BEGIN) == "None"
    assert ask(f"gpu.run('add', m, 8, 1, stream=s), set({PASSING.format(65)})") == "(0, {0})"
    # This event was recorded in the capture and later elsewhere: a stream that waits for it is in no capture.
    ask("o, p = (gpu.made('cuStreamCreate', 1) for _ in 'op'); k = events(1)[0]; n = gpu.memory(4 << 20)")
    assert ask("[gpu.code('cuEventRecord', k, of) for of in (s, o)]") == "[0, 0]"
    assert ask("gpu.code('cuStreamWaitEvent', p, k, 0)") == "0"
    break_domain(domain)
    move(line)
    assert line.hear(moving.OPAQUE).text == "a capture that cannot continue after a fail-over"
    ask("g = ctypes.c_uint64(); status = ctypes.c_int()")
    capturing = "gpu.code('cuStreamIsCapturing', s, ctypes.byref(status)), status.value"
    assert ask(capturing) == "(0, 2)"
    ended = "gpu.code('cuStreamEndCapture', s, ctypes.byref(g))"
    assert ask("gpu.run('add', n, 8, 1, stream=p), gpu.run('add', m, 8, 10, stream=s)") == "(0, 901)"
    # A launch that cannot be recorded fails too.
    assert ask(f"gpu.run_with({UPDATABLE}, m, 8, 10, stream=s)") == "901"
    assert ask(f"{ended}, gpu.sync() in (0, 719), gpu.word(n)") == "(901, True, 1)"
    assert ask(capturing) == "(0, 0)"
    # Freed memory is released at once, since no capture is in progress.
    assert ask("gpu.code('cuMemFree_v2', n), gpu.memory(4 << 20) == n") == "(0, True)"
    capture(ask)
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)") == "(0, 0, 11)"
    ask.end()


UPDATABLE = "(ctypes.c_uint32 * 18)(13, 0, 1)"


@MODES
def test_nodes_that_kernels_may_change_and_graphs_that_they_may_launch_are_named(
    post: Post, ask: Program, mode: int
) -> None:
    line = post.greet(mode)
    ask(f"s = gpu.made('cuStreamCreate', {NON_BLOCKING}); m = gpu.memory(4 << 20); given = {UPDATABLE}")
    assert ask(BEGIN) == "None"
    node = "given[4] | given[5] << 32 == gpu.functions['add']"
    assert ask(f"gpu.run_with(given, m, 8, 1, stream=s), {node}") == "(0, True)"
    assert line.hear(moving.OPAQUE).text == "a graph node that kernels may change"
    ask("g = ctypes.c_uint64(); gpu('cuStreamEndCapture', s, ctypes.byref(g)); g = g.value")
    assert ask("gpu.made('cuGraphInstantiateWithFlags', g, 4) > 0") == "True"
    assert line.hear(moving.OPAQUE).text == "a graph with device launch"
    ask.end()


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)
@pytest.mark.parametrize("again", [1, 2], ids=["at once", "in its turn"])
def test_a_capture_in_a_blocking_stream_goes_on_behind_what_is_done_again(
    domain: Domain, second: Domain, gate: Gate, post: Post, ask: Program, copies: Path, again: int
) -> None:
    """A capture in a blocking stream continues after the replay, which uses the legacy stream and may not
    overlap such a capture."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); s, o = (gpu.made('cuStreamCreate', f) for f in (0, 1)); gpu.sync()")
    stand_by(line, second, copies)
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 5, stream=o)") == "0"
    assert ask(BEGIN) == "None"
    assert ask("gpu.run('add', m, 8, 1, stream=s)") == "0"
    break_domain(domain)
    said = move(line, again=again)
    if again == 2:
        assert said.values[5]
        line.say(moving.TURN, 1)
        said = line.hear(moving.DONE)
    assert said.text == ""
    assert ask("gpu.run('add', m, 8, 10, stream=s)") == "0"
    end(ask)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 5)"
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)") == "(0, 0, 16)"
    assert ask.end() == ""


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)
@pytest.mark.parametrize(
    ("does", "after"),
    [("gpu.run('add', m, 8, 10, stream=s)", (16, [])), ("gpu.host('f', stream=s)", (6, [("f", 0)]))],
    ids=["kernel", "function"],
)
def test_what_is_captured_in_a_lost_context_is_done_with_the_graph_alone(
    domain: Domain,
    second: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    does: str,
    after: tuple[int, list[tuple[str, int]]],
) -> None:
    """A capture of a lost context ends with the graph alone, since the driver no longer reports the
    stream's capture."""
    line = post.greet(moving.EXACT)
    ask(f"m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', {NON_BLOCKING}); gpu.sync()")
    stand_by(line, second, copies)
    # From here on m is saved, and a kernel is recorded without a driver call.
    assert ask("gpu.run('add', m, 8, 5)") == "0"
    assert ask(BEGIN) == "None"
    assert ask("gpu.run('add', m, 8, 1, stream=s)") == "0"
    break_domain(domain)
    # Call the driver directly, since the proxy would wait for the move.
    ask("import ctypes, os; driver = ctypes.CDLL(os.environ['MPSD_REAL_LIBCUDA'])")
    ask("while driver.cuStreamQuery(None) in (0, 600): pass")
    ask.tell(does)
    line.hear(moving.OWN_ERROR)
    assert move(line).text == ""
    assert ask.answer() == "0"
    end(ask)
    assert ask("gpu.sync(), gpu.word(m), gpu.ran") == "(0, 5, [])"
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync()") == "(0, 0)"
    assert ask("gpu.word(m), gpu.ran") == repr(after)
    assert ask.end() == ""


@MODES
def test_a_copy_stays_while_it_is_asked_for_captures(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    ask(f"m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', {NON_BLOCKING}); gpu.sync()")
    ask("later = Later(gpu)")
    gate = Gate(Path(second.environment["CUDA_MPS_PIPE_DIRECTORY"]))
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    stand_by(line, third, copies, 2)
    assert ask(BEGIN) == "None"
    gate.keep(CAPTURE_INFO)
    ask("later.start('gpu.run(\"add\", m, 8, 1, stream=s)')")
    until(lambda: gate.kept() == CAPTURE_INFO)
    break_domain(second)
    assert move(line, 2).text == ""
    # One instance is in use and a thread is inside another, so the next standby takes a third.
    stand_by(line, third, copies, 3)
    assert ask("[mappings(f'libcuda-{number}.so.1') > 0 for number in range(3)]") == "[True, True, True]"
    gate.keep(0)
    assert ask("later.result()") == "0"
    end(ask)
    assert ask("gpu.word(m), gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)") == "(0, 0, 0, 1)"
    gate.close()
    assert ask.end() == ""


@MODES
@pytest.mark.parametrize("call", [BEGIN_CAPTURE, END_CAPTURE])
def test_a_capture_whose_beginning_or_end_a_move_overtakes_goes_on(
    domain: Domain,
    gate: Gate,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    mode: int,
    call: int,
) -> None:
    """A capture continues if its begin or end call is still in the old instance when the memory is
    unmapped there."""
    line = post.greet(mode)
    ask(f"m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', {NON_BLOCKING}); gpu.sync()")
    stand_by(line, second, copies)
    before = ask("mappings('mpsd-standin-vmm')")
    if call == END_CAPTURE:
        assert ask(BEGIN) == "None"
        assert ask("gpu.run('add', m, 8, 1, stream=s), gpu.run('add', m, 8, 10, stream=s)") == "(0, 0)"
    ask("g = ctypes.c_uint64(); later = Later(gpu)")
    gate.keep(call)
    ended = "gpu.code('cuStreamEndCapture', s, ctypes.byref(g))"
    ask(f"later.start({BEGIN if call == BEGIN_CAPTURE else ended!r})")
    until(lambda: gate.kept() == call)
    break_domain(domain)
    line.say(moving.MOVE, 1, again=1)
    until(lambda: ask("mappings('mpsd-standin-vmm')") != before)
    gate.keep(0)
    assert line.hear(moving.MOVED, moving.STAYED).kind == moving.MOVED
    assert ask("later.result()") == ("None" if call == BEGIN_CAPTURE else "0")
    if call == BEGIN_CAPTURE:
        assert ask("gpu.run('add', m, 8, 1, stream=s), gpu.run('add', m, 8, 10, stream=s)") == "(0, 0)"
        assert ask(ended) == "0"
    ask("x = gpu.made('cuGraphInstantiateWithFlags', g.value, 0)")
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)") == "(0, 0, 11)"
    # The count of open captures is right: memory is freed at once without a capture, and later with one.
    mapped = ask("mappings('mpsd-standin-vmm')")
    assert ask("n = gpu.memory(8 << 20); gpu('cuMemFree_v2', n)") == "None"
    assert ask("mappings('mpsd-standin-vmm')") == mapped
    assert ask(f"n = gpu.memory(8 << 20); {BEGIN}; gpu('cuMemFree_v2', n)") == "None"
    assert ask(f"gpu.run('add', m, 8, 1, stream=s), {ended}, gpu.code('cuGraphDestroy', g)") == "(0, 0, 0)"
    freed = "gpu.code('cuMemFree_v2', gpu.memory(8 << 20)), mappings('mpsd-standin-vmm')"
    assert ask(freed) == f"(0, {mapped})"
    # A planned move comes to rest too.
    stand_by(line, third, copies, 2)
    assert move(line, 2, planned=True).text == ""
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)") == "(0, 0, 22)"
    assert ask.end() == ""


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)
def test_a_graph_in_flight_is_launched_again(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask(f"m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', {NON_BLOCKING}); gpu.sync()")
    capture(ask)
    stand_by(line, second, copies)
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync()") == "(0, 0)"
    assert ask("[gpu.code('cuGraphLaunch', x, s), gpu.code('cuGraphLaunch', x, s)]") == "[0, 0]"
    ask.tell("gpu.sync()")
    break_domain(domain)
    assert move(line).text == ""
    assert ask.answer() == "0"
    assert ask("gpu.word(m)") == "33"
    assert ask.end() == ""


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)
def test_a_graph_with_the_hosts_memory_is_not_launched_again(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A graph that copies from host memory is not relaunched, since the data at the time of reading is
    unknown."""
    line = post.greet(moving.EXACT)
    ask(f"m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', {NON_BLOCKING}); gpu.sync()")
    ask("host = gpu.made('cuMemHostAlloc', 4096, 0)")
    assert ask(BEGIN) == "None"
    assert ask("gpu.code('cuMemcpyHtoDAsync_v2', m, host, 4096, s)") == "0"
    end(ask)
    stand_by(line, second, copies)
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.run('long', m, 8, 1)") == "(0, 0)"
    break_domain(domain)
    assert "a graph with copies" in move(line).text
    assert ask("gpu.sync(), gpu.sync(), gpu.code('cuGraphLaunch', x, s), gpu.sync()") == "(719, 0, 0, 0)"
    assert "a graph with copies" in ask.end()


@MODES
def test_a_capture_that_became_invalid_and_was_ended_does_not_go_on(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    """An invalidated capture that was ended does not continue; the driver reports no identifier for it."""
    line = post.greet(mode)
    ask("m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', 0); gpu.sync()")
    ask("g = ctypes.c_uint64(); status = ctypes.c_int()")
    asked = "gpu.code('cuStreamIsCapturing', s, ctypes.byref(status)), status.value"
    assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
    # The legacy stream waits for the capturing stream, which invalidates the capture.
    assert ask("gpu.run('add', m, 8, 1, stream=s), gpu.run('add', m, 8, 1)") == "(0, 906)"
    assert ask(asked) == "(0, 2)"
    assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(g))") == "901"
    assert ask(asked) == "(0, 0)"
    assert ask("gpu.run('add', m, 8, 100, stream=s), gpu.sync(), gpu.word(m)") == "(0, 0, 100)"
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    assert ask(asked) == "(0, 0)"
    assert ask("gpu.run('add', m, 8, 1000, stream=s), gpu.sync(), gpu.word(m)") == "(0, 0, 1100)"
    assert ask.end() == ""
