"""Memory operations in streams: writes of a word, and waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, IN_VAIN, gate, move
from tests.libcuda.test_failover import IMPATIENT, Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_failover import move as keep_moving
from tests.support import moving
from tests.support.gate import Gate
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

WAIT, WRITE, BARRIER, REDUCTION = 1, 2, 6, 8
"""Values of CUstreamBatchMemOpType."""

MADE = "m = gpu.memory(4 << 20); s, t = (gpu.made('cuStreamCreate', 1) for _ in range(2)); gpu.sync(); "
MADE += "h = gpu.made('cuMemHostAlloc', 4096, 0); words = (ctypes.c_uint32 * 8).from_address(h); "
MADE += "import struct; import ctypes"


def write(address: str, value: int, stream: str = "s") -> str:
    return f"gpu.code('cuStreamWriteValue32_v2', {stream}, {address}, {value}, 0)"


def wait(address: str, value: int, stream: str = "s") -> str:
    """Return a wait until the word is at least `value`."""
    return f"gpu.code('cuStreamWaitValue32_v2', {stream}, {address}, {value}, 0)"


def batch(*each: tuple[int, str, int]) -> str:
    packed = " + ".join(
        f"struct.pack('<IxxxxQQIxxxxQQ', {kind}, {address}, {value}, 0, 0, 0)"
        for kind, address, value in each
    )
    return f"gpu.code('cuStreamBatchMemOp_v2', s, {len(each)}, {packed}, 0)"


@EXACT
@pytest.mark.parametrize("lets", [0, 1, 2, 4, 5])
def test_what_is_written_in_flight_is_written_again(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, lets: int
) -> None:
    line = post.greet(moving.EXACT)
    ask(MADE)
    stand_by(line, second, copies)
    assert ask("gpu.put(m, 1, 2, 3, 4, 5, 6), gpu.sync()") == "(0, 0)"
    gate.let(0)
    assert ask(f"gpu.run('add', m, 6, 10, stream=s), {write('m', 100)}") == "(0, 0)"
    assert ask(batch((WRITE, "m + 4", 200), (BARRIER, "0", 0), (5, "m + 8", (7 << 32) + 300))) == "0"
    assert ask("gpu.run('add', m, 6, 1, stream=s)") == "0"
    gate.let(lets)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), [gpu.word(m + 4 * n) for n in range(6)]") == "(0, [101, 201, 301, 8, 16, 17])"
    assert ask.end() == ""


@pytest.mark.parametrize("mode", [moving.KEEP, moving.EXACT], ids=["keep", "exact"])
@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)
def test_streams_are_those_of_the_next_copy(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    ask(MADE)
    stand_by(line, second, copies)
    break_domain(domain)
    keep_moving(line)
    assert ask(f"{write('m + 4', 20)}, {batch((WRITE, 'm + 8', 30), (WAIT, 'm + 8', 30))}") == "(0, 0)"
    assert ask("gpu.code('cuStreamSynchronize', s), [gpu.word(m + 4 * n) for n in range(4)]") == (
        "(0, [0, 20, 30, 0])"
    )
    assert ask.end() == ""


@IN_VAIN
def test_nobody_waits_for_a_stream_that_waits_for_the_program(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Freeing in mode `exact` does not wait for a stream that the same thread releases later."""
    line = post.greet(moving.EXACT)
    ask(MADE)
    ask("e = gpu.made('cuEventCreate', 2); a = gpu.reserve(2 << 20); k = gpu.create(); gpu.map(a, k)")
    stand_by(line, second, copies)
    assert ask(f"gpu.run('add', m, 8, 1, stream=s), {wait('h', 1)}, gpu.run('add', m, 8, 1, stream=s)") == (
        "(0, 0, 0)"
    )
    assert ask("gpu.code('cuEventRecord', e, s), gpu.code('cuStreamWaitEvent', t, e, 0)") == "(0, 0)"
    assert ask("gpu.code('cuEventDestroy_v2', e), gpu.code('cuMemUnmap', a, 2 << 20)") == "(0, 0)"
    assert ask("gpu.code('cuStreamDestroy_v2', t)") == "0"
    ask("words[0] = 1")
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 2)"
    # From here on, everything works as before.
    assert ask("gpu.run('add', m, 8, 1, stream=s), gpu.run('slow', m, 8, 1, stream=s)") == "(0, 0)"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 4)"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize(
    ("call", "why"),
    [
        (wait("h", 1), "a stream wait for a memory value"),
        (write("h", 1), "a stream memory write outside the window"),
    ],
    ids=["wait", "write"],
)
def test_what_others_see_or_write_is_not_done_again_silently(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, call: str, why: str
) -> None:
    line = post.greet(moving.EXACT)
    ask(MADE)
    stand_by(line, second, copies)
    assert (
        ask(f"gpu.run('add', m, 8, 1, stream=s), {call}, gpu.run('long', m, 8, 1, stream=s)") == "(0, 0, 0)"
    )
    break_domain(domain)
    assert move(line).text == why
    assert ask("gpu.sync(), gpu.sync(), gpu.word(m) >= 0") == "(719, 0, True)"
    assert why in ask.end()


@pytest.mark.parametrize(
    ("does", "named"),
    [
        (write("gpu.variable('table')", 1), "a copy into a module variable"),
        (batch((WAIT, "gpu.variable('table')", 0)), "a copy into a module variable"),
    ],
    ids=["variable", "variable in a batch"],
)
def test_what_does_not_go_along_is_said_by_name(post: Post, ask: Program, does: str, named: str) -> None:
    line = post.greet()
    ask(MADE)
    ask(does)
    assert line.hear(moving.OPAQUE).text == named


def test_an_operation_of_an_unknown_kind_is_the_drivers_to_refuse(post: Post, ask: Program) -> None:
    post.greet()
    ask(MADE)
    assert ask(batch((REDUCTION, "m", 1))) == "1"
    assert ask(batch((WRITE, "m + 2", 1))) == "1"
    assert ask("gpu.code('cuStreamBatchMemOp_v2', s, 0, None, 0)") == "1"
    assert ask("gpu.sync()") == "0"
    assert ask.end() == ""


@pytest.mark.parametrize(
    ("ask", "is_moved"),
    [({"MPSD_FAILOVER": "exact"}, True), ({"MPSD_FAILOVER": "off"}, False)],
    indirect=["ask"],
)
@pytest.mark.parametrize("frees", ["gpu.code('cuMemFree_v2', x)", "gpu.code('cuMemUnmap', a, 2 << 20)"])
def test_who_frees_beside_a_stream_that_waits_keeps_nobody_from_writing_the_word(
    post: Post, ask: Program, frees: str, is_moved: bool
) -> None:
    """A thread that frees beside a waiting stream blocks in the driver alone; another thread can still
    write the word."""
    if is_moved:
        post.greet(moving.EXACT)
    ask(MADE)
    ask("x = gpu.memory(4 << 20); a = gpu.reserve(2 << 20); k = gpu.create(); gpu.map(a, k); gpu.sync()")
    ask("later, writer = Later(gpu), Later(gpu)")
    assert ask(wait("m", 1)) == "0"
    ask(f"later.start({frees!r})")
    ask("later.comes_back()")
    ask(f"writer.start({write('m', 1, 't')!r})")
    assert ask("writer.result(), later.result(), gpu.sync()") == "(0, 0, 0)"
    assert ask.end() == ""


@pytest.mark.parametrize(
    "ask",
    [
        {"MPSD_FAILOVER": "validate"} | IMPATIENT,
        {"MPSD_FAILOVER": "exact"} | IMPATIENT,
    ],
    indirect=True,
    ids=["validates", "plain"],
)
def test_a_thread_comes_back_from_a_wait_that_it_ends_itself(post: Post, ask: Program) -> None:
    """A thread can submit any amount of work behind a wait that it ends itself."""
    post.greet(moving.EXACT)
    ask(MADE)
    far = "[gpu.run('add', m, 8, 1, stream=s) for _ in range(900)]"
    assert ask(f"{wait('h', 1)}, any({far})") == "(0, False)"
    ask("words[0] = 1")
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 900)"


@EXACT
def test_a_word_is_not_written_again_behind_who_may_wait_for_it(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A write is not replayed if a kernel in another stream may wait for it: a replay in order would never
    end."""
    line = post.greet(moving.EXACT)
    ask(MADE)
    stand_by(line, second, copies)
    gate.let(0)
    assert ask(f"gpu.run('add', m + 64, 8, 1, stream=s), {write('m', 1, 't')}") == "(0, 0)"
    break_domain(domain)
    assert move(line).text == "a stream memory write while another stream works"
    assert ask("gpu.sync(), gpu.sync()") == "(719, 0)"
