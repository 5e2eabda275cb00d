"""Full domains: new clients go to the next domain, the clients that are there work on and stay protected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import FailoverMode, ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.domains import FULL_DOMAINS
from mpsd.core.failover.participants import Outcome, Standing
from mpsd.core.state import DomainState, Policy
from tests.support.core import GPU, SLOT, UID, World, facts, process
from tests.unit.test_core_failover import Site, site

FEW = Policy(clients_per_domain=3)
MOVING = replace(FEW, failover=FailoverMode.EXACT)


def states(world: World) -> dict[str, str]:
    return {name: domain.state.value for name, domain in world.state.domains.items()}


def full_world() -> World:
    """d1 is full with the clients 10, 11 and 12; d2 is active, d3 its standby domain."""
    world = World(FEW).ready()
    world.join(10, 11, 12)
    world.started("d3")
    return world


def test_with_as_many_clients_as_it_takes_the_next_domain_serves() -> None:
    world = World(FEW).ready()
    world.join(10, 11)
    assert world.path() == "d1"
    world.join(12)
    assert world.path() == "d2" and states(world) == {"d1": "full", "d2": "active", "d3": "starting"}
    assert not world.ever(fx.StopDomain) and not world.ever(fx.Move) and len(world.client_states()) == 3


def test_it_waits_for_a_warm_standby_domain() -> None:
    world = World(FEW)
    world.want()
    world.started("d1")
    world.join(10, 11, 12)
    assert world.path() == "d1" and states(world)["d1"] == "active"
    world.started("d2")
    assert world.path() == "d2" and states(world)["d1"] == "full"


def test_a_full_domain_ends_with_its_last_client() -> None:
    world = full_world()
    for pid in (10, 11, 12):
        world.die(pid)
        world.work_ended(pid)
    assert [e.domain for e in world.ever(fx.StopDomain)] == ["d1"]
    world.stopped("d1")
    assert states(world) == {"d2": "active", "d3": "warm"}


def test_no_client_returns_to_it_when_it_has_places_again() -> None:
    world = full_world()
    world.die(10)
    world.work_ended(10)
    assert world.path() == "d2" and states(world)["d1"] == "full"


def crowded_world() -> World:
    """As many full domains as a slot may have, and a full active domain, each with three clients."""
    world = World(FEW).ready()
    for number in range(1, FULL_DOMAINS + 2):
        world.join(*clients_in(number), domain=f"d{number}")
        if number <= FULL_DOMAINS:
            world.started(f"d{number + 2}")
    return world


def clients_in(number: int) -> range:
    """Return the clients of this domain in crowded_world()."""
    return range(7 + 3 * number, 10 + 3 * number)


def test_each_domain_is_followed_by_another_up_to_a_limit() -> None:
    world = crowded_world()
    full = [name for name, state in states(world).items() if state == "full"]
    assert len(full) == FULL_DOMAINS and world.path() == f"d{FULL_DOMAINS + 1}"
    assert world.state.counters["full_domains_kept"] >= 1


def test_at_the_limit_the_full_domain_with_the_fewest_clients_serves_again() -> None:
    world = crowded_world()
    last = f"d{FULL_DOMAINS + 1}"
    for pid in (*clients_in(3)[:1], *clients_in(5)[:2]):
        world.die(pid)
        world.work_ended(pid)
    world.do(ev.ClientRefused(last, 99, full=True))
    assert world.path() == "d5" and states(world)["d5"] == "active" and states(world)[last] == "full"
    # The standby domain is the same.
    assert states(world)[f"d{FULL_DOMAINS + 2}"] == "warm"
    world.join(100, 101, domain="d5")
    assert world.path() == "d3" and states(world)["d5"] == "full"


def test_at_the_limit_its_participants_keep_their_standby_domain() -> None:
    world = Site(MOVING)
    world.ready()
    world.do(ev.DriverFilesSeen(""))
    for number in range(1, FULL_DOMAINS + 2):
        for pid in clients_in(number):
            world.attach(pid, f"d{number}")
        if number <= FULL_DOMAINS:
            world.started(f"d{number + 2}")
    standby = FULL_DOMAINS + 2
    moving, *gone = clients_in(5)
    world.hello(moving)
    world.is_ready(moving, standby)
    for pid in gone:
        world.die(pid)
        world.work_ended(pid)
    world.do(ev.ClientRefused(f"d{FULL_DOMAINS + 1}", 99, full=True))
    assert world.path() == "d5" and world.standing(moving) is Standing.READY
    world.attach(100, "d5")
    world.fault(100, domain="d5")
    assert world.told() == [moving] and world.path() == f"d{standby}"


@pytest.mark.parametrize(("private", "path"), [(True, "d2"), (False, "d1")])
def test_a_refusal_in_the_log_counts_only_where_its_user_alone_writes_it(private: bool, path: str) -> None:
    world = World(FEW).ready(private=private)
    world.join(10)
    world.do(ev.ClientRefused("d1", 99, full=True))
    assert world.domain("d1").refused_full == 1 and world.path() == path
    assert bool(world.made(fx.AskServer)) is not private


def test_lines_of_an_open_log_fill_no_domain() -> None:
    world = World(FEW).ready(private=False)
    for pid in range(10, 20):
        world.do(ev.ClientNoticed("d1", facts(pid)))
    assert world.path() == "d1"
    for pid in range(10, 13):
        world.do(ev.ClientNoticed("d1", facts(pid), listed=True))
    assert world.path() == "d2"


def test_a_fault_there_costs_the_other_domains_nothing() -> None:
    world = full_world()
    world.join(20, domain="d2")
    world.fault(10)
    assert states(world)["d1"] == "faulted" and states(world)["d2"] == "active" and world.path() == "d2"
    assert sorted(world.pids(world.record().victims)) == [11, 12]


def filled_world() -> Site:
    """10 and 11 of d1, which has just become full, are ready in d2, which is active; d3 starts."""
    world = site(10, 11, policy=MOVING)
    world.join(12)
    assert states(world) == {"d1": "full", "d2": "active", "d3": "starting"}
    return world


def test_its_participants_stay_protected_until_the_next_standby_domain_is_warm() -> None:
    world = filled_world()
    assert not world.ever(fx.StandDown)
    assert [world.standing(pid) for pid in (10, 11)] == [Standing.READY, Standing.READY]
    world.started("d3")
    assert {(e.process.pid, e.generation) for e in world.made(fx.StandDown)} == {(10, 2), (11, 2)}
    assert {(e.process.pid, e.generation) for e in world.made(fx.OfferStandby)} == {(10, 3), (11, 3)}


def test_a_fault_before_that_moves_them_to_the_active_domain() -> None:
    world = filled_world()
    world.attach(20, "d2")
    world.fault(12)
    assert world.told() == [10, 11] and world.failover().to == "d2" and world.path() == "d2"
    world.moved(10, 2)
    world.moved(11, 2)
    assert world.outcomes() == {10: Outcome.MOVED, 11: Outcome.MOVED}


def test_a_context_that_becomes_ready_in_the_active_domain_counts() -> None:
    world = site(10, policy=MOVING)
    world.attach(11, "d1")
    world.hello(11)
    world.join(12)
    world.is_ready(11, 2)
    world.fault(12)
    assert world.told() == [10, 11]


def test_the_end_of_the_active_domain_withdraws_its_contexts() -> None:
    world = filled_world()
    world.do(ev.DomainUnreachable("d2", "its socket was removed"))
    assert [e.process.pid for e in world.made(fx.StandDown)] == [10, 11]
    world.fault(12)
    assert not world.told()


def test_participants_of_a_domain_that_was_full_before_are_protected_too() -> None:
    """The clients of d2 were too many before its standby domain was warm."""
    world = filled_world()
    world.attach(20, "d2")
    world.fault(12)
    world.moved(10, 2)
    world.moved(11, 2)
    world.started("d3")
    assert states(world)["d2"] == "full" and world.path() == "d3"
    for pid in (10, 11):
        world.is_ready(pid, 3)
    world.fault(20, domain="d2")
    assert world.told() == [10, 11] and world.failover().to == "d3"


def moving_world() -> Site:
    """10 and 11 of d1, which is full, and 20 of the active domain d2 can move to d3."""
    world = site(10, 11, policy=MOVING)
    world.join(12)
    world.started("d3")
    for pid in (10, 11):
        world.is_ready(pid, 3)
    world.attach(20, "d2")
    world.hello(20)
    world.is_ready(20, 3)
    return world


def test_its_participants_get_the_new_standby_domain() -> None:
    world = moving_world()
    assert {p.process.pid: p.home for p in world.state.members.values()} == {10: "d1", 11: "d1", 20: "d2"}
    assert {p.generation for p in world.state.members.values()} == {3}
    assert states(world)["d1"] == "full"


def test_its_participants_move_to_the_standby_domain_which_then_serves() -> None:
    world = moving_world()
    world.fault(12)
    assert world.told() == [10, 11] and world.path() == "d3"
    assert states(world) == {"d1": "faulted", "d2": "full", "d3": "active", "d4": "starting"}
    world.moved(10, 3)
    world.moved(11, 3)
    assert world.outcomes() == {10: Outcome.MOVED, 11: Outcome.MOVED}
    # The program of d2 did not move. It gets the next standby domain.
    assert world.state.members[process(20)].home == "d2" and world.standing(20) is not Standing.MOVING
    world.started("d4")
    assert fx.OfferStandby(process(20), 4, "d4") in world.last


def test_the_death_of_its_server_moves_its_participants() -> None:
    world = moving_world()
    server = world.domain("d1").server
    assert server is not None
    world.do(ev.ServerDied("d1", server))
    assert world.told() == [10, 11] and world.path() == "d3"


def test_a_drain_moves_them_too() -> None:
    world = moving_world()
    world.do(ev.DrainRequested((), on=True))
    told = [e.process.pid for e in world.ever(fx.Move)]
    assert sorted(told)[:2] == [10, 11] and world.path() == "d3"


def test_the_next_daemon_keeps_it() -> None:
    world = World(FEW)
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
    world.adopt("d1", ev.DomainRole.OLD, DomainState.FULL)
    world.adopt("d2", ev.DomainRole.ACTIVE, DomainState.ACTIVE)
    world.do(ev.ClientNoticed("d1", facts(10), listed=True))
    world.do(ev.AdoptionDone())
    assert states(world)["d1"] == "full" and world.path(SLOT) == "d2"
    world.server_state("d1", ServerState.FAULT)
    assert states(world)["d1"] == "faulted"
