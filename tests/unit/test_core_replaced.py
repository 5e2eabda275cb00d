"""A server dies and a second server starts in the same domain: which clients' contexts are dead."""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import FailoverMode, ProcessInstance, ReplayMode, ServerState, ZonePolicy
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover.participants import Standing, Turn
from mpsd.core.state import DomainState
from tests.support.core import facts, process, server_of
from tests.unit.test_core_failover import ON, Site, again, exact, site
from tests.unit.test_core_serialreplay import comes, lose, suspects

EXACT = FailoverMode.EXACT
ANOTHER = ProcessInstance(200_900, 500)


def replaced(world: Site, name: str = "d1") -> Site:
    """The server of that domain has died, and the control daemon has started a new server."""
    world.do(ev.ServerDied(name, server_of(name)))
    assert world.domain(name).state is DomainState.RETIRED
    world.do(ev.ServerSeen(name, ANOTHER))
    world.started("d3")
    return world


def with_one_that_is_not_ready() -> Site:
    """Client 10 is ready, and 11 is not."""
    world = site(10)
    world.attach(11, "d1")
    world.hello(11)
    return world


def test_who_was_not_ready_moves_when_it_is_though_another_server_is_there() -> None:
    world = replaced(with_one_that_is_not_ready())
    assert world.standing(11) is not Standing.READY
    world.is_ready(11, 2)
    assert world.told() == [11]
    world.moved(11, 2)
    assert world.state.members[process(11)].home == "d2"


def test_who_joined_the_other_server_stays() -> None:
    """Its contexts are healthy: it stays where it is, and gets no command."""
    world = replaced(site(10))
    world.attach(11, "d1")
    world.hello(11)
    world.is_ready(11, 2)
    assert not world.told() and world.standing(11) is Standing.READY
    # The death of the new server concerns the client.
    world.do(ev.ServerDied("d1", ANOTHER))
    assert world.told() == [11]


def test_another_program_in_the_same_process_is_none_of_those() -> None:
    world = site(10)
    for pid in (11, 12):
        world.attach(pid, "d1")
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.do(ev.ClientLeft(process(11), "exec"))
    world.do(ev.ServerSeen("d1", ANOTHER))
    # The address space left by the earlier program has the first number.
    world.do(ev.ClientNoticed("d1", facts(11)))
    world.do(ev.ClientAttached("d1", process(11), 1, tracked=True, space=1, apart=True))
    world.hello(11)
    world.is_ready(11, 2)
    assert not world.told() and world.standing(11) is Standing.READY


def test_what_is_told_of_its_end_is_nobodys_fault_to_who_comes_later_either() -> None:
    world = site(10, policy=replace(ON, failover=EXACT))
    world.attach(11, "d1")
    world.hello(11, EXACT)
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.wait(0.5)
    world.is_ready(11, 2)
    assert again(world) == {11: ReplayMode.AGAIN}


def test_a_fault_of_the_other_server_is_one() -> None:
    world = replaced(exact(10, 11))
    world.attach(12, "d1")
    world.hello(12)
    world.is_ready(12, 2)
    world.server_state("d1", ServerState.FAULT)
    assert world.domain("d1").state is DomainState.FAULTED and 12 in world.told()
    assert {r.fault_class for r in world.records().values()} > {"server-death"}


def test_nobody_has_a_turn_in_a_dead_context() -> None:
    world = suspects(10, 11)
    comes(world, 10, 30)
    comes(world, 11, 50)
    assert world.state.members[process(11)].turn is Turn.WAITS
    replaced(world, "d2")
    world.is_ready(10, 3)
    assert world.told() == [10] and not world.made(fx.GrantTurn)
    world.is_ready(11, 3)
    assert world.told() == [11] and not world.made(fx.GrantTurn)


def test_victims_of_a_fault_are_still_that() -> None:
    world = Site(replace(ON, kill_victims_after_s=1.0))
    world.ready()
    world.attach(13, "d1")
    world.attach(14, "d1")
    world.fault(13)
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.do(ev.ServerSeen("d1", ANOTHER))
    world.attach(15, "d1")
    world.wait(1.0)
    world.timer("kill-victims", "d1")
    killed = [e.client.process.pid for e in world.ever(fx.Kill)]
    assert 14 in killed and 15 not in killed


def test_who_was_frozen_in_a_domain_that_was_left_by_plan_is_killed_with_its_server() -> None:
    world = site(10)
    world.attach(13, "d1")
    world.do(ev.ZonePolicySet(process(13), ZonePolicy.FREEZE))
    world.do(ev.FreezeRestored(process(13)))
    world.do(ev.DrainRequested((), True))
    world.moved(10, 2)
    assert world.domain("d1").state is DomainState.RETIRED and not world.ever(fx.Kill)
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert [e.client.process.pid for e in world.ever(fx.Kill)] == [13]


def test_who_still_prepares_a_standby_is_let_live_for_a_while() -> None:
    world = site(10, policy=replace(ON, kill_victims_after_s=1.0))
    for pid in (11, 13, 14):
        world.attach(pid, "d1")
    world.hello(11)
    world.fault(13)
    world.wait(1.0)
    world.timer("kill-victims", "d1")
    killed = [e.client.process.pid for e in world.ever(fx.Kill)]
    assert 14 in killed and 11 not in killed
    world.wait(world.state.policy.move_wait_s)
    world.timer("kill-victims", "d1")
    assert 11 in [e.client.process.pid for e in world.ever(fx.Kill)]


def test_a_standby_that_is_lost_too_gives_no_turn() -> None:
    """The result is the same as before another server started."""
    world = suspects(10, 11)
    comes(world, 10, 30)
    lose(world, "d2")
    assert not world.made(fx.GrantTurn)
