"""Clients that could not report where they moved: their old domain ends, and their later report counts."""

from __future__ import annotations

import pytest

from mpsd.base.model import ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.events import DomainRole
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Outcome, Standing
from mpsd.core.state import DomainState
from tests.support.core import SLOT, process, server_of
from tests.unit.test_core_failover import KEEP, ON, Site, site
from tests.unit.test_core_poisoned import poisoned


def lose(world: Site, domain: str) -> None:
    world.kernel(43, "channel 0x1", server_of(domain).pid, "nvidia-cuda-mps")


def restarted(old: DomainState, state: ServerState) -> Site:
    """mpsd was killed between MOVE to d2 and MOVED: its notes say that the client is in d1."""
    world = Site(ON)
    world.do(ev.SlotWanted(SLOT, ("GPU-0",), 1000, start=False))
    world.adopt("d1", DomainRole.OLD, old, server_state=state)
    world.adopt("d2", DomainRole.ACTIVE, DomainState.ACTIVE)
    world.do(mev.MemberRestored(process(10), 1000, KEEP, "d1"))
    for domain in ("d1", "d2"):
        world.attach(10, domain)
    world.do(ev.AdoptionDone())
    world.do(ev.DriverFilesSeen(""))
    return world


def stopped(world: Site) -> list[str]:
    return [e.domain for e in world.ever(fx.StopDomain)]


@pytest.mark.parametrize("says", ["MOVED", "HELLO"])
def test_the_domain_that_was_left_ends_whichever_way_it_says_where_it_is(says: str) -> None:
    world = site(10)
    lose(world, "d1")
    assert world.told() == [10]
    if says == "MOVED":
        world.moved(10, 2)
    else:
        world.do(mev.MemberLeft(process(10)))
        world.hello(10, generation=2)
    assert world.state.members[process(10)].home == "d2"
    assert stopped(world) == ["d1"]


def test_it_ends_after_a_restart_too() -> None:
    world = restarted(DomainState.FAULTED, ServerState.FAULT)
    world.hello(10, generation=2)
    assert world.state.members[process(10)].home == "d2"
    assert stopped(world) == ["d1"]


@pytest.mark.parametrize("ends", ["no", "it is being stopped", "yes"])
def test_who_lives_in_a_domain_that_was_lost_meanwhile_is_moved_on(ends: str) -> None:
    """Its lease in d2 was taken for idle and released; d1, its former domain, is healthy and only drained."""
    world = restarted(DomainState.RETIRED, ServerState.ACTIVE)
    lose(world, "d2")
    if ends != "no":
        world.started("d3")
        assert world.state.domains["d2"].state is DomainState.STOPPING
    if ends == "yes":
        world.stopped("d2")
    assert ("d2" in world.state.domains) == (ends != "yes")
    world.hello(10, generation=2)
    assert world.state.has_lost(world.state.members[process(10)])
    if ends == "no":
        world.started("d3")
    world.is_ready(10, 3)
    assert world.told() == [10]
    world.moved(10, 3)
    assert world.state.members[process(10)].home == "d3"
    assert "d1" in stopped(world)


def test_who_lives_in_a_domain_that_is_well_and_is_no_client_there_yet_has_lost_nothing() -> None:
    world = site(10)
    world.do(mev.MemberLeft(process(10)))
    world.hello(10, generation=2)
    world.started("d2")
    assert not world.state.has_lost(world.state.members[process(10)])


@pytest.mark.parametrize("crossed", [False, True])
def test_who_is_not_ready_is_offered_the_next_standby_whatever_was_said_first(crossed: bool) -> None:
    world = site(10, 11)
    unready = mev.MemberUnready(process(10), 2, "its memory was needed", True)
    if not crossed:
        world.do(unready)
    lose(world, "d1")
    assert (10 in world.told()) == crossed
    if crossed:
        world.do(unready)
        world.do(mev.MemberStayed(process(10), 2, "no standby context of that generation"))
        (entry,) = (f for f in world.failover().fates if f.process.pid == 10)
        assert (entry.outcome, entry.why) == (
            Outcome.STAYED,
            "the standby context was not ready: its memory was needed",
        )
    world.started("d3")
    world.moved(11, 2)
    world.timer("failover-back", f"{process(10)} 2")
    assert world.standing(10) in (Standing.WAITING, Standing.OFFERED)


def test_a_word_that_crossed_keeps_nobody_beside_endless_work() -> None:
    world = poisoned(10)
    assert world.told() == [10]
    world.do(mev.MemberUnready(process(10), 2, "its memory was needed", True))
    world.do(mev.MemberStayed(process(10), 2, "no standby context of that generation"))
    world.timer("failover-back", f"{process(10)} 2")
    world.is_ready(10, 2)
    assert world.told() == [10]
    world.moved(10, 2)
    assert stopped(world) == ["d1"]
