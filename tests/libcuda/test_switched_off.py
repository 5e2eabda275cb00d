"""A program whose fail-over is switched off while it runs: GUARD. The test plays the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_budget import BUDGET, SLOW, leaves, snapshots
from tests.libcuda.test_exact import EXACT, gate, move
from tests.libcuda.test_failover import Program, ask, copies, offer, post, stand_by
from tests.libcuda.test_sanitizers import leave_with_threads
from tests.support import moving
from tests.support.gate import ANY, Gate
from tests.support.libcudas import Libraries
from tests.support.moving import Line, Post, Said
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second"]

BY_HAND = 3
TEXT = "switched off by hand"
LAUNCH = "gpu.run('add', m, 8, 1)"
BOTH = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}, {"MPSD_FAILOVER": "keep"}], indirect=True)


def mode_of(ask: Program) -> int:
    return moving.EXACT if b"MPSD_FAILOVER=exact" in environment(ask) else moving.KEEP


def environment(ask: Program) -> list[bytes]:
    return Path(f"/proc/{ask.process.pid}/environ").read_bytes().split(b"\0")


def is_by_hand(said: Said) -> None:
    assert (said.kind, said.values, said.text) == (moving.LEAVES, (BY_HAND, 0, 0, 0, 0, 0), TEXT)


def has_clients(domain: Domain) -> bool:
    servers = domain.say("get_server_list").split()
    return any(domain.say(f"get_client_list {server}").strip() for server in servers)


def takes_no_part(line: Line, ask: Program, second: Domain, copies: Path) -> None:
    """Neither a standby domain nor a move that the daemon had begun before it heard has an effect."""
    offer(line, second, copies, 2)
    line.say(moving.MOVE, 2, again=1)
    assert line.hear(moving.STAYED).generation == 2
    assert ask(f"{LAUNCH}, gpu.sync() or gpu.word(m) > 0, gpu.memory(2 << 20) > 0") == "(0, True, True)"
    assert not has_clients(second)


def test_a_program_says_that_it_can_be_switched_off(post: Post, ask: Program) -> None:
    line = post.accept()
    assert line.hear(moving.HELLO).values[0] == 15


@BOTH
@pytest.mark.parametrize("stands_by", [True, False])
def test_a_program_at_rest_leaves_at_once(
    second: Domain, post: Post, ask: Program, copies: Path, stands_by: bool
) -> None:
    mode = mode_of(ask)
    line = post.greet(mode, switch=True, budget=BUDGET if mode == moving.EXACT else None)
    ask("m = gpu.made('cuMemAlloc_v2', 8 << 20)")
    if stands_by:
        stand_by(line, second, copies)
    assert ask(f"{LAUNCH}, gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    line.say(moving.GUARD)
    is_by_hand(line.hear(moving.LEAVES))
    assert snapshots(ask).left == BY_HAND
    until(lambda: not has_clients(second))
    takes_no_part(line, ask, second, copies)
    line.say(moving.GUARD)
    until(line.is_read)
    assert ask(f"{LAUNCH}, gpu.sync()") == "(0, 0)"
    assert line.is_silent() and ask.end() == ""


@EXACT
def test_work_in_flight_is_recorded_until_its_epoch_ends(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT, switch=True, budget=BUDGET)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    gate.let(0)
    assert ask(LAUNCH) == "0"
    line.say(moving.GUARD)
    until(line.is_read)
    # The next message is answered after GUARD was obeyed.
    line.say(moving.MOVE, 7)
    assert line.hear(moving.STAYED).generation == 7
    assert snapshots(ask).left == 0
    gate.let(ANY)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 1)"
    is_by_hand(leaves(line))
    takes_no_part(line, ask, second, copies)
    assert ask.end() == ""


@EXACT
def test_work_in_flight_at_the_order_still_moves_if_the_move_came_first(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT, switch=True, budget=BUDGET)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    gate.let(0)
    assert ask(LAUNCH) == "0"
    gate.let(ANY)
    move(line)
    line.say(moving.GUARD)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 1)"
    is_by_hand(leaves(line))
    assert ask(f"{LAUNCH}, gpu.sync(), gpu.word(m)") == "(0, 0, 2)"
    assert ask.end() == ""


@pytest.mark.parametrize("ask", [SLOW], indirect=True)
def test_a_program_that_had_left_for_a_budget_keeps_that_reason(
    domain: Domain, gate: Gate, post: Post, ask: Program
) -> None:
    line = post.greet(moving.EXACT, switch=True, budget=BUDGET)
    ask("m = gpu.made('cuMemAlloc_v2', 8 << 20)")
    gate.let(ANY)
    assert ask("gpu.run('late', m, 8, 1), gpu.sync()") == "(0, 0)"
    assert leaves(line).values[0] == 1
    line.say(moving.GUARD)
    until(line.is_read)
    assert ask(f"{LAUNCH}, gpu.sync()") == "(0, 0)" and line.is_silent()
    assert snapshots(ask).left == 1 and ask.end() == ""


@BOTH
@pytest.mark.parametrize("budgets", [True, False])
def test_a_later_daemon_hears_of_it_only_if_it_knows_that_reason(
    second: Domain, post: Post, ask: Program, copies: Path, budgets: bool
) -> None:
    mode = mode_of(ask)
    budget = BUDGET if budgets and mode == moving.EXACT else None
    line = post.greet(mode, switch=True, budget=budget)
    ask("m = gpu.made('cuMemAlloc_v2', 8 << 20)")
    line.say(moving.GUARD)
    is_by_hand(line.hear(moving.LEAVES))
    line.close()
    # An earlier daemon: it would end the connection at a reason that it does not know.
    line = post.greet(mode, budget=budget)
    offer(line, second, copies, 3)
    said = line.hear(moving.UNREADY)
    assert (said.generation, said.text) == (3, TEXT)
    assert ask(f"{LAUNCH}, gpu.sync()") == "(0, 0)" and line.is_silent()
    line.close()
    line = post.greet(mode, switch=True, budget=budget)
    is_by_hand(line.hear(moving.LEAVES))
    assert ask.end() == ""


@pytest.mark.parametrize("relay", ["off", "always"])
def test_a_program_with_several_threads_is_switched_off(
    libraries: Libraries, tmp_path: Path, relay: str
) -> None:
    leave_with_threads(libraries, tmp_path, relay, by_hand=True)
