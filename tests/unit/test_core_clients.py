"""Clients: noticed, leased, dead, lingering, evicted."""

from __future__ import annotations

import pytest

from mpsd.base.model import ClientId, Confidence, Liveness
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.state import ClientState, DomainState
from tests.support.core import REQUESTER, UID, World, control_of, facts, process, server_of

NOT_RUNNING = [Liveness.STOPPED, Liveness.TRACED, Liveness.FROZEN, Liveness.DEAD]


def released(world: World) -> list[tuple[int, int]]:
    return [(e.client.process.pid, e.client.space) for e in world.made(fx.ReleaseLease)]


# Joining


def test_a_noticed_client_is_attached() -> None:
    world = World().ready()
    world.do(ev.ClientNoticed("d1", facts(10)))
    assert list(world.last) == [fx.Attach("d1", process(10), 0)]
    world.do(ev.ClientNoticed("d1", facts(10)))
    assert not world.last, "named twice by the log"
    world.wait(0.01).do(ev.ClientAttached("d1", process(10), 1, True))
    (told,) = world.made(fx.Publish)
    assert told.owner == 1000 and told.data["ms"] == 10.0
    client = world.client("d1", 10)
    assert (client.state, client.leased, client.tracked) == (ClientState.ATTACHED, True, True)


def test_every_address_space_is_leased_and_released() -> None:
    world = World().ready()
    world.join(10, spaces=2)
    world.die(10)
    assert [e.client.space for e in world.made(fx.ProbeWork)] == [0, 1]
    assert not world.made(fx.Forget)
    world.work_ended(10)
    assert released(world) == [(10, 0), (10, 1)]
    assert world.made(fx.Forget) == [fx.Forget(process(10))]


def test_a_lease_that_was_stored_late_is_no_problem_any_more() -> None:
    world = World().ready()
    world.do(ev.ClientNoticed("d1", facts(10)))
    world.do(ev.ClientAttached("d1", process(10), 2, True, unstored=(1,)))
    ids = [ClientId("d1", process(10), n) for n in (0, 1)]
    assert [world.state.clients[i].unstored for i in ids] == [False, True]
    for client_id in (*ids, ClientId("d1", process(99), 0)):
        world.do(ev.LeaseStored(client_id))
    assert not any(world.state.clients[i].unstored for i in ids)


def test_a_client_that_cannot_be_attached_lives_on_unprotected() -> None:
    world = World().ready()
    world.do(ev.ClientNoticed("d1", facts(10)))
    world.do(ev.AttachFailed("d1", process(10), "not permitted"))
    assert world.client("d1", 10).state is ClientState.UNPROTECTED
    assert [e.kind for e in world.made(fx.Publish)] == ["client-unprotected"]
    world.do(ev.ClientAttached("d1", process(10), 1, False, "faults are not seen"))
    assert world.client("d1", 10).state is ClientState.ATTACHED
    world.do(ev.AttachFailed("d1", process(10), "late"))
    assert world.client("d1", 10).state is ClientState.ATTACHED
    world.do(ev.AttachFailed("d1", process(99), "unknown"))
    assert not world.last


def test_clients_of_domains_that_cannot_take_them() -> None:
    world = World().ready()
    world.join(10)
    world.fault(10)
    world.do(ev.ClientNoticed("d1", facts(11)))
    assert world.last == (fx.Forget(process(11)),)
    world.do(ev.ClientRefused("d1", 12))
    world.do(ev.ClientRefused("d9", 12))
    assert world.domain("d1").refused == 2
    assert world.state.counters["clients_refused"] == 2
    world.do(ev.ClientNoticed("d9", facts(11)))
    world.die(10)
    world.do(ev.ClientNoticed("d1", facts(13)))
    assert world.state.counters["clients_of_unknown_domains"] == 2


def test_refused_in_one_domain_it_stays_a_client_of_another() -> None:
    world = World().ready()
    world.join(10)
    world.fault(10)
    world.join(11, domain="d2")
    for domain in ("d1", "d9"):
        world.do(ev.ClientNoticed(domain, facts(11)))
        assert not world.made(fx.Forget), "the pin of a client is kept"


def test_an_attach_that_comes_too_late_gives_its_leases_back() -> None:
    world = World().ready()
    world.do(ev.ClientNoticed("d1", facts(10)))
    world.die(10)
    assert world.last[-1] != fx.Forget(process(11)) and world.made(fx.Forget)
    world.do(ev.ClientAttached("d1", process(10), 2, True))
    assert released(world) == [(10, 0), (10, 1)]


# Death


def test_death_with_a_lease_lingers_until_the_work_has_ended() -> None:
    world = World().ready()
    world.join(10, 11)
    world.die(10)
    client = world.client("d1", 10)
    assert (client.state, client.died) == (ClientState.LINGERING, world.now)
    assert not released(world)
    assert ("linger", str(process(10)), 30.0) in [
        (t.kind, t.subject, t.delay_s) for t in world.made(fx.ArmTimer)
    ]
    world.wait(0.25).work_ended(10)
    assert released(world) == [(10, 0)]
    told = next(e for e in world.made(fx.Publish) if e.kind == "lease-released")
    assert told.data["after_ms"] == 250.0
    assert world.client_states() == {11: ClientState.ATTACHED}
    world.lingers(10)
    world.work_ended(10)
    world.die(10)
    assert not world.records()


def test_death_without_a_lease_is_forgotten_at_once() -> None:
    world = World().ready()
    world.do(ev.ClientNoticed("d1", facts(10)))
    world.die(10)
    assert not world.state.clients
    assert world.made(fx.Forget)


def test_death_in_a_faulted_domain_keeps_no_lease() -> None:
    world = World().ready()
    world.join(10, 11)
    world.fault(10)
    world.die(10)
    assert released(world) == [(10, 0)]
    assert world.made(fx.Forget)
    world.die(11)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_a_fault_ends_the_wait_for_the_dead() -> None:
    world = World().ready()
    world.join(10, 11)
    world.die(11)
    world.fault(10)
    assert released(world) == [(11, 0)]
    kinds = [type(e) for e in world.last]
    assert kinds.index(fx.SwitchPath) < kinds.index(fx.ReleaseLease)
    world.lingers(11)
    assert [r.fault_class for r in world.records().values()] == ["mmu-invalid-address"]


def test_endless_work_poisons_the_domain_and_is_held_to_the_last() -> None:
    world = World().ready()
    world.join(10, 11, 12)
    world.die(10)
    world.wait(30).lingers(10)
    assert world.client("d1", 10).state is ClientState.HELD
    assert world.domain("d1").state is DomainState.POISONED
    assert world.path() == "d2"
    record = world.record()
    # It may be a short kernel that waits behind a kernel of another client.
    assert (record.fault_class, record.confidence) == ("hang", Confidence.LIKELY)
    assert record.offender is not None and record.offender.id.process == process(10)
    assert not record.victims
    assert world.client_states() == {10: ClientState.HELD, 11: ClientState.ATTACHED, 12: ClientState.ATTACHED}
    world.die(11)
    world.work_ended(11)
    assert not any(pid == 10 for pid, _ in released(world))
    world.die(12)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]
    # While its server is alive the kernel runs, and would fault without its memory.
    assert not any(pid == 10 for pid, _ in released(world))
    world.stopped("d1")
    assert sorted(released(world)) == [(10, 0), (12, 0)]
    assert {e.process.pid for e in world.made(fx.Forget)} == {10, 12}
    world.lingers(10)
    world.work_ended(10)


def test_nobody_is_accused_before_a_new_look() -> None:
    world = World().ready()
    world.join(10, spaces=2)
    world.join(11)
    first, second = (ClientId("d1", process(10), space) for space in (0, 1))
    world.die(10)
    world.wait(30).timer("linger", process(10))
    assert [e.client for e in world.made(fx.ConfirmWork)] == [first, second]
    assert not world.ever(fx.Record) and world.client("d1", 10).state is ClientState.LINGERING
    world.do(ev.WorkEnded(first, "its semaphores"))
    world.do(ev.WorkRuns((first,), "a kernel"))
    world.do(ev.WorkRuns((ClientId("d1", process(11)),), "a kernel"))
    assert not world.ever(fx.Record) and world.domain("d1").state is DomainState.ACTIVE
    world.do(ev.WorkRuns((first, second), "a kernel"))
    assert "30 s after its death: a kernel" in world.record().evidence[0].text
    world.do(ev.WorkRuns((first, second), "a kernel"))
    assert len(world.ever(fx.Record)) == 1


def test_who_hangs_alone_is_named_for_certain() -> None:
    world = World().ready()
    world.join(10, spaces=2)
    world.join(11, domain="d2")
    world.die(10)
    world.wait(30).lingers(10)
    assert (world.record().fault_class, world.record().confidence) == ("hang", Confidence.CERTAIN)


def test_a_hang_that_ends_after_all() -> None:
    world = World().ready()
    world.join(10, 11)
    world.die(10)
    world.lingers(10)
    world.work_ended(10)
    assert released(world) == [(10, 0)]
    assert world.domain("d1").state is DomainState.POISONED
    assert world.client_states() == {11: ClientState.ATTACHED}


def test_one_hang_of_two_address_spaces_is_one_record() -> None:
    world = World().ready()
    world.join(10, spaces=2)
    world.join(11)
    world.die(10)
    world.lingers(10)
    assert len(world.records()) == 1
    world.fault(11)
    assert len(world.records()) == 2, "a fault after a hang is another fault"
    assert world.domain("d1").state is DomainState.FAULTED


def test_a_hang_in_the_spare_gives_up_the_spare() -> None:
    world = World().ready()
    world.join(10, domain="d2")
    world.die(10)
    world.lingers(10)
    assert world.state.slots["gpu0.uid1000"].spare == "d3"
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d2"]


def test_a_hang_in_a_headless_domain_is_recorded_only() -> None:
    world = World().ready()
    world.join(10, 11)
    world.do(ev.ControlDied("d1", control_of("d1")))
    world.die(10)
    world.lingers(10)
    assert world.record().fault_class == "hang"
    assert world.domain("d1").state is DomainState.HEADLESS


def test_exec_ends_a_client_and_the_next_program_is_another() -> None:
    world = World().ready()
    world.join(10)
    world.do(ev.ClientLeft(process(10), "exec"))
    assert world.client("d1", 10).state is ClientState.LINGERING
    assert "client-left" in [e.kind for e in world.made(fx.Publish)]
    world.do(ev.ClientNoticed("d1", facts(10)))
    assert world.last == (fx.Attach("d1", process(10), 1),)
    world.do(ev.ClientAttached("d1", process(10), 1, True, space=1))
    world.work_ended(10)
    assert released(world) == [(10, 0)]
    assert not world.made(fx.Forget)
    assert world.client("d1", 10, space=1).state is ClientState.ATTACHED
    world.die(10)
    world.work_ended(10)
    assert world.made(fx.Forget)


def test_the_end_of_one_lifes_work_says_nothing_of_the_next() -> None:
    world = World().ready()
    world.join(10, 11)
    world.do(ev.ClientLeft(process(10), "exec"))
    world.do(ev.ClientNoticed("d1", facts(10)))
    world.do(ev.ClientAttached("d1", process(10), 1, True, space=1))
    first, second = (ClientId("d1", process(10), space) for space in (0, 1))
    world.do(ev.WorkEnded(second, "too early"))
    world.do(ev.WorkNotVisible(second))
    assert not world.state.clients[second].blind
    world.die(10)
    assert [e.client for e in world.made(fx.ProbeWork)] == [second]
    world.do(ev.WorkNotVisible(first))
    assert [world.state.clients[i].blind for i in (first, second)] == [True, False]
    world.do(ev.WorkEnded(first, "its semaphores"))
    assert released(world) == [(10, 0)]
    assert world.client("d1", 10, space=1).state is ClientState.LINGERING
    world.do(ev.WorkEnded(first, "once more"))
    assert not world.last
    world.do(ev.WorkEnded(second, "its semaphores"))
    assert released(world) == [(10, 1)]


def test_a_reused_pid_is_another_process() -> None:
    world = World().ready()
    world.join(10)
    world.die(10)
    world.do(ev.ClientNoticed("d1", facts(10, start=2)))
    world.work_ended(10)
    assert list(world.state.clients) == [ClientId("d1", process(10, 2))]


def test_restored_leases() -> None:
    world = World().ready()
    world.do(ev.LeaseRestored("d1", facts(10), (0, 2)))
    assert [e.client.space for e in world.made(fx.ProbeWork)] == [0, 2]
    world.do(ev.LeaseRestored("d1", facts(10), (0,)))
    assert not world.made(fx.ProbeWork)
    world.do(ev.LeaseRestored("d9", facts(11), (0,)))
    assert released(world) == [(11, 0)]
    world.work_ended(10)
    assert released(world) == [(10, 0), (10, 2)]
    assert {e.uid for e in world.made(fx.ReleaseLease)} == {UID}


# Eviction


def test_eviction_asks_then_kills_then_answers() -> None:
    world = World().ready()
    world.join(10, 11)
    world.evict(10)
    audited, told, terminate = world.last
    assert isinstance(audited, fx.AuditEviction) and audited.outcome == "begun"
    assert audited.grounds == fx.Grounds(UID, "asked", ("leased", "own"), REQUESTER)
    assert isinstance(told, fx.Publish) and (told.kind, told.owner) == ("client-evicting", 1000)
    assert told.data == {"domain": "d1", "pid": 10, "reason": "asked"}
    assert terminate == fx.Terminate("d1", server_of("d1"), process(10), 0.05)
    assert world.client("d1", 10).state is ClientState.TERMINATING
    world.wait(0.008).terminate_finished(10)
    (kill,) = world.made(fx.Kill)
    assert kill == fx.Kill(ClientId("d1", process(10)), "asked")
    assert kill.grounds is not None and kill.grounds.requester == REQUESTER
    assert kill.grounds.steps == ("done", "SIGKILL")
    world.wait(0.002).die(10)
    (answer,) = world.made(fx.Answer)
    assert (answer.request, answer.ok) == ("r1", True)
    assert (answer.data["evict_ms"], answer.data["gone_ms"]) == (8.0, 10.0)
    assert answer.data["steps"] == ["done", "SIGKILL", "the process has gone"]
    assert not released(world), "the lease is held throughout"
    world.work_ended(10)
    assert released(world) == [(10, 0)]


def test_eviction_that_is_not_answered_in_time_kills() -> None:
    world = World().ready()
    world.join(10)
    world.evict(10)
    world.terminate_finished(10, done=False)
    assert world.made(fx.Kill)
    assert world.state.counters["terminate_failures"] == 1


@pytest.mark.parametrize("liveness", NOT_RUNNING)
def test_a_client_that_cannot_help_is_killed_without_asking(liveness: Liveness) -> None:
    world = World().ready()
    world.join(10)
    world.evict(10, liveness=liveness)
    assert not world.made(fx.Terminate)
    assert world.made(fx.Kill)
    world.die(10)
    assert liveness.value in world.made(fx.Answer)[0].data["steps"][0]  # type: ignore[index]


def test_in_a_faulted_domain_nobody_is_asked() -> None:
    world = World().ready()
    world.join(10, 11)
    world.fault(10)
    world.evict(11)
    assert not world.made(fx.Terminate)
    assert world.made(fx.Kill)


def test_without_server_or_control_daemon_nobody_is_asked() -> None:
    world = World().ready()
    world.join(10, 11)
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.evict(10)
    assert not world.made(fx.Terminate) and world.made(fx.Kill)
    world.do(ev.ControlDied("d1", control_of("d1")))
    world.evict(11, "r2")
    assert not world.made(fx.Terminate) and world.made(fx.Kill)


def test_who_is_not_a_client_is_not_evicted() -> None:
    world = World().ready()
    world.join(10)
    world.die(10)
    for pid in (10, 99):
        world.evict(pid)
        (answer,) = world.made(fx.Answer)
        assert (answer.ok, answer.data["code"]) == (False, "not-found")
        assert len(world.last) == 1


def test_a_second_eviction_is_refused_while_the_first_goes_on() -> None:
    world = World().ready()
    world.join(10)
    world.evict(10)
    world.evict(10, "r2")
    (answer,) = world.made(fx.Answer)
    assert (answer.request, answer.ok, answer.data["code"]) == ("r2", False, "busy")
    world.terminate_finished(10)
    world.evict(10, "r3")
    assert world.made(fx.Answer)[0].data["code"] == "busy"
    world.die(10)
    assert [e.request for e in world.made(fx.Answer)] == ["r1"]


def test_a_client_that_dies_while_being_evicted() -> None:
    world = World().ready()
    world.join(10)
    world.evict(10)
    world.die(10)
    assert [(e.request, e.ok) for e in world.made(fx.Answer)] == [("r1", True)]
    world.terminate_finished(10, done=False)
    assert not world.last
    assert world.client("d1", 10).state is ClientState.LINGERING


def test_exec_while_being_evicted_says_so() -> None:
    world = World().ready()
    world.join(10)
    world.evict(10)
    world.do(ev.ClientLeft(process(10), "exec"))
    assert world.made(fx.Answer)[0].data["steps"] == ["the process is no client any more: exec"]


def test_an_attach_that_finishes_while_evicting() -> None:
    world = World().ready()
    world.do(ev.ClientNoticed("d1", facts(10)))
    world.evict(10)
    world.do(ev.AttachFailed("d1", process(10), "not yet"))
    assert world.client("d1", 10).state is ClientState.TERMINATING
    world.do(ev.ClientAttached("d1", process(10), 2, True))
    assert {c.state for c in world.state.clients.values()} == {ClientState.TERMINATING}
    world.terminate_finished(10)
    world.die(10)
    assert [e.request for e in world.made(fx.Answer)] == ["r1"]
    assert {c.state for c in world.state.clients.values()} == {ClientState.LINGERING}


def test_a_fault_while_evicting() -> None:
    world = World().ready()
    world.join(10, 11)
    world.evict(11)
    world.fault(10)
    world.terminate_finished(11, done=False)
    assert world.made(fx.Kill) == [fx.Kill(ClientId("d1", process(11)), "asked")]
    world.die(11)
    assert [e.request for e in world.made(fx.Answer)] == ["r1"]
    assert released(world) == [(11, 0)]


def test_a_process_that_survives_sigkill_is_told_and_may_be_asked_for_again() -> None:
    world = World().ready()
    world.join(10, spaces=2)
    world.evict(10)
    world.terminate_finished(10)
    assert ("kill-wait", 5.0) in [(t.kind, t.delay_s) for t in world.made(fx.ArmTimer)]
    world.wait(5).timer("kill-wait", process(10))
    (answer,) = world.made(fx.Answer)
    assert (answer.request, answer.ok, answer.data["code"]) == ("r1", False, "deadline")
    world.timer("kill-wait", process(10))
    assert not world.made(fx.Answer)
    world.evict(10, "r2")
    assert world.made(fx.Kill) and not world.made(fx.Answer)
    world.die(10)
    assert [e.request for e in world.made(fx.Answer)] == ["r2"]
    world.timer("kill-wait", process(10))
    assert not world.last


def test_stop_overtakes_an_eviction_which_is_still_answered() -> None:
    world = World().ready()
    world.join(10)
    world.evict(10)
    world.do(ev.StopRequested())
    assert world.made(fx.Kill) and "kill-wait" in [t.kind for t in world.made(fx.ArmTimer)]
    world.terminate_finished(10)
    assert not world.made(fx.Kill)
    world.timer("kill-wait", process(10))
    assert [(e.request, e.ok) for e in world.made(fx.Answer)] == [("r1", False)]


def test_a_client_of_two_domains_is_evicted_from_both_with_one_answer() -> None:
    world = World().ready()
    world.join(10)
    world.join(10, domain="d2")
    world.evict(10)
    assert [e.domain for e in world.made(fx.Terminate)] == ["d1", "d2"]
    world.terminate_finished(10)
    world.terminate_finished(10)
    assert len(world.ever(fx.Kill)) == 1
    world.die(10)
    assert [e.request for e in world.made(fx.Answer)] == ["r1"]


def test_joining_another_domain_does_not_escape_an_eviction() -> None:
    world = World().ready()
    world.join(10)
    world.evict(10)
    world.do(ev.ClientNoticed("d2", facts(10)))
    world.terminate_finished(10)
    assert {c.state for c in world.state.clients.values()} == {ClientState.KILLING}
    world.die(10)
    assert [e.request for e in world.made(fx.Answer)] == ["r1"]


def test_work_that_cannot_be_seen_is_kept_while_others_could_be_harmed_and_blamed_on_nobody() -> None:
    world = World().ready()
    world.join(10, 11)
    world.die(10)
    world.do(ev.WorkNotVisible(ClientId("d1", process(10))))
    world.wait(60.0).do(ev.TimerFired("linger", str(process(10))))
    assert world.client("d1", 10).state is ClientState.LINGERING
    assert not released(world) and not world.made(fx.Record)
    world.die(11)
    assert (10, 0) in released(world)
