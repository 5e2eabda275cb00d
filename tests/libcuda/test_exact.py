"""Mode `exact`: work in flight in a lost context is rolled back and replayed in the next one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.libcuda.test_failover import IMPATIENT, Program, ask, break_domain, copies, post, stand_by, started
from tests.support import moving
from tests.support.gate import Gate, gate_of
from tests.support.libcudas import Libraries
from tests.support.long import of
from tests.support.moving import Line, Post, Said
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "post", "second", "third"]

EXACT = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)
# For waits that must time out.
TOO_LARGE = "one operation may write more than the snapshot buffers may hold"
IN_VAIN = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"} | IMPATIENT], indirect=True)


def move(line: Line, generation: int = 1, *, again: int = 1, planned: bool = False) -> Said:
    said = line.move(generation, again=again, planned=planned)
    assert said.kind == moving.MOVED, said
    return said


@pytest.fixture
def gate(domain: Domain) -> Iterator[Gate]:
    """Return the gate of the domain in which the program starts."""
    with gate_of(domain) as made:
        yield made


@pytest.fixture
def next_gate(second: Domain) -> Iterator[Gate]:
    """Return the gate of the domain to which the program moves first."""
    with gate_of(second) as made:
        yield made


def lost_in_flight(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> Line:
    """Return the connection of a program with a lost context: m is 5, and a kernel that adds 1 is in
    flight and does not run."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 5), gpu.sync()") == "(0, 0)"
    gate.let(3)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    break_domain(domain)
    return line


@EXACT
def test_what_was_in_flight_is_done_again(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("[gpu.run('add', m, 8, 5), gpu.sync()]") == "[0, 0]"
    # Run the snapshot of m, its completion mark and an event record; no kernel runs.
    gate.let(3)
    assert ask("[gpu.run('add', m, 8, 1) for _ in range(3)]") == "[0, 0, 0]"
    until(lambda: gate.left() == 0)
    ask.tell("gpu.sync()")
    break_domain(domain)
    said = move(line)
    assert (said.text, said.values[3], said.values[4]) == ("", 8 << 20, 3)
    assert ask.answer() == "0"
    assert ask("[gpu.word(m), gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]") == "[8, 0, 0, 9]"
    assert ask.end() == ""


@EXACT
def test_a_program_may_wait_before_it_has_done_anything(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    assert ask("[gpu.sync(), gpu.code('cuCtxSynchronize_v2', gpu.context), gpu.sync()]") == "[0, 0, 0]"


@EXACT
@pytest.mark.parametrize("lets", of([0, 3, 4, 5, 6, 7, 8], [3, 5, 6]))
@pytest.mark.parametrize("ends", [break_domain, lambda domain: os.kill(domain.server(), signal.SIGKILL)])
def test_a_long_copy_to_the_host_goes_on_where_it_was(
    domain: Domain,
    gate: Gate,
    second: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    lets: int,
    ends: Callable[[Domain], None],
) -> None:
    """A copy of 10 MiB in chunks of 4 MiB resumes where it was, after the kernel before it or after some
    chunks."""
    line = post.greet(moving.EXACT)
    ask("import ctypes; m = gpu.memory(10 << 20); out = (ctypes.c_uint32 * (10 << 18))()")
    for piece, words in ((0, 1 << 20), (1, 1 << 20), (2, 1 << 19)):
        assert ask(f"gpu.code('cuMemsetD32_v2', m + {piece << 22}, {piece + 3}, {words})") == "0"
    assert ask("gpu.sync()") == "0"
    stand_by(line, second, copies)
    gate.let(lets)
    ask("gpu.run('add', m, 1, 1)")
    ask.tell("gpu.code('cuMemcpyDtoH_v2', out, m, 10 << 20)")
    until(lambda: gate.left() == 0)
    ends(domain)
    move(line)
    assert ask.answer() == "0"
    assert (
        ask("[out[0], [sorted(set(out[i << 20 or 1:i + 1 << 20])) for i in range(3)]]")
        == "[4, [[3], [4], [5]]]"
    )
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("lets", of([0, 1, 2, 3, 4, 5, 6], [1, 4, 6]))
def test_it_does_not_matter_how_far_the_gpu_was(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, lets: int
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); n = gpu.memory(2 << 20); s = gpu.stream()")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 5), gpu.sync()") == "(0, 0)"
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 1), gpu.run('add', n, 8, 1, stream=s)") == "(0, 0)"
    gate.let(lets)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m), gpu.word(n)") == "(0, 6, 1)"
    assert ask.end() == ""


@EXACT
def test_nobody_knows_whose_fault_it_was(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Without a known offender nothing is replayed, since the offender's work would fault again; the
    program is told once."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.sync(), gpu.run('long', m, 8, 1)") == "(0, 0)"
    break_domain(domain)
    said = move(line, again=0)
    assert (said.text, said.values[3:5]) == ("the offender is unknown", (0, 0))
    assert ask("[gpu.sync(), gpu.sync(), gpu.word(m)]") == "[719, 0, 0]"
    assert "the offender is unknown" in ask.end()


@EXACT
def test_who_has_nothing_in_flight_is_told_nothing(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 3), gpu.sync()") == "(0, 0)"
    break_domain(domain)
    said = move(line, again=0)
    assert (said.text, said.values[3:5]) == ("", (0, 0))
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 3]"
    assert ask.end() == ""


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact", "snapshot_mib": "4"}], indirect=True)
def test_more_may_be_written_than_there_is_room_for(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask(
        "large = gpu.memory(8 << 20); gpu.sync(); small = [gpu.memory(2 << 20) for _ in range(4)]; gpu.sync()"
    )
    stand_by(line, second, copies)
    # The snapshot buffer holds two of these, so the epoch ends in between and no data is missing.
    assert (
        ask("[gpu.run('add', m, 8, 1) for m in small], gpu.run('late', small[0], 8, 1)")
        == "([0, 0, 0, 0], 0)"
    )
    break_domain(domain)
    assert move(line).text == ""
    assert ask("[gpu.word(m) for m in small]") == "[2, 1, 1, 1]"
    # This single operation may write more than the snapshot buffer holds.
    assert ask("gpu.sync(), gpu.run('add', large, 8, 1), gpu.sync(), gpu.word(large)") == "(0, 0, 0, 1)"
    assert ask.end() == ""


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact", "snapshot_mib": "4"}], indirect=True)
def test_an_operation_that_cannot_be_undone_is_said_by_name(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("large = gpu.memory(8 << 20); gpu.sync()")
    stand_by(line, second, copies)
    assert ask("gpu.run('long', large, 8, 1)") == "0"
    break_domain(domain)
    assert move(line).text == TOO_LARGE
    assert ask("[gpu.sync(), gpu.sync(), gpu.run('add', large, 8, 1), gpu.word(large)]") == "[719, 0, 0, 1]"
    assert TOO_LARGE in ask.end()


@EXACT
def test_the_daemon_wants_less(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.KEEP)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.sync(), gpu.run('long', m, 8, 1)") == "(0, 0)"
    break_domain(domain)
    move(line)
    assert ask("[gpu.sync(), gpu.sync(), gpu.word(m)]") == "[719, 0, 0]"
    assert "results of work in flight may be missing" in ask.end()


@EXACT
def test_pinned_memory_that_a_kernel_may_write_is_not_done_again(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); host = gpu.made('cuMemHostAlloc', 4096, 0); gpu.sync()")
    stand_by(line, second, copies)
    assert ask("[gpu.run('add', host, 8, 1), gpu.run('long', m, 8, 1)]") == "[0, 0]"
    break_domain(domain)
    assert "pinned host memory" in move(line).text
    assert line.why_unsure().startswith("a kernel that may write pinned host memory: ")
    assert line.unsure == []
    assert ask("gpu.sync(), gpu.sync()") == "(719, 0)"
    assert "pinned host memory" in ask.end()


@EXACT
def test_a_planned_move_does_nothing_again(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.run('late', m, 8, 3)") == "0"
    said = move(line, planned=True)
    assert (said.text, said.values[3:5]) == ("", (0, 0))
    assert ask("[gpu.sync(), gpu.word(m)]") == "[0, 3]"
    assert ask.end() == ""


MAY_OVERLAP = "(ctypes.c_uint32 * 18)(6, 0, 1)"


def test_a_kernel_that_may_overlap_the_one_before_it_does_not_when_it_is_done_again(
    libraries: Libraries, domain: Domain, gate: Gate, second: Domain, post: Post, copies: Path, tmp_path: Path
) -> None:
    """A kernel that may overlap its predecessor is replayed without overlap, since its predecessor may
    differ."""
    log = tmp_path / "notes"
    extra = {"MPSD_FAILOVER": "exact", "MPSD_STANDIN_NOTES": str(log)}
    with started(libraries, domain, post, **extra) as ask:
        line = post.greet(moving.EXACT)
        ask(f"m = gpu.memory(8 << 20); allowed = {MAY_OVERLAP}")
        stand_by(line, second, copies)
        assert ask("gpu.sync()") == "0"
        gate.let(0)
        assert ask("gpu.run_with(allowed, m, 8, 1)") == "0"
        break_domain(domain)
        assert move(line).text == ""
        assert ask("gpu.sync(), gpu.word(m)") == "(0, 1)"
        assert ask("gpu.run_with(allowed, m, 8, 1)") == "0"
        assert ask("gpu.sync(), gpu.word(m)") == "(0, 2)"
        assert ask.end() == ""
    homes = [home.environment["CUDA_MPS_PIPE_DIRECTORY"] for home in (domain, second)]
    noted = [line for line in log.read_text().splitlines() if "overlap" in line]
    assert noted == [f"{home} may overlap" for home in homes]


@EXACT
def test_undo_gives_way_to_what_the_program_allocates(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    post.greet(moving.EXACT)
    ask("m = gpu.memory(2 << 20); gpu.sync()")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    ask("free = ctypes.c_uint64(); total = ctypes.c_uint64()")
    ask("gpu('cuMemGetInfo_v2', ctypes.byref(free), ctypes.byref(total))")
    # The first size exceeds the free memory; the memory is free only together with the snapshot buffer.
    assert ask("rest = gpu.made('cuMemAlloc_v2', free.value + (32 << 20))") == "None"
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 2)"
    assert ask.end() == ""


@EXACT
def test_the_standby_gives_way_to_what_the_program_allocates(
    second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(2 << 20); gpu.sync()")
    stand_by(line, second, copies)
    assert ask("gpu.code('cuMemAlloc_v2', ctypes.byref(ctypes.c_uint64()), 1 << 50)") == "2"
    said = line.hear(moving.UNREADY)
    assert said.text == "its memory was needed"
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    assert ask.end() == ""


@EXACT
def test_a_program_waits_for_its_turn(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = lost_in_flight(domain, gate, second, post, ask, copies)
    said = move(line, again=2)
    assert (said.text, said.values[4]) == ("", 1) and said.values[5] > 1
    # The expected duration of a replay comes from earlier operations.
    assert 0 < said.values[3] < 20_000_000_000
    ask.tell("gpu.sync()")
    line.say(moving.TURN, 7)
    line.say(moving.TURN, 1)
    done = line.hear(moving.DONE)
    assert (done.generation, done.text, done.values[:2]) == (1, "", (8 << 20, 1))
    assert ask.answer() == "0"
    assert ask("gpu.word(m)") == "6"
    assert ask.end() == ""


@EXACT
def test_who_has_nothing_to_do_again_waits_for_no_turn(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 5), gpu.sync()") == "(0, 0)"
    break_domain(domain)
    assert move(line, again=2).values[5] == 0
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 5)"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("silent", [True, False], ids=["no word", "no daemon"])
def test_a_turn_that_never_comes(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, silent: bool
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.sync()") == "0"
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    break_domain(domain)
    assert move(line, again=2).values[5] > 1
    if silent:
        assert line.hear(moving.DONE).text == "the offender is unknown"
    else:
        line.close()
    assert ask("gpu.sync(), gpu.sync(), gpu.word(m)") == "(719, 0, 0)"
    assert "the offender is unknown" in ask.end()


@EXACT
def test_the_next_domain_is_lost_while_a_turn_is_waited_for(
    domain: Domain, gate: Gate, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = lost_in_flight(domain, gate, second, post, ask, copies)
    assert move(line, again=2).values[5] > 1
    ask.tell("gpu.sync()")
    stand_by(line, third, copies, 2)
    break_domain(second)
    said = move(line, 2)
    assert (said.text, said.values[3:5]) == ("", (8 << 20, 1))
    assert ask.answer() == "0"
    assert ask("gpu.word(m)") == "6"
    assert ask.end() == ""
