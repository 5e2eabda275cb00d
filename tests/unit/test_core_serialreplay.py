"""Serial replay: in which order suspects replay, the shortest replay first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import FailoverMode, ReplayMode, ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Standing, Turn
from mpsd.core.failover.serialreplay import GATHER_S, NEW_S, OPERATION_S, SHORT_REPLAY_S, TRIAL_S
from tests.support.core import process, server_of
from tests.unit.test_core_failover import ON, Site, again, exact, suspected, turns_of


def lose(world: Site, name: str) -> None:
    world.kernel(43, "channel 0x1", server_of(name).pid, "nvidia-cuda-mps")


def suspects(*pids: int) -> Site:
    """No client is named, and all clients except one bystander get the command to move."""
    world = exact(*pids, 9)
    lose(world, "d1")
    world.do(mev.MemberMoved(process(9), 2, 1, 2, 3))
    return world


def comes(world: Site, pid: int, takes_ms: int, *, waits: bool = True, new_s: float | None = None) -> None:
    step = 1_000_000
    said = mev.MemberMoved(process(pid), 2, step, 2 * step, 3 * step, replayed=9, waits=waits, new_s=new_s)
    world.do(replace(said, takes_ns=takes_ms * step))


def waited(world: Site, pid: int) -> None:
    """The client has waited its limit for clients with shorter replays."""
    subject = f"{pid} {process(pid).start_ticks} d2"
    assert [e for e in world.ever(fx.ArmTimer) if (e.kind, e.subject) == ("failover-gather", subject)]
    world.timer("failover-gather", subject)


def turns(world: Site) -> list[int]:
    return [e.process.pid for e in world.ever(fx.GrantTurn)]


def test_the_turns_begin_when_all_have_come_and_the_shortest_is_first() -> None:
    world = suspects(10, 11, 12)
    comes(world, 10, 15)
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-gather")
    assert timer.delay_s == 0.015 < GATHER_S
    comes(world, 11, 14)
    assert turns(world) == []
    comes(world, 12, 11)
    assert turns(world) == [12]
    entries = {f.process.pid: f for f in world.failover().fates}
    assert [entries[pid].replayed for pid in (10, 11, 12)] == [0, 0, 0]
    assert [entries[pid].turn_ms is None for pid in (10, 11, 12)] == [True, True, False]
    waited(world, 10)
    assert turns(world) == [12]
    world.do(mev.MemberDone(process(12), 2, 5, 27))
    world.do(mev.MemberDone(process(11), 2, 5, 196))
    assert turns(world) == [12, 11, 10]
    done = next(f for f in world.failover().fates if f.process.pid == 12)
    assert done.replayed == 27 and done.done_ms is not None


def test_who_needs_little_time_waits_for_nobody() -> None:
    world = suspects(10, 11, 12)
    comes(world, 10, 591)
    assert turns(world) == []
    comes(world, 11, round(SHORT_REPLAY_S * 1e3))
    assert turns(world) == [11]
    # The other client that has arrived still lets the third go first.
    world.do(mev.MemberDone(process(11), 2))
    assert turns(world) == [11]
    comes(world, 12, 1)
    assert turns(world) == [11, 12]


@pytest.mark.parametrize(("operations", "turn"), [(10, [10]), (2 * round(SHORT_REPLAY_S / OPERATION_S), [])])
def test_who_does_not_say_how_long_it_takes_has_so_many_operations(operations: int, turn: list[int]) -> None:
    world = suspects(10, 11)
    world.do(mev.MemberMoved(process(10), 2, 1, 2, 3, replayed=operations, waits=True))
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
    # The client arrives during the other's turn, and precedes a client with more to replay.
    comes(world, 12, 50)
    world.do(mev.MemberDone(process(11), 2))
    assert turns(world) == [11, 12]


def test_who_has_much_to_do_lets_the_others_come_first_and_waits_no_longer_than_that() -> None:
    world = suspects(10, 11, 12)
    comes(world, 10, 100_000)
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-gather")
    assert timer.delay_s == GATHER_S
    comes(world, 11, 30)
    waited(world, 11)
    assert turns(world) == [11]
    # It has not waited its limit yet, and the third is still on its way.
    world.do(mev.MemberDone(process(11), 2))
    assert turns(world) == [11]
    waited(world, 10)
    assert turns(world) == [11, 10]
    comes(world, 12, 50)
    world.do(mev.MemberDone(process(10), 2))
    assert turns(world) == [11, 10, 12]


def test_nobody_has_a_turn_in_a_domain_that_is_lost() -> None:
    """Other clients work beside a turn: a fault of the domain names no client."""
    world = suspects(10, 11)
    comes(world, 10, 30)
    comes(world, 11, 50)
    assert turns(world) == [10]
    lose(world, "d2")
    world.timer("failover-turn", f"10 {process(10).start_ticks} d2")
    assert turns(world) == [10]
    assert max(world.records().values(), key=lambda record: record.id).offender is None
    assert Standing.LEFT_BEHIND not in {world.standing(pid) for pid in (10, 11)}


def test_a_turn_does_not_last_for_ever() -> None:
    world = suspected(10, 11, 12, 9)
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-turn")
    world.timer("failover-turn", timer.subject)
    assert turns_of(world) == {11: Turn.HAS, 12: Turn.WAITS}
    world.timer("failover-turn", timer.subject)
    assert turns_of(world) == {11: Turn.HAS, 12: Turn.WAITS}
    # The client connects again: the end of its old connection is never seen.
    world.hello(11, FailoverMode.EXACT, 2)
    assert turns_of(world) == {12: Turn.HAS}


def all_told(*pids: int) -> Site:
    """All clients of the domain replay, or have nothing to replay: the offender is among them."""
    world = Site(replace(ON, failover=FailoverMode.EXACT))
    world.ready()
    world.do(ev.DriverFilesSeen(""))
    for pid in pids:
        world.attach(pid, "d1")
        world.hello(pid, FailoverMode.EXACT)
    for pid in pids:
        world.is_ready(pid, 2)
    return world


def lost(world: Site) -> None:
    lose(world, "d1")


def up_to_the_last() -> Site:
    """12, the youngest, has the least to replay; the other clients are done."""
    world = all_told(10, 11, 12)
    lost(world)
    for pid, takes_ms in ((10, 591), (11, 196), (12, 30)):
        comes(world, pid, takes_ms)
    assert turns(world) == [11]
    world.do(mev.MemberDone(process(11), 2))
    world.do(mev.MemberDone(process(10), 2))
    assert turns(world) == [11, 10] and turns_of(world) == {12: Turn.WAITS}
    world.started("d3")
    return world


def test_the_youngest_is_the_last_and_replays_where_no_other_client_works() -> None:
    world = up_to_the_last()
    assert [(e.process.pid, e.generation) for e in world.ever(fx.OfferStandby)][-1] == (12, 3)
    world.is_ready(12, 3)
    assert again(world) == {12: ReplayMode.IN_TURN}
    assert turns(world) == [11, 10]


def test_the_last_one_replays_beside_the_others_where_it_can_have_no_domain_of_its_own() -> None:
    world = up_to_the_last()
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-trial" and "12 " in e.subject)
    assert timer.delay_s == TRIAL_S
    world.timer(timer.kind, timer.subject)
    assert turns_of(world) == {12: Turn.HAS}
    world.do(mev.MemberDone(process(12), 2))
    assert turns_of(world) == {}


@pytest.mark.parametrize("who", ["a stranger", "one that has just ended", "one in mode keep"])
def test_where_somebody_older_may_have_made_the_fault_nobody_waits_for_that(who: str) -> None:
    world = all_told(10, 11)
    another(world, 9, who)
    lost(world)
    comes(world, 10, 591)
    comes(world, 11, 30)
    if who == "one in mode keep":
        world.do(mev.MemberMoved(process(9), 2, 1, 2, 3))
    assert turns(world) == [11]
    world.do(mev.MemberDone(process(11), 2))
    assert turns(world) == [11, 10]


def another(world: Site, pid: int, who: str) -> None:
    """Attach a client that will not replay."""
    world.attach(pid, "d1")
    if who == "one in mode keep":
        world.hello(pid, FailoverMode.KEEP)
        world.is_ready(pid, 2)
    if who == "one that has just ended":
        world.do(ev.ClientDied(process(pid)))


def test_a_server_that_was_killed_may_be_nobodys_fault() -> None:
    """At first mpsd knows only that the server is in FAULT."""
    world = all_told(10, 11)
    world.do(ev.ServerStateSeen("d1", ServerState.FAULT))
    comes(world, 10, 591)
    comes(world, 11, 30)
    world.do(mev.MemberDone(process(11), 2))
    assert turns(world) == [11, 10]


def test_one_alone_is_the_last() -> None:
    world = all_told(10)
    lost(world)
    comes(world, 10, 30)
    assert turns(world) == [] and world.state.members[process(10)].suspected


def test_who_comes_when_only_the_last_one_waits_has_a_turn_though_another_never_comes() -> None:
    world = all_told(10, 11, 12, 13)
    lost(world)
    comes(world, 10, 50)
    comes(world, 13, 30)
    # The last client has no turn yet, and its waiting time is not that of the other clients.
    waited(world, 13)
    assert turns(world) == []
    waited(world, 10)
    assert turns(world) == [10]
    world.do(mev.MemberDone(process(10), 2))
    assert turns_of(world) == {13: Turn.WAITS}
    comes(world, 11, 70)
    waited(world, 11)
    assert turns_of(world) == {13: Turn.WAITS, 11: Turn.HAS}
    world.do(mev.MemberDone(process(11), 2))
    world.do(mev.MemberStayed(process(12), 2, "nobody knows"))
    assert turns_of(world) == {13: Turn.WAITS} and world.state.members[process(13)].suspected


def test_one_that_stays_or_ends_is_waited_for_no_longer() -> None:
    world = suspects(10, 11, 12)
    comes(world, 10, 50)
    world.do(mev.MemberStayed(process(11), 2, "nobody knows"))
    assert turns(world) == []
    world.do(ev.ClientDied(process(12)))
    assert turns(world) == [10]


def test_the_youngest_may_be_still_on_its_way() -> None:
    """A client that waits meanwhile is not the last."""
    world = all_told(10, 11, 12)
    lost(world)
    comes(world, 10, 50)
    comes(world, 11, 70)
    waited(world, 10)
    waited(world, 11)
    world.do(mev.MemberDone(process(10), 2))
    assert turns(world) == [10, 11]


@pytest.mark.parametrize(
    ("new_s", "last"),
    [
        ({10: 0.02}, 10),
        ({10: NEW_S}, 12),
        ({10: 0.02, 11: 0.01}, 11),
        ({10: 0.02, 11: 0.3}, 11),
        ({10: 0.02, 12: 0.3}, 12),
        ({}, 12),
    ],
    ids=["new", "long ago", "two", "in another order", "the youngest too", "none"],
)
def test_who_has_just_launched_a_kernel_for_the_first_time_is_the_last(
    new_s: dict[int, float], last: int
) -> None:
    """If no client has a new kernel, the youngest replays last."""
    world = all_told(10, 11, 12)
    lost(world)
    for pid in (10, 11, 12):
        comes(world, pid, 30, new_s=new_s.get(pid))
    others = [pid for pid in (10, 11, 12) if pid != last]
    for pid in others:
        world.do(mev.MemberDone(process(pid), 2))
    assert turns(world) == others and turns_of(world) == {last: Turn.WAITS}
    assert [m.process.pid for m in world.state.members.values() if m.suspected] == [last]
