"""Clients that were told to move to a domain that faults before they report their arrival."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpsd.base.model import ClientId, FailoverMode
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.draft import FAILOVERS_KEPT
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Outcome, Standing
from mpsd.core.faults.records import Source
from mpsd.core.state import DomainState
from tests.support.core import facts, process, server_of
from tests.unit.test_core_failover import IN_TURN, KEEP, ON, Site, again, site
from tests.unit.test_core_serialreplay import all_told, comes, lose, lost

EXACT = FailoverMode.EXACT


def on_its_way(*, planned: bool) -> Site:
    """Client 10 was told to move from d1 to d2, which faults before its report; client 11 has arrived."""
    world = all_told(10, 11)
    if planned:
        world.do(ev.DrainRequested((), True))
        assert world.told() == [10, 11]
    else:
        lost(world)
    comes(world, 11, 5, waits=not planned)
    lose(world, "d2")
    assert world.standing(10) is Standing.MOVING and has_it(world)
    return world


def has_it(world: Site) -> bool:
    """Return whether the lease of 10 in d2 is held."""
    return ClientId("d2", process(10)) in world.state.clients


def stays(world: Site) -> None:
    world.do(mev.MemberStayed(process(10), 2, "nobody knows"))


def comes_again(world: Site) -> None:
    """Connect again without having moved."""
    world.hello(10, EXACT)


def says_nothing(world: Site) -> None:
    world.timer(
        "failover-wait", str(world.state.failovers[-1 if not world.state.failovers[-1].planned else 0].id)
    )
    for record in world.state.failovers:
        world.timer("failover-wait", str(record.id))


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("what", [stays, comes_again, says_nothing])
def test_the_domain_ends_over_who_does_not_come(planned: bool, what: Callable[[Site], None]) -> None:
    world = on_its_way(planned=planned)
    world.do(ev.ClientDied(process(11)))
    world.started("d3")
    assert world.path() == "d3" and world.domain("d2").state is DomainState.FAULTED
    what(world)
    assert not has_it(world) and world.domain("d2").state is DomainState.STOPPING


def test_who_comes_when_the_domain_has_ended_is_for_the_next_one() -> None:
    """The client had been stopped for a while and carries out the old command to move."""
    world = on_its_way(planned=False)
    world.do(ev.ClientDied(process(11)))
    world.started("d3")
    says_nothing(world)
    world.stopped("d2")
    world.do(mev.MemberMoved(process(10), 2, 1, 2, 3))
    assert [(e.process.pid, e.generation) for e in world.made(fx.OfferStandby)] == [(10, 3)]
    world.is_ready(10, 3)
    assert world.told() == [10]


def test_who_went_elsewhere_does_not_come_any_more() -> None:
    world = on_its_way(planned=False)
    world.started("d3")
    world.attach(10, "d3")
    world.do(mev.MemberMoved(process(10), 3, 1, 2, 3))
    assert not has_it(world)


def test_nobody_is_a_victim_where_he_may_not_be() -> None:
    world = on_its_way(planned=True)
    world.do(ev.ClientDied(process(11)))
    world.timer("laggards", "d2")
    assert not [e for e in world.ever(fx.Publish) if e.kind == "victims-stay"]
    world.timer("kill-victims", "d2")
    assert not [e for e in world.ever(fx.Kill) if e.client.process.pid == 10]


@pytest.mark.parametrize("first", [True, False], ids=["ends first", "ends last"])
def test_who_waited_there_when_it_ended_has_not_made_the_fault(first: bool) -> None:
    """The client was named in d1, is the youngest, and had only a standby context in d2."""
    world = all_told(10, 11, 12)
    world.fault(12)
    if first:
        world.do(ev.ClientDied(process(12)))
    for pid in (10, 11):
        comes(world, pid, 5, waits=False)
    if not first:
        world.do(ev.ClientDied(process(12)))
    world.started("d3")
    for pid in (10, 11):
        world.is_ready(pid, 3)
    lose(world, "d2")
    assert again(world) == {10: IN_TURN, 11: IN_TURN}
    assert Source.UVM in {e.source for r in world.records().values() for e in r.evidence}


def test_it_comes_to_a_domain_that_is_lost_and_not_gone() -> None:
    """A foreign client stays there. The client's own context is dead: it waits for the next one."""
    world = all_told(10)
    lost(world)
    world.attach(14, "d2")
    lose(world, "d2")
    world.started("d3")
    for record in world.state.failovers:
        world.timer("failover-wait", str(record.id))
    world.do(mev.MemberMoved(process(10), 2, 1, 2, 3))
    assert world.standing(10) is Standing.OFFERED
    world.is_ready(10, 3)
    assert world.told() == [10]


def test_a_planned_move_that_a_fault_overtakes_is_made_as_one_from_that() -> None:
    world = site(10)
    world.attach(13, "d1")
    world.do(ev.DrainRequested((), True))
    world.fault(13)
    world.do(mev.MemberStayed(process(10), 2, "its work did not end in time"))
    assert world.standing(10) is Standing.OFFERED
    world.is_ready(10, 2)
    assert world.told() == [10]


def test_an_exec_that_is_seen_late_leaves_the_new_programs_word() -> None:
    world = site(10)
    world.hello(10)
    world.do(ev.ClientLeft(process(10), "exec"))
    world.forget()
    world.do(ev.ClientNoticed("d1", facts(10)))
    world.do(ev.ClientAttached("d1", process(10), 1, tracked=True, space=1, apart=True))
    assert [e.process.pid for e in world.ever(fx.OfferStandby)] == [10]
    # If the connection was the old program's, its end removes the participant.
    world.do(ev.ClientLeft(process(10), "exit"))
    world.do(mev.MemberLeft(process(10)))
    assert process(10) not in world.state.members


def test_words_are_waited_for_beside_many_other_records() -> None:
    """There are more records than are kept, so the one being revised would be dropped."""
    world = Site(ON)
    world.do(ev.DriverFilesSeen(""))
    first = 0
    for number in range(FAILOVERS_KEPT + 1):
        uid, slot = 1000 + number, f"gpu0.uid{1000 + number}"
        world.want(slot, uid=uid)
        active = world.state.slots[slot].active
        assert active is not None
        world.started(active)
        standby = world.state.slots[slot].spare
        assert standby is not None
        world.started(standby)
        pids = (500, 501) if number == 0 else (600 + number,)
        for pid in pids:
            for domain in (active, standby):
                world.do(ev.ClientNoticed(domain, facts(pid, uid=uid)))
                world.do(ev.ClientAttached(domain, process(pid), 1, tracked=True, apart=True))
            world.do(mev.MemberCame(process(pid), uid, KEEP, 0))
        generation = int(standby.removeprefix("d"))
        world.do(mev.MemberReady(process(pids[0]), generation, 1, 1))
        world.do(ev.ServerDied(active, server_of(active)))
        if number == 0:
            first = world.state.failovers[0].id
        else:
            world.do(mev.MemberMoved(process(pids[0]), generation, 1, 2, 3, 0, 0))
    assert [f.outcome for r in world.state.failovers if r.id == first for f in r.fates] == [
        Outcome.TOLD,
        Outcome.NOT_TOLD,
    ]
    world.wait(10.0)
    world.timer("failover-wait", str(first))
    assert not [r for r in world.state.failovers if r.id == first]
    assert world.ever(fx.RecordFailover)[-1].record.fates[0].outcome is Outcome.SILENT
