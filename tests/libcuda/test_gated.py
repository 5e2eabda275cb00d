"""The replay is submitted to the new context while the old one is still being cut off, and begins after
that.

Writes of the old context until then are rolled back with the rest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate, next_gate
from tests.libcuda.test_failover import Program, ask, break_domain, copies, offer, post
from tests.libcuda.test_fence import at_work, is_held, line
from tests.libcuda.test_still import COPY, Run, known, reads, run, second_gate, validations
from tests.support import moving
from tests.support.gate import ANY, COPIED, MANAGER, NO_CUT, NO_UNMAP, UNMAP, Gate
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "known", "line", "next_gate", "post", "reads"]
__all__ += ["run", "second", "second_gate", "third", "validations"]

MANY = 1000
"""Operations that the gate of the next instance allows: more than there are."""
A_WHILE_S = 0.1
STILL_WRITES = "the old context may still write"


def giving(line: Line, gate: Gate, next_gate: Gate, keep: int = UNMAP) -> None:
    """Hold the move where it submits the saved data to the new driver instance while the old one is cut
    off."""
    next_gate.let(MANY)
    next_gate.keep(COPIED)
    gate.keep(keep)
    line.say(moving.MOVE, 1, again=1)
    until(lambda: gate.kept() == UNMAP)
    until(lambda: next_gate.kept() == COPIED)


def given(line: Line, gate: Gate, next_gate: Gate, ask: Program, keep: int = UNMAP) -> None:
    """Submit the whole replay to the new instance, while the cut of the old, healthy one is held.

    m was 4. Two kernels are to add 1 to it; neither has begun in either instance.
    """
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    giving(line, gate, next_gate, keep)
    next_gate.keep(0)
    ask.tell("[gpu.sync(), gpu.word(m)]")
    assert is_held(ask)
    assert line.is_silent()
    # The one operation is the wait for the fence.
    assert begun_in_it(next_gate) == 1


def goes_on(gate: Gate) -> None:
    """The old context has executed one of the two kernels and is executing the other."""
    gate.let(2)
    until(lambda: gate.left() == 0)


def begun_in_it(next_gate: Gate) -> int:
    return MANY - next_gate.left()


def but_for_errors(line: Line, kind: int) -> None:
    """Expect this message; the program may report its own error at any time after the second fault."""
    while line.hear(kind, moving.OWN_ERROR).kind != kind:
        pass


@EXACT
@pytest.mark.parametrize("end", ["cut off", "the daemon's word", "unmapped"])
def test_it_begins_when_the_old_context_writes_no_more(
    gate: Gate, next_gate: Gate, ask: Program, line: Line, end: str
) -> None:
    given(line, gate, next_gate, ask, UNMAP | NO_CUT * (end == "unmapped"))
    if end == "the daemon's word":
        # The daemon says that all kernels of the old domain have ended.
        line.say(moving.FENCED, 1)
    else:
        goes_on(gate)
        gate.keep(NO_CUT if end == "unmapped" else 0)
    assert line.hear(moving.MOVED).values[3:5] == (8 << 20, 2)
    assert ask.answer() == "[0, 6]"
    gate.keep(0)
    assert ask("[gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]") == "[0, 0, 7]"
    assert line.unsure == []
    assert ask.end() == ""


@EXACT
def test_another_fault_meanwhile_is_one_like_any(
    gate: Gate,
    next_gate: Gate,
    second: Domain,
    third: Domain,
    ask: Program,
    copies: Path,
    line: Line,
) -> None:
    given(line, gate, next_gate, ask)
    break_domain(second)
    goes_on(gate)
    gate.keep(0)
    but_for_errors(line, moving.MOVED)
    offer(line, third, copies, 2)
    but_for_errors(line, moving.READY)
    assert line.move(2, again=1).text == ""
    assert ask.answer() == "[0, 6]"
    assert ask.end() == ""


DOES = {
    "a save": "0",
    "a function of the host": "gpu.host(3)",
    "a copy from the host": "gpu.code('cuMemcpyHtoDAsync_v2', m + 4096, p, 4096, None)",
    "a copy to the host": "gpu.code('cuMemcpyDtoHAsync_v2', p, m, 4096, None)",
    "a capture": "gpu.code('cuStreamBeginCapture_v2', s, 2)",
    "a wait for a turn": "0",
    "at once": "0",
}
"""By case: the program's call while the kernel is in flight."""


def is_not_given(line: Line, gate: Gate, next_gate: Gate, again: int = 1) -> None:
    """Nothing is submitted to the new instance while the cut of the old one is held; then the program
    moves."""
    next_gate.let(MANY)
    gate.keep(UNMAP)
    line.say(moving.MOVE, 1, again=again)
    until(lambda: gate.kept() == UNMAP)
    assert line.is_silent(A_WHILE_S)
    assert begun_in_it(next_gate) == 0
    gate.keep(0)
    assert line.hear(moving.MOVED).text == ""


@EXACT
@pytest.mark.parametrize("does", DOES)
def test_what_would_not_be_right_so_is_given_behind_the_fence(
    gate: Gate, next_gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, does: str
) -> None:
    """Work is submitted only after the fence if an earlier submission could be wrong.

    Cases: a snapshot that may be incomplete, a host callback that may still run, a copy engine that may
    still copy, a capture that a wait would end, and a replay that does not start at once.
    """
    line = post.greet(moving.EXACT)
    assert ask("p = gpu.made('cuMemHostAlloc', 4096, 0); s = gpu.stream()") == "None"
    at_work(line, gate, second, ask, copies, saved=does != "a save")
    assert ask(DOES[does]) == "0"
    is_not_given(line, gate, next_gate, {"a wait for a turn": 2, "at once": 3}.get(does, 1))
    if does == "a wait for a turn":
        line.say(moving.TURN, 1)
    if does == "a capture":
        assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(ctypes.c_void_p()))") == "0"
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 5]"
    assert ask.end() == ""


def test_so_is_what_was_not_saved_for_nothing_had_written_it(run: Run, gate: Gate, second_gate: Gate) -> None:
    """Work on a buffer that was not saved, since nothing writes it, is submitted after the fence, where
    that is checked."""
    run.rest()
    gate.let(0)
    assert run.ask(COPY) == "0"
    # The buffer that is written is saved.
    gate.let(1)
    until(lambda: gate.left() == 0)
    is_not_given(run.line, gate, second_gate)
    assert run.ask("[gpu.sync(), gpu.word(to)]") == "[0, 7]"
    assert run.ask.end() == ""


@EXACT
def test_what_is_not_done_again_is_left_behind_the_fence_alone(gate: Gate, ask: Program, line: Line) -> None:
    """Work that cannot be replayed only leaves the old context behind the fence; without a fence the
    program stays and loses nothing."""
    assert ask("p = gpu.made('cuMemHostAlloc', 4096, 0); ctypes.memset(p, 0, 4096)") == "None"
    assert ask("gpu.run('add', p, 8, 1)") == "0"
    gate.keep(NO_CUT | NO_UNMAP)
    line.say(moving.MOVE, 1, again=1)
    assert line.hear(moving.MOVED, moving.STAYED).kind == moving.STAYED
    gate.keep(0)
    gate.let(ANY)
    assert ask("[gpu.sync(), gpu.word(m), ctypes.c_uint32.from_address(p).value]") == "[0, 5, 1]"
    assert line.why_unsure().startswith("a kernel that may write pinned host memory: ")
    assert ask.end() == ""


@EXACT
def test_where_the_old_context_may_write_on_no_wait_succeeds_any_more(
    gate: Gate, next_gate: Gate, ask: Program, line: Line
) -> None:
    """No wait succeeds any more if the old context may still write, since later results would be
    uncertain."""
    given(line, gate, next_gate, ask, UNMAP | NO_CUT | NO_UNMAP)
    gate.keep(NO_CUT | NO_UNMAP)
    assert line.hear(moving.MOVED).text == STILL_WRITES
    assert ask.answer() == "cuMemcpyDtoH_v2: 719"
    assert ask("[gpu.run('fill', m, 8, 3), gpu.sync(), gpu.sync()]") == "[0, 719, 719]"
    gate.keep(0)
    assert STILL_WRITES in ask.end()


@EXACT
def test_the_daemons_word_is_heard_while_work_is_still_given(
    gate: Gate, next_gate: Gate, ask: Program, line: Line
) -> None:
    giving(line, gate, next_gate)
    line.say(moving.FENCED, 1)
    until(line.is_read)
    # The work submitted by then begins.
    until(lambda: begun_in_it(next_gate) > 1)
    assert (gate.kept(), next_gate.kept()) == (UNMAP, COPIED)
    next_gate.keep(0)
    assert line.hear(moving.MOVED).values[3:5] == (8 << 20, 1)
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 5]"
    gate.keep(0)
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("refused", [False, True], ids=["goes on", "is refused"])
def test_so_it_is_while_the_driver_unmaps_whatever_comes_of_that(
    gate: Gate, next_gate: Gate, ask: Program, line: Line, refused: bool
) -> None:
    giving(line, gate, next_gate, UNMAP | NO_CUT)
    line.say(moving.FENCED, 1)
    if refused:
        gate.keep(NO_CUT | NO_UNMAP)
    else:
        # This segment is unmapped, the next one is not.
        gate.keep(NO_CUT | MANAGER)
        until(lambda: gate.kept() == MANAGER)
        gate.keep(NO_CUT | UNMAP)
        until(lambda: gate.kept() == UNMAP)
    until(lambda: begun_in_it(next_gate) > 1)
    assert next_gate.kept() == COPIED
    next_gate.keep(0)
    assert line.hear(moving.MOVED).text == ""
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 5]"
    gate.keep(0)
    assert ask.end() == ""


@EXACT
def test_what_else_it_says_is_obeyed_after_the_move(
    gate: Gate, next_gate: Gate, ask: Program, line: Line
) -> None:
    """Other commands are obeyed after the move, and a fence command after them comes too late."""
    giving(line, gate, next_gate)
    line.say(moving.STAND_DOWN, 7)
    line.say(moving.FENCED, 1)
    next_gate.keep(0)
    assert line.is_silent(A_WHILE_S)
    assert begun_in_it(next_gate) == 1
    assert not line.is_read()
    gate.keep(0)
    assert line.hear(moving.MOVED).text == ""
    until(line.is_read)
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 5]"
    assert ask.end() == ""


NO_MORE_FILES = "free = os.dup(0); os.close(free); resource.setrlimit(7, (free, resource.getrlimit(7)[1]))"


@EXACT
def test_where_nobody_can_be_left_at_it_and_it_cannot_be_ended_the_program_stays_as_it_was(
    gate: Gate, ask: Program, line: Line
) -> None:
    assert ask(f"import os, resource; {NO_MORE_FILES}") == "None"
    gate.keep(NO_CUT | NO_UNMAP)
    line.say(moving.MOVE, 1, again=1)
    assert line.hear(moving.STAYED).text == STILL_WRITES
    gate.keep(0)
    gate.let(ANY)
    ask.tell("[gpu.sync(), gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]")
    until(lambda: not is_held(ask))
    assert ask.answer() == "[0, 0, 0, 6]"
    assert ask.end() == ""


@EXACT
def test_what_keeps_who_cuts_it_off_keeps_nothing_else(
    gate: Gate, next_gate: Gate, ask: Program, line: Line
) -> None:
    given(line, gate, next_gate, ask)
    gate.keep(MANAGER)
    assert line.hear(moving.MOVED).values[4] == 2
    assert ask.answer() == "[0, 6]"
    gate.keep(0)
    assert ask.end() == ""


@EXACT
def test_a_program_ends_meanwhile(gate: Gate, next_gate: Gate, ask: Program, line: Line) -> None:
    next_gate.keep(COPIED)
    gate.keep(UNMAP)
    line.say(moving.MOVE, 1, again=1)
    until(lambda: next_gate.kept() == COPIED)
    next_gate.keep(0)
    assert ask.end() == ""
