"""A server dies and another one comes in the same domain: whose contexts are dead, and whose are not."""

from __future__ import annotations

import pytest

from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.standby import Standing
from mpsd.core.state import DomainState
from mpsd.model import ClientId, ProcessInstance
from tests.support.core import facts, process, server_of
from tests.unit.test_core_failover import KEEP, Site, site

ANOTHER = ProcessInstance(200_900, 500)
YOUNG = 900
"""When the other server, and a client of its, were started (the others: 1)."""


def replaced(world: Site) -> Site:
    """The server of d1 has died, and the control daemon has started another one."""
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert world.domain("d1").state is DomainState.RETIRED
    world.do(ev.ServerSeen("d1", ANOTHER))
    world.started("d3")
    return world


def late(world: Site) -> Site:
    """11 was not ready then, and is offered what is the standby now."""
    assert world.standing(11) is not Standing.READY
    world.is_ready(11, 2)
    return world


def with_one_that_is_not_ready() -> Site:
    world = site(10)
    world.attach(11, "d1")
    world.hello(11)
    return world


def test_who_was_not_ready_moves_when_it_is_though_another_server_is_there() -> None:
    world = replaced(with_one_that_is_not_ready())
    late(world)
    assert world.told() == [11]
    world.moved(11, 2)
    assert world.state.members[process(11)].home == "d2"


def test_who_joined_the_other_server_stays() -> None:
    """Its contexts are well: it stays where it is, and is told nothing."""
    world = replaced(site(10))
    world.wait(1.0)
    world.attach(11, "d1")
    world.hello(11)
    late(world)
    assert not world.told() and world.standing(11) is Standing.READY
    # What concerns that server concerns it.
    world.do(ev.ServerDied("d1", ANOTHER))
    assert world.told() == [11]


@pytest.mark.parametrize("start", [1, YOUNG], ids=["of the dead one", "of the other one"])
def test_it_died_while_mpsd_was_down(start: int) -> None:
    """All are noticed before that is told: who is younger than the other server is its client."""
    world = with_one_that_is_not_ready()
    its = process(12, start)
    world.do(ev.ClientNoticed("d1", facts(12, start)))
    world.do(ev.ClientAttached("d1", its, 1, tracked=True, apart=True))
    world.do(ev.MemberCame(its, facts(12).uid, KEEP, 0))
    replaced(world)
    world.do(ev.ClientNoticed("d2", facts(12, start)))
    world.do(ev.ClientAttached("d2", its, 1, tracked=True, apart=True))
    world.do(ev.MemberReady(its, 2, 5_000_000, 1 << 20))
    assert [e.process for e in world.made(fx.Move)] == ([its] if start == 1 else [])
    assert ClientId("d1", its) in world.state.clients
