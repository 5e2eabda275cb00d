"""Ends of clients of several domains: each lease ends by the signs of the domain in which the work ran."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import ClientId, ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.events import DomainRole
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Standing
from mpsd.core.state import ClientState, DomainState
from mpsd.core.victims import USE
from tests.support.core import SLOT, World, facts, process, server_of
from tests.unit.test_core_failover import KEEP, ON, Site, site

OFTEN = replace(ON, moves_per_minute=100)
MOVES = 4


def drained(world: Site) -> None:
    world.do(ev.DrainRequested((), True))
    world.do(ev.DrainRequested((), False))


def lost(world: World, domain: str) -> None:
    world.kernel(43, "channel 0x1", server_of(domain).pid, "nvidia-cuda-mps")


def moved(moves: int = MOVES) -> Site:
    """Client 10 has moved from d1 on, out of healthy domains in which the clients 21 and up live on."""
    world = site(10, policy=OFTEN)
    for number in range(1, moves + 1):
        world.attach(20 + number, f"d{number}")
        drained(world)
        world.moved(10, number + 1)
        world.started(f"d{number + 2}")
        world.is_ready(10, number + 2)
        world.wait(1.0)
    for number in (1, 2):
        world.attach(30 + number, f"d{moves + number}")
    assert domains_of(world) == [f"d{n}" for n in range(1, moves + 3)]
    return world


def domains_of(world: Site) -> list[str]:
    return sorted(c.id.domain for c in world.state.spaces_of(process(10)))


def released(world: Site) -> list[str]:
    return sorted(e.client.domain for e in world.ever(fx.ReleaseLease) if e.client.process == process(10))


def work_ends(world: Site, domain: str) -> None:
    world.do(ev.WorkEnded(ClientId(domain, process(10)), "its semaphores have been released"))


@pytest.mark.parametrize("visible", [True, False])
def test_the_end_of_its_work_releases_the_leases_in_all_domains_that_it_was_in(visible: bool) -> None:
    world = moved()
    everywhere = domains_of(world)
    world.die(10)
    assert released(world) == []
    if not visible:
        for domain in everywhere:
            if domain != "d5":
                world.do(ev.WorkNotVisible(ClientId(domain, process(10))))
    work_ends(world, "d5")
    assert released(world) == everywhere and domains_of(world) == []
    assert world.made(fx.Forget) == [fx.Forget(process(10))]


def test_no_lease_is_released_before_the_work_has_ended() -> None:
    world = moved()
    world.die(10)
    world.do(ev.WorkNotVisible(ClientId("d5", process(10))))
    assert "d5" in domains_of(world) and world.client("d5", 10).blind
    assert released(world) == []


def test_where_its_home_is_lost_the_other_leases_stay_beside_living_clients() -> None:
    """Its home is its own claim, and the end of its work elsewhere was not seen."""
    world = site(10, policy=replace(ON, moves_per_minute=0))
    world.attach(11, "d2")
    world.do(ev.ClientNoticed("d1", world.client("d1", 10).facts, listed=True))
    lost(world, "d1")
    assert not world.told() and world.domain("d2").state is DomainState.ACTIVE
    world.die(10)
    assert released(world) == ["d1"] and world.client("d2", 10).state is ClientState.LINGERING
    world.die(11)
    assert released(world) == ["d1", "d2"]


def test_what_it_may_have_begun_where_it_was_told_to_move_is_waited_for() -> None:
    world = site(10)
    world.attach(11, "d2")
    lost(world, "d1")
    assert world.told() == [10]
    world.die(10)
    assert released(world) == ["d1"]
    assert world.client("d2", 10).state is ClientState.LINGERING
    work_ends(world, "d2")
    assert released(world) == ["d1", "d2"]


@pytest.mark.parametrize("heard", [True, False])
def test_a_home_that_only_an_earlier_mpsd_knew_is_no_ground(heard: bool) -> None:
    world = Site(ON)
    world.do(ev.SlotWanted(SLOT, ("GPU-0",), 1000, start=False))
    world.adopt("d1", DomainRole.OLD, DomainState.FAULTED, server_state=ServerState.FAULT)
    world.adopt("d2", DomainRole.ACTIVE, DomainState.ACTIVE)
    world.do(mev.MemberRestored(process(10), 1000, KEEP, "d1"))
    for domain in ("d1", "d2"):
        world.attach(10, domain)
    world.attach(11, "d2")
    world.do(ev.AdoptionDone())
    if heard:
        world.hello(10)
        assert world.state.members[process(10)].home == "d1"
    world.die(10)
    assert "d2" not in released(world)


def test_the_leases_of_the_program_before_an_exec_go_by_themselves() -> None:
    world = moved(1)
    world.do(ev.ClientLeft(process(10), "exec"))
    world.wait(1.0)
    world.do(ev.ClientNoticed("d2", world.client("d2", 10).facts))
    world.do(ev.ClientAttached("d2", process(10), 1, tracked=True, space=1))
    world.die(10)
    world.do(ev.WorkEnded(ClientId("d2", process(10), 1), "gone"))
    assert released(world) == ["d2"] and domains_of(world) == ["d1", "d2", "d3"]
    work_ends(world, "d2")
    assert domains_of(world) == []


# -- clients without work in a faulted domain ------------------------------------------------------------


def looked_at(world: World, domain: str = "d1") -> list[int]:
    world.timer(USE, domain)
    return [e.client.process.pid for e in world.made(fx.ProbeUse)]


def unused(world: World, pid: int, domain: str = "d1") -> None:
    world.do(ev.NeverLaunched(ClientId(domain, process(pid))))


def faulted(*pids: int, exclusive: bool = False) -> World:
    """The clients 11 and `pids` of d1, which has faulted; d2 serves."""
    world = World().ready(exclusive)
    world.join(11, *pids)
    lost(world, "d1")
    assert world.domain("d1").state is DomainState.FAULTED
    return world


def stopped(world: World) -> list[str]:
    return [e.domain for e in world.ever(fx.StopDomain)]


def test_a_client_without_work_does_not_keep_a_faulted_domain() -> None:
    world = faulted()
    assert (USE, "d1") in {(e.kind, e.subject) for e in world.made(fx.ArmTimer)}
    assert looked_at(world) == [11] and stopped(world) == []
    unused(world, 11)
    assert stopped(world) == ["d1"]
    assert [e.client.process.pid for e in world.made(fx.ReleaseLease)] == [11]
    assert world.made(fx.Forget) == [fx.Forget(process(11))] and not world.ever(fx.Kill)


def test_a_client_that_has_launched_work_keeps_it() -> None:
    world = faulted(12)
    assert looked_at(world) == [11, 12]
    unused(world, 11)
    assert stopped(world) == [] and looked_at(world) == [12]
    world.die(12)
    assert stopped(world) == ["d1"]


@pytest.mark.parametrize("attached", [True, False])
def test_one_that_is_found_after_the_fault_is_looked_at_too(attached: bool) -> None:
    world = World().ready()
    world.join(11)
    world.do(ev.ClientNoticed("d1", facts(12), listed=True))
    lost(world, "d1")
    assert looked_at(world) == [11, 12]
    if attached:
        world.do(ev.ClientAttached("d1", process(12), 1, tracked=True))
    else:
        world.do(ev.AttachFailed("d1", process(12), "the process created no GPU address space"))
    assert (USE, "d1") in {(e.kind, e.subject) for e in world.made(fx.ArmTimer)}
    assert looked_at(world) == [11, 12]


def test_in_a_domain_that_serves_nothing_is_made_of_it() -> None:
    world = World().ready()
    world.join(11)
    assert looked_at(world) == []
    unused(world, 11)
    assert not world.client("d1", 11).unused


def test_where_one_server_can_exist_alone_its_process_is_waited_for() -> None:
    world = faulted(exclusive=True)
    unused(world, 11)
    assert world.client("d1", 11).living and stopped(world) == []


def test_one_under_eviction_is_waited_for() -> None:
    world = faulted()
    world.evict(11)
    unused(world, 11)
    assert world.client("d1", 11).state is ClientState.KILLING and stopped(world) == []


@pytest.mark.parametrize("ends", ["connection", "preparation"])
def test_a_participant_keeps_its_domain(ends: str) -> None:
    """It may connect again, and may be offered a standby context later."""
    world = site()
    world.attach(10, "d1")
    world.hello(10)
    lost(world, "d1")
    assert not world.told() and world.standing(10) is Standing.OFFERED
    unused(world, 10)
    assert stopped(world) == []
    if ends == "connection":
        world.do(mev.MemberLeft(process(10)))
    else:
        world.do(mev.MemberUnready(process(10), 2, "the driver refuses a second instance"))
    assert stopped(world) == []


def test_the_others_move_out_of_a_domain_before_such_a_client_ends_with_it() -> None:
    world = site(10)
    world.attach(21, "d1")
    lost(world, "d1")
    unused(world, 21)
    assert world.told() == [] and stopped(world) == []
    assert world.client("d1", 21).unused
    world.moved(10, 2)
    assert stopped(world) == ["d1"]
    assert domains_of(world) == ["d2"]


def test_such_a_client_is_known_for_as_long_as_its_domain_lasts() -> None:
    """A list of the server names it, and it is no newcomer."""
    world = site(10)
    for pid in (21, 22):
        world.attach(pid, "d1")
    lost(world, "d1")
    unused(world, 21)
    world.moved(10, 2)
    assert stopped(world) == [] and world.client("d1", 21).living
    world.do(ev.ClientNoticed("d1", facts(21), listed=True))
    assert world.domain("d1").refused == 0
    world.die(22)
    assert stopped(world) == ["d1"] and "clients_refused" not in world.state.counters
