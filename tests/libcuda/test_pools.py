"""Stream-ordered allocations come from the window, are reused in stream order, and move."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by, started
from tests.libcuda.test_graphs import BEGIN, MODES
from tests.support import moving
from tests.support.gate import ANY, Gate
from tests.support.libcudas import Libraries
from tests.support.long import of
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second"]

MIB = 1 << 20
EXACT = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)
KEEP = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "keep"}], indirect=True)
OPPORTUNISTIC, THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = 2, 4, 5, 6, 7, 8
HANDLE, RANGE_SIZE, LEGACY_IPC = 17, 12, 10
NOT_FOUND, INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED = 500, 1, 2, 801
FOREVER = 2**64 - 1
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
PLAIN, EXPORTED = (f"struct.pack('=iiii72x', 1, {handles}, 1, 0)" for handles in (0, 1))
"""Properties of a pool of device memory, without and with descriptors."""


def helpers(ask: Program) -> None:
    """Define alloc(), free(), sync(), get() and put() of the default pool's attributes, streams s and t."""
    ask("alloc = lambda size, stream=0: gpu.made('cuMemAllocAsync', size, stream)")
    ask("free = lambda m, stream=0: gpu.code('cuMemFreeAsync', m, stream)")
    ask("s, t = gpu.stream(), gpu.stream()")
    ask("pool = gpu.made('cuDeviceGetDefaultMemPool', 0)")
    ask("value = ctypes.c_uint64()")
    ask("get = lambda what: (gpu('cuMemPoolGetAttribute', pool, what, ctypes.byref(value)), value.value)[1]")
    ask("by = lambda number: ctypes.byref(ctypes.c_uint64(number))")
    ask("put = lambda what, to: gpu.code('cuMemPoolSetAttribute', pool, what, by(to))")
    ask("sync = lambda stream: gpu.code('cuStreamSynchronize', stream)")


def keep_all(ask: Program) -> None:
    """Set the release threshold that PyTorch sets."""
    assert ask(f"put({THRESHOLD}, {FOREVER})") == "0"


@MODES
def test_the_memory_moves(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    helpers(ask)
    ask(f"m, small, mine = alloc({8 * MIB}, s), alloc(600, s), gpu.made('cuMemPoolCreate', {PLAIN})")
    ask(f"own = gpu.made('cuMemAllocFromPoolAsync', {3 * MIB}, mine, s)")
    ask("[gpu('cuMemsetD32Async', x, 0, 8, s) for x in (m, small, own)]")
    assert ask("[gpu.run('add', x, 8, n, stream=s) for n, x in enumerate((m, small, own), 5)]") == "[0, 0, 0]"
    assert ask("sync(s)") == "0"
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text in ("", "mode keep")
    assert ask("[gpu.word(x) for x in (m, small, own)]") == "[5, 6, 7]"
    # Both pools serve on, and are asked by the handles from before the move.
    assert ask(f"put({THRESHOLD}, {FOREVER}), get({THRESHOLD}) == {FOREVER}") == "(0, True)"
    assert ask(f"gpu.made('cuDeviceGetMemPool', 0) == pool, get({USED})") == f"(True, {8 * MIB + 600})"
    assert ask(f"free(own, s), gpu.made('cuMemAllocFromPoolAsync', {3 * MIB}, mine, s) == own") == "(0, True)"
    assert ask(f"free(m, s), alloc({8 * MIB}, s) == m, free(small, s)") == "(0, True, 0)"
    assert ask("gpu.run('add', m, 8, 1, stream=s), sync(s), gpu.word(m)") == "(0, 0, 6)"
    assert ask("gpu.code('cuMemPoolDestroy', mine), gpu.code('cuMemPoolDestroy', mine)") == "(0, 1)"
    assert line.unsure == []
    assert line.is_silent()
    assert ask.end() == ""


@MODES
def test_a_stream_gets_what_was_freed_in_it_before_the_work_has_ended(
    gate: Gate, post: Post, ask: Program, mode: int
) -> None:
    post.greet(mode)
    helpers(ask)
    keep_all(ask)
    ask(f"m = alloc({4 * MIB}, s); gpu('cuMemsetD32Async', m, 0, 8, s); sync(s); gpu.sync()")
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 5, stream=s), free(m, s)") == "(0, 0)"
    # At most an eighth smaller.
    assert ask(f"n = alloc({4 * MIB - 100}, s); n == m") == "None"
    assert ask("n == m, gpu.run('add', n, 8, 7, stream=s)") == "(True, 0)"
    # Neither another stream nor another size gets it.
    assert ask(f"free(n, s), alloc({4 * MIB}, t) == m, alloc({2 * MIB}, s) == m") == "(0, False, False)"
    gate.let(ANY)
    assert ask("sync(s), gpu.word(m)") == "(0, 12)"
    assert ask.end() == ""


@MODES
def test_another_stream_gets_it_when_the_gpu_is_past_the_free(
    gate: Gate, post: Post, ask: Program, mode: int
) -> None:
    post.greet(mode)
    helpers(ask)
    keep_all(ask)
    ask(f"m = alloc({4 * MIB}, s); gpu('cuMemsetD32Async', m, 0, 8, s); sync(s); gpu.sync()")
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 5, stream=s), free(m, s)") == "(0, 0)"
    assert ask(f"[alloc({4 * MIB}, t) == m for _ in range(3)]") == "[False, False, False]"
    gate.let(ANY)
    # No wait of the program says so, so the fence of the last allocation is seen some time.
    ask("others = []")
    until(lambda: ask(f"others.append(alloc({4 * MIB}, t)) or m in others") == "True")
    assert ask.end() == ""


@EXACT
def test_a_free_in_a_blocking_stream_comes_behind_the_legacy_stream(
    gate: Gate, post: Post, ask: Program
) -> None:
    post.greet(moving.EXACT)
    helpers(ask)
    keep_all(ask)
    ask("blocking, apart = gpu.made('cuStreamCreate', 0), gpu.made('cuStreamCreate', 1)")
    ask(f"m = alloc({4 * MIB}, blocking); gpu('cuMemsetD32Async', m, 0, 8, blocking); gpu.sync()")
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 5), free(m, blocking)") == "(0, 0)"
    assert ask(f"[alloc({4 * MIB}, apart) == m for _ in range(3)]") == "[False, False, False]"
    gate.let(ANY)
    ask("others = []")
    until(lambda: ask(f"others.append(alloc({4 * MIB}, apart)) or m in others") == "True")
    assert ask.end() == ""


@MODES
def test_the_program_may_forbid_that(gate: Gate, post: Post, ask: Program, mode: int) -> None:
    post.greet(mode)
    helpers(ask)
    keep_all(ask)
    assert ask(f"put({OPPORTUNISTIC}, 0), get({OPPORTUNISTIC}) & 0xffffffff") == "(0, 0)"
    ask(f"m = alloc({4 * MIB}, s); free(m, s); gpu.sync()")
    assert ask(f"[alloc({4 * MIB}, t) == m for _ in range(3)]") == "[False, False, False]"
    assert ask(f"alloc({4 * MIB}, s) == m") == "True"
    assert ask.end() == ""


@MODES
def test_the_handle_of_a_stream_that_has_ended_may_come_again(
    gate: Gate, post: Post, ask: Program, mode: int
) -> None:
    post.greet(mode)
    helpers(ask)
    keep_all(ask)
    ask(
        f"m = alloc({4 * MIB}, s); gpu('cuMemsetD32Async', m, 0, 8, s); sync(s); gpu.sync(); u = gpu.stream()"
    )
    assert (
        ask("gpu.run('add', m, 8, 5, stream=u), free(m, u), gpu.code('cuStreamDestroy_v2', u)") == "(0, 0, 0)"
    )
    until(lambda: ask(f"alloc({4 * MIB}, t) == m") == "True")
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 5)"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("lets", of(range(0, 14), [0, 3, 5, 8, 11]))
def test_memory_freed_and_used_again_in_one_epoch_is_replayed_in_order(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, lets: int
) -> None:
    line = post.greet(moving.EXACT)
    helpers(ask)
    keep_all(ask)
    ask(f"seen = gpu.memory({4 * MIB}); m = alloc({4 * MIB}, s); gpu('cuMemsetD32Async', m, 1, 8, s)")
    ask("copy = lambda to, of: gpu.code('cuMemcpyDtoDAsync_v2', to, of, 32, s)")
    assert ask("sync(s), gpu.sync()") == "(0, 0)"
    stand_by(line, second, copies)
    gate.let(lets)
    # The old content, the same memory with other content, and a block that is new in this epoch.
    assert ask("gpu.run('add', m, 8, 10, stream=s), copy(seen, m), free(m, s)") == "(0, 0, 0)"
    assert ask(f"n = alloc({4 * MIB}, s)") == "None"
    assert ask("n == m, gpu.code('cuMemsetD32Async', n, 100, 8, s)") == "(True, 0)"
    assert ask("gpu.run('add', n, 8, 1, stream=s), copy(seen + 64, n), free(n, s)") == "(0, 0, 0)"
    ask(f"o = alloc({4 * MIB}, s); p = alloc({4 * MIB}, s)")
    assert (
        ask("o == m, p == m, gpu.run('add', o, 8, 1000, stream=s), copy(seen + 128, o)")
        == "(True, False, 0, 0)"
    )
    assert ask("gpu.code('cuMemsetD32Async', p, 7, 8, s), gpu.run('add', p, 8, 1, stream=s)") == "(0, 0)"
    # One allocation lies in the memory of one that the program waits to see.
    assert ask("copy(seen + 192, p), free(p, s), free(o, s)") == "(0, 0, 0)"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("sync(s), [gpu.word(seen + 64 * i) for i in range(4)]") == "(0, [11, 101, 1101, 8])"
    assert ask("[gpu.word(x) for x in (m, p)]") == "[1101, 8]"
    assert line.unsure == []
    assert ask.end() == ""


@EXACT
def test_two_streams_use_one_block_in_one_epoch(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    helpers(ask)
    keep_all(ask)
    ask(f"seen = gpu.memory({4 * MIB}); m = alloc({4 * MIB}, s); gpu('cuMemsetD32Async', m, 1, 8, s)")
    ask(f"hold = gpu.memory({4 * MIB})")
    assert ask("sync(s), gpu.sync()") == "(0, 0)"
    stand_by(line, second, copies)
    # The epoch stays open: this kernel runs until the fault.
    assert ask("gpu.run('long', hold, 8, 1, stream=gpu.stream())") == "0"
    assert ask("gpu.run('add', m, 8, 10, stream=s), free(m, s)") == "(0, 0)"
    until(lambda: ask(f"alloc({4 * MIB}, t) == m") == "True")
    assert (
        ask("gpu.code('cuMemcpyDtoDAsync_v2', seen, m, 32, t), gpu.run('add', m, 8, 100, stream=t)")
        == "(0, 0)"
    )
    break_domain(domain)
    assert move(line).text == ""
    assert ask("sync(t), gpu.word(seen), gpu.word(m)") == "(0, 11, 111)"
    assert ask.end() == ""


@EXACT
def test_blocks_from_before_a_move_are_any_streams(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    helpers(ask)
    keep_all(ask)
    ask(f"m = alloc({4 * MIB}, s); gpu('cuMemsetD32Async', m, 1, 8, s); sync(s); gpu.sync()")
    stand_by(line, second, copies)
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 10, stream=s), free(m, s)") == "(0, 0)"
    assert ask(f"alloc({4 * MIB}, t) == m") == "False"
    break_domain(domain)
    assert move(line).text == ""
    assert ask(f"alloc({4 * MIB}, t) == m") == "True"
    # What was replayed comes before work of that stream.
    assert ask("gpu.run('add', m, 8, 100, stream=t), sync(t), gpu.word(m)") == "(0, 0, 111)"
    assert ask.end() == ""


@MODES
def test_calls_in_a_lost_context_wait_for_the_move(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    helpers(ask)
    keep_all(ask)
    ask(f"m = alloc({4 * MIB}, s); gpu('cuMemsetD32Async', m, 3, 8, s); sync(s); gpu.sync()")
    stand_by(line, second, copies)
    break_domain(domain)
    ask.tell(f"free(m, s), alloc({4 * MIB}, s) == m, alloc({6 * MIB}, s) > 0, put({THRESHOLD}, 0)")
    assert move(line).text in ("", "mode keep")
    assert ask.answer() == "(0, True, True, 0)"
    assert ask("gpu.word(m), gpu.sync()") == "(3, 0)"
    assert line.unsure == []
    assert ask.end() == ""


@MODES
def test_counts_thresholds_and_trims(post: Post, ask: Program, mode: int) -> None:
    post.greet(mode)
    helpers(ask)
    held = f"[get(what) for what in ({USED}, {USED_HIGH}, {RESERVED}, {RESERVED_HIGH})]"
    assert ask(held) == "[0, 0, 0, 0]"
    ask(f"m, n = alloc({4 * MIB}, s), alloc(1000, s)")
    used, reserved = 4 * MIB + 1000, 4 * MIB + 1024
    assert ask(held) == f"{[used, used, reserved, reserved]}"
    # The threshold is 0, and nothing is in flight after the wait.
    assert ask("free(n, s), gpu.run('add', m, 8, 1, stream=s), free(m, s)") == "(0, 0, 0)"
    assert ask(held) == f"{[0, used, reserved, reserved]}"
    assert ask("gpu.sync()") == "0"
    assert ask(held) == f"{[0, used, 0, reserved]}"
    assert (
        ask(f"put({USED_HIGH}, 0), put({RESERVED_HIGH}, 0), put({USED_HIGH}, 1), put({USED}, 0)")
        == "(0, 0, 1, 1)"
    )
    assert ask(held) == "[0, 0, 0, 0]"
    keep_all(ask)
    ask(f"all = [alloc({4 * MIB}, s) for _ in range(3)]; [free(m, s) for m in all]; gpu.sync()")
    assert ask(f"get({RESERVED})") == f"{12 * MIB}"
    trim = f"gpu.code('cuMemPoolTrimTo', pool, {5 * MIB}), get({RESERVED})"
    assert ask(trim) == f"(0, {8 * MIB})"
    assert (
        ask(f"gpu.code('cuMemPoolTrimTo', pool, 0), get({RESERVED}), get({RESERVED_HIGH})")
        == f"(0, 0, {12 * MIB})"
    )
    assert ask("gpu.code('cuMemPoolTrimTo', 0, 0)") == f"{INVALID_VALUE}"
    assert ask.end() == ""


@MODES
def test_a_trim_leaves_what_work_may_use(gate: Gate, post: Post, ask: Program, mode: int) -> None:
    post.greet(mode)
    helpers(ask)
    keep_all(ask)
    ask(f"m = alloc({4 * MIB}, s); gpu('cuMemsetD32Async', m, 0, 8, s); gpu.sync()")
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 5, stream=s), free(m, s)") == "(0, 0)"
    trim = f"gpu.code('cuMemPoolTrimTo', pool, 0), get({RESERVED})"
    assert ask(trim) == f"(0, {4 * MIB})"
    gate.let(ANY)
    assert ask("gpu.sync()") == "0"
    assert ask(trim) == "(0, 0)"
    assert ask.end() == ""


@pytest.mark.parametrize(("named", "mode"), [("exact", moving.EXACT), ("keep", moving.KEEP)])
def test_free_blocks_are_given_back_before_memory_is_out(
    libraries: Libraries, domain: Domain, post: Post, named: str, mode: int
) -> None:
    with started(libraries, domain, post, MPSD_FAILOVER=named, MPSD_STANDIN_MEMORY=str(64 * MIB)) as ask:
        post.greet(mode)
        helpers(ask)
        keep_all(ask)
        ask(f"m = alloc({40 * MIB}, s)")
        assert ask("gpu.run('add', m, 8, 5, stream=s), free(m, s)") == "(0, 0)"
        # Of neither does the pool have one, and both do not fit beside what it keeps.
        ask(f"n = alloc({30 * MIB}, t)")
        assert ask(f"get({RESERVED})") == f"{30 * MIB}"
        assert ask(f"free(n, t), gpu.code('cuMemAlloc_v2', ctypes.byref(value), {40 * MIB})") == "(0, 0)"
        assert ask(f"get({RESERVED})") == "0"
        assert ask(f"gpu.code('cuMemAllocAsync', ctypes.byref(value), {40 * MIB}, s)") == f"{OUT_OF_MEMORY}"
        assert ask.end() == ""


@MODES
def test_each_kind_of_memory_may_be_freed_by_the_other_call(post: Post, ask: Program, mode: int) -> None:
    line = post.greet(mode)
    helpers(ask)
    keep_all(ask)
    ask(f"m, n = alloc({4 * MIB}, s), gpu.memory({4 * MIB})")
    # The program says that no work uses it any more.
    assert ask("gpu.code('cuMemFree_v2', m), free(n, s)") == "(0, 0)"
    assert ask(f"alloc({4 * MIB}, t) == m") == "True"
    wrong = "[free(x, s) for x in (n, m + 4096, 0)], gpu.code('cuMemFree_v2', m + 4096)"
    assert ask(wrong) == f"({[INVALID_VALUE] * 3}, {INVALID_VALUE})"
    twice = "free(m, t), free(m, t), gpu.code('cuMemFree_v2', m)"
    assert ask(twice) == f"(0, {INVALID_VALUE}, {INVALID_VALUE})"
    assert line.is_silent()
    assert ask.end() == ""


@MODES
def test_what_a_pointer_answers(post: Post, ask: Program, mode: int) -> None:
    post.greet(mode)
    helpers(ask)
    keep_all(ask)
    ask("base, size = ctypes.c_uint64(), ctypes.c_uint64()")
    ask("span = lambda m: gpu.code('cuMemGetAddressRange_v2', ctypes.byref(base), ctypes.byref(size), m)")
    ask(
        "about = lambda what, m: (gpu('cuPointerGetAttribute', ctypes.byref(value), what, m), value.value)[1]"
    )
    ask(f"m = alloc({4 * MIB}, s); free(m, s)")
    assert ask("span(m)") == f"{NOT_FOUND}"
    ask(f"m = alloc({4 * MIB} - 1000, s)")
    assert ask("span(m + 5), base.value == m, size.value") == f"(0, True, {4 * MIB - 1000})"
    assert ask(f"about({HANDLE}, m) == pool, about({RANGE_SIZE}, m)") == f"(True, {4 * MIB - 1000})"
    assert ask(f"value.__init__(0), about({LEGACY_IPC}, m)") == "(None, 0)"
    assert ask(f"n = gpu.memory({MIB}); gpu.sync()") == "None"
    assert ask(f"about({HANDLE}, n)") == "0"
    assert ask.end() == ""


@MODES
def test_in_a_capture_it_is_a_node_of_the_graph_and_does_not_move(
    post: Post, ask: Program, mode: int
) -> None:
    line = post.greet(mode)
    helpers(ask)
    keep_all(ask)
    ask(f"m = alloc({4 * MIB}, t); u = s")
    assert ask(BEGIN) == "None"
    # Beside a capture it is served.
    assert ask(f"free(m, t), alloc({4 * MIB}, t) == m, alloc({6 * MIB}, t) > 0") == "(0, True, True)"
    assert line.is_silent()
    # The stand-in has no such nodes.
    assert ask(f"gpu.code('cuMemAllocAsync', ctypes.byref(value), {MIB}, s)") == f"{NOT_SUPPORTED}"
    assert line.hear(moving.OPAQUE).text == "cuMemAllocAsync in a capture"
    assert ask.end() == ""


@MODES
@pytest.mark.parametrize("kind", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_allocations_beside_a_capture_do_not_spoil_it(post: Post, ask: Program, mode: int, kind: int) -> None:
    line = post.greet(mode)
    helpers(ask)
    keep_all(ask)
    ask(f"m, k = alloc({4 * MIB}, t), gpu.memory({4 * MIB}); gpu.sync()")
    assert ask(f"gpu.code('cuStreamBeginCapture_v2', s, {kind})") == "0"
    assert ask("gpu.run('add', k, 8, 3, stream=s), free(m, t)") == "(0, 0)"
    assert (
        ask(f"alloc({4 * MIB}, t) == m, alloc({6 * MIB}, t) > 0, alloc(700, t) > 0") == "(True, True, True)"
    )
    assert (
        ask("graph = ctypes.c_uint64(); code = gpu.code('cuStreamEndCapture', s, ctypes.byref(graph))")
        == "None"
    )
    assert ask("code") == "0"
    ask("launch = gpu.made('cuGraphInstantiateWithFlags', graph.value, 0)")
    assert ask("gpu.code('cuGraphLaunch', launch, s), sync(s), gpu.word(k)") == "(0, 0, 3)"
    assert line.is_silent()
    assert ask.end() == ""


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (f"gpu.made('cuMemPoolCreate', {EXPORTED}) > 0", "cuMemPoolCreate"),
        (
            "gpu.code('cuMemPoolSetAccess', pool, struct.pack('=iii', 1, 1, 3), 1) == 0",
            "cuMemPoolSetAccess",
        ),
    ],
)
def test_other_pools_are_the_drivers(
    libraries: Libraries, domain: Domain, post: Post, call: str, named: str
) -> None:
    with started(libraries, domain, post, MPSD_FAILOVER="exact", MPSD_STANDIN_DEVICES="2") as ask:
        line = post.greet(moving.EXACT)
        helpers(ask)
        ask(f"m = alloc({4 * MIB}, s)")
        assert ask(call) == "True"
        assert line.hear(moving.OPAQUE).text == named
        # Memory from before is freed as before, and the driver serves the rest.
        assert (
            ask(f"free(m, s), get({USED}), alloc({4 * MIB}, s) == m, get({USED})")
            == f"(0, 0, False, {4 * MIB})"
        )
        assert line.hear(moving.OPAQUE).text == "cuMemAllocAsync"
        assert ask.end() == ""


@MODES
def test_the_end_of_a_context_ends_its_blocks(post: Post, ask: Program, mode: int) -> None:
    post.greet(mode)
    helpers(ask)
    keep_all(ask)
    ask(f"m, n = alloc({4 * MIB}, s), alloc({6 * MIB}, s); free(m, s); gpu.sync()")
    assert ask("gpu.code('cuDevicePrimaryCtxReset_v2', 0)") == "0"
    assert ask(f"get({RESERVED}), get({USED})") == "(0, 0)"
    assert ask.end() == ""
