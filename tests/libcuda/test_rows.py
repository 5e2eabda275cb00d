"""Copies of rows and planes, memsets of rows, and peer copies behave as without the proxy and can be
replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_memory import ask as answer
from tests.support import moving
from tests.support.gate import Gate
from tests.support.libcudas import Libraries
from tests.support.long import of
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second"]

MODES = pytest.mark.parametrize(
    ("ask", "mode"),
    [({"MPSD_FAILOVER": "exact"}, moving.EXACT), ({"MPSD_FAILOVER": "keep"}, moving.KEEP)],
    indirect=["ask"],
    ids=["exact", "keep"],
)

# m and n hold 8 MiB of pattern, `host` holds the host's data, s is a stream.
START = (
    "from tests.support.rows import ARRAY, DEVICE, HOST, UNIFIED, box, plane; import ctypes;"
    "m = gpu.memory(8 << 20); n = gpu.memory(8 << 20); s = gpu.made('cuStreamCreate', 1);"
    "import array; host = array.array('I', range(1 << 20)); at = host.buffer_info()[0];"
    "pinned = gpu.made('cuMemHostAlloc', 4 << 20, 0); ctypes.memmove(pinned, at, 4 << 20);"
    "into = (ctypes.c_uint32 * (2 << 20))();"
    "seen = lambda a: (gpu.code('cuMemcpyDtoH_v2', into, a, 8 << 20), list(into[:8]),"
    " into[1 << 20], into[-1])[1:];"
    "rows = lambda call, *given: gpu.code(call, ctypes.byref(plane(*given)), s);"
    "gpu('cuMemsetD32_v2', m, 5, 2 << 20); gpu.sync()"
)

SAME = """
import zlib
from tests.support.rows import ARRAY, DEVICE, HOST, UNIFIED, Box, box, plane
start()
size, word = ctypes.c_size_t, ctypes.c_uint64
a, b, host = alloc(2 << 20), alloc(2 << 20), ctypes.create_string_buffer(bytes(range(256)) * 64)
must(cuda.cuMemsetD8_v2(word(a), 1, size(2 << 20)))
must(cuda.cuMemsetD8_v2(word(b), 2, size(2 << 20)))
at, back = ctypes.addressof(host), ctypes.create_string_buffer(1 << 20)
to = ctypes.addressof(back)
pinned, stream, context = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_void_p()
must(cuda.cuMemHostAlloc(ctypes.byref(pinned), size(1 << 20), 0))
must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
must(cuda.cuCtxGetCurrent(ctypes.byref(context)))
found = []
def look(code):
    must(cuda.cuCtxSynchronize())
    sums = []
    for where in (a, b, to, pinned.value):
        seen = (ctypes.c_uint8 * (1 << 20))()
        must(cuda.cuMemcpy(word(ctypes.addressof(seen)), word(where), size(1 << 20)))
        sums.append(zlib.crc32(bytes(seen)))
    found.append([code, *sums])
def two(*given, **more):
    now, asked = plane(*given, **more), ctypes.byref
    look(cuda.cuMemcpy2D_v2(asked(now)))
    look(cuda.cuMemcpy2DUnaligned_v2(asked(now)))
    look(cuda.cuMemcpy2DAsync_v2(asked(now), stream))
    look(cuda.cuMemcpy2DAsync_v2(asked(now), None))
def three(*given, **more):
    now = box(*given, **more)
    look(cuda.cuMemcpy3D_v2(ctypes.byref(now)))
    look(cuda.cuMemcpy3DAsync_v2(ctypes.byref(now), stream))
two((DEVICE, a, 512), (HOST, at, 128), 100, 7)
two((DEVICE, a, 512), (HOST, at, 128), 60, 7, srcXInBytes=33, srcY=5, dstXInBytes=11, dstY=3)
two((HOST, to, 300), (DEVICE, a, 512), 200, 9, srcXInBytes=1, dstXInBytes=2, dstY=4)
two((UNIFIED, b, 0), (UNIFIED, a, 256), 99, 3)
two((UNIFIED, pinned.value, 128), (DEVICE, b, 64), 64, 100)
two((DEVICE, b, 64), (UNIFIED, pinned.value, 128), 64, 1000, dstY=20)
two((HOST, to, 64), (HOST, at, 128), 60, 9)
two((HOST, pinned.value, 64), (HOST, at, 128), 60, 9, dstY=7)
two((HOST, to, 1024), (UNIFIED, pinned.value, 256), 200, 900)
# What the driver refuses, or what is nothing.
two((DEVICE, a, 50), (HOST, at, 128), 60, 2)
two((DEVICE, a, 512), (HOST, at, 60), 60, 2, srcXInBytes=1)
two((DEVICE, a, 59), (DEVICE, b, 128), 60, 1)
two((HOST, to, 59), (DEVICE, a, 128), 60, 3)
two((DEVICE, a, 512), (HOST, 0, 128), 60, 2)
two((HOST, 0, 512), (DEVICE, a, 128), 60, 2)
two((HOST, to, 512), (0, 0, 128), 60, 2)
two((7, 0, 512), (DEVICE, a, 128), 60, 2)
two((DEVICE, a, 512), (DEVICE, b, 128), 0, 2)
two((DEVICE, a, 512), (HOST, at, 128), 60, 0)
two((HOST, to, 512), (DEVICE, a, 512), 512, 1 << 20)
two((DEVICE, a, 1 << 63), (DEVICE, b, 512), 512, 1 << 10)
two((DEVICE, a, 1 << 30), (HOST, at, 128), 60, 2)
two((HOST, to, 128), (DEVICE, a, 1 << 30), 60, 2)
three((DEVICE, a, 64), (HOST, at, 32), 30, 3, 4, srcHeight=5, dstHeight=4, dstZ=2, srcY=1, dstXInBytes=3)
three((HOST, to, 64), (DEVICE, a, 32), 30, 3, 4, srcHeight=5, dstHeight=6, srcZ=1, dstY=2)
three((DEVICE, b, 64), (UNIFIED, a, 32), 30, 3, 4, srcHeight=3, dstHeight=3)
three((DEVICE, b, 64), (UNIFIED, a, 32), 30, 3, 4, srcHeight=2, dstHeight=3)
three((HOST, to, 64), (UNIFIED, a, 32), 30, 3, 4, srcHeight=3)
three((HOST, to, 64), (UNIFIED, a, 32), 30, 3, 1)
look(cuda.cuMemcpy2D_v2(None))
look(cuda.cuMemcpy2DAsync_v2(None, stream))
look(cuda.cuMemcpy3D_v2(None))
for width, name in ((1, "8"), (2, "16"), (4, "32")):
    for pitch, count, rows in ((512, 9, 5), (64, 16, 3), (15, 3, 2), (0, 3, 1), (8, 16, 2), (512, 0, 2),
                               (512, 9, 0), (1 << 63, 1, 8), (1 << 30, 8, 2)):
        given = (word(a + 4), size(pitch), 0x34, size(count), size(rows))
        look(getattr(cuda, f"cuMemsetD2D{name}_v2")(*given))
        look(getattr(cuda, f"cuMemsetD2D{name}Async")(*given, stream))
    look(getattr(cuda, f"cuMemsetD2D{name}_v2")(word(a + 1), size(64), 7, size(2), size(2)))
look(cuda.cuMemcpyPeer(word(a + (2 << 20) - 8), context, word(b), context, size(9)))
# From here on the program is not carried over.
for one, other in ((context, context), (context, None), (None, context), (ctypes.c_void_p(at), context)):
    look(cuda.cuMemcpyPeer(word(a), one, word(b + 77), other, size(999)))
    look(cuda.cuMemcpyPeerAsync(word(b), one, word(a + 5), other, size(999), stream))
two((ARRAY, 0, 512), (DEVICE, a, 128), 60, 2)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def without(libraries: Libraries) -> object:
    return answer(libraries, SAME, "0")


def test_the_stand_in_does_and_refuses_what_a_driver_does(without: object) -> None:
    assert isinstance(without, list)
    codes = [code for code, *_ in without]
    assert {0, 1, 201} == set(codes)
    # Nine copies in four ways; each changes memory the first time.
    assert codes[:36] == [0] * 36
    assert all(without[i][1:] != without[i - 1][1:] for i in range(4, 36, 4))
    assert codes[36 : 36 + 8 * 4] == [1] * 32


@pytest.mark.parametrize("mode", ["off", "keep", "exact"])
def test_the_proxy_changes_nothing(libraries: Libraries, post: Post, without: object, mode: str) -> None:
    chosen = {"MPSD_FAILOVER_SOCKET": str(post.path), "MPSD_FAILOVER": mode} if mode != "off" else {}
    assert answer(libraries, SAME, "1", **chosen) == without


WRITES = {
    "in": "rows('cuMemcpy2DAsync_v2', (DEVICE, m, 16), (HOST, at + 4, 12), 8, 2)",
    "now": "rows('cuMemcpy2D_v2', (DEVICE, m, 16), (HOST, at + 4, 12), 8, 2)",
    "pinned": "rows('cuMemcpy2DAsync_v2', (UNIFIED, m, 16), (HOST, pinned + 4, 12), 8, 2)",
    "within": "rows('cuMemcpy2DAsync_v2', (DEVICE, m, 16), (DEVICE, k, 12), 8, 2)",
    "box": "gpu.code('cuMemcpy3DAsync_v2', ctypes.byref(box((DEVICE, m, 8), (DEVICE, k, 12), 8, 1, 2,"
    " srcHeight=1, dstHeight=2)), s)",
    "set": "gpu.code('cuMemsetD2D16Async', m, 16, 1, 4, 2, s)",
    "peer": "gpu.code('cuMemcpyPeerAsync', m, gpu.context, k, gpu.context, 8, s)",
}


@EXACT
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_was_there_before_is_there_when_it_is_read_again(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, write: str
) -> None:
    """Overwritten source data is restored before the replay reads it: all work ran before the loss, and
    none is proven complete."""
    line = post.greet(moving.EXACT)
    assert ask(START) == "None"
    assert ask("k = gpu.memory(4096); gpu.put(k, 1, 2, 3, 4, 5); gpu.sync()") == "None"
    ask("ran = (ctypes.c_uint32 * 2).from_address(pinned + 4096); ran[:] = 0, 0; gpu.sync()")
    stand_by(line, second, copies)
    assert ask("gpu.code('cuMemcpyDtoDAsync_v2', n, m, 8 << 20, s)") == "0"
    # This copy is outside the stream and does not wait for it.
    assert ask("gpu.code('cuMemcpyDtoHAsync_v2', pinned + 4096, k + 12, 4, s)") == "0"
    until(lambda: ask("ran[0]") == "4")
    assert ask(write) == "0"
    assert ask("gpu.code('cuMemcpyDtoHAsync_v2', pinned + 4100, k + 16, 4, s)") == "0"
    until(lambda: ask("ran[1]") == "5")
    break_domain(domain)
    assert move(line).text == ""
    words = ask("gpu.sync(), seen(n)[0], seen(m)[0]")
    new = {"set": "[65537, 65537, 5, 5, 65537, 65537, 5, 5]", "peer": "[1, 2, 5, 5, 5, 5, 5, 5]"}
    kept = "[1, 2, 5, 5, 4, 5, 5, 5]"
    assert words == f"(0, [5, 5, 5, 5, 5, 5, 5, 5], {new.get(_name(write), kept)})"
    assert ask.end() == ""


def _name(write: str) -> str:
    return next(name for name, each in WRITES.items() if each == write)


@EXACT
@pytest.mark.parametrize("lets", range(4))
def test_of_rows_far_apart_only_their_own_pages_are_saved(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, lets: int
) -> None:
    """Only the pages of distant rows are saved, by two operations; the third is the completion mark."""
    line = post.greet(moving.EXACT)
    assert ask(START) == "None"
    stand_by(line, second, copies)
    gate.let(lets)
    assert ask("rows('cuMemcpy2DAsync_v2', (DEVICE, m, 6 << 20), (DEVICE, n, 256), 16, 2)") == "0"
    until(lambda: gate.left() == 0)
    break_domain(domain)
    said = move(line)
    assert (said.text, said.values[3:5]) == ("", ((4 << 20) * (lets == 3), 1))
    assert ask("gpu.sync(), seen(m)") == "(0, ([0, 0, 0, 0, 5, 5, 5, 5], 5, 5))"
    assert ask("gpu.word(m + (6 << 20)), gpu.word(m + (6 << 20) + 16)") == "(0, 5)"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("lets", of([0, 3, 4, 5, 6], [3, 5]))
@pytest.mark.parametrize(
    "shape", [((5 << 20) // 2, 3), (4096, 1500), (5 << 20, 1)], ids=["few", "many", "one"]
)
def test_a_long_copy_to_the_host_begins_anew(
    domain: Domain,
    gate: Gate,
    second: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    shape: tuple[int, int],
    lets: int,
) -> None:
    """A long copy to the host restarts after any part of it; data between the rows is unchanged.

    The copy runs in chunks of 4 MiB. The kernel before it, or some chunks, have ended.
    """
    width, height = shape
    line = post.greet(moving.EXACT)
    assert ask(START) == "None"
    ask(f"width, height = {width}, {height}; into[:] = [9] * len(into); gpu.sync()")
    stand_by(line, second, copies)
    gate.let(lets)
    ask("gpu.run('add', m, 1, 1)")
    ask.tell(
        "gpu.code('cuMemcpy2D_v2', ctypes.byref(plane((HOST, ctypes.addressof(into), width + 64),"
        " (DEVICE, m, width), width, height)))"
    )
    until(lambda: gate.left() == 0)
    break_domain(domain)
    assert move(line).text == ""
    assert ask.answer() == "0"
    ask("all_rows = [into[i * (width + 64) // 4:(i + 1) * (width + 64) // 4] for i in range(height)]")
    ask("all_rows[0][0] -= 1")
    assert ask("set(word for row in all_rows for word in row[:width // 4])") == "{5}"
    assert ask("set(word for row in all_rows for word in row[width // 4:])") == "{9}"
    assert ask.end() == ""


@EXACT
def test_rows_that_the_program_has_seen_are_not_written_again(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Replay does not overwrite rows that the program saw, although unproven work of another stream keeps
    the epoch open."""
    line = post.greet(moving.EXACT)
    assert ask(START) == "None"
    ask("out = (ctypes.c_uint32 * 8).from_address(pinned); out[:] = [0] * 8; t = gpu.stream()")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', n, 8, 1, stream=t)") == "0"
    assert ask("rows('cuMemcpy2DAsync_v2', (HOST, pinned, 16), (DEVICE, m, 8), 8, 2)") == "0"
    assert ask("gpu.code('cuStreamSynchronize', s), list(out)") == "(0, [5, 5, 0, 0, 5, 5, 0, 0])"
    ask("out[:] = [1] * 8")
    break_domain(domain)
    assert (said := move(line)).text == "" and said.values[4] == 1
    assert ask("gpu.sync(), list(out), gpu.word(n)") == "(0, [1, 1, 1, 1, 1, 1, 1, 1], 1)"
    assert ask.end() == ""


@MODES
def test_captured_rows_are_launched_in_the_next_copy(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    assert ask(START) == "None"
    assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
    assert ask("rows('cuMemcpy2DAsync_v2', (DEVICE, n, 16), (DEVICE, m, 12), 8, 2)") == "0"
    assert ask("gpu.code('cuMemsetD2D8Async', n + 8, 8, 1, 4, 2, s)") == "0"
    stand_by(line, second, copies)
    if mode == moving.EXACT:
        break_domain(domain)
        assert move(line).text == ""
    assert ask("gpu.code('cuMemcpyPeerAsync', n + 24, gpu.context, m, gpu.context, 4, s)") == "0"
    ask("g = ctypes.c_uint64(); gpu('cuStreamEndCapture', s, ctypes.byref(g))")
    ask("x = gpu.made('cuGraphInstantiateWithFlags', g.value, 0)")
    if mode == moving.KEEP:
        break_domain(domain)
        assert move(line).text in ("", "mode keep")
    wanted = "[5, 5, 16843009, 0, 16843009, 5, 5, 0]"
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync(), seen(n)[0]") == f"(0, 0, {wanted})"
    assert ask.end() == ""


@EXACT
def test_captured_rows_of_the_host_are_not_done_again(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    assert ask(START) == "None"
    assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
    assert ask("rows('cuMemcpy2DAsync_v2', (DEVICE, n, 16), (HOST, pinned, 12), 8, 2)") == "0"
    ask("g = ctypes.c_uint64(); gpu('cuStreamEndCapture', s, ctypes.byref(g))")
    ask("x = gpu.made('cuGraphInstantiateWithFlags', g.value, 0)")
    stand_by(line, second, copies)
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.run('long', m, 8, 1)") == "(0, 0)"
    break_domain(domain)
    assert "a graph with copies" in move(line).text
    # The graph reads the host memory at its launch.
    ask("ctypes.memmove(pinned, at + 4, 64), gpu.sync()")
    launched = "gpu.code('cuGraphLaunch', x, s), gpu.sync(), seen(n)[0]"
    assert ask(launched) == "(0, 0, [1, 2, 0, 0, 4, 5, 0, 0])"
    assert "a graph with copies" in ask.end()


@MODES
@pytest.mark.parametrize(
    ("does", "code", "why"),
    [
        (
            "rows('cuMemcpy2D_v2', (ARRAY, 0, 16), (DEVICE, m, 16), 8, 2)",
            1,
            "a 2D or 3D copy with a CUDA array",
        ),
        (
            "gpu.code('cuMemcpy3D_v2', ctypes.byref(box((DEVICE, m, 16), (ARRAY, 0, 0), 8, 2, 1)))",
            1,
            "a 2D or 3D copy with a CUDA array",
        ),
        (
            "gpu.code('cuMemcpyPeer', m, gpu.context, n, at, 64)",
            201,
            "cuMemcpyPeer between two contexts",
        ),
        (
            "gpu.code('cuMemcpyPeerAsync', m, at, n, gpu.context, 64, s)",
            201,
            "cuMemcpyPeerAsync between two contexts",
        ),
        (
            "rows('cuMemcpy2D_v2', (DEVICE, gpu.variable('table'), 8), (DEVICE, m, 16), 8, 2)",
            0,
            "a copy into a module variable",
        ),
        (
            "gpu.code('cuMemsetD2D8_v2', gpu.variable('table'), 8, 1, 4, 2)",
            0,
            "a copy into a module variable",
        ),
    ],
)
def test_what_cannot_come_along_is_said_and_the_answer_is_the_drivers(
    post: Post, ask: Program, mode: int, does: str, code: int, why: str
) -> None:
    line = post.greet(mode)
    assert ask(START) == "None"
    assert ask(does) == str(code)
    assert line.hear(moving.OPAQUE).text == why
    assert ask.end() == ""


@MODES
def test_rows_of_a_variable_are_not_read_back(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    assert ask(START) == "None"
    assert ask("table = gpu.variable('table'); gpu.put(table, 1, 2, 3, 4); gpu.sync()") == "None"
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text in ("", "mode keep")
    assert ask("rows('cuMemcpy2DAsync_v2', (DEVICE, m, 8), (UNIFIED, table, 8), 4, 2)") == "719"
    assert ask("rows('cuMemcpy2D_v2', (HOST, at, 8), (DEVICE, table, 8), 4, 2)") == "719"
    assert line.hear(moving.OPAQUE).text == "a copy from a module variable"
    assert ask("gpu.sync()") == "0"
    assert "lost in a fail-over" in ask.end()


@EXACT
@pytest.mark.parametrize(
    "does",
    [
        "gpu.code('cuMemsetD2D8Async', m, 512, 1, 512, 1 << 40, s)",
        "rows('cuMemcpy2DAsync_v2', (DEVICE, m, 512), (DEVICE, n, 512), 512, 1 << 40)",
        "gpu.code('cuMemsetD8Async', m, 1, 1 << 50, s)",
    ],
)
def test_what_is_larger_than_all_memory_the_driver_refuses(post: Post, ask: Program, does: str) -> None:
    post.greet(moving.EXACT)
    assert ask(START) == "None"
    assert ask(does) == "1"
    assert ask("gpu.run('add', m, 8, 1, stream=s), gpu.sync(), gpu.word(m)") == "(0, 0, 6)"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("call", ["cuMemcpy2D_v2", "cuMemcpy2DAsync_v2"])
def test_of_rows_that_are_refused_none_is_copied(post: Post, ask: Program, call: str) -> None:
    """A refused copy of rows copies none; the memory behind the allocation belongs to another allocation."""
    post.greet(moving.EXACT)
    assert ask(START) == "None"
    given = "(HOST, ctypes.addressof(into), 2 << 20), (DEVICE, m, 2 << 20), 4096"
    assert ask(f"into[:4] = [9] * 4; refused = rows({call!r}, {given}, 5)") == "None"
    assert ask("refused, into[:4]") == "(1, [9, 9, 9, 9])"
    assert ask(f"rows({call!r}, {given}, 4), into[:4]") == "(0, [5, 5, 5, 5])"
    assert ask.end() == ""
