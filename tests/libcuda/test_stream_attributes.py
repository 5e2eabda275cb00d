"""Stream attributes are carried over with the stream; queries and calls without lasting effect need no
record."""

from __future__ import annotations

from pathlib import Path

import pytest

from libcuda_build.carry import read_carried
from libcuda_build.compile import FOLDER
from libcuda_build.header import Function, find_include, read_functions
from libcuda_build.table import TableError, read_plan
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_memory import ask as answer
from tests.support import moving
from tests.support.libcudas import Libraries
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "post", "second", "third"]

MODES = pytest.mark.parametrize(
    ("ask", "mode"),
    [({"MPSD_FAILOVER": "exact"}, moving.EXACT), ({}, moving.KEEP)],
    indirect=["ask"],
    ids=["exact", "keep"],
)

# cuda.h: values of CUlaunchAttributeID and CUsynchronizationPolicy.
WINDOW, POLICY, PRIORITY, DOMAIN = 1, 3, 8, 10
AUTO, SPIN, YIELD, BLOCK = 1, 2, 3, 4
START = (
    "import ctypes; m = gpu.memory(8 << 20); gpu.sync();"
    "s = gpu.made('cuStreamCreate', 1); t = gpu.made('cuStreamCreate', 1);"
    "value = (ctypes.c_uint64 * 8)();"
    "setting = lambda stream, what, *words: (ctypes.memset(value, 0, 64), value.__setitem__("
    "slice(0, len(words)), words), gpu.code('cuStreamSetAttribute', stream, what, value))[2];"
    "got = lambda stream, what, words=1: (ctypes.memset(value, 0, 64),"
    " gpu('cuStreamGetAttribute', stream, what, value), list(value[:words]))[2]"
)


def move(line: Line, generation: int) -> None:
    said = line.move(generation, again=1)
    assert said.kind == moving.MOVED and said.text in ("", "mode keep"), said


@MODES
def test_what_is_set_of_a_stream_holds_in_the_next_copy(
    mode: int, domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(mode)
    assert ask(START) == "None"
    assert ask(f"setting(s, {WINDOW}, m, 4096, 1), setting(s, {POLICY}, {SPIN})") == "(0, 0)"
    assert (
        ask(f"setting(s, {POLICY}, {YIELD}), setting(0, {DOMAIN}, 1), setting(t, {DOMAIN}, 1)") == "(0, 0, 0)"
    )
    assert (
        ask("gpu.code('cuStreamCopyAttributes', t, s), gpu.code('cuStreamGetPriority', t, value)") == "(0, 0)"
    )
    # A value that the driver refused is not kept.
    assert (
        ask(f"setting(s, {POLICY}, 77), setting(s, 2, 1), setting(at := 4096, {POLICY}, 2)") == "(1, 1, 400)"
    )
    looked = f"[(got(x, {POLICY}), got(x, {WINDOW}, 3) == [m, 4096, 1], got(x, {DOMAIN})) for x in (s, t, 0)]"
    before = ask(looked)
    assert before == f"[([{YIELD}], True, [0]), ([{YIELD}], True, [0]), ([{AUTO}], False, [1])]"
    stand_by(line, second, copies)
    break_domain(domain)
    move(line, 1)
    assert ask(looked) == before
    # Attributes can be set after the move, and streams destroyed.
    assert ask(f"setting(t, {POLICY}, {BLOCK}), gpu.code('cuStreamCopyAttributes', s, 0)") == "(0, 0)"
    after = ask(looked)
    assert after == f"[([{AUTO}], False, [1]), ([{BLOCK}], True, [0]), ([{AUTO}], False, [1])]"
    assert ask("u = gpu.made('cuStreamCreate', 1)") == "None"
    assert ask(f"setting(u, {PRIORITY}, 2**32 - 3), gpu.code('cuStreamDestroy_v2', u)") == "(0, 0)"
    stand_by(line, third, copies, 2)
    break_domain(second)
    move(line, 2)
    assert ask(looked) == after
    assert ask("gpu.run('add', m, 8, 1, stream=s), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    assert ask.end() == ""


@MODES
def test_a_priority_that_was_set_later_holds_too(
    mode: int, domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(mode)
    assert ask(START) == "None"
    stand_by(line, second, copies)
    assert ask(f"setting(s, {PRIORITY}, 2**32 - 3)") == "0"
    break_domain(domain)
    move(line, 1)
    assert ask("priority = ctypes.c_int(); gpu('cuStreamGetPriority', s, ctypes.byref(priority))") == "None"
    assert ask("priority.value") == "-3"
    assert ask.end() == ""


@MODES
def test_the_profiler_leaves_nothing(
    mode: int, domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(mode)
    assert ask("m = gpu.memory(8 << 20); gpu.sync()") == "None"
    assert ask("gpu.code('cuProfilerStart')") == "0"
    stand_by(line, second, copies)
    break_domain(domain)
    move(line, 1)
    assert (
        ask("gpu.code('cuProfilerStop'), gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 0, 1)"
    )
    assert ask.end() == ""


def test_the_proxy_changes_nothing(libraries: Libraries, post: Post) -> None:
    script = """
codes = [cuda.cuProfilerStart(), cuda.cuStreamSetAttribute(None, 3, bytes(64))]
start()
stream, other, value = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(64)
must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
must(cuda.cuStreamCreate(ctypes.byref(other), 1))
codes += [cuda.cuProfilerStart(), cuda.cuProfilerStop()]
for one in (stream, None, ctypes.c_void_p(1), ctypes.c_void_p(4096)):
    for what in range(20):
        value.raw = bytes([2]) + bytes(63)
        for given in (value, None):
            codes.append(cuda.cuStreamSetAttribute(one, what, given))
            codes.append(cuda.cuStreamGetAttribute(one, what, given))
        codes.append(value.raw[0])
wrong = ctypes.c_void_p(4096)
for one, two in ((other, stream), (stream, None), (other, wrong), (wrong, other)):
    codes += [cuda.cuStreamCopyAttributes(one, two), cuda.cuStreamGetAttribute(other, 3, value), value.raw[0]]
print(json.dumps(codes))
"""
    without = answer(libraries, script, "0")
    assert isinstance(without, list) and set(without) == {0, 1, 2, 3, 400}
    for mode in ("keep", "exact"):
        chosen = {"MPSD_FAILOVER_SOCKET": str(post.path), "MPSD_FAILOVER": mode}
        assert answer(libraries, script, "1", **chosen) == without


def test_what_only_asks_is_given_no_handle_to_keep() -> None:
    """No pass-through query returns a handle, since that would be a driver handle of one instance."""
    functions = read_plan(FOLDER, read_functions(find_include())).functions
    asks = [one.function for one in read_carried(FOLDER / "carry.toml", functions) if one.does == "ask"]
    kinds = (
        "CUcontext *",
        "CUstream *",
        "CUevent *",
        "CUmodule *",
        "CUfunction *",
        "CUlibrary *",
        "CUkernel *",
    )
    assert not {one.name for one in asks for p in one.parameters if p.startswith(kinds)}
    assert {"cuProfilerStart", "cuProfilerStop", "cuStreamGetAttribute"} <= {one.name for one in asks}


def test_a_name_that_takes_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "functions.toml").write_text("")
    (tmp_path / "carry.toml").write_text('ask = ["cuProfilerStart"]\n')
    (tmp_path / "names.txt").write_text("cuProfilerStart()\ncuOther\n")
    plan = read_plan(tmp_path, {})
    assert plan.names == ("cuOther", "cuProfilerStart")
    assert plan.functions["cuProfilerStart"] == Function("cuProfilerStart", ())
    (tmp_path / "names.txt").write_text("cuProfilerStart\n")
    with pytest.raises(TableError, match="does not declare cuProfilerStart"):
        read_plan(tmp_path, {})
