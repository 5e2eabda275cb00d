"""Memory that a program makes and maps itself, as PyTorch's expandable segments are: it goes along when the
driver is changed under it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate
from tests.libcuda.test_exact import move as move_exactly
from tests.libcuda.test_failover import (
    Program,
    ask,
    both,
    break_domain,
    copies,
    move,
    post,
    stand_by,
)
from tests.support import moving
from tests.support.gate import Gate
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

INVALID_VALUE = 1
PIECE = 2 << 20
PLAIN = "import struct; PLAIN = struct.pack('<iiiiQQ', 1, 0, 1, 0, 0, 0); MIB = 1 << 20"
CREATE = f"gpu.made('cuMemCreate', {PIECE}, PLAIN, 0)"
SEGMENT = f"a = gpu.reserve({4 * PIECE}); h = [{CREATE}, {CREATE}]; "
SEGMENT += f"gpu.map(a, h[0]); gpu.map(a + {PIECE}, h[1]); "
SEGMENT += f"gpu('cuMemsetD8_v2', a, 0, {2 * PIECE}); gpu.sync()"
VARIABLES = "3"  # each copy's own, of a module's variables
STRADDLES = f"a + {PIECE} - 16"


@both
def test_it_is_there_in_the_next_copy(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask(PLAIN)
    ask(SEGMENT)
    ask(f"w = {STRADDLES}")
    assert ask("gpu.put(w, 1, 2, 3, 4, 5, 6, 7, 8), gpu.run('add', w, 8, 10), gpu.sync()") == "(0, 0, 0)"
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    assert ask("[gpu.word(w + 4 * i) for i in range(8)]") == "[11, 12, 13, 14, 15, 16, 17, 18]"
    assert ask("gpu.run('add', w, 8, 1), gpu.sync(), gpu.word(w), gpu.word(w + 28)") == "(0, 0, 12, 19)"
    assert ask.end() == ""


@both
def test_it_may_grow_and_shrink_at_any_time(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask(PLAIN)
    ask(SEGMENT)
    stand_by(line, second, copies)
    # While the standby is warm.
    ask(f"h.append({CREATE}); gpu.map(a + {2 * PIECE}, h[2]); gpu.put(a + {2 * PIECE}, 33)")
    ask(f"gpu.unmap(a, h[0]); b = gpu.reserve({PIECE}); h[0] = {CREATE}; gpu.map(b, h[0]); gpu.put(b, 44)")
    assert ask(f"gpu.word(a + {2 * PIECE}), gpu.word(b)") == "(33, 44)"
    break_domain(domain)
    move(line)
    assert ask(f"gpu.word(a + {2 * PIECE}), gpu.word(b)") == "(33, 44)"
    # In the second copy: what comes from there, and what came along.
    ask(f"h.append({CREATE}); gpu.map(a, h[3]); gpu.put(a, 55)")
    ask(f"gpu.unmap(a + {PIECE}, h[1]); gpu.put(a + {2 * PIECE}, 34); gpu.sync()")
    stand_by(line, third, copies, 2)
    break_domain(second)
    move(line, 2)
    assert ask(f"gpu.word(a), gpu.word(a + {2 * PIECE}), gpu.word(b)") == "(55, 34, 44)"
    assert ask(f"gpu.code('cuMemAddressFree', a, {4 * PIECE})") == str(INVALID_VALUE)
    ask(f"gpu.unmap(a, h[3]); gpu.unmap(a + {2 * PIECE}, h[2]); gpu.unmap(b, h[0])")
    assert ask(f"gpu.code('cuMemAddressFree', a, {4 * PIECE}), gpu.code('cuMemAddressFree', b, {PIECE})") == (
        "(0, 0)"
    )
    assert ask("memory_descriptors()") == VARIABLES
    assert ask.end() == ""


@both
def test_memory_outlives_its_mapping_and_its_handle(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A handle whose memory is mapped nowhere, and a mapping whose handle is released."""
    line = post.greet()
    ask(PLAIN)
    ask(SEGMENT)
    ask(f"gpu.put(a, 7); gpu.put(a + {PIECE}, 8); gpu.sync()")
    ask(f"gpu('cuMemUnmap', a, {PIECE}); gpu('cuMemRelease', h[1])")
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    assert ask(f"gpu.word(a + {PIECE})") == "8"
    ask(f"gpu.map(a + {2 * PIECE}, h[0])")
    assert ask(f"gpu.word(a + {2 * PIECE})") == "7"
    # Handles of what is mapped, as the driver gives them.
    ask(f"k = gpu.made('cuMemRetainAllocationHandle', a + {PIECE} + 4096)")
    assert ask(f"gpu.code('cuMemUnmap', a + {PIECE}, {2 * PIECE})") == "0"
    ask(f"gpu.map(a, k); gpu.map(a + {PIECE}, h[0]); gpu.sync()")
    assert ask(f"gpu.word(a), gpu.word(a + {PIECE})") == "(8, 7)"
    stand_by(line, third, copies, 2)
    break_domain(second)
    move(line, 2)
    assert ask(f"gpu.word(a), gpu.word(a + {PIECE})") == "(8, 7)"
    ask(f"gpu.unmap(a, k); gpu.unmap(a + {PIECE}, h[0])")
    assert ask("gpu.code('cuMemRelease', k), gpu.code('cuMemRelease', h[0])") == "(1, 1)"
    assert ask("memory_descriptors()") == VARIABLES
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("lets", range(8))
def test_what_was_in_flight_across_two_mappings_is_done_again(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, lets: int
) -> None:
    line = post.greet(moving.EXACT)
    ask(PLAIN)
    ask(SEGMENT)
    ask(f"w = {STRADDLES}")
    stand_by(line, second, copies)
    assert ask("gpu.put(w, 1, 2, 3, 4, 5, 6, 7, 8), gpu.run('add', w, 8, 10), gpu.sync()") == "(0, 0, 0)"
    gate.let(0)
    assert ask("[gpu.run('add', w, 8, 1) for _ in range(3)]") == "[0, 0, 0]"
    gate.let(lets)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    assert move_exactly(line).text == ""
    assert ask("gpu.sync(), [gpu.word(w + 4 * i) for i in range(8)]") == (
        "(0, [14, 15, 16, 17, 18, 19, 20, 21])"
    )
    assert ask.end() == ""


@EXACT
def test_what_is_in_flight_has_ended_before_its_memory_is_unmapped(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask(PLAIN)
    ask(SEGMENT)
    ask("other = gpu.memory(1 << 20); gpu.sync()")
    stand_by(line, second, copies)
    gate.let(0)
    assert ask("gpu.run('add', a, 8, 1), gpu.run('copy', other, a, 8)") == "(0, 0)"
    ask.tell(f"gpu.code('cuMemUnmap', a, {PIECE})")
    break_domain(domain)
    assert move_exactly(line).text == ""
    assert ask._answer() == "0"
    assert ask("gpu.word(other)") == "1"
    assert ask.end() == ""


def test_what_a_handle_is_may_be_asked(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """As the program wanted it, not as the proxy has made it; and nothing of it is an allocation."""
    line = post.greet()
    ask(PLAIN)
    ask(SEGMENT)
    ask("import ctypes; p = ctypes.create_string_buffer(32)")
    asked = "gpu.code('cuMemGetAllocationPropertiesFromHandle', p, h[0]), p.raw == PLAIN"
    assert ask(asked) == "(0, True)"
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    assert ask(asked) == "(0, True)"
    assert ask("gpu.code('cuMemFree_v2', a)") == str(INVALID_VALUE)
    assert ask("gpu.code('cuMemRelease', 12345)") == str(INVALID_VALUE)
    assert ask(f"gpu.code('cuMemUnmap', a + {2 * PIECE}, {PIECE})") == str(INVALID_VALUE)
    assert ask(f"gpu.code('cuMemMap', a, {PIECE}, 0, h[0], 0)") == str(INVALID_VALUE)
    assert ask.end() == ""


@pytest.mark.parametrize(
    ("makes", "named"),
    [
        (f"gpu.map(gpu.reserve({PIECE}), gpu.adopt(memory_of_another({PIECE})))", "cuMemImport"),
        ("gpu.export(gpu.create())", "cuMemExportToShareableHandle"),
        (f"gpu.reserve({1 << 44})", "not in a window"),
    ],
    ids=["imported", "exported", "more than a window"],
)
def test_what_does_not_go_along_is_said_by_name(post: Post, ask: Program, makes: str, named: str) -> None:
    line = post.greet()
    ask(PLAIN)
    ask(makes)
    said = line.hear(moving.OPAQUE)
    assert named in said.text


def test_a_forked_child_keeps_none_of_it(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    post.greet()
    ask(PLAIN)
    ask(SEGMENT)
    assert int(ask("memory_descriptors()")) > 0
    ask("before = memory_descriptors()")
    assert ask("before - in_child('memory_descriptors()')") == "2"
    assert ask.end() == ""
