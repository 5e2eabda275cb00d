"""Domains that clients cannot connect to, although their processes live."""

from __future__ import annotations

from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.state import ClientState, DomainState, Policy
from tests.support.core import SLOT, UID, World


def test_a_domain_out_of_reach_is_retired_and_its_standby_domain_takes_over() -> None:
    world = World().ready()
    world.join(10)
    world.do(ev.DomainUnreachable("d1", "the control socket of d1 was removed"))
    assert world.path() == "d2"
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d3"]
    assert world.domain("d1").state is DomainState.RETIRED
    assert world.domain("d1").problem == "the control socket of d1 was removed"
    (told,) = [e for e in world.made(fx.Publish) if e.kind == "domain-unreachable"]
    assert told.owner == UID and told.data["reason"] == "the control socket of d1 was removed"
    # Its client lives on, and nothing is a fault.
    assert world.client_states() == {10: ClientState.ATTACHED}
    assert not world.ever(fx.Record) and not world.ever(fx.StopDomain) and not world.ever(fx.Kill)
    world.die(10)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_a_standby_domain_out_of_reach_is_replaced() -> None:
    world = World().ready()
    world.do(ev.DomainUnreachable("d2", "the control socket of d2 was removed"))
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d2"]
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d3"]
    world.started("d3")
    assert (world.path(), world.state.slots[SLOT].spare) == ("d1", "d3")


def test_without_a_standby_domain_the_next_one_takes_over_once_it_has_started() -> None:
    world = World(Policy(spare=False))
    world.want()
    world.started("d1")
    world.do(ev.DomainUnreachable("d1", "gone"))
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d2"]
    assert world.path() == "d1"
    world.started("d2")
    assert world.path() == "d2"


def test_domains_that_stay_out_of_reach_are_replaced_with_growing_pauses() -> None:
    world = World(Policy(spare=False, start_retry_s=1, start_retry_max_s=5))
    world.want()
    world.started("d1")
    delays = []
    for number in range(1, 6):
        world.wait(1.0).do(ev.DomainUnreachable(f"d{number}", "gone"))
        delays += [t.delay_s for t in world.made(fx.ArmTimer) if t.kind == "ensure"]
        starts = [e.domain for e in world.made(fx.StartDomain)]
        if number > 1:
            assert not starts
            world.timer("ensure", SLOT)
            starts = [e.domain for e in world.made(fx.StartDomain)]
        assert starts == [f"d{number + 1}"]
        world.started(f"d{number + 1}")
    assert delays == [1, 2, 4, 5]
    # After a quiet time the first replacement is immediate again.
    world.wait(6.0).do(ev.DomainUnreachable("d6", "gone"))
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d7"]


def test_a_request_of_a_user_ends_the_pause() -> None:
    world = World().ready()
    for name in ("d2", "d1"):
        world.do(ev.DomainUnreachable(name, "gone"))
    assert world.domain("d3").state is DomainState.STARTING
    world.started("d3")
    assert world.path() == "d3" and world.state.slots[SLOT].spare is None
    world.want()
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d4"]


def test_only_a_domain_in_service_can_be_out_of_reach() -> None:
    world = World()
    world.want()
    for name in ("d1", "d9"):
        world.do(ev.DomainUnreachable(name, "gone"))
    assert not world.last and world.domain("d1").state is DomainState.STARTING
    assert world.state.counters["ignored_domain_triggers"] == 2
