"""Slots on demand: server and standby domain come with the first client, and end when the slot is idle."""

from __future__ import annotations

from typing import Any

import pytest

from mpsd.api.protectionview import Knowledge, client_view
from mpsd.base.model import FailoverMode, ServerState
from mpsd.base.protection import Protection, ProtectionLevel
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core import lists, slots
from mpsd.core.failover import reports as mev
from mpsd.core.state import DomainState, LogState, Policy
from tests.support.core import GPU, SLOT, UID, World, control_of, facts, process, server_of

IDLE_S = 300.0


def demand(**policy: Any) -> World:
    """Return a world with a control daemon alone."""
    world = World(Policy(on_demand=True, idle_s=IDLE_S, **policy))
    world.want()
    up(world, "d1")
    return world


def up(world: World, name: str) -> None:
    """Let a control daemon start without a server."""
    world.do(ev.DomainStarted(name, control_of(name), None, True))


def serve(world: World, name: str) -> None:
    """Let the control daemon start a server."""
    world.do(ev.ServerSeen(name, server_of(name), UID))
    world.server_state(name, ServerState.INITIALIZING)
    world.server_state(name, ServerState.ACTIVE)


def used() -> World:
    """Return a world with a client in d1, and the warm standby domain d2."""
    world = demand()
    world.join(1)
    serve(world, "d1")
    world.started("d2")
    return world


def starts(world: World) -> list[tuple[str, bool]]:
    return [(e.domain, e.server) for e in world.ever(fx.StartDomain)]


def idle(world: World) -> World:
    """End the client, and let the idle time pass."""
    world.die(1)
    world.work_ended(1)
    world.wait(IDLE_S).timer(slots.IDLE, SLOT)
    return world


def listed(world: World, name: str) -> None:
    world.do(ev.ClientsListed(name, world.now, frozenset()))


def roles(world: World) -> tuple[str | None, str | None]:
    slot = world.state.slots[SLOT]
    return slot.active, slot.spare


def test_a_slot_begins_with_a_control_daemon_alone() -> None:
    world = demand()
    assert starts(world) == [("d1", False)]
    assert roles(world) == ("d1", None) and world.path() == "d1"
    assert world.domain("d1").state is DomainState.ACTIVE
    assert not world.ever(fx.ArmTimer)


def test_the_standby_domain_starts_when_the_first_server_is_active() -> None:
    world = demand()
    world.do(ev.ClientNoticed("d1", facts(1)))
    world.do(ev.ServerSeen("d1", server_of("d1"), UID))
    world.server_state("d1", ServerState.INITIALIZING)
    assert starts(world) == [("d1", False)]
    world.server_state("d1", ServerState.ACTIVE)
    assert starts(world) == [("d1", False), ("d2", True)]
    world.server_state("d1", ServerState.ACTIVE)
    world.started("d2")
    assert roles(world) == ("d1", "d2") and len(starts(world)) == 2


def test_without_a_wish_for_a_standby_domain_a_participant_brings_it() -> None:
    world = demand(spare=False, failover=FailoverMode.EXACT)
    world.do(ev.DriverFilesSeen(""))
    world.join(1)
    serve(world, "d1")
    assert starts(world) == [("d1", False)]
    world.do(mev.MemberCame(process(1), UID, FailoverMode.EXACT, 0, True, True))
    assert starts(world) == [("d1", False), ("d2", True)]


def test_status_says_that_the_standby_domain_is_starting() -> None:
    """A client in its first second has not the protection that it will have."""
    world = demand(failover=FailoverMode.EXACT)
    world.do(ev.DriverFilesSeen(""))
    world.join(1)
    world.do(mev.MemberCame(process(1), UID, FailoverMode.EXACT, 0, True, True))
    known = Knowledge(Protection(ProtectionLevel.FAILOVER), False, None, None)
    shown = client_view(world.state, world.client("d1", 1), known, world.now)
    assert (shown["level"], shown["why"]) == ("guard", "its standby domain is starting")
    serve(world, "d1")
    assert starts(world) == [("d1", False), ("d2", True)]


def test_a_fault_before_the_standby_domain_is_followed_by_a_domain_with_a_server() -> None:
    world = demand()
    world.join(1)
    world.do(ev.ServerSeen("d1", server_of("d1"), UID))
    world.do(ev.ServerStateSeen("d1", ServerState.FAULT))
    assert world.domain("d1").state is DomainState.FAULTED
    assert starts(world) == [("d1", False), ("d2", True)] and world.path() == "d1"
    world.started("d2")
    assert world.path() == "d2"


def test_a_control_daemon_without_a_server_is_replaced_by_another_one() -> None:
    world = demand()
    world.do(ev.DomainUnreachable("d1", "no socket"))
    assert starts(world) == [("d1", False), ("d2", False)]
    up(world, "d2")
    world.do(ev.ControlDied("d2", control_of("d2")))
    assert starts(world)[2:] == [("d3", False)]


def test_an_idle_slot_is_served_by_a_fresh_control_daemon() -> None:
    world = idle(used())
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d2"]
    assert starts(world)[2:] == [("d3", False)] and world.path() == "d1"
    up(world, "d3")
    assert world.path() == "d3" and roles(world) == ("d3", None)
    assert world.domain("d1").state is DomainState.RETIRED
    assert not world.made(fx.StopDomain)
    world.stopped("d2")
    # A list that began before the end of the hand-over does not show who came at its beginning.
    world.wait(slots.HANDOVER_S / 2)
    listed(world, "d1")
    assert world.domain("d1").state is DomainState.RETIRED
    world.wait(slots.HANDOVER_S)
    listed(world, "d1")
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]
    world.stopped("d1")
    assert set(world.state.domains) == {"d3"}
    assert world.state.counters["slots_idle"] == 1


def test_a_replaced_idle_domain_ends_without_a_list_too() -> None:
    world = idle(used())
    up(world, "d3")
    world.wait(lists.UNSURE_S).timer(lists.UNSURE, "d1")
    assert not world.made(fx.StopDomain)
    world.wait(slots.HANDOVER_S).timer(lists.UNSURE, "d1")
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_a_client_that_took_the_old_path_keeps_its_domain() -> None:
    world = idle(used())
    up(world, "d3")
    world.join(2)
    world.wait(slots.HANDOVER_S * 2).do(ev.ClientsListed("d1", world.now, frozenset({2})))
    world.wait(20).timer(lists.UNSURE, "d1")
    assert world.domain("d1").state is DomainState.RETIRED and "d1" not in stops(world)
    world.die(2)
    world.work_ended(2)
    assert "d1" in stops(world)


def stops(world: World) -> list[str]:
    return [e.domain for e in world.ever(fx.StopDomain)]


def test_a_client_that_comes_while_the_fresh_control_daemon_starts_keeps_its_server() -> None:
    world = idle(used())
    world.join(2)
    up(world, "d3")
    assert world.path() == "d1" and stops(world) == ["d2", "d3"]
    assert starts(world)[3:] == [("d4", True)]
    world.started("d4")
    assert roles(world) == ("d1", "d4")


def test_a_fault_while_the_fresh_control_daemon_starts_leads_to_it() -> None:
    world = idle(used())
    world.join(2)
    world.do(ev.ServerStateSeen("d1", ServerState.FAULT))
    up(world, "d3")
    assert world.path() == "d3" and roles(world) == ("d3", None)


@pytest.mark.parametrize("early", [1.0, IDLE_S / 2])
def test_a_slot_is_idle_only_after_its_last_client(early: float) -> None:
    world = used()
    world.wait(IDLE_S).timer(slots.IDLE, SLOT)
    assert [e.delay_s for e in world.made(fx.ArmTimer)] == [IDLE_S] and not stops(world)
    world.wait(early)
    world.die(1)
    world.work_ended(1)
    world.wait(IDLE_S - early).timer(slots.IDLE, SLOT)
    assert [e.delay_s for e in world.made(fx.ArmTimer)] == [pytest.approx(early)] and not stops(world)
    world.wait(early).timer(slots.IDLE, SLOT)
    assert stops(world) == ["d2"]


def test_a_request_for_the_path_postpones_the_end() -> None:
    world = used()
    world.die(1)
    world.work_ended(1)
    world.wait(IDLE_S - 1).want()
    world.wait(1).timer(slots.IDLE, SLOT)
    assert not stops(world)


def test_memory_of_an_exited_client_keeps_the_server() -> None:
    world = used()
    world.die(1)
    world.wait(2 * IDLE_S).timer(slots.IDLE, SLOT)
    assert world.client_states() and not stops(world)


@pytest.mark.parametrize(
    "event",
    [
        ev.LogStateSeen("d1", LogState.INCOMPLETE, "lines were skipped"),
        ev.ClientsUnpinned("d1", 1),
        ev.ForeignNoticed("d1"),
    ],
)
def test_a_client_that_mpsd_may_not_know_keeps_the_server(event: ev.Event) -> None:
    world = used()
    world.die(1)
    world.work_ended(1)
    world.wait(IDLE_S).do(event)
    world.timer(slots.IDLE, SLOT)
    assert not stops(world) and world.made(fx.ArmTimer)


def test_in_exclusive_mode_the_server_stays() -> None:
    world = World(Policy(on_demand=True, idle_s=IDLE_S))
    world.want(exclusive=True)
    up(world, "d1")
    world.join(1)
    serve(world, "d1")
    idle(world)
    assert starts(world) == [("d1", False)] and not stops(world)


def test_a_fresh_control_daemon_that_does_not_start_is_tried_again_later() -> None:
    world = idle(used())
    world.do(ev.DomainStartFailed("d3", "no memory"))
    world.timer("ensure", SLOT)
    assert world.path() == "d1" and len(starts(world)) == 3
    world.wait(IDLE_S).timer(slots.IDLE, SLOT)
    assert starts(world)[3:] == [("d4", False)]
    world.do(ev.DomainStartFailed("d4", "no memory"))
    world.join(2)
    assert starts(world)[4:] == [("d5", True)]


def test_a_standby_domain_without_clients_ends_although_the_server_has_died() -> None:
    world = used()
    world.die(1)
    world.work_ended(1)
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert world.path() == "d2"
    world.started("d3")
    world.stopped("d1")
    world.wait(IDLE_S).timer(slots.IDLE, SLOT)
    assert stops(world) == ["d1", "d3"] and starts(world)[-1] == ("d4", False)


def test_after_a_server_failed_for_its_first_client_the_next_domain_has_one() -> None:
    world = demand()
    world.do(ev.ClientNoticed("d1", facts(1)))
    world.do(ev.ServerSeen("d1", server_of("d1"), UID))
    world.do(ev.ServerStartFailed("d1", "invalid argument", server_of("d1")))
    assert world.domain("d1").server is None and not world.ever(fx.Record)
    assert starts(world) == [("d1", False), ("d2", True)] and world.path() == "d1"
    assert world.state.slots[SLOT].failures == 1
    world.do(ev.DomainStartFailed("d2", "invalid argument", True))
    assert world.state.slots[SLOT].failures == 2
    # The control daemon tries again while its client waits.
    world.do(ev.ServerStartFailed("d1", "invalid argument", process(77)))
    assert world.state.slots[SLOT].failures == 2
    world.timer("ensure", SLOT)
    world.started("d3")
    assert world.path() == "d3" and world.state.slots[SLOT].failures == 0


def test_a_late_first_server_keeps_the_clients_that_wait_for_it() -> None:
    """The start may only be slow: no list names a client before the server is ACTIVE."""
    world = demand()
    world.do(ev.ServerSeen("d1", server_of("d1"), UID))
    world.server_state("d1", ServerState.INITIALIZING)
    world.do(ev.ServerStartFailed("d1", "not ACTIVE after 20 s", server_of("d1"), late=True))
    assert world.domain("d1").server == server_of("d1")
    left = [e for e in world.made(fx.Publish) if e.kind == "domain-left"]
    assert [e.data["lost"] for e in left] == [False]
    assert starts(world) == [("d1", False), ("d2", True)]
    world.started("d2")
    assert world.path() == "d2" and not stops(world)
    world.wait(lists.UNSURE_S + slots.HANDOVER_S).timer(lists.UNSURE, "d1")
    assert not stops(world)
    world.server_state("d1", ServerState.ACTIVE)
    world.join(1)
    world.wait(1).do(ev.ClientsListed("d1", world.now, frozenset({1})))
    world.wait(lists.LIST_WAIT_S).timer(lists.QUIET_LOG, "d1")
    assert not stops(world)
    world.die(1)
    world.work_ended(1)
    assert stops(world) == ["d1"]


def test_a_late_server_that_is_active_by_now_stays() -> None:
    world = used()
    world.do(ev.ServerStartFailed("d1", "not ACTIVE after 20 s", server_of("d1"), late=True))
    assert world.domain("d1").state is DomainState.ACTIVE and world.path() == "d1"


def test_a_late_server_that_ends_is_a_failed_start_once() -> None:
    world = demand()
    world.do(ev.ServerStartFailed("d1", "not ACTIVE after 20 s", server_of("d1"), late=True))
    world.started("d2")
    world.wait(lists.UNSURE_S + slots.HANDOVER_S)
    world.do(ev.ServerStartFailed("d1", "invalid argument", server_of("d1")))
    assert stops(world) == ["d1"] and world.state.counters["server_starts_failed"] == 1


def test_after_a_failed_first_server_the_domain_ends_once_its_clients_are_known() -> None:
    world = demand()
    world.do(ev.ServerStartFailed("d1", "invalid argument", server_of("d1")))
    world.started("d2")
    assert world.path() == "d2" and not stops(world)
    world.wait(lists.UNSURE_S + slots.HANDOVER_S).timer(lists.UNSURE, "d1")
    assert stops(world) == ["d1"]


def test_an_unseen_server_says_nothing_about_one_that_serves() -> None:
    world = used()
    world.do(ev.ServerStartFailed("d1", "invalid argument", None))
    assert world.domain("d1").state is DomainState.ACTIVE and world.path() == "d1"


def test_a_replaced_idle_domain_is_handed_over_in_a_later_daemon_too() -> None:
    world = World(Policy(on_demand=True, idle_s=IDLE_S))
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
    world.adopt("d1", ev.DomainRole.OLD, DomainState.RETIRED)
    world.adopt("d3", ev.DomainRole.ACTIVE, DomainState.ACTIVE, server=False, server_state=ServerState.GONE)
    world.do(ev.AdoptionDone())
    assert world.path() == "d3" and not stops(world)
    listed(world, "d1")
    assert not stops(world)
    world.wait(slots.HANDOVER_S * 2)
    listed(world, "d1")
    assert stops(world) == ["d1"]


def test_the_path_stays_at_a_dead_control_daemon_until_another_one_has_started() -> None:
    world = demand()
    world.do(ev.ControlDied("d1", control_of("d1")))
    assert starts(world) == [("d1", False), ("d2", False)] and world.path() == "d1"
    world.do(ev.DomainStartFailed("d2", "no memory"))
    assert world.path() == "d1" and stops(world) == ["d2"]
    world.timer("ensure", SLOT)
    assert starts(world)[2:] == [("d3", True)]
    world.started("d3")
    assert world.path() == "d3" and "d1" in stops(world)


def test_in_use_the_standby_domain_takes_the_path_of_a_dead_control_daemon() -> None:
    world = used()
    world.do(ev.ControlDied("d1", control_of("d1")))
    assert world.path() == "d2"


def test_a_report_about_an_earlier_server_counts_for_nothing() -> None:
    world = used()
    world.do(ev.ServerStartFailed("d1", "invalid argument", process(77)))
    world.do(ev.ServerStartFailed("d9", "invalid argument", None))
    assert world.domain("d1").state is DomainState.ACTIVE and world.path() == "d1"


def test_an_adopted_domain_without_a_server_waits_for_its_first_client() -> None:
    world = World(Policy(on_demand=True, idle_s=IDLE_S))
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
    world.adopt("d1", ev.DomainRole.ACTIVE, DomainState.ACTIVE, server=False, server_state=ServerState.GONE)
    world.do(ev.AdoptionDone())
    assert not world.ever(fx.StartDomain) and world.path() == "d1"
    world.join(1)
    serve(world, "d1")
    assert starts(world) == [("d2", True)]


def test_the_idle_time_runs_on_in_a_later_daemon() -> None:
    world = World(Policy(on_demand=True, idle_s=IDLE_S))
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False, used=world.now - 200))
    world.adopt("d1", ev.DomainRole.ACTIVE, DomainState.ACTIVE)
    world.adopt("d2", ev.DomainRole.SPARE, DomainState.WARM)
    world.do(ev.AdoptionDone())
    assert fx.ArmTimer(slots.IDLE, SLOT, IDLE_S) in world.last
    world.wait(IDLE_S).timer(slots.IDLE, SLOT)
    assert stops(world) == ["d2"] and starts(world) == [("d3", False)]


def test_at_once_nothing_waits_for_a_client_and_nothing_ends() -> None:
    world = World(Policy(idle_s=IDLE_S)).ready()
    assert starts(world) == [("d1", True), ("d2", True)]
    assert not [e for e in world.ever(fx.ArmTimer) if e.kind == slots.IDLE]
