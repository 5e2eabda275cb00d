"""Copies in mode `exact`: what the program has seen, what is read when, what the driver refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain

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
    """Another stream's work is unproven, so the epoch is not over. `b` waits for the legacy stream."""
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
