"""Snapshots before writes cover all memory that may be written, whatever part was saved before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate
from tests.libcuda.test_exact import move as move_exactly
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by, started
from tests.libcuda.test_vmm import CREATE, PIECE, PLAIN
from tests.support import moving
from tests.support.gate import Gate, gate_of
from tests.support.libcudas import Libraries
from tests.support.long import of
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
@pytest.mark.parametrize("lets", of([0, 2, 4, 6], [2, 6]))
@pytest.mark.parametrize("made", [ALLOCATED, MAPPED], ids=["allocated", "mapped"])
@pytest.mark.parametrize("first", FIRSTS)
def test_a_part_that_is_saved_does_not_stand_for_all(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path,
    first: str, made: str, lets: int,
) -> None:  # fmt: skip
    """A saved first page does not count as the whole buffer when a kernel writes more of it in the same
    epoch."""
    line = post.greet(moving.EXACT)
    ask(PLAIN)
    ask(made)
    ask(f"w = m + {PIECE} - 16; gpu('cuMemsetD8_v2', m, 0, 8 << 20)")
    assert ask("gpu.sync()") == "0"
    stand_by(line, second, copies)
    gate.let(0)
    ask.tell(f"{FIRSTS[first]}, gpu.run('add', w, 8, 1)")
    gate.let(lets)
    # Six operations, or five: a finished snapshot of the other per-stream log needs no wait.
    until(lambda: gate.left() <= max(0, lets - 5))
    break_domain(domain)
    assert move_exactly(line).text == ""
    assert ask.answer() == "(0, 0)"
    assert ask("gpu.sync(), [gpu.word(w + 4 * i) for i in range(8)]") == "(0, [1, 1, 1, 1, 1, 1, 1, 1])"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("captures", [False, True], ids=["loaded", "while something is captured"])
@pytest.mark.parametrize("lets", [0, 1, 2, 20])
def test_what_is_saved_together_comes_back(
    domain: Domain, gate: Gate, second: Domain, third: Domain, post: Post, ask: Program, copies: Path,
    captures: bool, lets: int,
) -> None:  # fmt: skip
    """More buffers than one kernel saves are restored, here and in the next instance; by copies where no
    kernel can be loaded."""
    line = post.greet(moving.EXACT)
    ask("many = [gpu.memory(2 << 20) for _ in range(20)]; s = gpu.made('cuStreamCreate', 1)")
    ask("writes = lambda: {gpu.run('add', m, 8, 1) for m in many}; g = ctypes.c_uint64()")
    ask("words = lambda: {gpu.word(m) for m in many}; [gpu('cuMemsetD8_v2', m, 0, 64) for m in many]")
    stand_by(line, second, copies)
    if captures:
        assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
    # The proxy learns which buffers are usually written and saves them at once from then on.
    ask("wait = lambda: gpu.code('cuStreamSynchronize', 0)")
    assert ask("writes(), wait(), writes(), wait()") == "({0}, 0, {0}, 0)"
    gate.let(0)
    assert ask("writes()") == "{0}"
    gate.let(lets)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    assert move_exactly(line).text == ""
    if captures:
        assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(g))") == "0"
    assert ask("gpu.sync(), words()") == "(0, {3})"
    assert ask("writes(), gpu.sync()") == "({0}, 0)"
    stand_by(line, third, copies, 2)
    assert ask("writes()") == "{0}"
    break_domain(second)
    assert move_exactly(line, 2).text == ""
    assert ask("gpu.sync(), words()") == "(0, {5})"
    assert ask.end() == ""


FULL = {
    "MPSD_FAILOVER": "exact",
    "snapshot_mib": "256",
    "MPSD_STANDIN_MEMORY": str(256 << 20),
}


@pytest.mark.parametrize("ask", [FULL], indirect=True)
def test_what_was_freed_in_a_capture_is_not_taken_away_from_what_is_about_to_be_saved(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Memory freed in a capture is released for the snapshot buffer before the snapshot begins, or not at
    all, when memory is full."""
    line = post.greet(moving.EXACT)
    ask("x = gpu.memory(8 << 20); y = gpu.memory(8 << 20); z = gpu.made('cuMemAlloc_v2', 60 << 20)")
    ask("g = ctypes.c_uint64()")
    ask("s = gpu.made('cuStreamCreate', 1); sizes = (ctypes.c_size_t * 2)()")
    ask("left = lambda: gpu.code('cuMemGetInfo_v2', sizes, ctypes.byref(sizes, 8)) or sizes[0]")
    assert ask("{(gpu.run('add', m, 8, 1), gpu.sync()) for _ in range(3) for m in (x, y)}") == "{(0, 0)}"
    ask("filled = gpu.made('cuMemAlloc_v2', (left() >> 20) - 20 << 20)")
    assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
    assert ask("gpu.code('cuMemFree_v2', x), gpu.code('cuStreamEndCapture', s, ctypes.byref(g))") == "(0, 0)"
    assert ask("gpu.run('add', z, 8, 1), gpu.run('add', y, 8, 1), gpu.sync()") == "(0, 0, 0)"
    stand_by(line, second, copies)
    assert ask("gpu.run('add', z, 8, 1), gpu.run('add', y, 8, 1)") == "(0, 0)"
    break_domain(domain)
    move_exactly(line)
    assert (
        ask("gpu.code('cuCtxSynchronize') in (0, 719), gpu.run('add', y, 8, 1), gpu.sync()") == "(True, 0, 0)"
    )


# A kernel launched with more shared memory than its function is allowed at the time of replay.
LARGE = (
    "shared = lambda bytes: gpu.code('cuFuncSetAttribute', gpu.functions['slow'], 8, bytes); "
    "large = lambda: gpu.run('slow', m, 8, 1, shared=65536)"
)


@EXACT
def test_what_cannot_be_done_again_leaves_memory_as_it_was(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Work that cannot be replayed leaves memory restored: restoring continues, and the next snapshot
    waits for it."""
    line = post.greet(moving.EXACT)
    # The buffers are too large to be saved at once, so each is saved for its own kernel.
    ask(f"w, *many = (gpu.memory(66 << 20) for _ in range(4)); m = many[0]; {LARGE}")
    assert ask(f"gpu.run('fill', w, {64 << 18}, 7), shared(65536), gpu.sync()") == "(0, 0, 0)"
    stand_by(line, second, copies)
    # w is saved, and no kernel has run.
    gate.let(0)
    assert ask("{gpu.run('add', to, 8, 1) for to in (w, *many)}, large(), shared(0)") == "({0}, 0, 0)"
    gate.let(2)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    assert move_exactly(line).text == "the work cannot be replayed"
    # The program is told at its next wait.
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.sync()") == "(0, 719, 0)"
    assert ask("[gpu.word(w + (i << 20)) for i in range(64)]") == str([8] + [7] * 63)
    assert "the work cannot be replayed" in ask.end()


@EXACT
def test_what_is_not_put_back_when_the_next_context_is_lost_is_put_back_in_that_after_it(
    domain: Domain, gate: Gate, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Data not yet restored when the next context is lost too is restored in the context after it, even if
    the replay was abandoned."""
    line = post.greet(moving.EXACT)
    ask(f"w, m = gpu.memory(8 << 20), gpu.memory(8 << 20); {LARGE}")
    assert ask("gpu.run('add', w, 8, 7), shared(65536), gpu.sync()") == "(0, 0, 0)"
    with gate_of(second) as there:
        stand_by(line, second, copies)
        # w is saved, and its kernel has run.
        gate.let(0)
        assert ask("gpu.run('add', w, 8, 1)") == "0"
        gate.let(2)
        until(lambda: gate.left() == 0)
        assert ask("large(), shared(0)") == "(0, 0)"
        there.let(0)
        break_domain(domain)
        assert move_exactly(line).text == "the work cannot be replayed"
        stand_by(line, third, copies, 2)
        break_domain(second)
        assert move_exactly(line, 2).text == ""
        assert ask("gpu.sync(), gpu.sync(), gpu.word(w), gpu.word(m)") == "(719, 0, 7, 0)"
    assert "the work cannot be replayed" in ask.end()


SEVERAL = 20


@pytest.mark.parametrize("refuses", [False, True], ids=["done", "refused"])
def test_memory_is_put_back_by_few_kernels_or_by_copies(
    libraries: Libraries,
    domain: Domain,
    gate: Gate,
    second: Domain,
    post: Post,
    copies: Path,
    tmp_path: Path,
    refuses: bool,
) -> None:
    there = second.environment["CUDA_MPS_PIPE_DIRECTORY"]
    extra = {"MPSD_FAILOVER": "exact", "MPSD_STANDIN_NOTES": str(tmp_path / "notes")}
    extra |= {"MPSD_STANDIN_REFUSES_SAVES": there} if refuses else {}
    with started(libraries, domain, post, **extra) as ask:
        line = post.greet(moving.EXACT)
        # The last buffer spans two chunks; the driver copies a part of that size.
        ask(f"several = [gpu.memory(2 << 20) for _ in range({SEVERAL - 1})]; gpu.sync()")
        assert ask("several.append(gpu.memory(70 << 20))") == "None"
        add = "{gpu.run('add', m, 8, 1) for m in several}"
        assert ask(f"{add}, gpu.sync()") == "({0}, 0)"
        stand_by(line, second, copies)
        gate.let(0)
        assert ask(add) == "{0}"
        break_domain(domain)
        assert move_exactly(line).text == ""
        assert ask("gpu.sync(), {gpu.word(m) for m in several}") == "(0, {2})"
        assert ask.end() == ""
    noted = (tmp_path / "notes").read_text().splitlines()
    at_once = [f"{there} copies 16 ranges", f"{there} copies {SEVERAL + 1 - 16} ranges"]
    assert [each for each in noted if each.startswith(f"{there} copies")] == at_once
