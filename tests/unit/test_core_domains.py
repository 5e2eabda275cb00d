"""Slots and domains: starting, switching, draining, stopping, adoption, exclusive mode."""

from __future__ import annotations

import pytest

from mpsd.base.model import ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.state import ClientState, DomainState, Policy
from mpsd.core.victims import USE, USE_S
from tests.support.core import GPU, SLOT, UID, World, control_of, facts, process, server_of

ACTIVE, SPARE, OLD = ev.DomainRole.ACTIVE, ev.DomainRole.SPARE, ev.DomainRole.OLD


# Starting


def test_a_slot_starts_its_domain_then_a_spare() -> None:
    world = World()
    world.want()
    assert list(world.last) == [fx.StartDomain("d1", (GPU,), UID)]
    world.started("d1")
    assert [type(e) for e in world.last] == [fx.SwitchPath, fx.Publish, fx.StartDomain]
    assert world.path() == "d1"
    world.started("d2")
    assert not world.last
    slot = world.state.slots[SLOT]
    assert (slot.active, slot.spare) == ("d1", "d2")
    assert [world.domain(d).state for d in ("d1", "d2")] == [DomainState.ACTIVE, DomainState.WARM]
    assert world.domain("d1").server == server_of("d1")


def test_a_slot_wanted_again_starts_nothing_more() -> None:
    world = World().ready()
    world.want()
    assert not world.last


def test_without_spares_one_domain_is_started() -> None:
    world = World(Policy(spare=False))
    world.want()
    world.started("d1")
    assert [e.domain for e in world.ever(fx.StartDomain)] == ["d1"]


def test_a_domain_without_a_server_is_started_too() -> None:
    world = World()
    world.want()
    world.do(ev.DomainStarted("d1", control_of("d1"), None))
    assert world.domain("d1").server_state is ServerState.GONE
    world.do(ev.ServerSeen("d1", server_of("d1")))
    assert world.domain("d1").server == server_of("d1")


def test_failed_starts_back_off_and_are_tried_again() -> None:
    world = World(Policy(start_retry_s=1, start_retry_max_s=5))
    world.want()
    delays = []
    for number in range(1, 6):
        world.do(ev.DomainStartFailed(f"d{number}", "no memory"))
        delays += [t.delay_s for t in world.made(fx.ArmTimer) if t.kind == "ensure"]
        assert [e.domain for e in world.made(fx.StopDomain)] == [f"d{number}"]
        world.stopped(f"d{number}")
        world.timer("ensure", SLOT)
        assert [e.domain for e in world.made(fx.StartDomain)] == [f"d{number + 1}"]
    assert delays == [1, 2, 4, 5, 5]
    world.started("d6")
    assert world.path() == "d6"
    assert world.state.slots[SLOT].failures == 0
    assert set(world.state.domains) == {"d6", "d7"}


def test_a_failed_spare_leaves_the_active_domain_alone() -> None:
    world = World()
    world.want()
    world.started("d1")
    world.do(ev.DomainStartFailed("d2", "no memory"))
    assert world.state.slots[SLOT].active == "d1"
    assert world.state.slots[SLOT].spare is None
    world.timer("ensure", SLOT)
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d3"]


def test_a_warm_spare_takes_over_when_the_first_domain_fails_to_start() -> None:
    world = World()
    world.want()
    world.want()
    world.started("d2")
    world.do(ev.DomainStartFailed("d1", "no memory"))
    assert world.path() == "d2"
    assert world.state.slots[SLOT].active == "d2"


def test_late_news_of_starts_and_stops_is_counted() -> None:
    world = World().ready()
    before = world.state.domains
    world.started("d1")
    world.do(ev.DomainStartFailed("d1", "late"))
    world.stopped("d1")
    assert world.state.domains == before
    assert not world.last
    world.started("d77")
    assert [e.domain for e in world.last if isinstance(e, fx.StopDomain)] == ["d77"]
    world.do(ev.DomainStartFailed("d77", "late"))
    world.stopped("d77")
    assert world.state.counters["late_domain_starts"] == 2
    assert world.state.counters["late_domain_stops"] == 2


# Death of control daemons and servers


def test_control_death_sends_new_clients_to_the_spare_and_names_the_victims() -> None:
    world = World().ready()
    world.join(10)
    world.do(ev.ControlDied("d1", control_of("d1")))
    assert world.path() == "d2"
    record = world.record()
    assert (record.fault_class, record.suspects) == ("control-death", ())
    assert world.pids(record.victims) == [10]
    assert world.domain("d1").state is DomainState.HEADLESS
    assert world.domain("d1").last_fault == record.id
    assert world.client_states() == {10: ClientState.ATTACHED}
    assert not world.ever(fx.StopDomain)
    world.die(10)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_a_server_that_goes_with_its_control_daemon_is_one_fault() -> None:
    world = World().ready()
    world.join(10)
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.do(ev.ControlDied("d1", control_of("d1")))
    assert [r.fault_class for r in world.records().values()] == ["control-death"]


def test_death_of_another_control_daemon_or_server_means_nothing() -> None:
    world = World().ready()
    world.do(ev.ControlDied("d1", process(1)))
    world.do(ev.ControlDied("d9", process(1)))
    world.do(ev.ServerDied("d1", process(1)))
    world.do(ev.ServerDied("d9", process(1)))
    world.do(ev.ServerSeen("d9", process(1)))
    assert not world.last
    assert world.domain("d1").state is DomainState.ACTIVE


def test_expected_end_of_a_stopping_domain_is_no_fault() -> None:
    world = World().ready()
    world.do(ev.ControlDied("d1", control_of("d1")))
    world.do(ev.ControlDied("d1", control_of("d1")))
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.stopped("d1")
    assert len(world.records()) == 1
    assert "d1" not in world.state.domains


def test_server_death_with_clients_is_recorded() -> None:
    world = World().ready()
    world.join(10, 11)
    world.do(ev.ServerDied("d1", server_of("d1")))
    switched = next(i for i, e in enumerate(world.last) if isinstance(e, fx.SwitchPath))
    recorded = next(i for i, e in enumerate(world.last) if isinstance(e, fx.Record))
    assert switched < recorded
    record = world.record()
    assert record.fault_class == "server-death"
    assert world.pids(record.victims) == [10, 11]
    assert record.offender is None and not record.suspects
    assert world.domain("d1").state is DomainState.RETIRED


def test_server_death_without_clients_is_no_fault() -> None:
    world = World().ready()
    world.do(ev.ServerDied("d2", server_of("d2")))
    assert not world.records()
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d2"]
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d3"]
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert not world.records()


def test_signs_that_follow_a_server_death_join_its_record() -> None:
    world = World().ready()
    world.join(10, 11)
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.wait(0.1).kernel(43, "Ch 0", pid=server_of("d1").pid)
    world.wait(0.1).nvml(31)
    assert [r.fault_class for r in world.records().values()] == ["server-death"]
    assert len(world.state.open_faults[0].evidence) == 3
    assert not world.state.strays


def test_control_death_of_a_faulted_domain() -> None:
    world = World().ready()
    world.join(10, 11)
    world.fault(10)
    world.do(ev.ControlDied("d1", control_of("d1")))
    assert world.domain("d1").state is DomainState.HEADLESS
    assert [r.fault_class for r in world.records().values()] == ["mmu-invalid-address", "control-death"]
    world.wait(0.2).fault(11)
    assert world.record().offender.facts.instance.pid == 11  # type: ignore[union-attr]


# Retrying where no standby domain can be started


def test_without_a_spare_the_path_stays_until_another_domain_has_started() -> None:
    world = World(Policy(spare=False))
    world.want()
    world.started("d1")
    world.join(10)
    world.fault(10)
    assert world.path() == "d1"
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d2"]
    assert "starting a fresh domain" in world.record().action
    world.die(10)
    assert [e.domain for e in world.made(fx.AskServer)] == ["d1"]
    world.started("d2")
    assert world.path() == "d2"
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_a_faulted_domain_that_is_still_led_to_may_recover() -> None:
    world = World()
    world.want()
    world.started("d1")
    world.join(10)
    world.fault(10)
    world.do(ev.DomainStartFailed("d2", "GPU busy"))
    world.server_state("d1", ServerState.ACTIVE)
    assert world.domain("d1").state is DomainState.FAULTED, "its client has not left"
    world.die(10)
    world.timer("ask", "d1")
    assert world.made(fx.AskServer)
    world.server_state("d1", ServerState.ACTIVE)
    assert world.domain("d1").state is DomainState.ACTIVE
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d3"]


# Exclusive mode


def test_exclusive_mode_has_no_spare_and_recovers_in_place() -> None:
    world = World().ready(exclusive=True)
    assert [e.domain for e in world.ever(fx.StartDomain)] == ["d1"]
    world.join(10, 11)
    world.fault(10)
    timers = {t.kind: t.delay_s for t in world.made(fx.ArmTimer)}
    assert timers["kill-victims"] == world.state.policy.exclusive_drain_s
    assert not world.made(fx.StartDomain)
    assert "fresh domain" not in world.record().action
    world.die(10)
    world.timer("kill-victims", "d1")
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [11]
    world.die(11)
    assert world.made(fx.AskServer)
    world.server_state("d1", ServerState.FAULT)
    assert world.domain("d1").state is DomainState.FAULTED
    world.server_state("d1", ServerState.ACTIVE)
    assert world.domain("d1").state is DomainState.ACTIVE
    assert world.path() == "d1"
    assert len(world.records()) == 1


@pytest.mark.parametrize("how", ["control", "server", "hang"])
def test_in_exclusive_mode_a_lost_domain_is_replaced_when_it_is_empty(how: str) -> None:
    world = World().ready(exclusive=True)
    world.join(10, 11)
    if how == "control":
        world.do(ev.ControlDied("d1", control_of("d1")))
    elif how == "server":
        world.do(ev.ServerDied("d1", server_of("d1")))
    else:
        world.die(11)
        world.lingers(11)
    assert not world.ever(fx.StopDomain)
    world.die(10)
    world.work_ended(10)
    if how != "hang":
        world.die(11)
        world.work_ended(11)
    kinds = [type(e) for e in world.effects if isinstance(e, fx.StopDomain | fx.StartDomain)]
    assert kinds == [fx.StartDomain, fx.StopDomain, fx.StartDomain]
    world.stopped("d1")
    world.started("d2")
    assert world.path() == "d2"


def test_victims_are_killed_also_when_the_server_of_a_faulted_domain_has_died() -> None:
    world = World().ready(exclusive=True)
    world.join(10, 11)
    world.fault(10)
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.timer("kill-victims", "d1")
    assert sorted(e.client.process.pid for e in world.made(fx.Kill)) == [10, 11]


def test_a_process_that_only_a_log_line_names_is_not_killed_as_a_victim() -> None:
    world = World(Policy(kill_victims_after_s=1.0)).ready()
    world.join(10)
    world.do(ev.ClientNoticed("d1", facts(12, uid=UID + 1)))
    world.fault(10)
    world.timer("kill-victims", "d1")
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [10]


def test_going_exclusive_gives_up_the_spare_and_coming_back_starts_one() -> None:
    world = World().ready()
    world.do(ev.ModeSeen(SLOT, True))
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d2"]
    world.do(ev.ModeSeen(SLOT, True))
    world.do(ev.ModeSeen("other", True))
    assert not world.last
    world.do(ev.ModeSeen(SLOT, False))
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d3"]


def test_going_exclusive_while_the_spare_is_starting() -> None:
    world = World()
    world.want()
    world.started("d1")
    world.do(ev.ClientNoticed("d2", facts(10)))
    world.do(ev.ModeSeen(SLOT, True))
    assert world.domain("d2").state is DomainState.RETIRED, "it has a client already"
    world.started("d2")
    assert world.domain("d2").control == control_of("d2")
    world.die(10)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d2"]
    world.started("d2")
    assert world.made(fx.StopDomain), "one that comes up too late is ended again"


def test_going_exclusive_with_a_faulted_domain_drains_it_in_place() -> None:
    world = World(Policy(spare=False))
    world.want()
    world.started("d1")
    world.join(10)
    world.fault(10)
    world.do(ev.ModeSeen(SLOT, True))
    assert "kill-victims" in [t.kind for t in world.made(fx.ArmTimer)]
    world.started("d2")
    assert world.path() == "d1", "a domain given up does not take over"


# Victims


def test_victims_that_stay_are_reported_and_left_alone() -> None:
    world = World().ready()
    world.join(10, 11)
    world.fault(10)
    world.timer("laggards", "d1")
    (told,) = world.made(fx.Publish)
    assert told.kind == "victims-stay" and told.data["pids"] == [10, 11]
    world.timer("kill-victims", "d2")
    assert not world.last
    world.die(10)
    world.die(11)
    world.stopped("d1")
    for kind in ("laggards", "kill-victims", "ask"):
        world.timer(kind, "d1")
        assert not world.last


def test_victims_are_killed_where_policy_says_so() -> None:
    world = World(Policy(kill_victims_after_s=3)).ready()
    world.join(10, 11)
    world.fault(10)
    assert {t.delay_s for t in world.made(fx.ArmTimer) if t.kind == "kill-victims"} == {3}
    world.timer("kill-victims", "d1")
    assert sorted(e.client.process.pid for e in world.made(fx.Kill)) == [10, 11]
    world.timer("kill-victims", "d1")
    assert not world.made(fx.Kill), "once"


# Drain, stop, counters, timers


def test_drain_and_undrain() -> None:
    world = World().ready()
    world.do(ev.DrainRequested((GPU, "GPU-1"), True))
    assert world.state.drained == {GPU, "GPU-1"}
    world.do(ev.DrainRequested((GPU,), False))
    assert world.state.drained == {"GPU-1"}
    world.do(ev.DrainRequested((), True))
    assert world.state.drained == {"GPU-1", "*"}
    world.do(ev.DrainRequested((), False))
    assert not world.state.drained
    assert [e.kind for e in world.ever(fx.Publish)][-4:] == ["drain", "undrain", "drain", "undrain"]


def test_stop_kills_the_clients_and_then_stops_every_domain() -> None:
    world = World().ready()
    world.join(10, 11)
    world.die(11)
    world.do(ev.StopRequested())
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [10]
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d2"]
    world.do(ev.StopRequested())
    assert not world.last
    world.stopped("d2")
    assert not world.ever(fx.DropPath)
    world.die(10)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]
    # Work of the killed clients may run for as long as the server does.
    assert not world.made(fx.ReleaseLease)
    world.stopped("d1")
    assert {e.client.process.pid for e in world.made(fx.ReleaseLease)} == {10, 11}
    # The path led to a domain for as long as there was one.
    assert [e.slot for e in world.made(fx.DropPath)] == [SLOT]
    assert not world.state.domains and not world.state.slots
    world.want("another")
    world.timer("ensure", SLOT)
    assert not world.ever(fx.StartDomain)[2:]


def test_stop_ends_a_domain_that_is_starting_and_a_client_that_comes_late() -> None:
    world = World()
    world.want()
    world.do(ev.ClientNoticed("d1", facts(10), listed=True))
    world.do(ev.StopRequested())
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [10]
    world.do(ev.ClientNoticed("d1", facts(11), listed=True))
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [11]
    world.started("d1")
    assert world.path() is None
    world.die(10)
    world.die(11)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_stop_gives_up_a_path_that_leads_to_nothing_and_keeps_one_whose_domain_lives() -> None:
    world = World().ready()
    world.join(10)
    world.do(ev.SlotWanted("empty", (GPU,), 5, False, start=False))
    world.do(ev.StopRequested())
    assert [e.slot for e in world.made(fx.DropPath)] == ["empty"]
    assert set(world.state.slots) == {SLOT}


def test_who_asks_while_it_stops_gets_no_slot_that_the_next_mpsd_would_serve() -> None:
    world = World().ready()
    world.join(10)
    world.do(ev.StopRequested())
    world.do(ev.SlotWanted("late", (GPU,), 5, False, start=True))
    assert set(world.state.slots) == {SLOT} and not world.made(fx.StartDomain)


def test_a_fault_while_stopping_starts_nothing() -> None:
    world = World().ready()
    world.join(10)
    world.do(ev.StopRequested())
    world.fault(10)
    assert not world.made(fx.StartDomain)
    assert "new clients" not in world.record().action
    world.die(10)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_counted_and_unknown_timers() -> None:
    world = World()
    world.do(ev.Counted({"a": 2, "b": 1}))
    world.do(ev.Counted({"a": 1}))
    world.timer("no-such", "x")
    for kind in ("ensure", "linger", "kill-wait", "strays"):
        world.timer(kind, "gone")
    assert dict(world.state.counters) == {"a": 3, "b": 1, "unknown_timers": 1}
    assert not world.effects


def test_other_server_states_are_remembered() -> None:
    world = World().ready()
    world.server_state("d1", ServerState.INITIALIZING)
    assert world.domain("d1").server_state is ServerState.INITIALIZING
    world.server_state("d9", ServerState.FAULT)
    assert not world.last


def test_two_users_have_domains_of_their_own() -> None:
    world = World().ready()
    world.want("gpu0.uid2000", uid=2000)
    world.started("d3")
    world.join(10)
    world.fault(10)
    assert world.path() == "d2"
    assert world.path("gpu0.uid2000") == "d3"
    assert world.state.slot_for((GPU,), 2000) == world.state.slots["gpu0.uid2000"]
    assert {d.id for d in world.state.domains_on(GPU)} == set(world.state.domains)


# Adoption


def adopting() -> World:
    world = World()
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
    assert not world.last
    return world


def test_adoption_of_a_whole_node() -> None:
    world = adopting()
    world.adopt("d7", OLD, DomainState.FAULTED, server_state=ServerState.FAULT)
    world.adopt("d8", ACTIVE, DomainState.ACTIVE)
    world.adopt("d9", SPARE, DomainState.WARM)
    world.join(10, domain="d7")
    world.do(ev.AdoptionDone())
    assert world.last == (
        fx.ArmTimer("laggards", "d7", world.state.policy.laggard_report_s),
        fx.ArmTimer(USE, "d7", USE_S),
    )
    assert world.path() == "d8"
    assert (world.state.slots[SLOT].active, world.state.slots[SLOT].spare) == ("d8", "d9")
    assert world.state.next_domain == 10
    world.die(10)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d7"]


def test_nothing_is_emptied_before_its_living_clients_are_known() -> None:
    world = adopting()
    world.adopt("d1", ACTIVE, DomainState.ACTIVE)
    world.adopt("d2", OLD, DomainState.RETIRED)
    world.do(ev.LeaseRestored("d2", facts(10), (0, 1)))
    assert [e.client.space for e in world.made(fx.ProbeWork)] == [0, 1]
    world.work_ended(10)
    assert not world.made(fx.StopDomain)
    world.join(11, domain="d2")
    world.do(ev.AdoptionDone())
    assert not world.made(fx.StopDomain)
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d3"]
    world.die(11)
    world.work_ended(11)
    assert "d2" in [e.domain for e in world.ever(fx.StopDomain)]


def test_a_faulted_domain_does_not_recover_before_its_living_clients_are_known() -> None:
    world = adopting()
    world.adopt("d1", ACTIVE, DomainState.FAULTED, server_state=ServerState.FAULT)
    world.server_state("d1", ServerState.ACTIVE)
    assert world.domain("d1").state is DomainState.FAULTED
    world.do(ev.AdoptionDone())
    assert {fx.AskServer, fx.StartDomain} <= {type(e) for e in world.last}


def test_what_the_earlier_daemon_left_half_done_is_replaced() -> None:
    world = adopting()
    world.adopt("d1", OLD, DomainState.STOPPING)
    world.adopt("d2", ACTIVE, DomainState.STARTING, server=False)
    world.adopt("d3", SPARE, DomainState.WARM)
    world.do(ev.AdoptionDone())
    assert world.path() == "d3"
    assert sorted(e.domain for e in world.made(fx.StopDomain)) == ["d1", "d2"]


def test_a_warm_domain_that_the_path_leads_to_is_active() -> None:
    world = adopting()
    world.adopt("d1", ACTIVE, DomainState.WARM)
    assert world.domain("d1").state is DomainState.ACTIVE


def test_a_second_domain_for_the_same_role_is_retired() -> None:
    world = adopting()
    world.adopt("d1", ACTIVE, DomainState.ACTIVE)
    world.adopt("d2", ACTIVE, DomainState.ACTIVE)
    world.adopt("d3", SPARE, DomainState.WARM)
    world.adopt("d4", SPARE, DomainState.WARM)
    world.do(ev.AdoptionDone())
    assert sorted(e.domain for e in world.made(fx.StopDomain)) == ["d2", "d4"]


def test_adoption_without_anything_left_starts_afresh() -> None:
    world = adopting()
    world.do(ev.AdoptionDone())
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d1"]


def test_adoption_with_a_spare_only_promotes_it() -> None:
    world = adopting()
    world.adopt("d5", SPARE, DomainState.WARM)
    world.do(ev.AdoptionDone())
    assert world.path() == "d5"


def test_adoption_of_the_unknown_is_ignored() -> None:
    world = World().ready()
    before = world.state.domains
    world.adopt("d1", ACTIVE, DomainState.FAULTED)
    world.do(ev.DomainAdopted("x", "none", OLD, DomainState.WARM, None, None, ServerState.GONE))
    assert world.state.domains == before
    assert world.state.counters["adoptions_ignored"] == 2
    world.do(ev.DomainAdopted("x", SLOT, OLD, DomainState.WARM, None, None, ServerState.GONE))
    assert world.domain("x").state is DomainState.RETIRED
