"""Guard hits in core: one record per out-of-bounds access, what each policy does, what may never be done."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import (
    Access,
    ClientId,
    Confidence,
    Liveness,
    Nearby,
    Relation,
    ServerState,
    ZonePolicy,
    ZoneRole,
)
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.faults.hitrecords import HITS_KEPT, QUIET_S
from mpsd.core.faults.records import HitOutcome
from mpsd.core.state import ClientState, DomainState, Policy
from mpsd.records import hittext
from tests.support.core import UID, World, facts, process, uvm

MIB = 1 << 20
NEAR = Nearby(Relation.PAST, 4096, False, 0x7F0000000000, 20 * MIB, 7, 3.0)


def world(policy: ZonePolicy = ZonePolicy.EVICT, *pids: int) -> World:
    made = World(Policy(zone_policy=policy)).ready()
    made.join(*(pids or (10, 11)))
    return made


def hit(
    here: World,
    pid: int = 10,
    access: Access = Access.WRITE,
    liveness: Liveness = Liveness.RUNNING,
    role: ZoneRole = ZoneRole.GUARD,
    domain: str = "d1",
) -> None:
    event = replace(uvm(access=access), fatal=False)
    here.do(ev.GuardHit(ClientId(domain, process(pid)), event, role, 1, liveness))


def end(here: World, pid: int = 10) -> None:
    here.terminate_finished(pid)
    here.die(pid)


@pytest.mark.parametrize("liveness", [Liveness.RUNNING, Liveness.STOPPED])
def test_of_a_client_with_nothing_running_nobody_is_asked_to_let_it_go(liveness: Liveness) -> None:
    """terminate_client would delay the other clients."""
    here = world()
    event = replace(uvm(access=Access.WRITE), fatal=False)
    here.do(ev.GuardHit(ClientId("d1", process(10)), event, ZoneRole.GUARD, 1, liveness, idle=True))
    assert not any(isinstance(effect, fx.Terminate) for effect in here.last)
    (kill,) = (effect for effect in here.last if isinstance(effect, fx.Kill))
    assert kill.client == ClientId("d1", process(10))


def test_what_is_not_leased_is_asked_for_though_it_seems_idle() -> None:
    here = world()
    here.do(ev.ClientNoticed("d1", facts(12), listed=True))
    event = replace(uvm(access=Access.WRITE), fatal=False)
    here.do(ev.GuardHit(ClientId("d1", process(12)), event, ZoneRole.GUARD, 1, Liveness.RUNNING, idle=True))
    assert not any(isinstance(effect, fx.Kill) for effect in here.last)
    assert any(isinstance(effect, fx.Terminate) for effect in here.last)


def test_a_hit_names_its_client_for_certain_and_puts_it_out_first() -> None:
    here = world()
    hit(here)
    kinds = [type(effect) for effect in here.last]
    assert kinds.index(fx.Terminate) < kinds.index(fx.Describe) < kinds.index(fx.Record)
    record = here.record()
    assert (record.fault_class, record.confidence, record.victims) == ("guard-hit", Confidence.CERTAIN, ())
    assert record.offender is not None and record.offender.id.process == process(10)
    assert here.domain("d1").state is DomainState.ACTIVE
    here.wait(0.009).terminate_finished(10)
    assert here.made(fx.Kill)
    here.wait(0.1).die(10)
    facts_of = here.record().hit
    assert facts_of is not None and facts_of.outcome is HitOutcome.EVICTED
    assert facts_of.outcome_s == pytest.approx(0.009) and facts_of.alone
    assert here.client_states() == {10: ClientState.LINGERING, 11: ClientState.ATTACHED}


def test_the_record_says_what_lay_there_also_after_the_end() -> None:
    here = world()
    hit(here)
    number = here.record().id
    here.wait(0.009)
    end(here)
    here.do(ev.HitDescribed(number, NEAR, "saxpy"))
    assert hittext.summary(here.record()) == (
        "pid 10 wrote 4 KiB past the end of a 20 MiB allocation made 3 s ago (kernel saxpy was in flight); "
        "evicted after 9.0 ms; no other client was affected"
    )


def test_many_hits_of_one_misdeed_are_one_record() -> None:
    here = world()
    for _ in range(5):
        hit(here)
        here.wait(0.001)
    assert len(here.ever(fx.Terminate)) == 1
    assert len(here.ever(fx.Record)) == 1
    end(here)
    record = here.record()
    assert record.hit is not None and record.hit.count == 5
    assert len(here.records()) == 1
    assert here.state.tallies == {}


def test_prefetches_strangers_and_fatal_events_are_none() -> None:
    here = world()
    hit(here, access=Access.PREFETCH)
    hit(here, pid=99)
    here.do(ev.GuardHit(ClientId("d1", process(10)), uvm(), ZoneRole.GUARD, 1, Liveness.RUNNING))
    assert not here.ever(fx.Record) and not here.ever(fx.Terminate)
    assert here.state.counters["guard_hits_of_nobody"] == 3


def test_who_is_stopped_or_in_a_faulted_domain_is_not_asked() -> None:
    here = world()
    hit(here, liveness=Liveness.STOPPED)
    assert here.made(fx.Kill) and not here.ever(fx.Terminate)
    here = world()
    here.server_state("d1", ServerState.FAULT)
    hit(here, pid=11)
    assert here.made(fx.Kill) and not here.ever(fx.Terminate)
    here.die(11)
    record = next(r for r in reversed(list(here.records().values())) if r.fault_class == "guard-hit")
    assert record.hit is not None and record.hit.alone is False


def test_absorb_reports_and_does_nothing_at_a_rate_that_falls() -> None:
    here = world(ZonePolicy.ABSORB)
    hit(here)
    assert {type(e) for e in here.last} == {fx.Describe, fx.Record}
    number = here.record().id
    due = None
    for _ in range(6000):
        hit(here.wait(0.1))
        for timer in here.made(fx.ArmTimer):
            assert due is None and timer.kind == "hits"
            due = here.now + timer.delay_s
        if due is not None and here.now >= due:
            due = None
            here.timer("hits", number)
    # Ten minutes of hits.
    assert 5 < len(here.ever(fx.Record)) < 20
    assert set(here.records()) == {number}
    assert here.client("d1", 10).state is ClientState.ATTACHED
    here.wait(QUIET_S + 1)
    hit(here)
    assert len(here.records()) == 2, "a misdeed much later is another one"


def test_more_clients_that_stray_than_records_are_kept_do_not_flood_the_journal() -> None:
    pids = range(10, 10 + HITS_KEPT + 6)
    here = world(ZonePolicy.ABSORB, *pids)
    for _ in range(3):
        for pid in pids:
            hit(here, pid)
    assert len(here.records()) == len(pids)
    assert len(here.state.hits) == HITS_KEPT
    assert here.state.counters["guard_hits_untold"] > 0


def test_room_is_made_by_finished_records_then_by_those_of_who_has_most() -> None:
    here = world(ZonePolicy.ABSORB, 10)
    here.do(ev.ClientNoticed("d1", facts(11, uid=2000), listed=True))
    here.do(ev.ClientAttached("d1", process(11), 1, tracked=True))
    hit(here, 11)
    first = here.record().id
    hit(here, 10)
    for pid in range(100, 100 + 2 * HITS_KEPT):
        here.join(pid)
        hit(here, pid)
        here.die(pid)
    assert {first, first + 1} <= {r.id for r in here.state.hits}
    pids = range(300, 300 + 2 * HITS_KEPT)
    here.join(*pids)
    for pid in pids:
        hit(here, pid)
    assert len(here.state.hits) == HITS_KEPT
    kept = {r.id: r for r in here.state.hits}
    assert first in kept and first + 1 not in kept
    assert not any(r.hit is None or r.hit.outcome is HitOutcome.ENDED for r in kept.values())


def test_freeze_stops_it_and_nobody_asks_it_to_leave() -> None:
    here = world(ZonePolicy.FREEZE)
    hit(here)
    (stop,) = here.made(fx.Freeze)
    assert stop.client.process == process(10)
    assert "kill -CONT 10" in here.record().action
    assert stop.grounds is not None
    assert (stop.grounds.fault, stop.grounds.fault_class) == (here.record().id, here.record().fault_class)
    # The signal may not have arrived when the state was read: the server is not asked in any case.
    here.evict(10, liveness=Liveness.RUNNING)
    assert here.made(fx.Kill) and not here.ever(fx.Terminate)
    here.die(10)
    record = here.record()
    assert record.hit is not None and record.hit.outcome is HitOutcome.EVICTED


def test_what_mpsd_froze_is_killed_when_its_domain_faults_and_the_domain_empties() -> None:
    here = world(ZonePolicy.FREEZE)
    hit(here)
    here.fault(11)
    (kill,) = here.ever(fx.Kill)
    assert kill.client == ClientId("d1", process(10))
    assert here.client("d1", 11).state is ClientState.ATTACHED, "the others are not killed for it"
    here.die(10)
    here.die(11)
    assert here.domain("d1").state is DomainState.STOPPING


def test_who_is_frozen_in_a_domain_that_has_faulted_or_lost_its_server_is_killed() -> None:
    here = world(ZonePolicy.FREEZE)
    here.server_state("d1", ServerState.FAULT)
    hit(here)
    assert [e.client.process for e in here.ever(fx.Kill)] == [process(10)]
    here = world(ZonePolicy.FREEZE)
    here.server_state("d1", ServerState.FAULT)
    here.do(ev.FreezeRestored(process(10)))
    assert [e.client.process for e in here.ever(fx.Kill)] == [process(10)]
    here = world(ZonePolicy.FREEZE)
    hit(here)
    server = here.domain("d1").server
    assert server is not None
    here.do(ev.ServerDied("d1", server))
    assert [e.client.process for e in here.ever(fx.Kill)] == [process(10)]


def test_a_client_that_is_being_put_out_is_not_stopped() -> None:
    here = world(ZonePolicy.FREEZE)
    here.evict(10)
    hit(here)
    assert not here.ever(fx.Freeze)
    record = here.record()
    assert record.hit is not None and record.hit.outcome is HitOutcome.EVICTING


def test_a_frozen_client_that_goes_on_is_stopped_again() -> None:
    here = world(ZonePolicy.FREEZE)
    hit(here)
    hit(here.wait(0.01))
    assert len(here.ever(fx.Freeze)) == 1, "what was in flight hits on"
    here.wait(1).timer("thaw", process(10))
    assert here.made(fx.LookAtFrozen)
    here.do(ev.LivenessSeen(process(10), Liveness.STOPPED))
    assert here.made(fx.ArmTimer)
    here.wait(1).do(ev.LivenessSeen(process(10), Liveness.RUNNING))
    assert here.client("d1", 10).frozen is None
    hit(here)
    assert len(here.ever(fx.Freeze)) == 2
    # The client may continue and hit again before the next look.
    hit(here.wait(0.6))
    assert len(here.ever(fx.Freeze)) == 3


def test_a_stop_that_was_withheld_is_told() -> None:
    here = world(ZonePolicy.FREEZE)
    hit(here)
    here.do(ev.FreezeRefused(process(10), "not uid 1000's own"))
    record = here.record()
    assert record.hit is not None and record.hit.outcome is HitOutcome.WITHHELD
    assert here.client("d1", 10).frozen is None
    hit(here)
    # A lease is no proof enough for a kill by policy: the record stays as it was.
    assert len(here.ever(fx.Freeze)) == 1


def test_another_user_s_process_in_a_user_s_domain_is_named_and_left_alone() -> None:
    here = world()
    here.do(ev.ClientNoticed("d1", facts(12, uid=2000), listed=True))
    here.do(ev.ClientAttached("d1", process(12), 1, tracked=True))
    hit(here, pid=12)
    assert not here.ever(fx.Terminate) and not here.ever(fx.Kill)
    record = here.record()
    assert record.hit is not None and record.hit.outcome is HitOutcome.WITHHELD
    assert record.confidence is Confidence.CERTAIN


def test_a_policy_of_one_client_is_its_own_and_holds_from_the_next_hit_on() -> None:
    here = world(ZonePolicy.EVICT)
    here.do(ev.ZonePolicySet(process(10), ZonePolicy.ABSORB))
    hit(here)
    assert not here.ever(fx.Terminate)
    hit(here, pid=11)
    assert here.made(fx.Terminate)
    here.do(ev.ZonePolicySet(process(10), ZonePolicy.EVICT))
    hit(here)
    assert [e.process for e in here.ever(fx.Terminate)] == [process(11), process(10)]
    record = here.record()
    assert record.hit is not None and record.hit.policy is ZonePolicy.EVICT


def test_a_hit_takes_no_sign_of_a_fault_and_gives_none() -> None:
    here = world(ZonePolicy.ABSORB)
    hit(here)
    here.fault(11)
    assert {r.fault_class for r in here.records().values()} == {"guard-hit", "mmu-invalid-address"}
    assert not here.state.hits[0].victims


def test_the_work_of_the_dead_that_strays_on_is_counted() -> None:
    here = world()
    hit(here)
    end(here)
    hit(here)
    assert len(here.records()) == 1
    facts_of = here.state.hits[0].hit
    assert facts_of is not None and (facts_of.outcome, facts_of.count) == (HitOutcome.EVICTED, 2)


def test_who_ended_before_its_hit_was_told_is_named_all_the_same() -> None:
    here = world()
    here.die(10)
    hit(here)
    assert not here.ever(fx.Terminate) and not here.ever(fx.Kill)
    assert hittext.summary(here.record()).endswith("absorbed, the client ended; no other client was affected")
    hit(here)
    assert len(here.records()) == 1


def test_exec_ends_what_was_said_of_the_program_before() -> None:
    here = world(ZonePolicy.ABSORB)
    hit(here)
    here.do(ev.ClientLeft(process(10), "exec"))
    record = here.record()
    assert record.hit is not None and record.hit.outcome is HitOutcome.ENDED
    assert here.state.tallies == {}


PAGE = Nearby(Relation.BEFORE, 4096, True, 0x7F0000000000, 3 << 10, 7, 0.02)


@pytest.mark.parametrize(
    ("nearby", "role", "said"),
    [
        (PAGE, ZoneRole.GUARD, "within 4 KiB before the start of a 3 KiB allocation made 20 ms ago"),
        (replace(PAGE, distance=8192), ZoneRole.GUARD, "8 KiB before the start of a 3 KiB"),
        (replace(PAGE, relation=Relation.PAST, distance=0), ZoneRole.GUARD, "within 4 KiB past the end of"),
        (replace(NEAR, distance=0), ZoneRole.GUARD, "right past the end of a 20 MiB allocation"),
        (replace(NEAR, distance=16 * MIB), ZoneRole.GUARD, "16 MiB past the end of a 20 MiB"),
        (
            replace(NEAR, distance=6349 * MIB),
            ZoneRole.FAR,
            "6.2 GiB past the end of a 20 MiB allocation made 3 s ago",
        ),
        (
            Nearby(Relation.INSIDE, 512, False, 0, 20 * MIB, 1, 300.0, 7000.0),
            ZoneRole.QUARANTINE,
            "512 B from the start, inside a 20 MiB allocation made 5 min ago and freed 117 min ago",
        ),
        (None, ZoneRole.GUARD, "at 0x7f0000001000 in a guard zone"),
        (None, ZoneRole.NULL_PAGE, "through a null pointer (address 0x7f0000001000)"),
    ],
)
def test_every_place_has_its_words(nearby: Nearby | None, role: ZoneRole, said: str) -> None:
    here = world(ZonePolicy.ABSORB)
    hit(here, role=role)
    here.do(ev.HitDescribed(here.record().id, nearby, None))
    summary = hittext.summary(here.record())
    assert summary.startswith(f"pid 10 wrote {said}")
    assert summary.endswith("absorbed, the client continues")
    assert hittext.hit_json(here.state.hits[0].hit or pytest.fail("no hit"))["zone"] == role.value


@pytest.mark.parametrize("owner", [None, UID])
def test_who_asks_for_an_eviction_that_policy_has_begun_is_answered_by_its_end(owner: int | None) -> None:
    world = World().ready()
    world.join(10)
    hit = replace(uvm(), fatal=False)
    world.do(ev.GuardHit(ClientId("d1", process(10)), hit, ZoneRole.GUARD, 1, Liveness.RUNNING))
    assert len(world.made(fx.Terminate)) == 1
    world.evict(10, owner=owner)
    (joined,) = world.last
    assert isinstance(joined, fx.AuditEviction) and joined.outcome == "joined"
    world.terminate_finished(10)
    # The requester's rights limit the kill.
    assert [e.owner for e in world.made(fx.Kill)] == [owner]
    world.die(10)
    assert [(e.request, e.ok) for e in world.made(fx.Answer)] == [("r1", True)]


def test_the_audit_log_gets_the_record_that_an_eviction_answers() -> None:
    here = world(ZonePolicy.EVICT)
    hit(here)
    (audited,) = here.made(fx.AuditEviction)
    assert audited.grounds.requester is None and "own" in audited.grounds.proof
    assert (audited.grounds.fault, audited.grounds.fault_class) == (
        here.record().id,
        here.record().fault_class,
    )
