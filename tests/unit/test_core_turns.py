"""In which order suspects do their work again: who needs least time for it is first."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.standby import Standing, Turn
from mpsd.core.turns import EACH_S, GATHER_S, GUESS_S, LAST_S, SOON_S
from mpsd.model import Again, ClientId, Confidence, FailoverMode, ServerState
from tests.support.core import process, server_of
from tests.unit.test_core_failover import AT_ONCE, IN_TURN, ON, Site, exact, suspected, turns_of


def suspects(*pids: int) -> Site:
    """Nobody is named, and all of them, but for one that is none, are told to move."""
    world = exact(*pids, 9)
    world.kernel(43, "channel 0x1", server_of("d1").pid, "nvidia-cuda-mps")
    world.do(ev.MemberMoved(process(9), 2, 1, 2, 3))
    return world


def comes(world: Site, pid: int, takes_ms: int, *, waits: bool = True) -> None:
    step = 1_000_000
    said = ev.MemberMoved(process(pid), 2, step, 2 * step, 3 * step, replayed=9, waits=waits)
    world.do(replace(said, takes_ns=takes_ms * step))


def waited(world: Site, pid: int) -> None:
    """It has waited as long as it may for those who need less time."""
    subject = f"{pid} {process(pid).start_ticks} d2"
    assert [e for e in world.ever(fx.ArmTimer) if (e.kind, e.subject) == ("failover-gather", subject)]
    world.timer("failover-gather", subject)


def turns(world: Site) -> list[int]:
    return [e.process.pid for e in world.ever(fx.HaveTurn)]


def test_the_turns_begin_when_all_have_come_and_the_shortest_is_first() -> None:
    world = suspects(10, 11, 12)
    comes(world, 10, 15)
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-gather")
    assert timer.delay_s == 0.015 < GATHER_S
    comes(world, 11, 14)
    assert turns(world) == []
    comes(world, 12, 11)
    assert turns(world) == [12]
    fates = {f.process.pid: f for f in world.failover().fates}
    assert [fates[pid].replayed for pid in (10, 11, 12)] == [0, 0, 0]
    assert [fates[pid].turn_ms is None for pid in (10, 11, 12)] == [True, True, False]
    waited(world, 10)
    assert turns(world) == [12]
    world.do(ev.MemberDone(process(12), 2, 5, 27))
    world.do(ev.MemberDone(process(11), 2, 5, 196))
    assert turns(world) == [12, 11, 10]
    done = next(f for f in world.failover().fates if f.process.pid == 12)
    assert done.replayed == 27 and done.done_ms is not None


def test_who_needs_little_time_waits_for_nobody() -> None:
    world = suspects(10, 11, 12)
    comes(world, 10, 591)
    assert turns(world) == []
    comes(world, 11, round(SOON_S * 1e3))
    assert turns(world) == [11]
    # The other one that has come still lets the third be first.
    world.do(ev.MemberDone(process(11), 2))
    assert turns(world) == [11]
    comes(world, 12, 1)
    assert turns(world) == [11, 12]


@pytest.mark.parametrize(("operations", "turn"), [(10, [10]), (2 * round(SOON_S / EACH_S), [])])
def test_who_does_not_say_how_long_it_takes_has_so_many_operations(operations: int, turn: list[int]) -> None:
    world = suspects(10, 11)
    world.do(ev.MemberMoved(process(10), 2, 1, 2, 3, replayed=operations, waits=True))
    assert turns(world) == turn


def test_one_with_nothing_to_do_again_may_be_the_last_that_was_waited_for() -> None:
    world = suspects(10, 11)
    comes(world, 10, 30)
    assert turns(world) == []
    comes(world, 11, 0, waits=False)
    assert turns(world) == [10]


def test_who_does_not_come_is_not_waited_for_long() -> None:
    world = suspects(10, 11, 12)
    comes(world, 10, 591)
    comes(world, 11, 30)
    assert turns(world) == []
    waited(world, 11)
    assert turns(world) == [11]
    # It comes while the other has its turn, and is before who has more to do.
    comes(world, 12, 50)
    world.do(ev.MemberDone(process(11), 2))
    assert turns(world) == [11, 12]


def test_who_has_much_to_do_lets_the_others_come_first_and_waits_no_longer_than_that() -> None:
    world = suspects(10, 11, 12)
    comes(world, 10, 100_000)
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-gather")
    assert timer.delay_s == GATHER_S
    comes(world, 11, 30)
    waited(world, 11)
    assert turns(world) == [11]
    # It has not waited long yet, and the third is still coming.
    world.do(ev.MemberDone(process(11), 2))
    assert turns(world) == [11]
    waited(world, 10)
    assert turns(world) == [11, 10]
    comes(world, 12, 50)
    world.do(ev.MemberDone(process(10), 2))
    assert turns(world) == [11, 10, 12]


def test_nobody_has_a_turn_in_a_domain_that_is_lost() -> None:
    """Who has it when that is lost is named, in the record of the fault too."""
    world = suspects(10, 11)
    comes(world, 10, 30)
    comes(world, 11, 50)
    assert turns(world) == [10]
    world.kernel(43, "channel 0x1", server_of("d2").pid, "nvidia-cuda-mps")
    world.timer("failover-turn", f"10 {process(10).start_ticks} d2")
    assert turns(world) == [10]
    fates = {f.process.pid: f.why for f in world.failover().fates}
    assert fates[10] == "what it did again faulted again"
    assert world.ever(fx.StandDown)[-1].final
    named = max(world.records().values(), key=lambda record: record.id)
    assert named.offender is not None
    assert (named.domain, named.offender.id.process, named.confidence) == (
        "d2",
        process(10),
        Confidence.LIKELY,
    )


def test_a_turn_does_not_last_for_ever() -> None:
    world = suspected(10, 11, 12, 9)
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-turn")
    world.timer("failover-turn", timer.subject)
    assert turns_of(world) == {11: Turn.HAS, 12: Turn.WAITS}
    world.timer("failover-turn", timer.subject)
    assert turns_of(world) == {11: Turn.HAS, 12: Turn.WAITS}
    # It comes by a new connection: the end of its old one is never seen.
    world.hello(11, FailoverMode.EXACT, 2)
    assert turns_of(world) == {12: Turn.HAS}


def all_told(*pids: int) -> Site:
    """All clients of the domain do their work again, or have none: whoever made the fault is among them."""
    world = Site(replace(ON, failover=FailoverMode.EXACT))
    world.ready()
    world.do(ev.CopiesSeen(""))
    for pid in pids:
        world.attach(pid, "d1")
        world.hello(pid, FailoverMode.EXACT)
    for pid in pids:
        world.is_ready(pid, 2)
    return world


def lost(world: Site) -> None:
    world.kernel(43, "channel 0x1", server_of("d1").pid, "nvidia-cuda-mps")


def up_to_the_last() -> Site:
    """12, the youngest, has least to do; the others have done theirs, and get a next standby."""
    world = all_told(10, 11, 12)
    lost(world)
    for pid, takes_ms in ((10, 591), (11, 196), (12, 30)):
        comes(world, pid, takes_ms)
    assert turns(world) == [11]
    world.do(ev.MemberDone(process(11), 2))
    world.do(ev.MemberDone(process(10), 2))
    assert turns(world) == [11, 10] and turns_of(world) == {12: Turn.WAITS}
    world.started("d3")
    assert {e.process.pid for e in world.ever(fx.OfferStandby) if e.generation == 3} == {10, 11}
    return world


def test_the_youngest_is_the_last_and_waits_until_the_others_can_go_on_elsewhere() -> None:
    world = up_to_the_last()
    world.is_ready(10, 3)
    assert turns_of(world) == {12: Turn.WAITS}
    world.is_ready(11, 3)
    assert turns_of(world) == {12: Turn.HAS}
    # It was the offender: the others have one more short stop.
    world.kernel(43, "channel 0x1", server_of("d2").pid, "nvidia-cuda-mps")
    assert world.told() == [10, 11]
    assert {e.process.pid: e.again for e in world.made(fx.Move)} == {10: Again.AGAIN, 11: Again.AGAIN}
    assert {f.process.pid: f.why for f in world.failover().fates}[12] == "what it did again faulted again"


def test_the_last_one_is_cleared_by_its_turn_as_the_others_are() -> None:
    world = up_to_the_last()
    world.is_ready(10, 3)
    world.is_ready(11, 3)
    world.do(ev.MemberDone(process(12), 2))
    assert turns_of(world) == {}
    assert [e.process.pid for e in world.made(fx.OfferStandby)] == [12]


@pytest.mark.parametrize("what", ["time", "unready", "gone", "ended"])
def test_nobody_is_waited_for_who_will_not_be_ready(what: str) -> None:
    world = up_to_the_last()
    world.is_ready(10, 3)
    if what == "time":
        (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-last" and "12 " in e.subject)
        assert timer.delay_s == LAST_S
        world.timer(timer.kind, timer.subject)
    elif what == "unready":
        world.do(ev.MemberUnready(process(11), 3, "no memory"))
    elif what == "gone":
        world.do(ev.MemberLeft(process(11)))
    else:
        world.do(ev.ClientDied(process(11)))
    assert turns_of(world) == {12: Turn.HAS}


@pytest.mark.parametrize("who", ["a stranger", "one that has just ended", "one in mode keep"])
def test_where_somebody_older_may_have_made_the_fault_nobody_waits_for_that(who: str) -> None:
    world = all_told(10, 11)
    another(world, 9, who)
    lost(world)
    comes(world, 10, 591)
    comes(world, 11, 30)
    if who == "one in mode keep":
        world.do(ev.MemberMoved(process(9), 2, 1, 2, 3))
    assert turns(world) == [11]
    world.do(ev.MemberDone(process(11), 2))
    assert turns(world) == [11, 10]


def another(world: Site, pid: int, who: str) -> None:
    """One that will do nothing again."""
    world.attach(pid, "d1")
    if who == "one in mode keep":
        world.hello(pid, FailoverMode.KEEP)
        world.is_ready(pid, 2)
    if who == "one that has just ended":
        world.do(ev.ClientDied(process(pid)))


def told(world: Site) -> dict[int, Again]:
    return {e.process.pid: e.again for e in world.made(fx.Move)}


def guessed(who: str = "a stranger") -> Site:
    """13, the youngest, does nothing again: the others do at once."""
    world = all_told(10, 11)
    another(world, 13, who)
    lost(world)
    assert {pid: again for pid, again in told(world).items() if pid != 13} == {10: AT_ONCE, 11: AT_ONCE}
    return world


@pytest.mark.parametrize("who", ["a stranger", "one that has just ended", "one in mode keep"])
def test_where_the_youngest_does_nothing_again_the_others_do_at_once_and_side_by_side(who: str) -> None:
    world = guessed(who)
    comes(world, 10, 591)
    comes(world, 11, 30)
    assert turns(world) == [] and turns_of(world) == {10: Turn.HAS, 11: Turn.HAS}
    fates = {f.process.pid: f for f in world.failover().fates}
    assert [(fates[pid].turn_ms, fates[pid].done_ms) for pid in (10, 11)] == [(3.0, None)] * 2
    world.do(ev.MemberDone(process(11), 2, 5, 196))
    done = next(f for f in world.failover().fates if f.process.pid == 11)
    assert done.replayed == 196 and done.done_ms is not None
    # No word of the other's end.
    world.timer("failover-turn", f"10 {process(10).start_ticks} d2")
    assert turns_of(world) == {}


def test_one_with_nothing_in_flight_needs_no_turn_on_a_guess_either() -> None:
    world = guessed()
    comes(world, 10, 0, waits=False)
    assert turns_of(world) == {}
    assert {f.process.pid: f.turn_ms for f in world.failover().fates}[10] is None


def lose(world: Site, name: str) -> None:
    world.kernel(43, "channel 0x1", server_of(name).pid, "nvidia-cuda-mps")


def whys(world: Site) -> dict[int, str]:
    return {f.process.pid: f.why for f in world.failover().fates}


def named(world: Site) -> int | None:
    """Who is named in the newest record of a fault."""
    offender = max(world.records().values(), key=lambda record: record.id).offender
    return None if offender is None else offender.id.process.pid


def wrong() -> Site:
    """A guess that was wrong: 11 is done already, 10 is not; a stranger has come that is younger yet."""
    world = guessed()
    comes(world, 10, 591)
    comes(world, 11, 30)
    world.do(ev.MemberDone(process(11), 2, 5, 196))
    world.started("d3")
    world.is_ready(11, 3)
    world.attach(14, "d2")
    world.now += GUESS_S
    lose(world, "d2")
    return world


def test_a_wrong_guess_names_nobody_and_takes_turns_next() -> None:
    world = wrong()
    assert told(world) == {11: IN_TURN}
    assert named(world) is None and world.standing(10) is not Standing.LEFT_BEHIND
    # The other one had no standby yet; it has its turn alone, and is named by that.
    world.is_ready(10, 3)
    assert told(world) == {10: IN_TURN}
    world.do(ev.MemberMoved(process(11), 3, 1, 2, 3))
    world.do(ev.MemberMoved(process(10), 3, 1, 2, 3, replayed=9, waits=True, takes_ns=30_000_000))
    assert [e.process.pid for e in world.made(fx.HaveTurn)] == [10]
    lose(world, "d3")
    assert world.standing(10) is Standing.LEFT_BEHIND and named(world) == 10


def test_a_turn_that_was_lost_with_its_domain_is_over() -> None:
    world = wrong()
    assert turns_of(world) == {}
    # A word that was on its way changes nothing of the newer record.
    world.do(ev.MemberDone(process(10), 2, 5, 591))
    assert whys(world)[10] == "it was not ready: no standby"
    # Nobody who comes after the loss is kept from moving, or ended, over it.
    world.hello(14, FailoverMode.EXACT)
    world.is_ready(10, 3)
    assert told(world) == {10: IN_TURN}
    world.is_ready(14, 3)
    assert told(world) == {14: IN_TURN}
    assert not [e for e in world.ever(fx.ArmTimer) if e.kind == "failover-put-out"]


def test_a_guess_that_was_long_ago_was_right() -> None:
    world = guessed()
    world.now += 1.0
    for pid in (10, 11):
        comes(world, pid, 30)
        world.do(ev.MemberDone(process(pid), 2))
    world.started("d3")
    world.is_ready(10, 3)
    world.is_ready(11, 3)
    world.attach(14, "d2")
    world.now += GUESS_S
    lose(world, "d2")
    assert told(world) == {10: AT_ONCE, 11: AT_ONCE}


def test_a_guess_counts_from_when_it_began() -> None:
    world = guessed()
    world.now += GUESS_S
    for pid in (10, 11):
        comes(world, pid, 30)
        world.do(ev.MemberDone(process(pid), 2))
    world.started("d3")
    world.is_ready(10, 3)
    world.attach(14, "d2")
    world.now += GUESS_S - 0.001
    lose(world, "d2")
    assert told(world) == {10: IN_TURN}


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
    assert told(world) == {10: IN_TURN}


def test_one_that_is_still_on_its_way_may_be_the_offender() -> None:
    """Its word that it has moved, and does its work again, is read after the loss."""
    world = guessed()
    comes(world, 11, 30)
    lose(world, "d2")
    assert named(world) is None and whys(world) == {11: "there was no standby"}
    comes(world, 10, 30)
    assert turns_of(world) == {}
    world.started("d3")
    assert {e.process.pid for e in world.ever(fx.OfferStandby) if e.generation == 3} == {10, 11}
    world.is_ready(11, 3)
    assert told(world) == {11: IN_TURN}
    world.is_ready(10, 3)
    assert told(world) == {10: IN_TURN}


def test_who_was_to_go_where_everything_is_lost_and_stays_has_nothing_there() -> None:
    world = guessed()
    comes(world, 11, 30)
    lose(world, "d2")
    world.do(ev.MemberStayed(process(10), 2, "nobody knows"))
    assert ClientId("d2", process(10)) not in world.state.clients


def test_the_youngest_is_no_stranger_for_not_being_ready() -> None:
    world = all_told(10)
    world.attach(12, "d1")
    world.hello(12, FailoverMode.EXACT)
    lost(world)
    assert told(world) == {10: IN_TURN}
    world.is_ready(12, 2)
    assert told(world) == {12: IN_TURN}


@pytest.mark.parametrize("who", ["left behind", "not connected"])
def test_one_that_cannot_move_does_nothing_again(who: str) -> None:
    world = all_told(10, 11)
    if who == "left behind":
        world.do(ev.MemberStayed(process(11), 2, "nobody knows"))
        member = replace(world.state.members[process(11)], standing=Standing.LEFT_BEHIND)
        members = {**world.state.members, process(11): member}
        world.state = replace(world.state, members=MappingProxyType(members))
    else:
        world.do(ev.MemberLeft(process(11)))
    lost(world)
    assert told(world) == {10: AT_ONCE}


def test_who_comes_after_the_loss_makes_no_guess() -> None:
    world = all_told()
    for pid in (10, 11):
        world.attach(pid, "d1")
    lost(world)
    for pid in (10, 11):
        world.hello(pid, FailoverMode.EXACT)
    world.is_ready(11, 2)
    assert told(world) == {11: IN_TURN}
    world.is_ready(10, 2)
    assert told(world) == {10: IN_TURN}


@pytest.mark.parametrize("has_come", [True, False])
def test_who_is_late_beside_a_guess_takes_its_turn_and_is_not_named_for_it(has_come: bool) -> None:
    world = all_told(10, 11)
    world.attach(9, "d1")
    world.hello(9, FailoverMode.EXACT)
    another(world, 13, "a stranger")
    lost(world)
    assert told(world) == {10: AT_ONCE, 11: AT_ONCE}
    world.is_ready(9, 2)
    assert told(world) == {9: IN_TURN}
    comes(world, 9, 5)
    assert turns(world) == [9]
    if has_come:
        comes(world, 11, 30)
    assert turns_of(world) == {9: Turn.HAS} | ({11: Turn.HAS} if has_come else {})
    lose(world, "d2")
    assert named(world) is None and set(whys(world).values()) == {"there was no standby"}


def test_one_that_repeats_its_word_is_not_at_once_a_second_time() -> None:
    world = guessed()
    comes(world, 10, 30)
    world.do(ev.MemberDone(process(10), 2))
    comes(world, 10, 30)
    assert turns_of(world) == {10: Turn.WAITS}


def test_a_planned_move_blames_nobody_who_has_its_turn() -> None:
    world = suspected(10, 11, 12, 9)
    assert turns_of(world)[10] is Turn.HAS
    world.started("d3")
    world.is_ready(9, 3)
    world.do(ev.DrainRequested((), True))
    assert world.told() == [9]
    assert world.standing(10) is not Standing.LEFT_BEHIND and turns_of(world)[10] is Turn.HAS


def test_a_server_that_was_killed_may_be_nobodys_fault() -> None:
    """All that is known of it at first is that it is in FAULT."""
    world = all_told(10, 11)
    world.do(ev.ServerStateSeen("d1", ServerState.FAULT))
    comes(world, 10, 591)
    comes(world, 11, 30)
    world.do(ev.MemberDone(process(11), 2))
    assert turns(world) == [11, 10]


def test_one_alone_has_nobody_to_wait_for() -> None:
    world = all_told(10)
    lost(world)
    comes(world, 10, 30)
    assert turns(world) == [10]


def test_who_comes_when_only_the_last_one_waits_has_a_turn_though_another_never_comes() -> None:
    world = all_told(10, 11, 12, 13)
    lost(world)
    comes(world, 10, 50)
    comes(world, 13, 30)
    # The last one has no turn yet, and its waiting is not the others'.
    waited(world, 13)
    assert turns(world) == []
    waited(world, 10)
    assert turns(world) == [10]
    world.do(ev.MemberDone(process(10), 2))
    assert turns_of(world) == {13: Turn.WAITS}
    comes(world, 11, 70)
    waited(world, 11)
    assert turns_of(world) == {13: Turn.WAITS, 11: Turn.HAS}
    world.do(ev.MemberDone(process(11), 2))
    world.do(ev.MemberStayed(process(12), 2, "nobody knows"))
    # The others get their next standby now.
    assert turns_of(world) == {13: Turn.WAITS}


def test_one_that_stays_or_ends_is_waited_for_no_longer() -> None:
    world = all_told(10, 11, 12)
    lost(world)
    comes(world, 10, 50)
    world.do(ev.MemberStayed(process(11), 2, "nobody knows"))
    assert turns(world) == []
    world.do(ev.ClientDied(process(12)))
    assert turns(world) == [10]


def test_the_youngest_may_be_still_on_its_way() -> None:
    """Who waits meanwhile is not the last."""
    world = all_told(10, 11, 12)
    lost(world)
    comes(world, 10, 50)
    comes(world, 11, 70)
    waited(world, 10)
    waited(world, 11)
    world.do(ev.MemberDone(process(10), 2))
    assert turns(world) == [10, 11]
