"""Programs that were told to move to a domain that is lost before they say that they have come there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.records import Source
from mpsd.core.standby import Standing, Turn
from mpsd.core.state import DomainState
from mpsd.core.turns import GUESS_S
from mpsd.model import ClientId, FailoverMode
from tests.support.core import process
from tests.unit.test_core_failover import AT_ONCE, IN_TURN, Site, again, turns_of
from tests.unit.test_core_guess import named
from tests.unit.test_core_turns import all_told, another, comes, lose, lost

EXACT = FailoverMode.EXACT


def on_its_way(*, planned: bool) -> Site:
    """10 was told to go from d1 to d2, which is lost before it says anything; 11 has come there."""
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
    """Whether the lease of 10 in d2 is held."""
    return ClientId("d2", process(10)) in world.state.clients


def stays(world: Site) -> None:
    world.do(ev.MemberStayed(process(10), 2, "nobody knows"))


def comes_again(world: Site) -> None:
    """By a new connection, and it has not moved."""
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
    """It had been stopped for a while: what it was told it does then."""
    world = on_its_way(planned=False)
    world.do(ev.ClientDied(process(11)))
    world.started("d3")
    says_nothing(world)
    world.stopped("d2")
    world.do(ev.MemberMoved(process(10), 2, 1, 2, 3))
    assert [(e.process.pid, e.generation) for e in world.made(fx.OfferStandby)] == [(10, 3)]
    world.is_ready(10, 3)
    assert world.told() == [10]


def test_who_went_elsewhere_does_not_come_any_more() -> None:
    world = on_its_way(planned=False)
    world.started("d3")
    world.attach(10, "d3")
    world.do(ev.MemberMoved(process(10), 3, 1, 2, 3))
    assert not has_it(world)


def test_nobody_is_a_victim_where_he_may_not_be() -> None:
    world = on_its_way(planned=True)
    world.do(ev.ClientDied(process(11)))
    world.timer("laggards", "d2")
    assert not [e for e in world.ever(fx.Publish) if e.kind == "victims-stay"]
    world.timer("kill-victims", "d2")
    assert not [e for e in world.ever(fx.Kill) if e.client.process.pid == 10]


def test_one_that_is_silent_on_a_guess_keeps_nobody_from_being_named_for_long() -> None:
    world = all_told(9, 10)
    another(world, 13, "a stranger")
    world.attach(11, "d1")
    world.hello(11, EXACT)
    lost(world)
    assert again(world) == {9: AT_ONCE, 10: AT_ONCE}
    comes(world, 9, 5)
    world.do(ev.MemberDone(process(9), 2))
    world.now += GUESS_S
    world.is_ready(11, 2)
    comes(world, 11, 5)
    assert turns_of(world) == {11: Turn.HAS}
    lose(world, "d2")
    assert named(world) == 11


@pytest.mark.parametrize("first", [True, False], ids=["ends first", "ends last"])
def test_who_waited_there_when_it_ended_has_not_made_the_fault(first: bool) -> None:
    """It was named in d1, is the youngest, and had nothing but a standby in d2."""
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
