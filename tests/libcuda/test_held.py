"""Calls of the program while the standby creates a shadow object, which may take long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, is_ready, offer, post
from tests.libcuda.test_overtaken import next_gate
from tests.support import moving
from tests.support.gate import LIMIT, MODULE, WRITE, Gate
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "next_gate", "post", "second"]

pytestmark = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)


def begin_standby(line: Line, at: Domain, copies: Path, gate: Gate, call: int) -> None:
    """Start a standby and hold its thread in this driver call."""
    gate.keep(call)
    offer(line, at, copies)
    until(lambda: gate.kept() == call)


def end_standby(line: Line, gate: Gate) -> None:
    gate.keep(0)
    is_ready(line)


def test_the_program_makes_and_ends_other_things_meanwhile(
    domain: Domain, second: Domain, next_gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); gpu.sync()")
    begin_standby(line, second, copies, next_gate, MODULE)
    ask("s = gpu.stream(); e = gpu.made('cuEventCreate', 0); add = gpu.functions['add']")
    assert ask("gpu.made('cuModuleGetFunction', gpu.module, b'add') == add") == "True"
    assert ask("gpu.code('cuStreamDestroy_v2', gpu.stream()), gpu.code('cuCtxSetLimit', 0, 4096)") == "(0, 0)"
    assert ask("gpu.run('add', m, 8, 1, stream=s), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    end_standby(line, next_gate)
    break_domain(domain)
    move(line)
    assert ask("gpu.run('add', m, 8, 1, stream=s), gpu.sync(), gpu.word(m)") == "(0, 0, 2)"
    assert ask("gpu.timed(e)") == "0"
    assert ask.end() == ""


def test_what_has_a_twin_ends_in_both_while_another_one_is_made(
    domain: Domain, second: Domain, next_gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); ended = gpu.stream(); gpu.sync()")
    offer(line, second, copies)
    is_ready(line)
    next_gate.keep(MODULE)
    ask("more = gpu.made('cuModuleLoadData', IMAGE)")
    until(lambda: next_gate.kept() == MODULE)
    assert ask("gpu.code('cuStreamDestroy_v2', ended)") == "0"
    next_gate.keep(0)
    break_domain(domain)
    move(line)
    assert ask("gpu.code('cuStreamDestroy_v2', ended), gpu.code('cuModuleUnload', more)") == "(400, 0)"
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    assert ask.end() == ""


def test_who_waits_for_a_twin_goes_on_in_the_next_copy_where_a_move_comes_first(
    second: Domain, next_gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); gpu.sync(); later = Later(gpu)")
    begin_standby(line, second, copies, next_gate, MODULE)
    ask("later.start(\"gpu.code('cuModuleUnload', gpu.module)\")")
    assert ask("later.comes_back()") == "False"
    line.say(moving.MOVE, 1)
    next_gate.keep(0)
    is_ready(line)
    said = line.hear(moving.MOVED, moving.STAYED)
    assert (said.kind, said.text) == (moving.MOVED, "")
    assert ask("later.result(), gpu.sync(), gpu.word(m)") == "(0, 0, 0)"
    assert ask("gpu.code('cuModuleUnload', gpu.module)") == "400"
    assert ask.end() == ""


def test_its_end_waits_for_its_twin(
    domain: Domain, second: Domain, next_gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); gpu.sync(); later = Later(gpu)")
    begin_standby(line, second, copies, next_gate, MODULE)
    ask("later.start(\"gpu.code('cuModuleUnload', gpu.module)\")")
    assert ask("later.comes_back(), gpu.code('cuStreamDestroy_v2', gpu.stream())") == "(False, 0)"
    end_standby(line, next_gate)
    assert ask("later.result()") == "0"
    break_domain(domain)
    move(line)
    assert ask("gpu.sync(), gpu.word(m), gpu.code('cuModuleUnload', gpu.module)") == "(0, 0, 400)"
    assert ask.end() == ""


def test_a_setting_that_is_replaced_meanwhile_is_the_last_one_there(
    domain: Domain, second: Domain, next_gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("gpu.sync(); later = Later(gpu)")
    assert ask("gpu.code('cuCtxSetLimit', 0, 4096)") == "0"
    begin_standby(line, second, copies, next_gate, LIMIT)
    ask("later.start(\"gpu.code('cuCtxSetLimit', 0, 8192)\")")
    assert ask("later.comes_back(), gpu.code('cuStreamDestroy_v2', gpu.stream())") == "(False, 0)"
    end_standby(line, next_gate)
    assert ask("later.result()") == "0"
    break_domain(domain)
    move(line)
    assert ask("gpu.made('cuCtxGetLimit', 0)") == "8192"
    assert ask.end() == ""


def test_a_variable_that_is_written_meanwhile_is_filled_again(
    domain: Domain, second: Domain, next_gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); table = gpu.variable('table')")
    assert ask("gpu.put(table, 1, 2, 3, 4), gpu.sync()") == "(0, 0)"
    # Data that the host wrote is being copied into the standby's variable.
    begin_standby(line, second, copies, next_gate, WRITE)
    assert ask("gpu.put(table + 4, 7), gpu.sync()") == "(0, 0)"
    end_standby(line, next_gate)
    break_domain(domain)
    move(line)
    assert ask("gpu.peek(table, 4)") == "[1, 7, 3, 4]"
    assert ask.end() == ""
