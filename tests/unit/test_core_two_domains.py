"""A process that is a client of two domains at once, through a second driver instance."""

from __future__ import annotations

from mpsd.base.model import ClientId, Confidence, Liveness, ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.state import ClientState, DomainState, Policy
from tests.support.core import World, process, server_of

BOTH = [ClientId("d1", process(10)), ClientId("d3", process(10))]


def world_of_two(policy: Policy | None = None) -> World:
    """10 is a client of d1 and of d3, which belong to one user; 11 only of d1, and 12 only of d3."""
    world = World(policy).ready()
    world.want(slot="second")
    world.started("d3")
    world.started("d4")
    for domain in ("d1", "d3"):
        world.join(10, domain=domain)
    world.join(11)
    world.join(12, domain="d3")
    return world


def released(world: World) -> list[ClientId]:
    return [e.client for e in world.made(fx.ReleaseLease)]


def states(world: World) -> dict[str, DomainState]:
    return {name: world.domain(name).state for name in ("d1", "d3")}


def test_its_death_keeps_both_leases_until_its_work_has_ended() -> None:
    world = world_of_two()
    world.die(10)
    assert [e.client for e in world.made(fx.ProbeWork)] == BOTH
    assert not released(world) and not world.made(fx.Forget)
    world.work_ended(10)
    assert released(world) == BOTH
    assert world.made(fx.Forget) == [fx.Forget(process(10))]


def test_where_one_server_has_lost_its_work_the_other_lease_stays() -> None:
    world = world_of_two()
    world.fault(11)
    world.die(10)
    assert released(world) == BOTH[:1]
    assert world.client("d3", 10).state is ClientState.LINGERING
    world.work_ended(10)
    assert released(world) == BOTH[1:]


def test_an_eviction_asks_both_servers_kills_once_and_answers_once() -> None:
    world = world_of_two()
    world.evict(10)
    assert [(e.domain, e.server) for e in world.made(fx.Terminate)] == [
        ("d1", server_of("d1")),
        ("d3", server_of("d3")),
    ]
    world.terminate_finished(10)
    assert len(world.made(fx.Kill)) == 1
    world.terminate_finished(10)
    assert not world.made(fx.Kill)
    world.die(10)
    assert [e.ok for e in world.made(fx.Answer)] == [True]
    assert {c.state for c in world.state.spaces_of(process(10))} == {ClientState.LINGERING}


def test_a_server_that_cannot_be_asked_spares_the_other_one_too() -> None:
    world = world_of_two()
    world.server_state("d3", ServerState.FAULT)
    world.evict(10, liveness=Liveness.RUNNING)
    assert not world.made(fx.Terminate)
    assert len(world.made(fx.Kill)) == 1


def test_as_a_victim_of_one_domain_it_is_killed_once() -> None:
    world = world_of_two(Policy(kill_victims_after_s=1))
    world.fault(11)
    world.timer("kill-victims", "d1")
    assert sorted(e.client.process.pid for e in world.made(fx.Kill)) == [10, 11]
    world.do(ev.StopRequested())
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [12]


def test_its_fault_takes_the_domain_whose_server_says_so_and_no_other() -> None:
    world = world_of_two()
    # Each tracker on the process sees the fault, in each domain.
    for domain in ("d1", "d3"):
        world.fault(10, domain=domain)
        record = world.record()
        assert record.confidence is Confidence.CERTAIN and record.offender is not None
        assert record.offender.id.process == process(10) and not record.victims
    assert states(world) == {"d1": DomainState.ACTIVE, "d3": DomainState.ACTIVE}
    world.do(ev.ServerFatalLogged("d3", "fatal GPU error"))
    assert states(world) == {"d1": DomainState.ACTIVE, "d3": DomainState.FAULTED}
    assert world.path("second") == "d4"
    record = world.record()
    assert (record.domain, world.pids(record.victims)) == ("d3", [12])
    assert len(world.records()) == 2
