"""A program finds out whether its own code raised the SM exception that made the domain fault.

The stand-in records the program counter of the faulting warp (MPSD_STANDIN_EXCEPTION). The test plays the
daemon.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, break_domain, copies, post, stand_by, started
from tests.support import moving
from tests.support.gate import Gate
from tests.support.libcudas import Libraries
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["backend", "copies", "domain", "gate", "post", "second", "third"]

OWN, OTHERS, FIRST, NO_SIGN = 1, 2, 3, 4
AGAIN, IN_TURN, AT_ONCE = 1, 2, 3
CODE_BYTES = 64 << 10


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return the file in which the stand-in's SMs record the exception."""
    return tmp_path / "exception"


@pytest.fixture
def ask(libraries: Libraries, domain: Domain, post: Post, tmp_path: Path, kept: Path) -> Iterator[Program]:
    extra = {
        "MPSD_FAILOVER": "exact",
        "MPSD_STANDIN_MANAGER": str(tmp_path / "asked"),
        "MPSD_STANDIN_EXCEPTION": str(kept),
    }
    with started(libraries, domain, post, **extra) as program:
        yield program


def code_of(program: Program, number: int = 0) -> int:
    """Return an address in the code of driver instance `number` (0: the original), as that instance maps
    it for its GPU."""
    name = "/libcuda.so.1" if not number else f"/libcuda-{number - 1}.so.1"
    maps = Path(f"/proc/{program.process.pid}/maps").read_text()
    found = [line for line in maps.splitlines() if line.endswith(name) and " r--p " in line]
    # The proxy and the stand-in share the name; the proxy's path does not contain "standin".
    standin = min(found, key=lambda line: "standin" not in line)
    return int(re.split("-| ", standin)[0], 16)


def in_flight(line: Line, ask: Program, gate: Gate, second: Domain, copies: Path) -> None:
    """Put a kernel that adds 1 in flight; m is 0."""
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.sync()") == "0"
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 1)") == "0"


def looked(
    line: Line,
    again: int = IN_TURN,
    *,
    unlogged: bool = False,
    may_go_on: bool = False,
    hurries: bool = False,
    goes_on: bool = False,
) -> int:
    """Return the finding that the program reports before it reports the move; 0: no finding.

    `goes_on`: whether it must say that it replays without a turn.
    """
    line.say(moving.MOVE, 1, again=again, unlogged=unlogged, may_go_on=may_go_on, hurries=hurries)
    found = 0
    while (said := line.hear(moving.LOOKED, moving.MOVED, moving.OWN_ERROR)).kind != moving.MOVED:
        if said.kind == moving.LOOKED:
            assert said.generation == 1 and not found and said.values[1] == goes_on
            found = said.values[0]
    return found


def goes_on(line: Line, ask: Program) -> None:
    line.say(moving.TURN, 1)
    line.hear(moving.DONE)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 1)"


@pytest.mark.parametrize(("whose", "look"), [(OWN, 1), (OTHERS, 2), (0, 1), (NO_SIGN, 2)])
def test_a_program_says_whether_it_was_in_its_own_code(
    domain: Domain,
    second: Domain,
    post: Post,
    ask: Program,
    gate: Gate,
    copies: Path,
    kept: Path,
    tmp_path: Path,
    whose: int,
    look: int,
) -> None:
    """A daemon of an earlier release does not know the last finding."""
    line = post.greet(moving.EXACT, look=look)
    in_flight(line, ask, gate, second, copies)
    if whose in (OWN, OTHERS):
        kept.write_text(f"{code_of(ask) + (0x40 if whose == OWN else 1 << 40):x}")
    break_domain(domain)
    if whose not in (OWN, OTHERS):
        # The stand-in reports the lost context first and queries its cause a moment later.
        until(lambda: (tmp_path / "asked").exists())
    assert looked(line) == whose
    goes_on(line, ask)


@pytest.mark.parametrize("whose", [OTHERS, NO_SIGN])
def test_who_denies_the_fault_goes_on_without_a_turn_if_it_may(
    domain: Domain,
    second: Domain,
    post: Post,
    ask: Program,
    gate: Gate,
    copies: Path,
    kept: Path,
    tmp_path: Path,
    whose: int,
) -> None:
    """Where no exception was logged it does not read the SMs, which keep an address in its own code here."""
    line = post.greet(moving.EXACT, look=2)
    in_flight(line, ask, gate, second, copies)
    kept.write_text(f"{code_of(ask) + (1 << 40 if whose == OTHERS else 0x40):x}")
    break_domain(domain)
    until(lambda: (tmp_path / "asked").exists())
    assert looked(line, unlogged=whose == NO_SIGN, may_go_on=True, goes_on=True) == whose
    line.hear(moving.DONE)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 1)"


def test_who_claims_the_fault_waits_whatever_it_may(
    domain: Domain, second: Domain, post: Post, ask: Program, gate: Gate, copies: Path, kept: Path
) -> None:
    line = post.greet(moving.EXACT, look=2)
    in_flight(line, ask, gate, second, copies)
    kept.write_text(f"{code_of(ask):x}")
    break_domain(domain)
    assert looked(line, may_go_on=True) == OWN
    # No DONE comes before the turn.
    line.say(moving.MOVE, 1, again=IN_TURN)
    assert line.hear(moving.LOOKED).values[:2] == (OWN, 0)
    assert line.hear(moving.MOVED).values[5] > 0
    goes_on(line, ask)


def test_who_does_not_wait_for_its_look_has_its_turn(
    domain: Domain, second: Domain, post: Post, ask: Program, gate: Gate, copies: Path, kept: Path
) -> None:
    """It says what it has found by then, which depends on the machine."""
    line = post.greet(moving.EXACT, look=2)
    in_flight(line, ask, gate, second, copies)
    kept.write_text(f"{code_of(ask) + (1 << 40):x}")
    break_domain(domain)
    assert looked(line, hurries=True) in (0, OTHERS)
    goes_on(line, ask)


def test_who_has_nothing_in_flight_looks_too(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, kept: Path
) -> None:
    """A program without work in flight looks too: its last wait may have succeeded falsely, and it waits
    for its turn."""
    line = post.greet(moving.EXACT, look=2)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.sync()") == "0"
    kept.write_text(f"{code_of(ask):x}")
    break_domain(domain)
    assert looked(line) == OWN
    ask.tell("gpu.sync(), gpu.word(m)")
    line.say(moving.TURN, 1)
    assert line.hear(moving.DONE).values[:2] == (0, 0)
    assert ask.answer() == "(0, 0)"


@pytest.mark.parametrize(("look", "again"), [(0, IN_TURN), (2, AGAIN), (2, AT_ONCE)])
def test_nobody_looks_who_need_not(
    domain: Domain,
    second: Domain,
    post: Post,
    ask: Program,
    gate: Gate,
    copies: Path,
    kept: Path,
    look: int,
    again: int,
) -> None:
    """No program looks if the daemon is too old for the message, or if the offender is already known or
    guessed."""
    line = post.greet(moving.EXACT, look=look)
    in_flight(line, ask, gate, second, copies)
    kept.write_text(f"{code_of(ask):x}")
    break_domain(domain)
    assert looked(line, again) == 0


def test_what_the_copy_does_that_is_in_use_counts(
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    kept: Path,
) -> None:
    """After a move, only the current driver instance's code counts as the program's own."""
    line = post.greet(moving.EXACT, look=2)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.sync()") == "0"
    first = code_of(ask)
    break_domain(domain)
    move(line, planned=True)
    stand_by(line, third, copies, 2)
    kept.write_text(f"{code_of(ask, 1):x}")
    break_domain(second)
    line.say(moving.MOVE, 2, again=IN_TURN)
    said = line.hear(moving.LOOKED, moving.OWN_ERROR)
    if said.kind == moving.OWN_ERROR:
        said = line.hear(moving.LOOKED)
    assert said.values[0] == OWN
    line.hear(moving.MOVED)
    assert abs(first - code_of(ask, 1)) >= CODE_BYTES


@pytest.mark.parametrize("unlogged", [False, True])
def test_who_made_a_trap_has_its_error_without_a_look(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, tmp_path: Path, unlogged: bool
) -> None:
    line = post.greet(moving.EXACT, look=2)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.sync()") == "0"
    ask.tell("gpu.run('trap', 0, 0, 0), gpu.sync()")
    line.hear(moving.OWN_ERROR)
    assert looked(line, unlogged=unlogged) == FIRST
    # This program would get the last turn; here it is refused.
    line.close()
    assert ask.answer() == "(0, 719)"
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("unlogged", [False, True])
def test_who_meets_a_neighbours_trap_looks(
    domain: Domain,
    second: Domain,
    post: Post,
    ask: Program,
    gate: Gate,
    copies: Path,
    tmp_path: Path,
    unlogged: bool,
) -> None:
    line = post.greet(moving.EXACT, look=2)
    in_flight(line, ask, gate, second, copies)
    neighbour = domain.client().ready()
    assert neighbour.error("dev.launch('trap')") is None
    until(lambda: domain.status() == "FAULT")
    # Its driver instance queried the cause, since no command came within the wait.
    until(lambda: (tmp_path / "asked").exists())
    assert looked(line, unlogged=unlogged) == NO_SIGN
    goes_on(line, ask)
