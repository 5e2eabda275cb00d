"""What is saved before it is written: all that may be, whatever of it was saved before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate
from tests.libcuda.test_exact import move as move_exactly
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_vmm import CREATE, PIECE, PLAIN
from tests.support import moving
from tests.support.gate import Gate
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

FIRSTS = {
    "memset": "gpu.code('cuMemsetD8Async', m, 0, 64, 0)",
    "copy": "gpu.put(m, 0)",
    "word": "gpu.code('cuStreamWriteValue32_v2', 0, m, 0, 0)",
}
ALLOCATED = "m = gpu.memory(8 << 20)"
MAPPED = f"m = gpu.reserve({4 * PIECE}); h = [{CREATE} for _ in range(4)]; "
MAPPED += f"[gpu.map(m + i * {PIECE}, h[i]) for i in range(4)]"


@EXACT
@pytest.mark.parametrize("lets", range(0, 10, 2))
@pytest.mark.parametrize("made", [ALLOCATED, MAPPED], ids=["allocated", "mapped"])
@pytest.mark.parametrize("first", FIRSTS)
def test_a_part_that_is_saved_does_not_stand_for_all(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path,
    first: str, made: str, lets: int,
) -> None:  # fmt: skip
    """Its first page is written by something small before a kernel writes more, in one epoch."""
    line = post.greet(moving.EXACT)
    ask(PLAIN)
    ask(made)
    ask(f"w = m + {PIECE} - 16; gpu('cuMemsetD8_v2', m, 0, 8 << 20)")
    assert ask("gpu.sync()") == "0"
    stand_by(line, second, copies)
    gate.let(0)
    ask.tell(f"{FIRSTS[first]}, gpu.run('add', w, 8, 1)")
    gate.let(lets)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    assert move_exactly(line).text == ""
    assert ask._answer() == "(0, 0)"
    assert ask("gpu.sync(), [gpu.word(w + 4 * i) for i in range(8)]") == "(0, [1, 1, 1, 1, 1, 1, 1, 1])"
    assert ask.end() == ""
