"""Copies in mode `exact`: results that the program has seen, the time of reading, and copies that the
driver refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "post", "second"]


SEEN = {
    "within": "gpu.code('cuMemcpyDtoDAsync_v2', pinned, m, 32, s), gpu.code('cuStreamSynchronize', s)",
    "by another": (
        "gpu.code('cuMemcpyDtoHAsync_v2', pinned, m, 32, 0) or gpu.run('add', n + 4096, 1, 1, stream=b),"
        " gpu.code('cuStreamSynchronize', b)"
    ),
    "from the host": "gpu.code('cuMemcpy', ctypes.addressof(out), ctypes.addressof(five), 32), 0",
}


@EXACT
@pytest.mark.parametrize("copy", SEEN.values(), ids=SEEN)
def test_what_the_program_has_seen_is_not_written_again(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, copy: str
) -> None:
    """Replay does not overwrite results that the program saw, although the epoch is open; `b` waits for
    the legacy stream."""
    line = post.greet(moving.EXACT)
    ask("import ctypes; m = gpu.memory(8 << 20); n = gpu.memory(8 << 20); s = gpu.stream(); t = gpu.stream()")
    ask("b = gpu.made('cuStreamCreate', 0)")
    ask("pinned = gpu.made('cuMemHostAlloc', 4096, 0); words = ctypes.c_uint32 * 8; five = words(*[5] * 8)")
    ask("out = words.from_address(pinned) if 'pinned' in COPY else words()".replace("COPY", repr(copy)))
    assert ask("gpu.code('cuMemsetD32_v2', m, 5, 8), gpu.sync()") == "(0, 0)"
    stand_by(line, second, copies)
    assert ask("gpu.run('add', n, 8, 1, stream=t)") == "0"
    assert ask(f"{copy}, list(out)") == "(0, 0, [5, 5, 5, 5, 5, 5, 5, 5])"
    ask("out[:] = [1] * 8; five[:] = [2] * 8")
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), list(out), gpu.word(n)") == "(0, [1, 1, 1, 1, 1, 1, 1, 1], 1)"
    assert ask.end() == ""


@EXACT
def test_where_nothing_is_to_be_copied_the_driver_says_so(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    calls = ("DtoH_v2", "DtoHAsync_v2", "HtoD_v2", "HtoDAsync_v2", "", "Async", "DtoDAsync_v2")
    for name in calls:
        stream = ", 0" if "Async" in name else ""
        given = (
            ["0, m", "m, 0"] if not name.startswith(("Dto", "Hto")) else ["0, m" if "toH" in name else "m, 0"]
        )
        for sides in given:
            assert ask(f"gpu.code('cuMemcpy{name}', {sides}, 64{stream})") == "1", (name, sides)
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 0]"
    assert ask.end() == ""


@EXACT
def test_a_copy_from_pinned_memory_has_what_was_copied_there_before(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); n = gpu.memory(8 << 20); s = gpu.stream()")
    ask("p = gpu.made('cuMemHostAlloc', 4096, 0)")
    ask("gpu.code('cuMemsetD32_v2', m, 7, 8); gpu.sync()")
    assert ask("gpu.run('late', m + 4096, 1, 1, stream=s)") == "0"
    copies = "gpu.code('cuMemcpyDtoHAsync_v2', p, m, 32, s), gpu.code('cuMemcpyHtoDAsync_v2', n, p, 32, s)"
    assert ask(f"{copies}, gpu.sync(), gpu.word(n), gpu.word(n + 28)") == "(0, 0, 0, 7, 7)"
    assert ask.end() == ""


COPY = {
    "in": "gpu.code('cuMemcpyHtoDAsync_v2', n, p, 32, {})",
    "out": "gpu.code('cuMemcpyDtoHAsync_v2', p, n, 32, {})",
}
REACHED = "gpu.code('cuEventRecord', e, {0}), gpu.code('cuEventSynchronize', e)"
KERNEL = "gpu.run('add', n + 64, 8, 1, stream={})"
# Ways to order a stream and the legacy stream, each with what the program waits for.
ORDERS = {
    "same": ["a", REACHED.format("a")],
    "legacy, then an event": ["0", KERNEL.format("b"), REACHED.format("b")],
    "an event of the legacy stream": ["a", REACHED.format("0")],
    "a kernel between": ["a", KERNEL.format("0"), REACHED.format("0")],
    "through the legacy stream": [
        "a",
        KERNEL.format("0"),
        KERNEL.format("b"),
        "gpu.code('cuStreamSynchronize', b)",
    ],
    "a copy that waits": ["a", "gpu.code('cuMemcpyHtoD_v2', m + 4096, p + 2048, 32)"],
}


@EXACT
@pytest.mark.parametrize("way", COPY)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_streams_that_wait_for_each_other_prove_each_other(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, way: str, order: list[str]
) -> None:
    """Completion of one stream proves that the streams it waited for have completed, so their buffers may
    change; `t` is unproven."""
    line = post.greet(moving.EXACT)
    ask("import ctypes; m = gpu.memory(8 << 20); n = gpu.memory(8 << 20); t = gpu.stream()")
    ask("a = gpu.made('cuStreamCreate', 0); b = gpu.made('cuStreamCreate', 0)")
    ask("e = gpu.made('cuEventCreate', 2)")
    ask("p = gpu.made('cuMemHostAlloc', 4096, 0); w = (ctypes.c_uint32 * 8).from_address(p); w[:] = [5] * 8")
    ask("gpu.sync()")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 1, stream=t)") == "0"
    assert set(ask(f"{COPY[way].format(order[0])}, {', '.join(order[1:])}")) == set("(0, )")
    ask("w[:] = [100] * 8")
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(n), w[0]") == f"(0, {5 if way == 'in' else 0}, 100)"
    assert ask.end() == ""


@EXACT
def test_rows_that_are_read_are_written_over_later(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("import ctypes; n = gpu.memory(8 << 20); s = gpu.stream()")
    ask("from tests.support.rows import DEVICE, HOST, plane")
    ask("p = gpu.made('cuMemHostAlloc', 1 << 20, 0); w = (ctypes.c_uint32 * (1 << 18)).from_address(p)")
    ask("w[0] = 5; w[4096] = 6; w[8192] = 7; gpu.sync()")
    stand_by(line, second, copies)
    ask("g = plane((DEVICE, n, 4096), (HOST, p, 16384), 4, 3)")
    assert (
        ask("gpu.code('cuMemcpy2DAsync_v2', ctypes.byref(g), s), gpu.run('add', n, 1, 100, stream=s)")
        == "(0, 0)"
    )
    assert ask("gpu.code('cuMemcpyDtoHAsync_v2', p + 32768, n, 4, s)") == "0"
    until(lambda: ask("w[8192]") == "105")
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), [gpu.word(n + 4096 * i) for i in range(3)], w[8192]") == "(0, [105, 6, 7], 105)"
    assert ask.end() == ""


@EXACT
def test_a_stream_that_is_ended_behind_a_function_that_waits_is_not_forgotten(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Lost work of a destroyed stream is reported, even if another stream gets the same handle or slot."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); n = gpu.memory(8 << 20); s = gpu.stream(); gpu.sync()")
    stand_by(line, second, copies)
    assert ask("gpu.host('a', stream=s, holds=True), gpu.run('add', m, 8, 10, stream=s)") == "(0, 0)"
    until(lambda: ask("gpu.began") == "['a']")
    assert ask("gpu.code('cuStreamDestroy_v2', s)") == "0"
    ask("t = gpu.stream()")
    both = "gpu.run('add', n, 8, 1, stream=t), gpu.code('cuStreamSynchronize', t)"
    assert ask(f"{both}, {both}") == "(0, 0, 0, 0)"
    break_domain(domain)
    assert move(line).text == "a pending host callback"
    ask("gpu.go('a')")
    assert ask("gpu.sync(), gpu.word(n)") == "(719, 2)"
    assert "a pending host callback" in ask.end()


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": mode} for mode in ("exact", "keep")], indirect=True)
@pytest.mark.parametrize("rows", [False, True])
def test_pageable_memory_is_read_behind_a_function_of_the_host(post: Post, ask: Program, rows: bool) -> None:
    post.greet(moving.EXACT)
    ask("import ctypes; from tests.support.rows import DEVICE, HOST, plane")
    ask("n = gpu.memory(8 << 20); gpu.sync()")
    ask("gpu.x = x = (ctypes.c_uint32 * 65536)(); after = threading.Timer(0.2, gpu.go, ['a'])")
    ask("g = plane((DEVICE, n, 4096), (HOST, ctypes.addressof(x), 4096), 4096, 64)")
    assert ask("gpu.host('a', stream=0, holds=True, does='self.x.__setitem__(0, 9) or 1')") == "0"
    copy = (
        "gpu.code('cuMemcpy2D_v2', ctypes.byref(g))" if rows else "gpu.code('cuMemcpyHtoD_v2', n, x, 262144)"
    )
    assert ask(f"after.start(), {copy}, gpu.sync(), gpu.word(n)") == "(None, 0, 0, 9)"
    assert ask.end() == ""


@pytest.mark.parametrize(
    "ask", [{"MPSD_FAILOVER": mode} for mode in ("off", "keep", "exact")], indirect=True, ids=str
)
@pytest.mark.parametrize(
    "call",
    [
        "'cuMemcpyHtoD_v2', n, ctypes.c_void_p(m), 64",
        "'cuMemcpyHtoDAsync_v2', n, ctypes.c_void_p(m), 64, 0",
        "'cuMemcpyDtoHAsync_v2', ctypes.c_void_p(n), m, 64, 0",
        "'cuMemcpyDtoH_v2', ctypes.c_void_p(n), m, 64",
    ],
)
def test_an_address_of_the_gpus_that_is_named_the_hosts(post: Post, ask: Program, call: str) -> None:
    """A device address passed as a host address works as with the driver, since addresses are unified."""
    mode = {"keep": moving.KEEP, "exact": moving.EXACT}.get(ask("os.environ['MPSD_FAILOVER']").strip("'"))
    if mode is not None:
        post.greet(mode)
    ask("m = gpu.memory(4 << 20); n = gpu.memory(4 << 20); gpu.run('add', m, 8, 5); gpu.sync()")
    assert ask(f"gpu.code({call}), gpu.sync(), gpu.word(n)") == "(0, 0, 5)"
    assert ask.end() == ""
