"""Module variables in a move: each driver instance has them at its own addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import move as move_exactly
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "post", "second", "third"]

MODES = pytest.mark.parametrize(
    ("ask", "mode"), [({"MPSD_FAILOVER": "exact"}, moving.EXACT), ({}, moving.KEEP)], indirect=["ask"]
)


@MODES
def test_what_the_host_has_put_there_comes_along(
    mode: int, domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(mode)
    ask("m = gpu.memory(8 << 20); table = gpu.variable('table')")
    assert ask("gpu.put(table, 1, 2, 3, 4)") == "0"
    stand_by(line, second, copies)
    # Write to the standby's variable too, over a part of the data.
    assert ask("[gpu.put(table + 4, 7), gpu.sync()]") == "[0, 0]"
    for home, away, generation in ((domain, third, 1), (second, None, 2)):
        break_domain(home)
        said = line.move(generation, again=1)
        assert (said.kind, said.text) == (moving.MOVED, ""), said
        # The variable keeps its first virtual address.
        assert ask("gpu.variable('table') == table") == "True"
        if away:
            stand_by(line, away, copies, 2)
    assert ask("gpu.peek(table, 4)") == "[1, 7, 3, 4]"
    assert ask("gpu.put(table, 9), gpu.peek(table, 2)") == "(0, [9, 7])"
    assert ask.end() == ""


COPIES = [
    "gpu.code('cuMemcpyDtoD_v2', m, table, 16)",
    "gpu.code('cuMemcpyAsync', m, table, 16, 0)",
    "gpu.code('cuMemcpy', at, table, 16)",
    "gpu.code('cuMemcpyDtoH_v2', at, table, 16)",
    "gpu.code('cuMemcpyDtoHAsync_v2', at, table, 16, 0)",
]


@MODES
@pytest.mark.parametrize("copy", COPIES)
def test_who_reads_one_back_does_not_come_along(
    mode: int, copy: str, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(mode)
    ask("m = gpu.memory(8 << 20); table = gpu.variable('table'); import ctypes")
    ask("out = (ctypes.c_uint32 * 4)(); at = ctypes.addressof(out)")
    assert ask("gpu.put(table, 1, 2, 3, 4)") == "0"
    stand_by(line, second, copies)
    assert ask(f"[{copy}, gpu.sync()]") == "[0, 0]"
    assert (
        ask("list(out) if list(out) != [0] * 4 else [gpu.word(m + 4 * i) for i in range(4)]")
        == "[1, 2, 3, 4]"
    )
    assert line.hear(moving.OPAQUE).text == "a copy from a module variable"


@MODES
@pytest.mark.parametrize("copy", COPIES)
def test_after_a_move_it_is_not_read_back(
    mode: int, copy: str, domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """After a move, the first read of a variable fails, since kernels' writes to it were lost; a module
    loaded since lost nothing."""
    line = post.greet(mode)
    ask("m = gpu.memory(8 << 20); table = gpu.variable('table'); import ctypes")
    ask("at = ctypes.addressof(ctypes.create_string_buffer(16)); gpu.sync()")
    stand_by(line, second, copies)
    break_domain(domain)
    assert line.move(1, again=1).kind == moving.MOVED
    assert ask(f"[{copy}, gpu.sync()]") == "[719, 0]"
    assert ask("gpu.put(table, 7), gpu.peek(table, 1)") == "(0, [7])"
    ask("gpu.module = gpu.made('cuModuleLoadData', IMAGE); late = gpu.variable('table')")
    assert ask("gpu.put(late, 5), gpu.word(late)") == "(0, 5)"
    assert "lost in a fail-over" in ask.end()


@MODES
@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("gpu.code('cuMemsetD8_v2', table, 1, 4)", "a copy into a module variable"),
        ("gpu.code('cuMemcpyDtoD_v2', table + 8, m, 4)", "a copy into a module variable"),
        ("gpu.put(table + 12, 1, 2)", "a copy into a module variable"),
    ],
)
def test_what_else_is_put_there_does_not(
    mode: int, does: str, why: str, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(mode)
    ask("m = gpu.memory(8 << 20); table = gpu.variable('table')")
    stand_by(line, second, copies)
    assert ask(does) in ("0", "1")
    assert line.hear(moving.OPAQUE).text == why


def test_a_kernel_that_is_given_one_may_write_there(post: Post, ask: Program) -> None:
    """Before a move, mode `keep` does not inspect kernels' parameters for variables."""
    line = post.greet()
    ask("m = gpu.memory(8 << 20); table = gpu.variable('table')")
    assert (
        ask("[gpu.run('add', m, 4, 1), gpu.run('add', table, 4, 1), gpu.sync(), gpu.word(table)]")
        == "[0, 0, 0, 1]"
    )
    del line


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)
@pytest.mark.parametrize("before", [0, 3])
def test_in_exact_it_is_seen(post: Post, ask: Program, before: int) -> None:
    """A variable passed to a kernel is noticed in mode `exact`, even for a known kernel with all buffers
    saved."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); table = gpu.variable('table')")
    assert ask(f"[gpu.run('add', m, 2, 1) for _ in range({before})]") == str([0] * before)
    assert line.is_silent()
    assert ask("[gpu.run('add', table + 4, 2, 1), gpu.sync(), gpu.word(table + 4)]") == "[0, 0, 1]"
    assert line.hear(moving.OPAQUE).text == "a kernel with a module variable as parameter"


OTHER = r"b'standin module\nkernel all add_to_all 0\nglobal own 16\n'"
LARGE = f"""image = {OTHER}
other = gpu.made("cuModuleLoadData", image); function = gpu.made("cuModuleGetFunction", other, b"all")
def give(address):
    given = (ctypes.c_uint64 * 12)(m, *[0] * 10, address)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(given))
    return gpu.code("cuLaunchKernel", function, *[1] * 6, 0, 0, pointers, None)
"""


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)
def test_what_is_left_in_a_large_parameter_is_no_other_modules_variable(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Left-over bytes in a large parameter are no variable of another module; they may be one of the
    kernel's own module."""
    line = post.greet(moving.EXACT)
    assert ask(f"exec({LARGE!r}, globals())") == "None"
    ask("m = gpu.memory(8 << 20); table = gpu.variable('table')")
    ask("own = gpu.made('cuModuleGetGlobal_v2', ctypes.byref(ctypes.c_size_t()), other, b'own')")
    stand_by(line, second, copies)
    assert ask("[give(table), give(table + 1), gpu.sync(), gpu.word(m)]") == "[0, 0, 0, 2]"
    assert line.is_silent()
    assert ask("give(0)") == "0"
    break_domain(domain)
    assert move_exactly(line).text == ""
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 3]"
    assert ask("[give(own + 4), gpu.sync()]") == "[0, 0]"
    assert line.hear(moving.OPAQUE).text == "a kernel with a module variable as parameter"


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)
def test_after_a_move_in_exact_a_kernel_that_is_known_finds_it(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); table = gpu.variable('table')")
    assert ask("[gpu.put(table, 5), gpu.run('add', m, 1, 1), gpu.sync()]") == "[0, 0, 0]"
    stand_by(line, second, copies)
    break_domain(domain)
    assert line.move(1).kind == moving.MOVED
    assert ask("[gpu.run('add', m, 1, 1) for _ in range(3)]") == "[0, 0, 0]"
    assert ask("[gpu.run('add', table, 1, 1), gpu.sync(), gpu.peek(table, 1)]") == "[0, 0, [6]]"
    assert ask("gpu.word(m)") == "4"


def test_after_a_move_a_kernel_finds_it(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask("m = gpu.memory(8 << 20); table = gpu.variable('table')")
    assert ask("[gpu.put(table, 5), gpu.sync()]") == "[0, 0]"
    stand_by(line, second, copies)
    break_domain(domain)
    assert line.move(1).kind == moving.MOVED
    assert ask("[gpu.run('add', table, 1, 1), gpu.sync(), gpu.peek(table, 1)]") == "[0, 0, [6]]"
    assert line.hear(moving.OPAQUE).text == "a kernel with a module variable as parameter"
