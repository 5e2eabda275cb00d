"""Host callbacks in streams run once, whatever happens to their context."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.gate import Gate
from tests.support.long import of
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

MODES = pytest.mark.parametrize(
    ("ask", "mode"),
    [({"MPSD_FAILOVER": "exact"}, moving.EXACT), ({"MPSD_FAILOVER": "keep"}, moving.KEEP)],
    indirect=["ask"],
    ids=["exact", "keep"],
)
WAYS = pytest.mark.parametrize("callback", [False, True], ids=["function", "callback"])


def ran(ask: Program, *wanted: tuple[str, int]) -> str:
    """Wait until that many callbacks have run; return each with the status that it was given."""
    until(lambda: int(ask("len(gpu.ran)")) >= len(wanted))
    return ask("gpu.ran")


@MODES
@WAYS
def test_before_and_after_a_move_it_runs_once_in_its_place(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, mode: int, callback: bool
) -> None:
    line = post.greet(mode)
    ask("m = gpu.memory(4 << 20); s = gpu.stream(); gpu.sync()")
    stand_by(line, second, copies)
    assert ask(f"gpu.host('a', stream=s, callback={callback}), gpu.sync()") == "(0, 0)"
    break_domain(domain)
    assert move(line).text == ""
    # One stream comes from the original instance, one exists only in the current instance.
    ask("t = gpu.stream()")
    for name, stream in (("b", "s"), ("c", "t")):
        code = f"gpu.host({name!r}, stream={stream}, callback={callback})"
        assert ask(f"{code}, gpu.code('cuStreamSynchronize', {stream}), gpu.sync()") == "(0, 0, 0)"
    assert ask("gpu.ran") == str([("a", 0), ("b", 0), ("c", 0)])
    assert line.unsure == []
    assert ask.end() == ""


@MODES
def test_the_driver_may_not_be_called_inside(post: Post, ask: Program, mode: int) -> None:
    post.greet(mode)
    ask("m = gpu.memory(4 << 20); s = gpu.stream(); gpu.sync()")
    calls = ["code('cuStreamSynchronize', 0)", "sync()", "run('add', 0, 8, 1)", "host('b')"]
    calls += ["code('cuMemFree_v2', 4096)", "code('cuMemcpyDtoH_v2', ctypes.addressof(ctypes.c_int()), 0, 4)"]
    does = f"[{', '.join(f'self.{call}' for call in calls)}]"
    assert ask(f"gpu.host('a', stream=s, does={does!r}), gpu.sync(), gpu.ran") == str(
        (0, 0, [("a", [800] * len(calls))])
    )
    assert ask.end() == ""


@EXACT
@WAYS
@pytest.mark.parametrize("lets", of([0, 1, 2, 3, 4, 5, 6], [0, 2, 4]))
def test_what_did_not_run_runs_in_the_next_copy(
    domain: Domain,
    gate: Gate,
    second: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    lets: int,
    callback: bool,
) -> None:
    """A host callback that has not run runs in the next instance, wherever the GPU stopped.

    Operations: a snapshot, its mark, an event, the kernel, its mark, the callback and another kernel.
    """
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); gpu.sync()")
    stand_by(line, second, copies)
    gate.let(0)
    work = f"gpu.run('add', m, 8, 1), gpu.host('a', callback={callback}), gpu.run('add', m, 8, 10)"
    assert ask(work) == "(0, 0, 0)"
    gate.let(lets)
    ask.tell("gpu.sync()")
    until(lambda: gate.left() == 0)
    break_domain(domain)
    assert move(line).text == ""
    assert ask.answer() == "0"
    assert ask("gpu.word(m), gpu.ran") == "(11, [('a', 0)])"
    assert ask.end() == ""


@EXACT
@WAYS
def test_one_that_runs_goes_on_and_what_is_behind_it_waits(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path, callback: bool
) -> None:
    """A host callback that is running when its context is lost completes, and the work behind it waits; so
    again in the next context."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); s = gpu.stream(); gpu.sync()")
    stand_by(line, second, copies)
    works = f"gpu.run('add', m, 8, 1, stream=s), gpu.host('a', stream=s, callback={callback}, holds=True)"
    assert ask(f"{works}, gpu.run('add', m, 8, 10, stream=s), gpu.host('b', stream=s)") == "(0, 0, 0, 0)"
    until(lambda: ask("gpu.began") == "['a']")
    break_domain(domain)
    assert move(line).text == ""
    query = "gpu.code('cuStreamQuery', s), gpu.ran, gpu.began"
    assert ask(query) == "(600, [], ['a'])"
    stand_by(line, third, copies, 2)
    break_domain(second)
    assert move(line, 2).text == ""
    assert ask(query) == "(600, [], ['a'])"
    ask("gpu.go('a')")
    assert ask("gpu.sync(), gpu.word(m), gpu.ran, gpu.began") == str(
        (0, 11, [("a", 0), ("b", 0)], ["a", "b"])
    )
    assert ask.end() == ""


@EXACT
def test_one_that_waits_for_a_thread_which_the_move_holds(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); s = gpu.stream(); later = Later(gpu); gpu.sync()")
    stand_by(line, second, copies)
    assert ask("gpu.host('a', stream=s, holds=True), gpu.run('add', m, 8, 10, stream=s)") == "(0, 0)"
    until(lambda: ask("gpu.began") == "['a']")
    break_domain(domain)
    assert move(line, again=2).values[5] > 1
    ask('later.start(\'gpu.run("add", m, 8, 1), gpu.go("a")\')')
    line.say(moving.TURN, 1)
    assert line.hear(moving.DONE).text == ""
    assert ask("later.result()") == "(0, None)"
    assert ask("gpu.sync(), gpu.word(m), gpu.ran") == "(0, 11, [('a', 0)])"
    assert ask.end() == ""


@EXACT
def test_one_that_waits_for_a_thread_while_another_thread_waits_for_all(post: Post, ask: Program) -> None:
    """A host callback and a thread that frees memory do not deadlock: the free holds the submission lock
    for one second only."""
    post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); n = gpu.memory(4 << 20); s = gpu.stream(); later = Later(gpu); gpu.sync()")
    assert ask("gpu.host('a', stream=s, holds=True)") == "0"
    until(lambda: ask("gpu.began") == "['a']")
    ask("later.start('gpu.code(\"cuMemFree_v2\", n)')")
    assert ask("gpu.run('add', m, 8, 1), gpu.go('a'), later.result()") == "(0, None, 0)"
    assert ask("gpu.sync(), gpu.word(m), gpu.ran") == "(0, 1, [('a', 0)])"
    assert ask.end() == ""


@MODES
@WAYS
def test_what_is_lost_never_runs_and_a_callback_is_told_once(
    domain: Domain,
    gate: Gate,
    second: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    mode: int,
    callback: bool,
) -> None:
    """Lost host callbacks never run and stream callbacks get the error once, although the old context
    executes them later."""
    line = post.greet(mode)
    ask("m = gpu.memory(4 << 20); s = gpu.stream(); t = gpu.stream(); gpu.sync()")
    stand_by(line, second, copies)
    gate.let(0)
    host = f"gpu.host(%r, stream=s, callback={callback})"
    assert ask(f"{host % 'a'}, {host % 'b'}, gpu.host('c', stream=s, callback=True)") == "(0, 0, 0)"
    # Nothing is replayed in either mode, since the offender is unknown.
    assert move(line, again=0).text != ""
    told = [(name, 719) for name in ("a", "b", "c") if callback or name == "c"]
    assert ran(ask, *told) == str(told)
    # Three operations are left in the old context; mode `exact` adds two completion marks.
    gate.let(64)
    until(lambda: gate.left() <= (59 if mode == moving.EXACT else 61))
    assert ask("gpu.sync(), gpu.sync(), gpu.host('d', stream=s), gpu.sync()") == "(719, 0, 0, 0)"
    assert ask("gpu.ran") == str([*told, ("d", 0)])
    assert "results of work in flight may be missing" in ask.end()


def fault_while_one_runs(gate: Gate, ask: Program) -> None:
    """Lose the context while a host callback runs; behind it are a host callback and a stream callback."""
    ask("s = gpu.stream(); gpu.sync()")
    gate.let(1)
    assert ask("gpu.host('a', stream=s, holds=True), gpu.host('b', stream=s)") == "(0, 0)"
    assert ask("gpu.host('c', stream=s, callback=True)") == "0"
    until(lambda: ask("gpu.began") == "['a']")
    gate.break_context()
    ask("gpu.go('a')")


@MODES
def test_nobody_moves_the_program(
    gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, mode: int
) -> None:
    """Without a move, a host callback does not run and a stream callback gets the driver's error."""
    line = post.greet(mode)
    ask("gpu.sync()")
    stand_by(line, second, copies)
    fault_while_one_runs(gate, ask)
    assert line.hear(moving.OWN_ERROR).values[0] == 719
    told = [("a", 0), ("c", 719)]
    assert ran(ask, *told) == str(told)


@MODES
def test_there_is_no_standby(gate: Gate, post: Post, ask: Program, mode: int) -> None:
    post.greet(mode)
    fault_while_one_runs(gate, ask)
    told = [("a", 0), ("c", 719)]
    assert ran(ask, *told) == str(told)


@EXACT
def test_the_copy_that_was_left_runs_nothing_and_proves_nothing(
    gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """The old instance runs no callback and proves nothing, although its healthy context runs on while the
    program waits for its turn."""
    line = post.greet(moving.EXACT)
    ask("s = gpu.stream(); gpu.sync()")
    stand_by(line, second, copies)
    gate.let(0)
    assert ask("gpu.host('a', stream=s), gpu.host('b', stream=s, callback=True)") == "(0, 0)"
    # A query makes the GPU write its progress.
    assert ask("gpu.code('cuStreamQuery', s)") == "600"
    # The program waits for its turn; it has never launched a kernel.
    assert move(line, again=2).values[5] == 1
    # Two callbacks, each with a completion mark behind it.
    gate.let(4)
    until(lambda: gate.left() == 0)
    assert ask("gpu.ran") == "[]"
    line.say(moving.TURN, 1)
    assert line.hear(moving.DONE).text == ""
    assert ask("gpu.sync(), gpu.ran") == "(0, [('a', 0), ('b', 0)])"
    assert ask.end() == ""


@MODES
@WAYS
def test_a_planned_move_lets_them_run(
    domain: Domain,
    gate: Gate,
    second: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    mode: int,
    callback: bool,
) -> None:
    line = post.greet(mode)
    ask("m = gpu.memory(4 << 20); s = gpu.stream(); gpu.sync()")
    stand_by(line, second, copies)
    work = f"gpu.run('late', m, 8, 1, stream=s), gpu.host('a', stream=s, callback={callback})"
    assert ask(work) == "(0, 0)"
    assert move(line, planned=True).text == ""
    assert ask("gpu.ran, gpu.sync(), gpu.word(m)") == "([('a', 0)], 0, 1)"
    assert ask.end() == ""


@MODES
def test_a_callback_in_a_capture_is_the_drivers_to_refuse(post: Post, ask: Program, mode: int) -> None:
    post.greet(mode)
    ask("s = gpu.stream(); g = ctypes.c_uint64(); gpu('cuStreamBeginCapture_v2', s, 2)")
    assert ask("gpu.host('a', stream=s, callback=True)") == "900"
    assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(g)), gpu.sync(), gpu.ran") == "(901, 0, [])"
    assert ask.end() == ""
