"""Pinned memory that the program frees or unregisters: a refused call leaves it unchanged in any instance."""

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

NOT_REGISTERED, INVALID_VALUE = "713", "1"
MAPPED = 2
HELD = "import mmap; held = mmap.mmap(-1, 1 << 20); p = ctypes.addressof(ctypes.c_char.from_buffer(held))"


def adds(ask: Program, before: int) -> None:
    """The GPU reaches the pinned memory, and its writes are visible."""
    assert ask("gpu.run('add', p, 8, 1), gpu.sync()") == "(0, 0)"
    assert ask("ctypes.c_uint32.from_address(p).value") == str(before + 1)


@EXACT
@pytest.mark.parametrize("is_moved_first", [False, True])
def test_what_was_allocated_is_not_unregistered(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, is_moved_first: bool
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    ask(f"p = gpu.made('cuMemHostAlloc', 1 << 20, {MAPPED})")
    stand_by(line, second, copies)
    if not is_moved_first:
        assert ask("gpu.code('cuMemHostUnregister', p)") == NOT_REGISTERED
    adds(ask, 0)
    break_domain(domain)
    move(line)
    adds(ask, 1)
    assert ask("gpu.code('cuMemHostUnregister', p)") == NOT_REGISTERED
    adds(ask, 2)
    # The same holds for memory allocated in the current instance.
    ask(f"q = gpu.made('cuMemHostAlloc', 1 << 20, {MAPPED})")
    assert ask("gpu.code('cuMemHostUnregister', q)") == NOT_REGISTERED
    assert ask("[gpu.code('cuMemFreeHost', one) for one in (p, q)]") == "[0, 0]"
    assert ask.end() == ""


@EXACT
def test_registered_memory_is_not_freed(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    ask(HELD)
    assert ask(f"gpu.code('cuMemHostRegister_v2', p, 1 << 20, {MAPPED})") == "0"
    assert ask("gpu.code('cuMemFreeHost', p)") == INVALID_VALUE
    adds(ask, 0)
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    assert ask("gpu.code('cuMemFreeHost', p)") == INVALID_VALUE
    adds(ask, 1)
    assert ask("gpu.code('cuMemHostUnregister', p)") == "0"
    assert ask("gpu.code('cuMemHostUnregister', p)") == NOT_REGISTERED
    assert ask.end() == ""
