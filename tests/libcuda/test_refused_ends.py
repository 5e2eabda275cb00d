"""Objects that the driver refuses to destroy stay usable in any instance, and invalidated captures stay
invalid."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.libcuda.test_graphs import MODES
from tests.support import moving
from tests.support.gate import UNLOAD, Gate
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

CAPTURE_UNSUPPORTED, INVALIDATED, INVALID_HANDLE = "900", "901", "400"
# During a capture in mode GLOBAL the driver refuses every unload.
BEGIN = "gpu.code('cuStreamBeginCapture_v2', s, 0)"
END = "gpu.code('cuStreamEndCapture', s, ctypes.byref(graph))"
ADD = "gpu.run('own', m, 8, 1), gpu.sync(), gpu.word(m)"
# Code to create each kind, and code to destroy it.
MODULE = "own = gpu.made('cuModuleLoadData', IMAGE); add = gpu.made('cuModuleGetFunction', own, b'add')"
LIBRARY = """
own = ctypes.c_void_p()
gpu("cuLibraryLoadData", ctypes.byref(own), IMAGE, None, None, 0, None, None, 0)
add = gpu.made("cuKernelGetFunction", gpu.made("cuLibraryGetKernel", own, b"add"))
"""
KINDS = pytest.mark.parametrize(
    ("made", "unload"),
    [(MODULE, "gpu.code('cuModuleUnload', own)"), (LIBRARY, "gpu.code('cuLibraryUnload', own)")],
    ids=["module", "library"],
)


def refuse(ask: Program, unload: str) -> None:
    assert ask(BEGIN) == "0"
    assert ask(unload) == CAPTURE_UNSUPPORTED
    assert ask(END) == INVALIDATED


def begin(ask: Program, made: str) -> None:
    ask("m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', 1); graph = ctypes.c_uint64()")
    assert ask(f"exec({made!r}, globals())") == "None"
    ask("gpu.functions['own'] = add")


def move_on(line: Line, home: Domain, away: Domain, copies: Path, generation: int = 1) -> None:
    stand_by(line, away, copies, generation)
    break_domain(home)
    assert move(line, generation).text == ""


@MODES
@KINDS
def test_what_was_not_unloaded_comes_along(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, mode: int,
    made: str, unload: str,
) -> None:  # fmt: skip
    """A module or library is carried over after refused unloads before, beside and after a standby."""
    line = post.greet(mode)
    begin(ask, made)
    refuse(ask, unload)
    assert ask(ADD) == "(0, 0, 1)"
    stand_by(line, second, copies)
    refuse(ask, unload)
    assert ask(ADD) == "(0, 0, 2)"
    ask("gpu.made('cuEventCreate', 0)")
    break_domain(domain)
    assert move(line).text == ""
    assert ask(ADD) == "(0, 0, 3)"
    refuse(ask, unload)
    assert ask(ADD) == "(0, 0, 4)"
    move_on(line, second, third, copies, 2)
    assert ask(ADD) == "(0, 0, 5)"
    assert ask(unload) == "0"
    assert ask(unload) == INVALID_HANDLE
    assert line.is_silent()
    assert ask.end() == ""


VARIABLE = """
def variable(of):
    address, size = ctypes.c_uint64(), ctypes.c_size_t()
    gpu("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), of, b"table")
    return address.value
"""


@MODES
def test_what_is_in_a_variable_comes_along_where_its_module_was_not_unloaded(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    line = post.greet(mode)
    begin(ask, MODULE + VARIABLE)
    assert ask("gpu.put(variable(own), 1, 2, 3, 4), gpu.sync()") == "(0, 0)"
    refuse(ask, "gpu.code('cuModuleUnload', own)")
    move_on(line, domain, second, copies)
    assert ask("gpu.peek(variable(own), 4)") == "[1, 2, 3, 4]"
    ask.end()


@MODES
def test_what_is_in_a_variable_is_not_lost_with_that_which_was_there_before(
    domain: Domain, second: Domain, gate: Gate, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    """Data in a new variable is kept if it takes the place of a variable that another thread is still
    unloading."""
    line = post.greet(mode)
    begin(ask, MODULE + VARIABLE)
    ask("later = Later(gpu); before = variable(own)")
    assert ask("gpu.put(before, 1, 1, 1, 1), gpu.sync()") == "(0, 0)"
    gate.keep(UNLOAD)
    ask("later.start(\"gpu.code('cuModuleUnload', own)\")")
    until(lambda: gate.kept() == UNLOAD)
    ask("other = gpu.made('cuModuleLoadData', IMAGE)")
    assert ask("variable(other) == before, gpu.put(before, 7, 8, 9, 10)") == "(True, 0)"
    gate.keep(0)
    assert ask("later.result(), gpu.sync()") == "(0, 0)"
    move_on(line, domain, second, copies)
    assert ask("gpu.peek(before, 4)") == "[7, 8, 9, 10]"
    ask.end()


@MODES
@pytest.mark.parametrize("goes_on", [False, True], ids=["ended", "gone on with"])
def test_a_capture_that_is_invalid_is_so_in_the_next_copy(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int, goes_on: bool
) -> None:
    """A capture invalidated before a move is invalid after it, and launches since then are in no graph."""
    line = post.greet(mode)
    ask("m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', 0); graph = ctypes.c_uint64(1); gpu.sync()")
    ask("status = ctypes.c_int()")
    asked = "gpu.code('cuStreamIsCapturing', s, ctypes.byref(status)), status.value"
    stand_by(line, second, copies)
    assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
    assert ask("gpu.run('add', m, 8, 1, stream=s), gpu.run('add', m, 8, 1)") == "(0, 906)"
    assert ask(asked) == "(0, 2)"
    if goes_on:
        assert ask("gpu.run('add', m, 8, 10, stream=s)") == INVALIDATED
    break_domain(domain)
    # In mode `keep` a refused launch counts as submitted, so the program gets an error.
    met = "719" if mode == moving.KEEP else "0"
    assert move(line).text == ("mode keep" if mode == moving.KEEP else "")
    assert ask(asked) == "(0, 2)"
    assert ask("gpu.run('add', m, 8, 10, stream=s)") == INVALIDATED
    assert ask(f"{END}, graph.value") == f"({INVALIDATED}, 0)"
    assert ask(f"gpu.run('add', m, 8, 10, stream=s), {END}, gpu.sync()") == f"(0, 401, {met})"
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 10)"
    assert line.is_silent()
    assert ("mode keep" in ask.end()) is (mode == moving.KEEP)
