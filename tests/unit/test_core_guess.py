"""Parallel replay on a guess: suspects replay at once where the youngest client does not replay."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from mpsd.base.model import ClientId, ExceptionOwner, FailoverMode
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Standing, Turn
from mpsd.core.failover.serialreplay import GUESS_S
from tests.support.core import process
from tests.unit.test_core_failover import AT_ONCE, IN_TURN, Site, again, suspected, turns_of
from tests.unit.test_core_programcounter import exception, moves
from tests.unit.test_core_serialreplay import all_told, another, comes, lose, lost, turns


def guessed(who: str = "a stranger") -> Site:
    """Client 13, the youngest, does not replay: the other clients replay at once."""
    world = all_told(10, 11)
    another(world, 13, who)
    lost(world)
    assert {pid: word for pid, word in again(world).items() if pid != 13} == {10: AT_ONCE, 11: AT_ONCE}
    return world


@pytest.mark.parametrize("who", ["a stranger", "one that has just ended", "one in mode keep"])
def test_where_the_youngest_does_nothing_again_the_others_do_at_once_and_side_by_side(who: str) -> None:
    world = guessed(who)
    comes(world, 10, 591)
    comes(world, 11, 30)
    assert turns(world) == [10, 11] and turns_of(world) == {10: Turn.HAS, 11: Turn.HAS}
    entries = {f.process.pid: f for f in world.failover().fates}
    assert [(entries[pid].turn_ms, entries[pid].done_ms) for pid in (10, 11)] == [(0.0, None)] * 2
    world.do(mev.MemberDone(process(11), 2, 5, 196))
    done = next(f for f in world.failover().fates if f.process.pid == 11)
    assert done.replayed == 196 and done.done_ms is not None
    # The report of the other client's end does not come.
    world.timer("failover-turn", f"10 {process(10).start_ticks} d2")
    assert turns_of(world) == {}


@pytest.mark.parametrize(
    ("who", "has_ended"),
    [("a stranger", False), ("one that has just ended", True), ("one in mode keep", False)],
)
def test_searches_are_not_awaited_if_the_likely_offender_has_ended(who: str, has_ended: bool) -> None:
    """A stranger that lives may be innocent, and the search may find that."""
    told = {e.process.pid: e.hurries for e in guessed(who).ever(fx.Move)}
    assert {told[10], told[11]} == {has_ended}


def test_searches_are_not_awaited_if_the_youngest_participant_has_gone() -> None:
    world = all_told(10, 11)
    world.do(mev.MemberLeft(process(11)))
    lost(world)
    assert {e.process.pid: e.hurries for e in world.ever(fx.Move)} == {10: True}


def test_one_with_nothing_in_flight_needs_no_turn_on_a_guess_either() -> None:
    world = guessed()
    comes(world, 10, 0, waits=False)
    assert turns_of(world) == {}
    assert {f.process.pid: f.turn_ms for f in world.failover().fates}[10] is None


def whys(world: Site) -> dict[int, str]:
    return {f.process.pid: f.why for f in world.failover().fates}


def named(world: Site) -> int | None:
    """Return the offender of the newest fault record."""
    offender = max(world.records().values(), key=lambda record: record.id).offender
    return None if offender is None else offender.id.process.pid


def wrong() -> Site:
    """A guess that was wrong: 11 has replayed, 10 has not, and a still younger foreign client has come."""
    world = guessed()
    comes(world, 10, 591)
    comes(world, 11, 30)
    world.do(mev.MemberDone(process(11), 2, 5, 196))
    world.started("d3")
    world.is_ready(11, 3)
    world.attach(14, "d2")
    world.now += GUESS_S
    lose(world, "d2")
    return world


def test_a_wrong_guess_names_nobody_and_makes_suspects() -> None:
    world = wrong()
    assert again(world) == {11: IN_TURN}
    assert named(world) is None and world.standing(10) is not Standing.LEFT_BEHIND
    # The other client had no standby context yet. A fault came while it replayed: it is a suspect now.
    world.is_ready(10, 3)
    assert again(world) == {10: IN_TURN}
    world.do(mev.MemberMoved(process(11), 3, 1, 2, 3))
    world.do(mev.MemberMoved(process(10), 3, 1, 2, 3, replayed=9, waits=True, takes_ns=30_000_000))
    assert world.made(fx.GrantTurn) == [] and turns_of(world) == {10: Turn.WAITS}


def test_a_turn_that_was_lost_with_its_domain_is_over() -> None:
    world = wrong()
    assert turns_of(world) == {}
    # A message that was on its way does not change the newer record.
    world.do(mev.MemberDone(process(10), 2, 5, 591))
    assert whys(world)[10] == "the standby context was not ready: no standby"
    # A client that joins after the fault is neither kept from moving nor killed for it.
    world.hello(14, FailoverMode.EXACT)
    world.is_ready(10, 3)
    assert again(world) == {10: IN_TURN}
    world.is_ready(14, 3)
    assert again(world) == {14: IN_TURN}
    assert not [e for e in world.ever(fx.ArmTimer) if e.kind == "failover-put-out"]


def test_a_guess_that_was_long_ago_was_right() -> None:
    world = guessed()
    world.now += 1.0
    for pid in (10, 11):
        comes(world, pid, 30)
        world.do(mev.MemberDone(process(pid), 2))
    world.started("d3")
    world.is_ready(10, 3)
    world.is_ready(11, 3)
    world.attach(14, "d2")
    world.now += GUESS_S
    lose(world, "d2")
    assert again(world) == {10: AT_ONCE, 11: AT_ONCE}


def test_a_guess_counts_from_when_it_began() -> None:
    world = guessed()
    world.now += GUESS_S
    for pid in (10, 11):
        comes(world, pid, 30)
        world.do(mev.MemberDone(process(pid), 2))
    world.started("d3")
    world.is_ready(10, 3)
    world.attach(14, "d2")
    world.now += GUESS_S - 0.001
    lose(world, "d2")
    assert again(world) == {10: IN_TURN}


def test_who_came_by_a_new_connection_has_made_its_guess_all_the_same() -> None:
    world = guessed()
    comes(world, 10, 30)
    world.hello(10, FailoverMode.EXACT, 2)
    comes(world, 11, 30)
    world.do(ev.ClientDied(process(11)))
    world.started("d3")
    world.is_ready(10, 3)
    world.attach(14, "d2")
    lose(world, "d2")
    assert again(world) == {10: IN_TURN}


def test_one_that_is_still_on_its_way_may_be_the_offender() -> None:
    """Its report that it has moved and replays is read after the fault."""
    world = guessed()
    comes(world, 11, 30)
    lose(world, "d2")
    assert named(world) is None and whys(world) == {11: "no standby domain was available"}
    comes(world, 10, 30)
    assert turns(world) == [11] and turns_of(world) == {10: Turn.WAITS}
    world.started("d3")
    assert {e.process.pid for e in world.ever(fx.OfferStandby) if e.generation == 3} == {10, 11}
    world.is_ready(11, 3)
    assert again(world) == {11: IN_TURN}
    world.is_ready(10, 3)
    assert again(world) == {10: IN_TURN}


def test_who_was_to_go_where_everything_is_lost_and_stays_has_nothing_there() -> None:
    world = guessed()
    comes(world, 11, 30)
    lose(world, "d2")
    world.do(mev.MemberStayed(process(10), 2, "nobody knows"))
    assert ClientId("d2", process(10)) not in world.state.clients


def test_the_youngest_is_no_stranger_for_not_being_ready() -> None:
    world = all_told(10)
    world.attach(12, "d1")
    world.hello(12, FailoverMode.EXACT)
    lost(world)
    assert again(world) == {10: IN_TURN}
    world.is_ready(12, 2)
    assert again(world) == {12: IN_TURN}


@pytest.mark.parametrize("who", ["left behind", "not connected"])
def test_one_that_cannot_move_does_nothing_again(who: str) -> None:
    world = all_told(10, 11)
    if who == "left behind":
        world.do(mev.MemberStayed(process(11), 2, "nobody knows"))
        participant = replace(world.state.members[process(11)], standing=Standing.LEFT_BEHIND)
        participants = {**world.state.members, process(11): participant}
        world.state = replace(world.state, members=MappingProxyType(participants))
    else:
        world.do(mev.MemberLeft(process(11)))
    lost(world)
    assert again(world) == {10: AT_ONCE}


def test_who_comes_after_the_loss_makes_no_guess() -> None:
    world = all_told()
    for pid in (10, 11):
        world.attach(pid, "d1")
    lost(world)
    for pid in (10, 11):
        world.hello(pid, FailoverMode.EXACT)
    world.is_ready(11, 2)
    assert again(world) == {11: IN_TURN}
    world.is_ready(10, 2)
    assert again(world) == {10: IN_TURN}


@pytest.mark.parametrize("has_come", [True, False])
def test_who_is_late_beside_a_guess_takes_its_turn_and_is_not_named_for_it(has_come: bool) -> None:
    world = all_told(10, 11)
    world.attach(9, "d1")
    world.hello(9, FailoverMode.EXACT)
    another(world, 13, "a stranger")
    lost(world)
    assert again(world) == {10: AT_ONCE, 11: AT_ONCE}
    world.is_ready(9, 2)
    assert again(world) == {9: IN_TURN}
    comes(world, 9, 5)
    assert turns(world) == [9]
    if has_come:
        comes(world, 11, 30)
    assert turns_of(world) == {9: Turn.HAS} | ({11: Turn.HAS} if has_come else {})
    lose(world, "d2")
    assert named(world) is None and set(whys(world).values()) == {"no standby domain was available"}


def test_one_that_repeats_its_word_is_not_at_once_a_second_time() -> None:
    world = guessed()
    comes(world, 10, 30)
    world.do(mev.MemberDone(process(10), 2))
    comes(world, 10, 30)
    assert turns(world) == [10, 10] and turns_of(world) == {}


def test_a_suspect_does_not_replay_beside_others_on_a_guess() -> None:
    """The client that was started last is not the offender, and cannot deny the fault."""
    world = all_told(10, 11)
    another(world, 13, "a stranger")
    exception(world)
    moves(world, {10: ExceptionOwner.OWN, 11: ExceptionOwner.OTHERS})
    assert turns(world) == [11] and turns_of(world) == {10: Turn.WAITS, 11: Turn.HAS}
    world.started("d3")
    assert {e.process.pid for e in world.ever(fx.OfferStandby) if e.generation == 3} == {10}


def test_a_planned_move_blames_nobody_who_has_its_turn() -> None:
    world = suspected(10, 11, 12, 9)
    assert turns_of(world)[10] is Turn.HAS
    world.started("d3")
    world.is_ready(9, 3)
    world.do(ev.DrainRequested((), True))
    assert world.told() == [9]
    assert world.standing(10) is not Standing.LEFT_BEHIND and turns_of(world)[10] is Turn.HAS
