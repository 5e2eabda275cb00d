"""A program frees pinned memory while another stream waits for the program."""

from __future__ import annotations

import pytest

from tests.libcuda.test_exact import EXACT
from tests.libcuda.test_failover import Program, ask, post
from tests.support import moving
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain
from tests.support.simnode import until

__all__ = ["ask", "backend", "domain", "post"]

HELD = {
    "a function": ("gpu.host('h', stream=t, holds=True)", "a pending host callback", "gpu.go('h')"),
    "a word": (
        "gpu.code('cuStreamWaitValue32_v2', t, w, 1, 0)",
        "a stream wait for a memory value",
        "gpu.code('cuStreamWriteValue32_v2', v, w, 1, 0)",
    ),
}


@EXACT
@pytest.mark.parametrize(("holds", "unsure", "go"), HELD.values(), ids=HELD)
def test_what_was_copied_from_there_is_not_looked_at_any_more(
    post: Post, ask: Program, holds: str, unsure: str, go: str
) -> None:
    """The source of a completed copy is not inspected any more. No standby exists: the driver's own wait
    completes the copy, and nothing would be replayed."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); k = gpu.memory(4 << 20); w = gpu.memory(4 << 20); gpu.sync()")
    ask("s, t, u, v = (gpu.made('cuStreamCreate', 1) for _ in 'stuv'); later = Later(gpu)")
    ask("n = 8 << 20; p = gpu.made('cuMemHostAlloc', n, 0)")
    copy = "gpu.code('cuMemcpyHtoDAsync_v2', m, p, n, s)"
    for call in (holds, copy) if "host" in holds else (copy, holds):
        assert ask(call) == "0"
    ask("later.start(\"gpu.code('cuMemFreeHost', p)\")")
    assert line.hear(moving.UNSURE).text == unsure
    ask(go)
    assert ask("later.result()") == "0"
    # Some work is unfinished, so the proxy checks which operations have ended.
    assert ask("gpu.run('slow', k, 8, 1, stream=u), gpu.code('cuStreamSynchronize', s)") == "(0, 0)"
    assert ask("gpu.sync()") == "0"
    ask.end()


@EXACT
@pytest.mark.parametrize("moves", [False, True])
def test_a_variable_is_filled_with_what_is_there_when_the_program_lets_it(
    post: Post, ask: Program, moves: bool
) -> None:
    """A copy into a variable reads pinned memory when the program releases the stream.

    Such a copy prevents carry-over, since the data recorded at the call may differ.
    """
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); table = gpu.variable('table')")
    ask("s, t = (gpu.made('cuStreamCreate', 1) for _ in 'st')")
    ask("p = gpu.made('cuMemHostAlloc', 4096, 0); words = (ctypes.c_uint32 * 4).from_address(p)")
    if moves:
        assert ask("gpu.code('cuStreamWaitValue32_v2', s, m, 1, 0)") == "0"
    assert ask("gpu.code('cuMemcpyHtoDAsync_v2', table, p, 16, s)") == "0"
    if moves:
        assert line.hear(moving.OPAQUE).text == "a copy into a module variable"
        assert ask("words[:] = [1, 2, 3, 4]") == "None"
        assert ask("gpu.code('cuStreamWriteValue32_v2', t, m, 1, 0), gpu.sync()") == "(0, 0)"
        assert ask("gpu.peek(table, 4)") == "[1, 2, 3, 4]"
    assert ask("gpu.sync()") == "0"
    until(lambda: moves or line.is_silent())
    ask.end()
