"""A move skips waiting for the unmapping in the old context if something proves earlier that the context
cannot write any more.

Proofs: nothing is in flight, the old context's path to the memory is cut off, or the daemon says so.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate, next_gate
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.gate import COPIED, MANAGER, NO_CUT, NO_ROOM_CUT, ROOM, UNMAP, Gate
from tests.support.libcudas import run, standalone
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "next_gate", "post", "second", "third"]

A_WHILE_S = 0.1
SEVERAL = pytest.mark.parametrize(
    "ask",
    [{"MPSD_FAILOVER": "exact"}, {"MPSD_FAILOVER": "exact", "cutters": "8"}],
    indirect=True,
    ids=["usual", "several"],
)
"""Number of threads that cut off an instance from the beginning; by default one for each CPU."""
ROOM_S = 2.1
"""Longer [s] than a program waits for its snapshot buffer."""


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_who_waits_leaves_processors_to_others_and_keeps_a_word_that_it_cannot_use_yet(
    tmp_path: Path, sanitize: str
) -> None:
    """A waiting thread yields its CPU and keeps a command that it cannot use yet. The test program stands
    in for the driver and the GPU."""
    sources = [f"failover/{name}.c" for name in ("fence", "unmapping", "spins", "undoroom")]
    needs = [f"-DMPSD_{name}=0" for name in ("cuMemUnmap", "cuMemRelease")]
    wraps = "-Wl,--wrap=sched_getaffinity,--wrap=mpsd_fence_rest"
    program = standalone(
        tmp_path,
        "fence",
        [*sources, "clock.c", "thread.c"],
        "-DMPSD_CARRIED=1",
        *needs,
        wraps,
        sanitize=sanitize,
    )
    done = run([program], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def moving_out(line: Line, gate: Gate, domain: Domain, second: Domain, ask: Program, copies: Path) -> None:
    """Start a move of a program with completed work and with work in flight."""
    at_work(line, gate, second, ask, copies)
    lose(line, gate, domain)


def at_work(
    line: Line, gate: Gate, second: Domain, ask: Program, copies: Path, *, saved: bool = False
) -> None:
    """Put a kernel in flight that does not begin. `saved`: the buffer that it may write is saved."""
    assert ask("m = gpu.memory(8 << 20); n = gpu.memory(600)") == "None"
    stand_by(line, second, copies)
    assert ask("[gpu.run('add', m, 8, 4), gpu.sync()]") == "[0, 0]"
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    if saved:
        # The kernel that saves the buffer marks its own completion.
        gate.let(1)
        until(gate.is_done)


def lose(line: Line, gate: Gate, domain: Domain, keep: int = UNMAP) -> None:
    """Make the domain fault, send the move command and hold the program where it unmaps its memory."""
    gate.keep(keep)
    break_domain(domain)
    line.say(moving.MOVE, 1, again=1)
    unmapping(gate)


def unmapping(gate: Gate) -> None:
    until(lambda: gate.kept() == UNMAP)


@EXACT
def test_the_daemons_word_is_a_fence(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    moving_out(line, gate, domain, second, ask, copies)
    line.say(moving.FENCED, 1)
    assert line.hear(moving.MOVED).generation == 1
    assert ask("[gpu.sync(), gpu.word(m), gpu.run('add', m, 8, 1), gpu.sync()]") == "[0, 5, 0, 0]"
    assert ask("gpu.word(m)") == "6"
    # Memory freed and allocated meanwhile belongs to the new driver instance.
    assert ask("[gpu.code('cuMemFree_v2', m), (k := gpu.memory(8 << 20)) > 0]") == "[0, True]"
    gate.keep(0)
    assert ask("[gpu.run('fill', k, 8, 3), gpu.sync(), gpu.word(k)]") == "[0, 0, 3]"
    assert ask.end() == ""


@EXACT
def test_a_program_ends_while_its_old_copy_unmaps(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    moving_out(line, gate, domain, second, ask, copies)
    line.say(moving.FENCED, 1)
    line.hear(moving.MOVED)
    assert ask.end() == ""


FROM_HOST = "[gpu.code('cuMemcpyHtoDAsync_v2', m, p, 4096, None)]"
TO_HOST = (
    "[gpu.code('cuMemsetD8Async', m, 7, 4096, None), gpu.code('cuMemcpyDtoHAsync_v2', p, m, 4096, None)]"
)
# More than 4 GiB in total.
WITHIN = "[gpu.code('cuMemsetD8Async', m, 7, 8 << 20, None) for _ in range(520)]"


@EXACT
@pytest.mark.parametrize(
    "does", [FROM_HOST, TO_HOST, WITHIN], ids=["from the host", "to the host", "much within the GPU"]
)
def test_it_is_no_fence_for_copies(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, does: str
) -> None:
    """The end of the kernels is no fence for copies, which a copy engine may still execute."""
    line = post.greet(moving.EXACT)
    assert ask("m = gpu.memory(8 << 20)") == "None"
    assert ask("p = gpu.made('cuMemHostAlloc', 4096, 0); ctypes.memset(p, 7, 4096)") == "None"
    stand_by(line, second, copies)
    gate.let(0)
    assert ask(f"set({does})") == "{0}"
    lose(line, gate, domain)
    line.say(moving.FENCED, 1)
    assert line.is_silent()
    gate.keep(0)
    assert line.hear(moving.MOVED).generation == 1
    assert ask("[gpu.sync(), gpu.word(m)]") == f"[0, {0x07070707}]"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize(
    ("does", "lets", "word"),
    # The snapshot and its completion mark; the copy and its completion mark.
    [(FROM_HOST, 4, 0x07070708), ("[gpu.code('cuMemcpyAsync', m, n, 4096, None)]", 0, 1)],
    ids=["a copy from the host that has ended", "a copy that does not say that it is within the GPU"],
)
def test_it_is_a_fence_beside_other_copies(
    domain: Domain,
    gate: Gate,
    second: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    does: str,
    lets: int,
    word: int,
) -> None:
    line = post.greet(moving.EXACT)
    assert ask("m = gpu.memory(8 << 20); n = gpu.memory(8 << 20)") == "None"
    assert ask("p = gpu.made('cuMemHostAlloc', 4096, 0); ctypes.memset(p, 7, 4096)") == "None"
    stand_by(line, second, copies)
    assert ask("gpu.sync()") == "0"
    gate.let(0)
    assert ask(f"set({does})") == "{0}"
    gate.let(lets)
    until(lambda: gate.left() == 0)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    lose(line, gate, domain)
    line.say(moving.FENCED, 1)
    assert line.hear(moving.MOVED).generation == 1
    assert ask("[gpu.sync(), gpu.word(m)]") == f"[0, {word}]"
    gate.keep(0)
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("first", [(moving.FENCED, 7), (moving.STAND_DOWN, 7)])
def test_other_words_are_no_fence(
    domain: Domain,
    gate: Gate,
    second: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    first: tuple[int, int],
) -> None:
    line = post.greet(moving.EXACT)
    moving_out(line, gate, domain, second, ask, copies)
    line.say(*first)
    line.say(moving.FENCED, 1)
    assert line.is_silent()
    gate.keep(0)
    assert line.hear(moving.MOVED).generation == 1
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 5]"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("keep", [UNMAP, UNMAP | NO_CUT], ids=["to be cut off", "to be unmapped"])
def test_without_such_a_word_the_end_is_waited_for(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, keep: int
) -> None:
    line = post.greet(moving.EXACT)
    at_work(line, gate, second, ask, copies)
    lose(line, gate, domain, keep)
    assert line.is_silent()
    gate.keep(keep & ~UNMAP)
    assert line.hear(moving.MOVED).values[4] == 1
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 5]"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("pieces", [1, 40])
def test_what_is_cut_off_need_not_be_unmapped(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, pieces: int
) -> None:
    """Memory that is cut off need not be unmapped: the program has moved while the resource manager still
    blocks."""
    line = post.greet(moving.EXACT)
    assert ask(f"held = [gpu.memory(2 << 20) for _ in range({pieces})]") == "None"
    at_work(line, gate, second, ask, copies)
    gate.keep(MANAGER)
    break_domain(domain)
    line.say(moving.MOVE, 1, again=1)
    assert line.hear(moving.MOVED).values[4] == 1
    assert ask("[gpu.sync(), gpu.word(m), {gpu.word(one) for one in held}]") == "[0, 5, {0}]"
    assert ask("[gpu.code('cuMemFree_v2', held.pop()), (k := gpu.memory(2 << 20)) > 0]") == "[0, True]"
    gate.keep(0)
    assert ask("[gpu.run('fill', k, 8, 3), gpu.sync(), gpu.word(k)]") == "[0, 0, 3]"
    assert ask.end() == ""


@pytest.fixture
def line(gate: Gate, second: Domain, post: Post, ask: Program, copies: Path) -> Line:
    """Return the connection of a program with a kernel in flight and a snapshot of the buffer that it may
    write."""
    made = post.greet(moving.EXACT)
    at_work(made, gate, second, ask, copies, saved=True)
    return made


def leave_room_open(line: Line, gate: Gate, domain: Domain, again: int = 1) -> None:
    """Start a move and hold the program where it cuts off its snapshot buffer."""
    gate.keep(ROOM)
    break_domain(domain)
    line.say(moving.MOVE, 1, again=again)
    until(lambda: gate.kept() == ROOM)


def room_is_open(line: Line, gate: Gate, next_gate: Gate, domain: Domain, again: int = 1) -> None:
    """Cut off all memory but the snapshot buffer; the replay, if any, has executed with its completion
    marks."""
    before = 1000
    next_gate.let(before)
    leave_room_open(line, gate, domain, again)
    if again == 1:
        until(lambda: next_gate.left() <= before - 3)


def is_held(ask: Program) -> bool:
    """Return whether the program does not execute a command for a while."""
    assert ask.process.stdout is not None
    return not select.select([ask.process.stdout], [], [], A_WHILE_S)[0]


def saves_when_room_is_cut_off(ask: Program, gate: Gate, line: Line) -> None:
    """The program takes the next snapshot only after the snapshot buffer is cut off, and reports nothing
    else."""
    ask.tell(ONE_MORE)
    assert is_held(ask)
    gate.keep(0)
    assert ask.answer() == "[0, 0, 0, 6]"
    assert line.unsure == []
    assert ask.end() == ""


ONE_MORE = "[gpu.sync(), gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]"
"""Each launch is in its own epoch, so that the buffer is saved before it."""


@SEVERAL
def test_a_program_goes_on_while_room_for_copies_is_cut_off_and_saves_nothing_new_before(
    domain: Domain, gate: Gate, next_gate: Gate, ask: Program, line: Line
) -> None:
    room_is_open(line, gate, next_gate, domain)
    assert line.hear(moving.MOVED).values[3:5] == (8 << 20, 1)
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 5]"
    saves_when_room_is_cut_off(ask, gate, line)


@SEVERAL
def test_room_that_is_being_copied_into_is_cut_off_before_anything_is_copied_there_again(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    at_work(line, gate, second, ask, copies)
    leave_room_open(line, gate, domain)
    ask.tell("[gpu.sync(), gpu.word(m)]")
    assert is_held(ask)
    assert line.is_silent()
    gate.keep(0)
    assert ask.answer() == "[0, 5]"
    assert line.hear(moving.MOVED).values[3:5] == (0, 1)
    assert ask(ONE_MORE) == "[0, 0, 0, 6]"
    assert line.unsure == []
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("again", [1, 3])
def test_so_is_what_was_about_to_be_copied_into_when_the_others_were_begun(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, again: int
) -> None:
    """The same holds for a large buffer that the driver was about to copy into when the fence began."""
    line = post.greet(moving.EXACT)
    assert ask("w = gpu.memory(40 << 20); later = Later(gpu)") == "None"
    at_work(line, gate, second, ask, copies, saved=True)
    gate.keep(COPIED)
    ask("later.start(\"gpu.run('fill', w, 8, 7)\")")
    until(lambda: gate.kept() == COPIED)
    gate.keep(COPIED | UNMAP)
    line.say(moving.MOVE, 1, again=again)
    until(lambda: gate.kept() == UNMAP)
    # The driver of the old instance still accepts this copy, but no kernel, since a move is ahead.
    gate.keep(UNMAP)
    ask.tell("later.result()")
    assert again == 1 or ask.answer() == "0"
    gate.keep(ROOM)
    until(lambda: gate.kept() == ROOM)
    ask.tell("[gpu.sync(), gpu.word(m), gpu.word(w)]")
    assert again == 3 or line.hear(moving.MOVED).values[4] == 1
    assert is_held(ask)
    gate.keep(0)
    assert again == 3 or ask.answer() == "0"
    assert ask.answer() == "[0, 5, 7]"
    assert again == 1 or line.hear(moving.MOVED).values[4] == 2
    assert line.unsure == []
    assert ask.end() == ""


WITHOUT_ZONES = {"MPSD_FAILOVER": "exact", "zone_bytes": "0", "snapshot_mib": "96"}


@pytest.mark.parametrize("ask", [WITHOUT_ZONES], indirect=True)
@pytest.mark.parametrize("before", range(4))
def test_so_it_is_behind_other_room(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, before: int
) -> None:
    """The same holds for a snapshot buffer behind a second buffer: of two separate chunks the later lies
    first."""
    line = post.greet(moving.EXACT)
    some = f"some = [gpu.made('cuMemAlloc_v2', 2 << 20) for _ in range({before})]"
    assert ask(f"{some}; m, hole = [gpu.made('cuMemAlloc_v2', mib << 20) for mib in (8, 32)]") == "None"
    assert ask("[gpu.run('fill', m, 8, 4), gpu.sync(), gpu.code('cuMemFree_v2', hole)]") == "[0, 0, 0]"
    assert ask("large = [gpu.made('cuMemAlloc_v2', 40 << 20) for _ in range(2)]; gpu.sync()") == "None"
    assert ask("[{gpu.run('add', one, 8, 1) for one in large}, gpu.sync()]") == "[{0}, 0]"
    assert ask("last = gpu.memory(32 << 20)") == "None"
    stand_by(line, second, copies)
    assert ask("gpu.sync()") == "0"
    gate.let(0)
    assert ask("gpu.code('cuMemsetD8Async', m, 5, 4096, None)") == "0"
    leave_room_open(line, gate, domain)
    ask.tell("[gpu.sync(), gpu.word(m)]")
    assert is_held(ask)
    gate.keep(0)
    assert ask.answer() == f"[0, {0x05050505}]"
    assert ask.end() == ""


@SEVERAL
def test_the_daemons_word_lets_it_save_while_its_room_is_cut_off(
    domain: Domain, gate: Gate, next_gate: Gate, ask: Program, line: Line
) -> None:
    room_is_open(line, gate, next_gate, domain)
    assert line.hear(moving.MOVED).text == ""
    ask.tell(ONE_MORE)
    assert is_held(ask)
    line.say(moving.FENCED, 1)
    assert ask.answer() == "[0, 0, 0, 6]"
    gate.keep(0)
    assert line.unsure == []
    assert ask.end() == ""


@SEVERAL
def test_room_for_copies_that_cannot_be_cut_off_is_unmapped_before_anything_new_is_saved(
    domain: Domain, gate: Gate, next_gate: Gate, ask: Program, line: Line
) -> None:
    room_is_open(line, gate, next_gate, domain)
    # The cut is refused, and the unmapping is held.
    gate.keep(NO_ROOM_CUT | MANAGER)
    until(lambda: gate.kept() == MANAGER)
    assert line.hear(moving.MOVED).text == ""
    saves_when_room_is_cut_off(ask, gate, line)


@EXACT
def test_a_program_waits_no_longer_than_seconds_for_room_for_copies(
    domain: Domain, gate: Gate, next_gate: Gate, ask: Program, line: Line
) -> None:
    """A program that has waited some seconds for its snapshot buffer continues without it and says so."""
    room_is_open(line, gate, next_gate, domain)
    line.hear(moving.MOVED)
    assert ask(ONE_MORE) == "[0, 0, 0, 6]"
    assert gate.kept() == ROOM
    gate.keep(0)
    assert ask(ONE_MORE) == "[0, 0, 0, 7]"
    assert line.hear(moving.UNSURE).text == "snapshot memory that the old context may still write"
    assert ask.end() == ""


@EXACT
def test_a_program_that_had_its_turn_waits_for_room_as_long_however_long_it_had_waited_for_that(
    domain: Domain, gate: Gate, next_gate: Gate, ask: Program, line: Line
) -> None:
    room_is_open(line, gate, next_gate, domain, again=2)
    assert line.hear(moving.MOVED).values[5]
    assert line.is_silent(ROOM_S)
    line.say(moving.TURN, 1)
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 5]"
    assert line.hear(moving.DONE).text == ""
    saves_when_room_is_cut_off(ask, gate, line)


@EXACT
@pytest.mark.parametrize("has_turn", [False, True])
def test_a_word_that_comes_while_it_waits_for_its_turn_or_behind_that_lets_it_save(
    domain: Domain, gate: Gate, next_gate: Gate, ask: Program, line: Line, has_turn: bool
) -> None:
    room_is_open(line, gate, next_gate, domain, again=2)
    line.hear(moving.MOVED)
    if has_turn:
        next_gate.let(0)
        line.say(moving.TURN, 1)
        until(line.is_read)
    line.say(moving.FENCED, 1)
    until(line.is_read)
    next_gate.let(1000)
    if not has_turn:
        line.say(moving.TURN, 1)
    line.hear(moving.DONE)
    assert ask(ONE_MORE) == "[0, 0, 0, 6]"
    assert gate.kept() == ROOM
    gate.keep(0)
    assert line.unsure == []
    assert ask.end() == ""


@EXACT
def test_the_next_move_waits_for_the_room_of_the_one_before(
    domain: Domain,
    gate: Gate,
    next_gate: Gate,
    second: Domain,
    third: Domain,
    ask: Program,
    copies: Path,
    line: Line,
) -> None:
    """The next move waits for the cut of the previous snapshot buffer, while the program waits for its
    turn."""
    room_is_open(line, gate, next_gate, domain, again=2)
    line.hear(moving.MOVED)
    stand_by(line, third, copies, 2)
    break_domain(second)
    line.say(moving.MOVE, 2, again=1)
    until(line.is_read)
    # The command belongs to the domain that the program leaves now.
    line.say(moving.FENCED, 2)
    assert line.is_silent(A_WHILE_S)
    gate.keep(0)
    assert line.hear(moving.MOVED).generation == 2
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 5]"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("planned", [False, True])
def test_who_has_nothing_in_flight_waits_for_neither(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, planned: bool
) -> None:
    line = post.greet(moving.EXACT)
    assert ask("m = gpu.memory(8 << 20)") == "None"
    stand_by(line, second, copies)
    assert ask("[gpu.run('add', m, 8, 5), gpu.sync()]") == "[0, 0]"
    gate.keep(UNMAP)
    line.say(moving.MOVE, 1, planned=planned, again=1)
    assert line.hear(moving.MOVED).values[3:5] == (0, 0)
    assert ask("[gpu.word(m), gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]") == "[5, 0, 0, 6]"
    gate.keep(0)
    assert ask.end() == ""


def test_in_mode_keep_nobody_knows_what_is_in_flight(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    assert ask("m = gpu.memory(8 << 20)") == "None"
    stand_by(line, second, copies)
    gate.keep(UNMAP)
    line.say(moving.MOVE, 1)
    unmapping(gate)
    assert line.is_silent()
    gate.keep(MANAGER)
    line.hear(moving.MOVED)
    assert ask("[gpu.sync() in (0, 719), gpu.word(m)]") == "[True, 0]"
    gate.keep(0)
    ask.end()


@EXACT
@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2"])
@pytest.mark.parametrize("waits", [False, True], ids=["while it runs", "after it"])
def test_copies_within_the_hosts_memory_are_not_done_again(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, waits: bool, call: str
) -> None:
    """Copies within host memory are not replayed: no fence stops the old context from writing there. The
    program is told if such a copy is unfinished, whatever the call is named."""
    line = post.greet(moving.EXACT)
    assert ask("m = gpu.memory(8 << 20); p = gpu.made('cuMemHostAlloc', 4096, 0)") == "None"
    assert ask("q = gpu.made('cuMemHostAlloc', 4096, 0); ctypes.memset(q, 7, 4096)") == "None"
    stand_by(line, second, copies)
    if not waits:
        gate.let(0)
    assert ask(f"gpu.code('{call}', p, q, 4096, 0)") == "0"
    if waits:
        assert ask("gpu.sync()") == "0"
    break_domain(domain)
    said = line.move(1, again=1)
    assert (said.kind, said.text) == (moving.MOVED, "" if waits else "a copy within host memory")
    assert ask("gpu.sync()") == ("0" if waits else "719")
    assert ask("gpu.run('fill', m, 8, 3), gpu.sync(), gpu.word(m)") == "(0, 0, 3)"
    end = ask.end()
    assert (end == "") is waits and said.text in end
