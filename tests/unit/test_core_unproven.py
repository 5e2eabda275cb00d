"""Turns that end before their replay has: a later fault names no other client."""

from __future__ import annotations

import pytest

from mpsd.base.model import FailoverMode
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Standing, Turn
from mpsd.core.failover.serialreplay import GUESS_S, SLOW_TURN_S, TURN_S
from tests.support.core import OUT_OF_RANGE, process, server_of
from tests.unit.test_core_failover import Site, suspected, turns_of


def in_turn(*pids: int) -> Site:
    """The first client replays in d2, the other clients wait, except the last, which has nothing to replay.

    d3 is the standby domain.
    """
    world = suspected(*pids)
    world.started("d3")
    assert turns_of(world) == {pid: Turn.HAS if pid == pids[0] else Turn.WAITS for pid in pids[:-1]}
    return world


def lose(world: Site, domain: str = "d2") -> None:
    world.kernel(43, "channel 0x2", server_of(domain).pid, "nvidia-cuda-mps")


def named(world: Site) -> int | None:
    offender = world.record().offender
    return offender.id.process.pid if offender is not None else None


def end_turn(world: Site) -> None:
    """End the current turn by its time limit."""
    timer = world.ever(fx.ArmTimer)
    (subject,) = {e.subject for e in timer if e.kind == "failover-turn" and _has_turn(world, e.subject)}
    world.timer("failover-turn", subject)


def offered(world: Site) -> set[int]:
    """Return the clients that were offered d3."""
    return {e.process.pid for e in world.ever(fx.OfferStandby) if e.generation == 3}


def late(world: Site, pid: int) -> None:
    """Let the time pass after which a client with unfinished work is offered a standby context again."""
    assert pid not in offered(world)
    world.wait(SLOW_TURN_S)
    (timer,) = {e.subject for e in world.ever(fx.ArmTimer) if e.kind == "failover-late"}
    world.timer("failover-late", timer)
    assert pid in offered(world)


def move_both(world: Site) -> None:
    """Move 10 and 11 into d3, both with work to replay."""
    for pid in (10, 11):
        world.is_ready(pid, 3)
    for pid in (10, 11):
        world.do(mev.MemberMoved(process(pid), 3, 1, 2, 3, waits=True, takes_ns=1))


def _has_turn(world: Site, subject: str) -> bool:
    return turns_of(world).get(int(subject.split()[0])) is Turn.HAS


@pytest.mark.parametrize("how", ["died", "left", "came again"])
def test_who_is_next_is_not_named_for_one_that_went_in_its_turn(how: str) -> None:
    world = in_turn(10, 11, 9)
    if how == "died":
        world.die(10)
    elif how == "left":
        world.do(mev.MemberLeft(process(10)))
    else:
        world.hello(10, FailoverMode.EXACT, generation=2)
    assert turns_of(world) == {11: Turn.HAS}
    world.wait(GUESS_S / 2)
    lose(world)
    assert named(world) is None
    assert world.standing(11) is not Standing.LEFT_BEHIND


def test_a_fault_long_after_one_went_is_of_who_has_the_turn() -> None:
    world = in_turn(10, 11, 9)
    world.die(10)
    world.wait(GUESS_S + 0.1)
    lose(world)
    assert named(world) == 11
    assert world.standing(11) is Standing.LEFT_BEHIND


def test_one_that_waited_and_went_makes_nobody_unsure() -> None:
    world = in_turn(10, 11, 9)
    world.die(11)
    lose(world)
    assert named(world) == 10


def test_work_that_runs_on_keeps_the_turn_until_it_has_ended_or_its_time_is_over() -> None:
    world = in_turn(10, 11, 9)
    world.do(mev.MemberDone(process(10), 2, 5, 6, runs_on=True))
    assert turns_of(world) == {10: Turn.HAS, 11: Turn.WAITS}
    world.do(mev.MemberDone(process(10), 2, 5, 6))
    assert turns_of(world) == {11: Turn.HAS}
    lose(world)
    assert named(world) == 11


def test_nobody_is_named_while_work_of_two_may_run() -> None:
    world = in_turn(10, 11, 9)
    end_turn(world)
    assert turns_of(world) == {11: Turn.HAS}
    world.wait(60)
    lose(world)
    assert named(world) is None
    assert Standing.LEFT_BEHIND not in {world.standing(pid) for pid in (10, 11, 9)}


def test_work_that_is_known_to_have_ended_after_its_turn_was_none_that_faulted() -> None:
    world = in_turn(10, 11, 9)
    end_turn(world)
    world.do(mev.MemberDone(process(10), 2, 5, 6))
    lose(world)
    assert named(world) == 11


def test_the_only_work_that_is_not_known_to_have_ended_is_at_fault() -> None:
    world = in_turn(10, 11, 9)
    end_turn(world)
    world.do(mev.MemberDone(process(11), 2, 5, 6))
    lose(world)
    assert named(world) == 10
    assert world.standing(10) is Standing.LEFT_BEHIND


def test_after_a_while_it_may_as_well_be_what_others_do_by_then() -> None:
    world = in_turn(10, 11, 9)
    world.do(mev.MemberDone(process(10), 2, 5, 6, runs_on=True))
    end_turn(world)
    world.do(mev.MemberDone(process(11), 2, 5, 6))
    world.wait(SLOW_TURN_S)
    lose(world)
    assert named(world) is None
    assert Standing.LEFT_BEHIND not in {world.standing(pid) for pid in (10, 11, 9)}


def test_who_is_cut_off_and_runs_on_makes_the_next_ones_unsure_for_as_long() -> None:
    world = in_turn(10, 11, 12, 9)
    world.do(mev.MemberDone(process(10), 2, 5, 6, runs_on=True))
    world.do(mev.MemberLeft(process(10)))
    world.hello(10, FailoverMode.EXACT, generation=2)
    assert turns_of(world) == {11: Turn.HAS, 12: Turn.WAITS}
    world.wait(1.4)
    world.do(mev.MemberDone(process(11), 2, 5, 6))
    assert turns_of(world) == {12: Turn.HAS}
    world.wait(GUESS_S)
    lose(world)
    assert named(world) is None
    assert world.standing(12) is not Standing.LEFT_BEHIND


def test_two_that_are_slow_take_turns_in_being_the_first() -> None:
    """Otherwise the work of 10 would run beside each turn of 11, the offender."""
    world = in_turn(10, 11, 9)
    world.wait(TURN_S)
    end_turn(world)
    end_turn(world)
    lose(world)
    assert named(world) is None
    move_both(world)
    assert turns_of(world) == {11: Turn.HAS, 10: Turn.WAITS}
    times = [e.delay_s for e in world.ever(fx.ArmTimer) if e.kind == "failover-turn"]
    assert times == [TURN_S, TURN_S, SLOW_TURN_S - TURN_S]
    world.wait(4.4)
    lose(world, "d3")
    assert named(world) == 11


def test_who_took_longer_than_its_turn_comes_last_the_next_time_and_is_waited_for() -> None:
    world = in_turn(10, 11, 9)
    end_turn(world)
    lose(world)
    move_both(world)
    assert turns_of(world) == {11: Turn.HAS, 10: Turn.WAITS}
    lose(world, "d3")
    assert named(world) == 11
    times = [e.delay_s for e in world.ever(fx.ArmTimer) if e.kind == "failover-turn"]
    assert set(times) == {TURN_S}


def test_the_turn_of_one_that_is_slow_is_longer() -> None:
    world = in_turn(10, 11, 9)
    end_turn(world)
    lose(world)
    world.is_ready(10, 3)
    world.do(mev.MemberMoved(process(10), 3, 1, 2, 3, waits=True, takes_ns=1))
    world.do(mev.MemberLeft(process(11)))
    assert turns_of(world) == {10: Turn.HAS}
    times = [e.delay_s for e in world.ever(fx.ArmTimer) if e.kind == "failover-turn"]
    assert times == [TURN_S, TURN_S, SLOW_TURN_S]


def test_who_took_longer_and_died_is_open_for_a_while_alone() -> None:
    world = in_turn(10, 11, 9)
    end_turn(world)
    world.die(10)
    world.work_ended(10)
    world.wait(GUESS_S + 0.1)
    lose(world)
    assert named(world) == 11


def test_who_took_longer_and_came_again_is_not_named_for_good() -> None:
    """After its new connection the client no longer reports that its work has ended."""
    world = in_turn(10, 11, 9)
    end_turn(world)
    world.do(mev.MemberDone(process(11), 2, 5, 6))
    world.do(mev.MemberLeft(process(10)))
    world.hello(10, FailoverMode.EXACT, generation=2)
    world.wait(600)
    lose(world)
    assert named(world) is None
    assert world.standing(10) is not Standing.LEFT_BEHIND


def put_out(world: Site) -> list[int]:
    """Return the clients that are killed after they have moved."""
    for timer in [e for e in world.ever(fx.ArmTimer) if e.kind == "failover-put-out"]:
        world.timer(timer.kind, timer.subject)
    return [e.client.process.pid for e in world.ever(fx.Kill)]


def test_who_moved_on_is_not_ended_for_a_fault_where_it_was() -> None:
    world = in_turn(10, 11, 9)
    end_turn(world)
    world.do(mev.MemberDone(process(11), 2, 5, 6))
    late(world, 10)
    world.is_ready(10, 3)
    world.do(ev.DrainRequested((), True))
    assert 10 in world.told()
    world.moved(10, 3)
    world.is_ready(11, 3)
    world.wait(60)
    lose(world)
    assert named(world) is None
    assert put_out(world) == []


def test_who_comes_late_names_nobody_of_those_who_were_open_when_the_domain_was_lost() -> None:
    world = in_turn(10, 11, 9)
    world.attach(8, "d2")
    end_turn(world)
    lose(world)
    assert named(world) is None
    world.hello(8, FailoverMode.EXACT)
    world.is_ready(10, 3)
    world.do(mev.MemberMoved(process(10), 3, 1, 2, 3, waits=True, takes_ns=1))
    world.is_ready(8, 3)
    assert world.state.members[process(10)].home == "d3"
    assert put_out(world) == []


@pytest.mark.parametrize("in_time", [True, False])
def test_slow_is_who_took_longer_than_its_turn_when_it_had_it_last(in_time: bool) -> None:
    world = in_turn(10, 11, 9)
    end_turn(world)
    if not in_time:
        world.do(mev.MemberDone(process(10), 2, 5, 6))
        assert world.state.members[process(10)].slow
        return
    lose(world)
    move_both(world)
    for pid in (11, 10):
        world.do(mev.MemberDone(process(pid), 3, 5, 6))
    assert not world.state.members[process(10)].slow


def test_who_begins_after_the_first_sign_of_a_fault_did_not_make_it() -> None:
    """An SM exception's line names no client, and comes before the line that tells which domain faulted."""
    world = in_turn(10, 11, 9)
    world.wait(world.state.policy.evidence_window_s + 1.0)
    world.kernel(13, OUT_OF_RANGE)
    world.wait(0.01)
    world.do(mev.MemberDone(process(10), 2, 5, 6))
    assert turns_of(world) == {11: Turn.HAS}
    world.wait(0.01)
    lose(world)
    assert named(world) is None
    assert world.standing(11) is not Standing.LEFT_BEHIND
