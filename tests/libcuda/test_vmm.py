"""Memory that a program creates and maps itself, as PyTorch's expandable segments, is carried over to
another instance."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate
from tests.libcuda.test_exact import move as move_exactly
from tests.libcuda.test_failover import (
    LAZY,
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
from tests.support.gate import HOST as GATE_HOST
from tests.support.gate import UNMAP, Gate
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

INVALID_VALUE = 1
PIECE = 2 << 20
PLAIN = "import struct, ctypes; ALLOWED = 14; PLAIN = struct.pack('<iiiiQQ', 1, 0, 1, 0, 0, 0); MIB = 1 << 20"
CREATE = f"gpu.made('cuMemCreate', {PIECE}, PLAIN, 0)"
OF_HOST = "HOST = struct.pack('<iiiiQQ', 1, 1, 3, 0, 0, 0)"
HOST = f"gpu.made('cuMemCreate', {PIECE}, HOST, 0)"
SEGMENT = f"a = gpu.reserve({4 * PIECE}); h = [{CREATE}, {CREATE}]; "
SEGMENT += f"gpu.map(a, h[0]); gpu.map(a + {PIECE}, h[1]); "
SEGMENT += f"gpu('cuMemsetD8_v2', a, 0, {2 * PIECE}); gpu.sync()"
VARIABLES = 3  # module variables that each instance has for itself
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


KEEP = {"MPSD_FAILOVER": "keep"}
HIGH = 700
"""The program's own files have lower numbers; descriptors kept for the next instance have higher ones."""

KEPT = f"kept = lambda: sum(int(n) > {HIGH} for n in os.listdir('/proc/self/fd'))"

kept_alone = pytest.mark.parametrize("ask", [KEEP, KEEP | LAZY], indirect=True, ids=["eager", "lazy"])
"""Only the program's memory is kept. Mode `exact`, the default until the daemon answers, also keeps a
snapshot buffer."""


@kept_alone
def test_it_may_grow_and_shrink_at_any_time(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask(PLAIN)
    ask(KEPT)
    ask(SEGMENT)
    stand_by(line, second, copies)
    # While the standby is warm.
    ask(f"h.append({CREATE}); gpu.map(a + {2 * PIECE}, h[2]); gpu.put(a + {2 * PIECE}, 33)")
    ask(f"gpu.unmap(a, h[0]); b = gpu.reserve({PIECE}); h[0] = {CREATE}; gpu.map(b, h[0]); gpu.put(b, 44)")
    assert ask(f"gpu.word(a + {2 * PIECE}), gpu.word(b)") == "(33, 44)"
    break_domain(domain)
    move(line)
    assert ask(f"gpu.word(a + {2 * PIECE}), gpu.word(b)") == "(33, 44)"
    # In the second instance: new memory and carried-over memory.
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
    assert ask("kept()") == "0"
    # The old instances may still be unloading.
    until(lambda: int(ask("memory_descriptors()")) <= VARIABLES)
    assert ask.end() == ""


@kept_alone
def test_memory_outlives_its_mapping_and_its_handle(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Memory is carried over with a handle alone, without a mapping, and with a mapping alone, after its
    handle's release."""
    line = post.greet()
    ask(PLAIN)
    ask(KEPT)
    ask(SEGMENT)
    ask(f"gpu.put(a, 7); gpu.put(a + {PIECE}, 8); gpu.sync()")
    ask(f"gpu('cuMemUnmap', a, {PIECE}); gpu('cuMemRelease', h[1])")
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    assert ask(f"gpu.word(a + {PIECE})") == "8"
    ask(f"gpu.map(a + {2 * PIECE}, h[0])")
    assert ask(f"gpu.word(a + {2 * PIECE})") == "7"
    # Handles retained from mappings, as the driver returns them.
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
    assert ask("kept()") == "0"
    # The old instances may still be unloading.
    until(lambda: int(ask("memory_descriptors()")) <= VARIABLES)
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("lets", range(5))
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
    assert ask.answer() == "0"
    assert ask("gpu.word(other)") == "1"
    assert ask.end() == ""


def test_what_a_handle_is_may_be_asked(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Properties of a handle are those that the program asked for, not the proxy's, and the memory counts
    as no allocation."""
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


def test_memory_of_the_hosts_moves_until_it_is_mapped(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """NCCL makes such memory only to see whether it could. The next instance makes it anew, empty."""
    line = post.greet()
    ask(f"{PLAIN}; {OF_HOST}")
    ask(SEGMENT)
    ask(f"gpu('cuMemRelease', {HOST}); kept, gone = {HOST}, {HOST}")
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    ask("p = ctypes.create_string_buffer(32)")
    asked = "gpu.code('cuMemGetAllocationPropertiesFromHandle', p, kept), p.raw == HOST"
    assert ask(asked) == "(0, True)"
    assert ask("gpu.code('cuMemRelease', gone), gpu.code('cuMemRelease', gone)") == f"(0, {INVALID_VALUE})"
    ask(f"new = {HOST}")
    assert ask("len({kept, new, *h})") == "4"
    assert ask(f"gpu.code('cuMemMap', gpu.reserve({PIECE}), {PIECE}, 0, kept, 0)") == "0"
    assert "outside a window" in line.hear(moving.OPAQUE).text
    assert ask("gpu.code('cuMemRelease', kept), gpu.code('cuMemRelease', new)") == "(0, 0)"
    assert ask.end() == ""


def test_memory_of_the_hosts_ends_as_nccl_ends_it(post: Post, ask: Program) -> None:
    """By the handle that the address answers."""
    post.greet()
    ask(f"{PLAIN}; {OF_HOST}; before = memory_descriptors()")
    ask(f"a = gpu.reserve({PIECE}); k = {HOST}; gpu('cuMemMap', a, {PIECE}, 0, k, 0)")
    ask("access = struct.pack('<iiiiii', 3, 0, 3, 1, 0, 3)")
    assert (
        ask(f"gpu.code('cuMemSetAccess', a, {PIECE}, access, 2), gpu.put(a, 7), gpu.word(a)") == "(0, 0, 7)"
    )
    assert ask("(r := gpu.made('cuMemRetainAllocationHandle', a)) == k") == "True"
    assert ask("[gpu.code('cuMemRelease', k) for _ in range(3)]") == f"[0, 0, {INVALID_VALUE}]"
    assert ask(f"gpu.code('cuMemUnmap', a, {PIECE}), gpu.code('cuMemAddressFree', a, {PIECE})") == "(0, 0)"
    assert ask("memory_descriptors() - before") == "0"
    assert ask.end() == ""


def test_what_is_retained_outside_a_window_has_no_other_memorys_name(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """The next instance answers handles that an earlier one has given, and the program still holds."""
    line = post.greet()
    ask(f"{PLAIN}; {OF_HOST}; g = [{CREATE} for _ in range(40)]")
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    # The old instance has let go of its handles.
    until(lambda: int(ask("memory_descriptors()")) <= 40 + VARIABLES)
    ask(f"a = gpu.reserve({1 << 44}); k = [{HOST} for _ in range(60)]")
    ask(f"[gpu('cuMemMap', a + i * {PIECE}, {PIECE}, 0, k[i], 0) for i in range(60)]")
    assert ask("len({*g, *k})") == "100"
    ask(f"r = [gpu.made('cuMemRetainAllocationHandle', a + i * {PIECE}) for i in range(60)]")
    assert ask("r == k") == "True"
    assert ask("{gpu.code('cuMemRelease', x) for x in g + k + r}") == "{0}"
    assert ask.end() == ""


def test_memory_whose_making_a_move_overtakes_is_not_left_behind(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask(f"{PLAIN}; {OF_HOST}; later = Later(gpu)")
    stand_by(line, second, copies)
    before = int(ask("memory_descriptors()"))
    gate.keep(GATE_HOST)
    ask(f'later.start("{HOST}")')
    until(lambda: gate.kept() == GATE_HOST)
    break_domain(domain)
    move(line)
    gate.keep(0)
    assert ask("gpu.code('cuMemRelease', later.result())") == "0"
    until(lambda: int(ask("memory_descriptors()")) <= before)
    assert ask.end() == ""


@pytest.mark.parametrize(
    ("makes", "named"),
    [
        (f"gpu.map(gpu.reserve({PIECE}), gpu.adopt(memory_of_another({PIECE})))", "cuMemImport"),
        ("gpu.export(gpu.create())", "cuMemExportToShareableHandle"),
        (f"gpu.reserve({1 << 44})", "outside a window"),
        (f"gpu.map(gpu.reserve({PIECE}), {HOST})", "outside a window"),
    ],
    ids=["imported", "exported", "more than a window", "memory of the host's"],
)
def test_what_does_not_go_along_is_said_by_name(post: Post, ask: Program, makes: str, named: str) -> None:
    line = post.greet()
    ask(f"{PLAIN}; {OF_HOST}")
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


def mapped(pieces: int) -> str:
    """Reserve `pieces` segments at `a`, map `h` in the first one, and create `k`."""
    return f"a = gpu.reserve({pieces * PIECE}); h, k = {CREATE}, {CREATE}; gpu.map(a, h)"


@EXACT
@pytest.mark.parametrize("lets", range(6))
def test_what_has_grown_since_it_was_saved_is_saved_too(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, lets: int
) -> None:
    """A segment mapped with data behind a segment that was already saved is saved too."""
    line = post.greet(moving.EXACT)
    ask(PLAIN)
    ask(mapped(2))
    ask(f"b = gpu.reserve({PIECE}); gpu.map(b, k); gpu.put(b, 5, 6, 7, 8)")
    ask(f"gpu('cuMemsetD8_v2', a, 0, {PIECE}); gpu.sync(); gpu('cuMemUnmap', b, {PIECE})")
    stand_by(line, second, copies)
    gate.let(0)
    assert ask("gpu.run('add', a, 4, 1)") == "0"
    ask(f"gpu.map(a + {PIECE}, k)")
    assert ask(f"gpu.run('add', a + {PIECE} - 16, 8, 100)") == "0"
    gate.let(lets)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    assert move_exactly(line).text == ""
    assert ask(f"gpu.sync(), [gpu.word(a + {PIECE} - 16 + 4 * n) for n in range(8)]") == (
        "(0, [100, 100, 100, 100, 105, 106, 107, 108])"
    )
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize(
    "access", ["None", "gpu('cuMemSetAccess', a + {0}, {0}, READ, 1)"], ids=["no", "read"]
)
@pytest.mark.parametrize("lets", [0, 1, 2, 3])
def test_what_nobody_may_write_is_let_alone(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, lets: int, access: str
) -> None:
    line = post.greet(moving.EXACT)
    ask(PLAIN + "; READ = struct.pack('<iii', 1, 0, 1)")
    ask(mapped(2))
    ask(f"gpu('cuMemsetD8_v2', a, 0, {PIECE}); gpu.sync(); gpu('cuMemMap', a + {PIECE}, {PIECE}, 0, k, 0)")
    ask(access.format(PIECE))
    stand_by(line, second, copies)
    gate.let(0)
    assert ask("gpu.run('add', a, 4, 1), gpu.run('add', a, 4, 1)") == "(0, 0)"
    gate.let(lets)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    assert move_exactly(line).text == ""
    assert ask("gpu.sync(), gpu.word(a)") == "(0, 2)"
    assert ask.end() == ""


def test_memory_of_a_window_has_no_handle_and_nobody_waits_for_one(post: Post, ask: Program) -> None:
    line = post.greet()
    ask("m = gpu.memory(4 << 20); later, other = Later(gpu), Later(gpu)")
    ask("later.start(\"gpu.code('cuMemRetainAllocationHandle', ctypes.byref(ctypes.c_uint64()), m)\")")
    assert ask("later.result()") == str(INVALID_VALUE)
    ask('other.start("gpu.memory(4096) > 0")')
    assert ask("other.result()") == "True"
    assert line.is_silent()
    assert ask.end() == ""


def test_a_handle_that_was_retained_is_not_anothers(post: Post, ask: Program) -> None:
    """A retained handle keeps its memory, although the driver reuses the handle's value once the program
    has released it."""
    post.greet()
    ask(PLAIN)
    ask(f"a = gpu.reserve({4 * PIECE}); b = a + {PIECE}; h = {CREATE}; gpu.map(a, h); gpu.put(a, 7)")
    ask("gpu.sync(); gpu('cuMemRelease', h); k = gpu.made('cuMemRetainAllocationHandle', a)")
    ask(f"gpu('cuMemUnmap', a, {PIECE}); n = {CREATE}; gpu.map(b, n); gpu.put(b, 9); gpu.sync()")
    ask(f"gpu.map(b + {PIECE}, k)")
    assert ask(f"gpu.word(b + {PIECE}), gpu.word(b)") == "(7, 9)"
    assert ask("gpu.code('cuMemRelease', n), gpu.code('cuMemRelease', k), gpu.code('cuMemRelease', k)") == (
        f"(0, 0, {INVALID_VALUE})"
    )
    assert ask.end() == ""


def test_what_the_program_did_not_want_to_be_shared_is_not(post: Post, ask: Program) -> None:
    """Memory created without sharing cannot be exported, although the proxy creates it shareable; a failed
    attempt does not prevent carry-over."""
    line = post.greet()
    ask(PLAIN)
    ask(mapped(1))
    ask("out = ctypes.c_int(-1); types = ctypes.c_uint64(9)")
    assert ask("gpu.code('cuMemExportToShareableHandle', ctypes.byref(out), h, 1, 0)") == str(INVALID_VALUE)
    assert ask("gpu.code('cuPointerGetAttribute', ctypes.byref(types), ALLOWED, a), types.value") == "(0, 0)"
    ask("s = gpu.create(); gpu('cuMemUnmap', a, 2 << 20); gpu.map(a, s)")
    assert ask("gpu.code('cuPointerGetAttribute', ctypes.byref(types), ALLOWED, a), types.value") == "(0, 1)"
    assert line.is_silent()
    assert ask.end() == ""


def test_several_reservations_of_more_than_the_gpus_memory_fit(post: Post, ask: Program) -> None:
    """Several reservations larger than GPU memory fit, as PyTorch makes them for each stream and for small
    and large blocks."""
    line = post.greet()
    total = int(ask("gpu.made('cuDeviceTotalMem_v2', 0)"))
    size = -(-total * 9 // 8 // PIECE) * PIECE
    ask(f"all = [gpu.reserve({size}) for _ in range(6)]; m = gpu.memory(4 << 20)")
    assert ask(f"sorted(all)[-1] - m < 10 * {size} and m - sorted(all)[0] < 10 * {size}") == "True"
    assert line.is_silent()
    assert ask.end() == ""


def test_a_child_closes_nothing_of_its_own(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A child process closes no descriptor of its own when it releases a handle that no driver instance
    holds any more."""
    line = post.greet()
    ask(PLAIN)
    ask(f"HIGH = {HIGH}; before = set(os.listdir('/proc/self/fd')); h = {CREATE}")
    ask("kept = [int(n) for n in set(os.listdir('/proc/self/fd')) - before if int(n) > HIGH]")
    assert ask("len(kept)") == "1"
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    ask("null = os.open('/dev/null', 0)")
    ask("does = f\"os.dup2(null, {kept[0]}) * 0 + gpu.code('cuMemRelease', h)\"")
    assert ask("in_child(does)") == "0"
    assert ask("in_child(f\"[{does}] and os.path.exists('/proc/self/fd/{kept[0]}')\")") == "1"
    assert ask.end() == ""


def test_a_handle_of_what_is_mapped_can_be_exported(post: Post, ask: Program) -> None:
    """A retained handle of exportable memory can be exported after the program has released the original
    handle."""
    post.greet()
    ask(PLAIN + "; out = ctypes.c_int(-1)")
    ask(f"a = gpu.reserve({PIECE}); s = gpu.create(); gpu.map(a, s); gpu('cuMemRelease', s)")
    ask("k = gpu.made('cuMemRetainAllocationHandle', a)")
    assert ask("gpu.code('cuMemExportToShareableHandle', ctypes.byref(out), k, 1, 0)") == "0"
    assert ask("os.close(out.value)") == "None"
    assert ask.end() == ""


def test_a_child_of_who_unmaps_may_release(gate: Gate, post: Post, ask: Program) -> None:
    post.greet()
    ask(PLAIN + "; import signal")
    ask(SEGMENT)
    ask("later = Later(gpu)")
    gate.keep(UNMAP)
    ask(f"later.start(\"gpu.code('cuMemUnmap', a, {PIECE})\")")
    until(lambda: gate.kept() == UNMAP)
    assert ask("in_child(\"signal.alarm(20) or gpu.code('cuMemRelease', h[1]) * 0\")") == "0"
    gate.keep(0)
    assert ask("later.result()") == "0"
    assert ask.end() == ""


@both
def test_what_is_ours_is_forgotten_when_it_is_unmapped_with_what_is_not(post: Post, ask: Program) -> None:
    post.greet()
    ask(PLAIN)
    ask(KEPT)
    ask(f"a = gpu.reserve({2 * PIECE}); s = gpu.create(); out = ctypes.c_int(-1)")
    ask("gpu('cuMemExportToShareableHandle', ctypes.byref(out), s, 1, 0)")
    ask("i = gpu.made('cuMemImportFromShareableHandle', ctypes.c_void_p(out.value), 1); os.close(out.value)")
    ask(f"gpu.map(a, s); gpu.map(a + {PIECE}, i); gpu('cuMemRelease', s); gpu('cuMemRelease', i)")
    assert ask(f"gpu.code('cuMemUnmap', a, {2 * PIECE}), kept()") == "(0, 0)"
    ask("s = gpu.create(); gpu.map(a, s); gpu.unmap(a, s)")
    assert ask(f"gpu.code('cuMemAddressFree', a, {2 * PIECE}), kept()") == "(0, 0)"
