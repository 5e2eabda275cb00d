"""Budgets of mode exact: a program that saving slows too much, or that needs too much memory for it, leaves
fail-over and runs on.

The test plays the daemon. The stand-in's memory is made so slow that copies take longer than kernels.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpsd_libcuda.stats import Snapshots, read_stats
from tests.libcuda.test_exact import EXACT, gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, offer, post, stand_by
from tests.libcuda.test_sanitizers import leave_with_threads
from tests.support import moving
from tests.support.gate import ANY, Gate
from tests.support.libcudas import Libraries, run, standalone
from tests.support.moving import Line, Post, Said
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second"]

MIB = 1 << 20
BUDGET = 30
TIME, MEMORY = 1, 2
# 42 bytes per microsecond: the copy of 8 MiB takes as long as the kernel "late", 200 ms.
SLOW = {"MPSD_FAILOVER": "exact", "MPSD_STANDIN_MEMORY_CLOCK": "1000", "MPSD_STANDIN_BUS_WIDTH": "420"}
SLOW_COPIES = pytest.mark.parametrize("ask", [SLOW], indirect=True)
LATE = "gpu.run('late', m, 8, 1)"


def snapshots(ask: Program) -> Snapshots:
    stats = read_stats(ask.process.pid)
    assert stats is not None
    return stats.snapshots


def leaves(line: Line) -> Said:
    """Return the program's LEAVES once its snapshot buffers are released, which it may say first."""
    said = line.hear(moving.LEAVES)
    held: tuple[int, ...] = line.held[-1] if line.held else ()
    while held != (0, 0):
        held = tuple(line.hear(moving.HOLDS).values[:2])
    return said


def limit(line: Line, size: int, answers: int = 0) -> None:
    """Tell a limit, in answer to a wish or to none. Return when the program has taken it."""
    line.say(moving.LIMIT, value=size, number=answers)
    # The program reads the second message after it has taken the first.
    line.say(moving.LIMIT, value=size)
    until(line.is_read)


def test_arithmetic(tmp_path: Path) -> None:
    program = standalone(tmp_path, "budget", ["exact/budget.c"])
    done = run([program], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_chunks(tmp_path: Path) -> None:
    """A move, a loss of all chunks, or a new chunk comes while one is freed; a fork during a release."""
    names = ("real_cuDeviceTotalMem_v2", "real_cuThreadExchangeStreamCaptureMode", "inner_cuMemFree_v2")
    flags = [f"-D{name}={name.partition('_')[2]}" for name in names]
    program = standalone(tmp_path, "chunks", ["exact/chunks.c", "exact/leave.c"], "-DMPSD_CARRIED=1", *flags)
    done = run([program], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@SLOW_COPIES
@pytest.mark.parametrize("stands_by", [True, False])
def test_a_program_beyond_the_time_budget_leaves_and_runs_on(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, stands_by: bool
) -> None:
    line = post.greet(moving.EXACT, budget=BUDGET)
    ask("m = gpu.made('cuMemAlloc_v2', 8 << 20)")
    if stands_by:
        stand_by(line, second, copies)
    assert ask(f"{LATE}, gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    said = leaves(line)
    budget, added, rest, thousandths, may_come_back, _ = said.values
    assert (budget, thousandths, may_come_back) == (TIME, BUDGET, 1)
    assert added > 0 and rest > 0 and added * 1000 > rest * BUDGET
    assert said.text == f"saving slows the program by {added * 100 // rest} %; the budget is 3.0 %"
    assert snapshots(ask).left == TIME
    # Nothing is saved or marked any more: a launch is one operation.
    gate.let(1)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    until(gate.is_done)
    gate.let(ANY)
    assert ask("gpu.sync(), gpu.word(m), gpu.memory(2 << 20) > 0") == "(0, 2, True)"
    # A move that the daemon had begun before it heard comes to nothing.
    line.say(moving.MOVE, 1, again=1)
    assert line.hear(moving.STAYED).generation == 1
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 3)"
    assert line.is_silent() and ask.end() == ""


@SLOW_COPIES
def test_a_program_that_only_polls_may_be_slowed(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT, budget=BUDGET)
    ask("m = gpu.memory(8 << 20); polled = lambda: set(iter(lambda: gpu.code('cuStreamQuery', 0), 0))")
    assert ask(f"{LATE}, polled(), gpu.word(m)") == "(0, {600}, 1)"
    assert leaves(line).values[0] == TIME
    assert ask("gpu.run('add', m, 8, 1), polled() <= {600}, gpu.word(m)") == "(0, True, 2)"
    assert ask.end() == ""


@SLOW_COPIES
def test_copies_that_idle_time_hides_cost_nothing(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """The program comes to wait only after its kernels have ended."""
    line = post.greet(moving.EXACT, budget=BUDGET)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    for number in range(3):
        assert ask(f"{LATE}, gpu.host('{number}')") == "(0, 0)"
        until(lambda at=number: ask("len(gpu.ran)") == str(at + 1))
        assert ask("gpu.sync()") == "0"
    made = snapshots(ask)
    assert made.left == 0 and made.periods >= 3 and made.saved >= 3 * 8 * MIB
    assert ask(f"{LATE}") == "0"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 4)"
    assert ask.end() == ""


@SLOW_COPIES
def test_a_warm_up_passes(domain: Domain, second: Domain, post: Post, ask: Program, copies: Path) -> None:
    """One epoch with 50 ms of copies is within what a program may owe."""
    line = post.greet(moving.EXACT, budget=BUDGET)
    ask("m = gpu.memory(2 << 20)")
    assert ask(f"{LATE}, gpu.sync()") == "(0, 0)"
    made = snapshots(ask)
    assert made.left == 0 and made.added_ns > 0
    stand_by(line, second, copies)
    assert ask(f"{LATE}") == "0"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 2)"
    assert ask.end() == ""


@SLOW_COPIES
@pytest.mark.parametrize("budget", [None, 0], ids=["older daemon", "no time budget"])
def test_without_a_time_budget_nothing_changes(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, budget: int | None
) -> None:
    line = post.greet(moving.EXACT, budget=budget)
    ask("m = gpu.memory(8 << 20)")
    assert ask(f"{LATE}, gpu.sync(), {LATE}, gpu.sync()") == "(0, 0, 0, 0)"
    assert snapshots(ask).left == 0
    stand_by(line, second, copies)
    assert (line.held == []) == (budget is None)
    assert ask(f"{LATE}") == "0"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 3)"
    assert ask.end() == ""


@SLOW_COPIES
def test_a_program_that_has_moved_leaves_where_it_is(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT, budget=BUDGET)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    break_domain(domain)
    assert move(line).text == ""
    assert ask(f"gpu.sync(), {LATE}, gpu.sync(), gpu.word(m)") == "(0, 0, 0, 2)"
    assert leaves(line).values[0] == TIME
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 3)"
    assert ask.end() == ""


@pytest.mark.parametrize("relay", ["off", "always"])
def test_a_program_with_several_threads_leaves(libraries: Libraries, tmp_path: Path, relay: str) -> None:
    leave_with_threads(libraries, tmp_path, relay)


@SLOW_COPIES
def test_it_is_said_to_each_daemon_that_comes(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT, budget=BUDGET)
    ask("m = gpu.memory(8 << 20)")
    assert ask(f"{LATE}, gpu.sync()") == "(0, 0)"
    first = leaves(line)
    line.close()
    line = post.greet(moving.EXACT, budget=BUDGET)
    assert line.hear(moving.LEAVES) == first
    line.close()
    # An older daemon does not know that message, and offers a standby domain.
    line = post.greet(moving.EXACT)
    offer(line, second, copies)
    said = line.hear(moving.READY, moving.UNREADY)
    assert (said.kind, said.text) == (moving.UNREADY, first.text)
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 2)"
    assert ask.end() == ""


ADD_LARGE = "gpu.run('add', large, 8, 1), gpu.sync()"


def ask_for_more(line: Line, ask: Program) -> int:
    """Make the program write 8 MiB at once with a limit of 4 MiB. Return how many bytes it wants."""
    limit(line, 4 * MIB)
    ask("large = gpu.made('cuMemAlloc_v2', 8 << 20)")
    assert ask(ADD_LARGE) == "(0, 0)"
    return wish(line)


def wish(line: Line, most: int = 4 * MIB) -> int:
    """Return how many bytes a program wants that may have `most`."""
    said = line.hear(moving.HOLDS)
    while not said.values[1]:
        said = line.hear(moving.HOLDS)
    assert said.values[0] <= most < said.values[1]
    return said.values[1]


def next_wish(line: Line, ask: Program) -> int:
    """Work on until the program asks again, which it does at most once a second."""
    while True:
        assert ask(ADD_LARGE) == "(0, 0)"
        while not line.is_silent():
            said = line.hear(moving.HOLDS, moving.COST, moving.UNSURE)
            if said.kind == moving.HOLDS and said.values[1]:
                return said.values[1]


@EXACT
def test_an_operation_that_never_fits_makes_the_program_leave(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT, budget=0)
    wanted = ask_for_more(line, ask)
    # A program may have a few of them, for example at its start.
    for _ in range(3):
        limit(line, 4 * MIB, wanted)
        for _ in range(5):
            assert ask(ADD_LARGE) == "(0, 0)"
        assert snapshots(ask).left == 0
        wanted = next_wish(line, ask)
    limit(line, 4 * MIB, wanted)
    assert ask(ADD_LARGE) == "(0, 0)"
    said = leaves(line)
    assert said.values == (MEMORY, 8 * MIB, 4 * MIB, 0, 1, 0)
    assert said.text == "one operation needs 8 MiB of snapshot buffers; the limit is 4 MiB"
    assert snapshots(ask).left == MEMORY
    assert ask("-gpu.word(large) + (gpu.run('add', large, 8, 1) or gpu.sync() or gpu.word(large))") == "1"
    assert ask.end() == ""


@EXACT
def test_a_limit_that_answers_no_wish_refuses_none(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A daemon that has come back repeats the limit, and another program's wish lowers it."""
    line = post.greet(moving.EXACT, budget=0)
    wanted = ask_for_more(line, ask)
    line.close()
    line = post.greet(moving.EXACT, budget=0)
    limit(line, 4 * MIB)
    assert wish(line) == wanted
    for size in (4, 3, 3, 2, 2):
        limit(line, size * MIB)
        assert ask(ADD_LARGE) == "(0, 0)"
    assert snapshots(ask).left == 0
    limit(line, 16 * MIB, wanted)
    assert ask(ADD_LARGE) == "(0, 0)"
    stand_by(line, second, copies)
    assert ask("gpu.run('late', large, 8, 1)") == "0"
    break_domain(domain)
    said = move(line)
    assert (said.text, said.values[3]) == ("", 8 * MIB)
    assert line.unsure == [] and ask.end() == ""


@EXACT
def test_a_limit_raised_in_time_keeps_the_program(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT, budget=0)
    wanted = ask_for_more(line, ask)
    for _ in range(3):
        limit(line, 4 * MIB, wanted)
        wanted = next_wish(line, ask)
    # One epoch too many, and while it runs the operation comes to fit.
    limit(line, 4 * MIB, wanted)
    assert ask("gpu.run('add', large, 8, 1)") == "0"
    limit(line, 16 * MIB)
    assert ask("gpu.sync()") == "0"
    assert snapshots(ask).left == 0
    # The earlier misses are forgotten.
    limit(line, 4 * MIB)
    limit(line, 4 * MIB, next_wish(line, ask))
    assert ask(ADD_LARGE) == "(0, 0)"
    assert snapshots(ask).left == 0 and ask.end() == ""


@EXACT
def test_a_limit_that_is_raised_is_used(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT, budget=0)
    limit(line, 16 * MIB, ask_for_more(line, ask))
    for _ in range(5):
        assert ask(ADD_LARGE) == "(0, 0)"
    assert snapshots(ask).left == 0
    stand_by(line, second, copies)
    assert ask("gpu.run('late', large, 8, 1)") == "0"
    break_domain(domain)
    said = move(line)
    assert (said.text, said.values[3]) == ("", 8 * MIB)
    assert ask("gpu.sync(), gpu.word(large)") == "(0, 7)"
    # The first of them had no snapshot, while the daemon had not answered. That is no lasting flaw.
    assert line.unsure == [] and ask.end() == ""


@EXACT
def test_small_operations_fit_under_the_limit_one_epoch_after_the_other(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """The buffers hold two of four snapshots, so each round ends epochs early. The program asks for more."""
    line = post.greet(moving.EXACT, budget=BUDGET)
    limit(line, 4 * MIB)
    ask("small = [gpu.made('cuMemAlloc_v2', 2 << 20) for _ in range(4)]")
    stand_by(line, second, copies)
    for _ in range(3):
        assert ask("[gpu.run('add', m, 8, 1) for m in small], gpu.sync()") == "([0, 0, 0, 0], 0)"
        limit(line, 4 * MIB)
    made = snapshots(ask)
    assert made.left == 0 and made.saved >= 3 * 8 * MIB
    assert ask("[gpu.run('add', m, 8, 1) for m in small], gpu.run('late', small[0], 8, 1)")
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), [gpu.word(m) for m in small]") == "(0, [5, 4, 4, 4])"
    assert line.unsure == [] and any(want > 4 * MIB for _, want in line.held)
    assert ask.end() == ""


@SLOW_COPIES
def test_a_capture_is_not_measured(post: Post, ask: Program) -> None:
    """An epoch that ends while another stream captures says nothing about cost."""
    line = post.greet(moving.EXACT, budget=BUDGET)
    ask("m = gpu.made('cuMemAlloc_v2', 8 << 20); s = gpu.made('cuStreamCreate', 1); g = ctypes.c_uint64()")
    ask("t = gpu.made('cuStreamCreate', 1); wait = lambda: gpu.code('cuStreamSynchronize', t)")
    assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
    assert ask("gpu.run('late', m, 8, 1, stream=t), wait()") == "(0, 0)"
    assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(g))") == "0"
    assert snapshots(ask) == Snapshots(0, 0, 0, 0, 0)
    assert ask("gpu.run('late', m, 8, 1, stream=t), wait(), gpu.word(m)") == "(0, 0, 2)"
    assert leaves(line).values[0] == TIME
    assert ask.end() == ""


@EXACT
def test_buffers_beyond_a_lowered_limit_are_released(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT, budget=0)
    ask("m = gpu.memory(2 << 20)")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    assert line.hear(moving.HOLDS).values[:2] == (64 * MIB, 0)
    line.say(moving.LIMIT, value=8 * MIB)
    assert line.hear(moving.HOLDS).values[:2] == (0, 0)
    # The program takes again as much as it needs.
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 2)"
    assert line.hear(moving.HOLDS).values[:2] == (8 * MIB, 0)
    assert snapshots(ask).left == 0 and ask.end() == ""


@SLOW_COPIES
def test_the_daemon_hears_what_saving_costs(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT, budget=10**6)
    ask("m = gpu.memory(8 << 20)")
    assert ask(f"{LATE}, gpu.sync()") == "(0, 0)"
    said = line.hear(moving.COST)
    assert said.values[0] == 8 * MIB and said.values[3:] == (0, 0, 0)
    assert ask.end() == ""


@SLOW_COPIES
def test_a_callback_that_ends_an_epoch_ends_no_period(post: Post, ask: Program) -> None:
    """The wait that comes with it is counted when it returns, and copies delay a program that waits."""
    post.greet(moving.EXACT, budget=10**6)
    ask("m = gpu.made('cuMemAlloc_v2', 8 << 20)")
    assert ask(f"{LATE}, gpu.host('a'), gpu.sync()") == "(0, 0, 0)"
    made = snapshots(ask)
    assert (made.periods, made.saved) == (1, 8 * MIB) and made.added_ns > 0
    assert ask.end() == ""


@EXACT
def test_no_cost_is_said_where_the_time_of_copies_is_unknown(post: Post, ask: Program) -> None:
    """The stand-in's GPU does not tell how fast its memory is."""
    line = post.greet(moving.EXACT, budget=BUDGET)
    ask("m = gpu.memory(2 << 20)")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    line.say(moving.LIMIT, value=8 * MIB)
    # The program says what saving costs before it says what it holds.
    said = [line.hear(moving.HOLDS, moving.COST)]
    while said[-1].values[:2] != (0, 0):
        said.append(line.hear(moving.HOLDS, moving.COST))
    assert {s.kind for s in said} == {moving.HOLDS}
    assert snapshots(ask).saved == 2 * MIB and ask.end() == ""


def exposure(line: Line) -> str | None:
    """Return why the program is exposed now, None if it is not any more."""
    said = line.hear(moving.EXPOSED)
    assert said.values[0] == (said.text != "")
    return said.text or None


TOO_LARGE = "one operation may write more than the snapshot buffers may hold"


@EXACT
def test_a_program_is_exposed_while_an_operation_has_no_snapshot(post: Post, ask: Program) -> None:
    """It says so again to each daemon that comes."""
    line = post.greet(moving.EXACT, budget=0, exposed=True)
    limit(line, 4 * MIB)
    ask("m, large = gpu.memory(2 << 20), gpu.made('cuMemAlloc_v2', 8 << 20)")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    assert ask("gpu.run('add', large, 8, 1)") == "0"
    assert exposure(line) == TOO_LARGE
    line.close()
    line = post.greet(moving.EXACT, budget=0, exposed=True)
    assert exposure(line) == TOO_LARGE
    assert ask("gpu.sync()") == "0"
    assert exposure(line) is None
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(large)") == "(0, 0, 1)"
    assert line.is_silent() and ask.end() == ""


@EXACT
def test_a_program_whose_mode_ends_stays_exposed(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT, budget=0, exposed=True)
    ask("made = [gpu.made('cuStreamCreate', 0) for _ in range(700)]; m = gpu.memory(2 << 20)")
    assert ask("{gpu.run('add', m, 8, 1, stream=s) for s in made}, gpu.sync()") == "({0}, 0)"
    assert exposure(line) == "more streams than per-stream logs"
    assert ask.end() == ""


@EXACT
def test_an_older_daemon_does_not_hear_of_it(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT, budget=0)
    ask_for_more(line, ask)
    assert ask(ADD_LARGE) == "(0, 0)"
    # The program reads this after it has said what there is to say.
    limit(line, 16 * MIB)
    while not line.is_silent():
        assert line.hear(moving.HOLDS, moving.COST, moving.UNSURE).kind != moving.EXPOSED
    assert ask.end() == ""


@EXACT
def test_a_request_that_is_answered_in_time_saves_the_first_operation(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT, budget=0, exposed=True)
    limit(line, 4 * MIB)
    ask("large = gpu.made('cuMemAlloc_v2', 8 << 20)")
    stand_by(line, second, copies)
    ask.tell("gpu.run('late', large, 8, 1)")
    limit(line, 16 * MIB, wish(line))
    assert ask.answer() == "0"
    break_domain(domain)
    said = move(line)
    assert (said.text, said.values[3]) == ("", 8 * MIB)
    assert line.unsure == [] and ask.end() == ""
