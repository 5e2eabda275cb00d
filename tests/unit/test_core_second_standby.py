"""The second standby domain: a suspect's trial domain at once, else the next standby domain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import FailoverMode, ServerState, SnapshotBudget
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core import slots
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Excess, Turn
from mpsd.core.state import DomainState, Policy, Slot
from tests.support.core import GPU, SLOT, UID, control_of, facts, process, server_of
from tests.unit.test_core_failover import ON, Site, turns_of
from tests.unit.test_core_programcounter import OTHERS, OWN, exception, moves, offender
from tests.unit.test_core_serialreplay import all_told, another, lose
from tests.unit.test_core_trial import arrives, offered


def waits(world: Site, seconds: float = slots.SECOND_AFTER_S) -> Site:
    """Let the timer of the slot's standby domains fire after so many seconds."""
    assert any(e.kind == slots.STANDBYS for e in world.ever(fx.ArmTimer))
    world.wait(seconds).timer(slots.STANDBYS, SLOT)
    return world


def ready() -> Site:
    """Clients 10 to 12 work in d1. d2 is the standby domain, and d3 the second one, warm."""
    world = waits(all_told(10, 11, 12))
    world.started("d3")
    return world


def slot_of(world: Site) -> Slot:
    return world.state.slots[SLOT]


def roles(world: Site) -> tuple[str | None, str | None, str | None]:
    slot = slot_of(world)
    return slot.active, slot.spare, slot.second


def begun(world: Site) -> list[str]:
    """Return the domains that the last event started."""
    return [e.domain for e in world.made(fx.StartDomain)]


@pytest.mark.parametrize(
    ("mode", "second"), [(FailoverMode.EXACT, "d3"), (FailoverMode.KEEP, None), (FailoverMode.OFF, None)]
)
def test_a_slot_has_one_for_clients_that_replay(mode: FailoverMode, second: str | None) -> None:
    world = Site(Policy(failover=FailoverMode.EXACT))
    world.ready()
    world.do(ev.DriverFilesSeen(""))
    world.attach(10, "d1")
    world.hello(10, mode)
    assert slot_of(world).second is None
    world.wait(slots.SECOND_AFTER_S).timer(slots.STANDBYS, SLOT)
    assert roles(world) == ("d1", "d2", second)
    # Participants keep contexts in the standby domain alone.
    if second is not None:
        world.started(second)
        assert begun(world) == [] and offered(world, 3) == set() and offered(world, 2) == {10}


def test_it_starts_after_the_standby_domain() -> None:
    world = Site(replace(ON, failover=FailoverMode.EXACT))
    world.want()
    world.started("d1")
    world.attach(10, "d1")
    world.hello(10, FailoverMode.EXACT)
    world.wait(slots.SECOND_AFTER_S)
    assert roles(world) == ("d1", "d2", None)
    world.started("d2")
    assert roles(world) == ("d1", "d2", "d3") and begun(world) == ["d3"]


def test_a_series_of_short_programs_starts_none() -> None:
    world = Site(replace(ON, failover=FailoverMode.EXACT))
    world.ready()
    for pid in range(20, 50):
        world.attach(pid, "d1")
        world.hello(pid, FailoverMode.EXACT)
        world.wait(slots.SECOND_AFTER_S / 2)
        world.do(mev.MemberLeft(process(pid)))
        world.die(pid)
        world.timer(slots.STANDBYS, SLOT)
    assert roles(world) == ("d1", "d2", None)


def test_after_a_fault_nothing_starts_until_the_last_client_has_moved() -> None:
    world = ready()
    world.fault(12)
    assert roles(world) == ("d2", None, "d3") and begun(world) == []
    world.moved(10, 2)
    assert roles(world) == ("d2", None, "d3") and begun(world) == [] and offered(world, 3) == set()
    world.moved(11, 2)
    assert roles(world) == ("d2", "d3", None) and begun(world) == [] and offered(world, 3) == {10, 11}
    # The next one starts when the replays are over.
    waits(world)
    assert roles(world) == ("d2", "d3", "d4") and begun(world) == ["d4"]


def test_a_client_that_never_moves_delays_it_for_a_bounded_time() -> None:
    world = ready()
    world.fault(12)
    (timer,) = (e for e in world.made(fx.ArmTimer) if e.kind == slots.STANDBYS)
    assert timer.delay_s == slots.SETTLE_S
    world.moved(10, 2)
    waits(world, slots.SETTLE_S)
    assert roles(world) == ("d2", "d3", None) and offered(world, 3) == {10}


def test_one_that_is_starting_becomes_the_standby_domain_at_once() -> None:
    world = waits(all_told(10, 11, 12))
    world.fault(12)
    assert roles(world) == ("d2", "d3", None) and begun(world) == []
    # It offers standby contexts once it is warm, and no other domain starts before all have moved.
    world.started("d3")
    world.moved(10, 2)
    assert roles(world) == ("d2", "d3", None) and offered(world, 3) == {10}
    world.moved(11, 2)
    assert roles(world) == ("d2", "d3", None)
    waits(world)
    assert roles(world) == ("d2", "d3", "d4")


def test_a_suspect_has_it_as_its_trial_domain_without_a_start() -> None:
    world = ready()
    another(world, 9, "a stranger")
    exception(world)
    assert begun(world) == []
    moves(world, {11: OTHERS, 12: OTHERS, 10: OWN})
    assert offered(world, 3) == {10} and world.domain("d3").trial == process(10)
    # The others have moved, so their next standby domain starts now.
    assert roles(world) == ("d2", "d4", None) and begun(world) == ["d4"]
    world.is_ready(10, 3)
    assert world.told() == [10]
    arrives(world)
    assert turns_of(world)[10] is Turn.HAS
    lose(world, "d3")
    assert offender(world)[0] == 10


def test_a_start_in_place_of_a_trial_domain_waits_for_clients_that_are_moving() -> None:
    world = ready()
    another(world, 9, "a stranger")
    exception(world)
    moves(world, {10: OWN})
    assert world.domain("d3").trial == process(10) and begun(world) == []
    moves(world, {11: OTHERS})
    assert roles(world) == ("d2", None, None)
    waits(world, slots.SETTLE_S)
    assert roles(world) == ("d2", "d4", None) and begun(world) == ["d4"]


def test_new_clients_go_to_it_when_a_second_fault_finds_no_standby_domain() -> None:
    world = ready()
    world.fault(12)
    assert roles(world) == ("d2", None, "d3")
    lose(world, "d2")
    assert roles(world) == ("d3", None, None) and world.path() == "d3"
    waits(world, slots.SETTLE_S)
    assert roles(world) == ("d3", "d4", None)


def test_the_next_one_starts_a_while_after_one_that_ended() -> None:
    world = ready()
    world.do(ev.ServerDied("d3", server_of("d3")))
    assert world.domain("d3").state in (DomainState.FAULTED, DomainState.STOPPING)
    assert roles(world) == ("d1", "d2", None) and begun(world) == []
    waits(world, slots.SECOND_AGAIN_S)
    assert roles(world) == ("d1", "d2", "d4")


@pytest.mark.parametrize("failure", ["start", "server", "unreachable"])
def test_one_that_fails_is_no_failure_of_its_slot(failure: str) -> None:
    world = waits(all_told(10, 11, 12))
    if failure != "start":
        world.started("d3", server=failure != "server")
    event = {
        "start": ev.DomainStartFailed("d3", "no memory"),
        "server": ev.ServerStartFailed("d3", None, "no memory"),
        "unreachable": ev.DomainUnreachable("d3", "its socket is gone"),
    }[failure]
    before = slot_of(world)
    world.do(event)
    after = slot_of(world)
    assert roles(world) == ("d1", "d2", None) and begun(world) == []
    assert (after.failures, after.lost, after.paused) == (before.failures, before.lost, before.paused)
    waits(world, slots.SECOND_AGAIN_S)
    assert roles(world) == ("d1", "d2", "d4")


def test_many_starts_leave_the_next_ones_to_standby_domains() -> None:
    world = ready()
    many = (world.now,) * (slots.STARTS_PER_MINUTE // 2)
    world.state = replace(world.state, slots={SLOT: replace(slot_of(world), starts=many)})
    world.fault(12)
    world.moved(10, 2)
    world.moved(11, 2)
    world.is_ready(10, 3)
    assert roles(world) == ("d2", "d3", None)
    waits(world, slots.MINUTE_S)
    assert roles(world) == ("d2", "d3", "d4")


def test_it_makes_way_for_an_allocation_that_would_fail() -> None:
    world = ready()
    world.do(mev.MemberWantsMemory(process(10), 1 << 30, 0, 1))
    assert roles(world) == ("d1", "d2", None)
    assert world.domain("d3").state is DomainState.STOPPING
    assert [e.delay_s for e in world.made(fx.ArmTimer) if e.kind == slots.STANDBYS] == [slots.SECOND_AGAIN_S]
    waits(world, slots.SECOND_AGAIN_S)
    assert roles(world) == ("d1", "d2", "d4")


def test_it_becomes_the_standby_domain_when_the_last_client_ends_in_its_move() -> None:
    world = ready()
    world.fault(12)
    for pid in (10, 11):
        world.do(mev.MemberLeft(process(pid)))
        world.die(pid)
    assert roles(world) == ("d2", "d3", None)


def test_a_client_left_behind_in_its_trial_domain_needs_none() -> None:
    world = ready()
    another(world, 9, "a stranger")
    exception(world)
    moves(world, {11: OTHERS, 12: OTHERS, 10: OWN})
    world.is_ready(10, 3)
    arrives(world)
    lose(world, "d3")
    for pid in (11, 12):
        world.do(mev.MemberLeft(process(pid)))
        world.die(pid)
    world.started("d4")
    assert roles(world) == ("d2", "d4", None)


def test_it_ends_with_the_last_client_that_replays() -> None:
    world = ready()
    for pid in (10, 11, 12):
        world.do(mev.MemberLeft(process(pid)))
        # It connects again if it lives.
        assert roles(world) == ("d1", "d2", "d3")
    for pid in (10, 11, 12):
        world.die(pid)
    assert roles(world) == ("d1", "d2", None)
    assert world.domain("d3").state is DomainState.STOPPING


def test_it_ends_where_all_clients_have_left_fail_over() -> None:
    world = ready()
    for pid in (10, 11, 12):
        world.do(mev.MemberCame(process(pid), UID, FailoverMode.EXACT, budgets=True))
    for pid in (10, 11, 12):
        assert roles(world) == ("d1", "d2", "d3")
        world.do(mev.MemberExceeds(process(pid), Excess(SnapshotBudget.TIME, 580, 30)))
    assert roles(world) == ("d1", "d2", None)


def test_it_ends_where_the_gpu_admits_one_server() -> None:
    world = ready()
    world.do(ev.ModeSeen(SLOT, exclusive=True))
    assert roles(world) == ("d1", None, None)
    assert world.domain("d3").state is DomainState.STOPPING


@pytest.mark.parametrize("standby", [True, False])
def test_a_later_daemon_takes_it_over(standby: bool) -> None:
    world = Site(replace(ON, failover=FailoverMode.EXACT))
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
    for name, role, state in (
        ("d1", ev.DomainRole.ACTIVE, DomainState.ACTIVE),
        ("d2", ev.DomainRole.SPARE, DomainState.WARM),
        ("d3", ev.DomainRole.SECOND, DomainState.WARM),
    ):
        if standby or name != "d2":
            mps = (control_of(name), server_of(name), ServerState.ACTIVE)
            world.do(ev.DomainAdopted(name, SLOT, role, state, *mps))
    world.do(ev.ClientNoticed("d1", facts(10)))
    world.do(mev.MemberRestored(process(10), UID, FailoverMode.EXACT, "d1"))
    world.do(ev.AdoptionDone())
    if not standby:
        waits(world)
    assert roles(world) == (("d1", "d2", "d3") if standby else ("d1", "d3", "d4"))
