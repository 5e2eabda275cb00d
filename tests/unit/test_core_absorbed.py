"""Records of the kernel module in core: offenders end, and a fault that the driver answers is one record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import (
    Access,
    AddressKind,
    Confidence,
    KernelAction,
    KernelFault,
    Liveness,
    UvmEvent,
    UvmFaultType,
    ZonePolicy,
    ZoneRole,
)
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.faults.records import HitOutcome, Source
from mpsd.core.state import ClientState, DomainState, Policy
from mpsd.records import hittext
from tests.support.core import GPU, World, facts, mmu_text, process, uvm

SPACE = 77


def world(policy: ZonePolicy = ZonePolicy.EVICT) -> World:
    made = World(Policy(zone_policy=policy)).ready()
    made.join(10, 11)
    return made


def record(
    action: KernelAction = KernelAction.SUNK, pid: int | None = 10, event: UvmEvent | None = None
) -> KernelFault:
    maker = process(pid) if pid is not None else None
    sink = 65536 if action is KernelAction.SUNK else 0
    return KernelFault(1, action, SPACE, maker, event or uvm(), "graphics", "", 1, GPU, sink)


def see(here: World, fault: KernelFault, liveness: Liveness = Liveness.RUNNING) -> None:
    here.do(ev.KernelFaultSeen(fault, liveness))


@pytest.mark.parametrize("policy", ZonePolicy)
def test_whoever_was_sunk_is_put_out_whatever_the_policy_of_zones_is(policy: ZonePolicy) -> None:
    here = world(policy)
    see(here, record())
    kinds = [type(effect) for effect in here.last]
    assert kinds.index(fx.Terminate) < kinds.index(fx.Record) < kinds.index(fx.Acknowledge)
    assert here.made(fx.Acknowledge) == [fx.Acknowledge(SPACE)]
    found = here.record()
    assert (found.fault_class, found.confidence) == ("mmu-invalid-address", Confidence.CERTAIN)
    assert found.offender is not None and found.offender.id.process == process(10)
    assert found.victims == () and here.domain("d1").state is DomainState.ACTIVE
    assert [e.source for e in found.evidence] == [Source.KERNEL_PART]
    assert found.evidence[0].text == (
        "write at 0x7f0000001000, invalid pte, engine graphics: absorbed, 64 KiB"
    )
    here.wait(0.009).terminate_finished(10)
    assert here.made(fx.Kill)
    here.wait(0.1).die(10)
    facts_of = here.record().hit
    assert facts_of is not None and facts_of.outcome is HitOutcome.EVICTED and facts_of.alone
    assert hittext.summary(here.record()) == (
        "pid 10 wrote at 0x7f0000001000 where nothing is mapped; evicted after 9.0 ms; "
        "no other client was affected"
    )
    assert here.client_states() == {10: ClientState.LINGERING, 11: ClientState.ATTACHED}


def test_a_null_pointer_is_called_one() -> None:
    here = world()
    see(here, record(event=uvm(0x10, Access.READ)))
    found = here.record()
    assert (found.fault_class, found.lies_there) == ("mmu-null", AddressKind.NULL_PAGE)
    assert hittext.summary(found).startswith("pid 10 read through a null pointer (address 0x10)")


def test_a_storm_is_one_record_and_counts_what_the_module_counted() -> None:
    here = world()
    for faults in (1, 2, 4, 8):
        see(here, replace(record(), faults=faults, acknowledged=faults > 1))
    (found,) = here.records().values()
    assert len(here.ever(fx.Acknowledge)) == 1 and len(here.ever(fx.Terminate)) == 1
    kept = here.state.hits[0].hit
    assert kept is not None and kept.count == 8
    assert found.id == here.state.hits[0].id
    assert here.state.counters["faults_isolated"] == 8


def test_a_stopped_client_is_killed_and_never_asked() -> None:
    here = world()
    see(here, record(), Liveness.STOPPED)
    assert [type(e) for e in here.last if isinstance(e, fx.Kill | fx.Terminate | fx.Acknowledge)] == [
        fx.Kill,
        fx.Acknowledge,
    ]


def test_what_is_not_proven_is_left_to_the_module() -> None:
    """A line in a user's log named the client: mpsd does not kill it, so the module is not told to wait."""
    here = World(Policy()).ready(private=False)
    here.do(ev.ClientNoticed("d1", facts(12, uid=4242)))
    see(here, record(pid=12))
    assert not here.ever(fx.Kill) and not here.ever(fx.Terminate) and not here.ever(fx.Acknowledge)
    kept = here.record().hit
    assert kept is not None and kept.outcome is HitOutcome.WITHHELD
    see(here, record(KernelAction.KILL, pid=12))
    last = here.record().evidence[-1]
    assert last.source is Source.KERNEL_PART and "killed the client" in last.text


@pytest.mark.parametrize("liveness", [Liveness.RUNNING, Liveness.STOPPED])
def test_who_is_not_leased_is_left_to_the_module_which_holds_what_it_kills(liveness: Liveness) -> None:
    """The work of a client killed without a lease would fault unattributed, and end every client."""
    here = World(Policy()).ready()
    here.do(ev.ClientNoticed("d1", facts(12), listed=True))
    see(here, record(pid=12), liveness)
    assert not here.ever(fx.Kill) and not here.ever(fx.Terminate) and not here.ever(fx.Acknowledge)
    kept = here.record().hit
    assert kept is not None and kept.outcome is HitOutcome.WITHHELD and "lease" in kept.why
    here.do(ev.ClientAttached("d1", process(12), 1, tracked=True))
    see(here, record(pid=12), liveness)
    assert any(isinstance(e, fx.Kill | fx.Terminate) for e in here.last)
    assert here.made(fx.Acknowledge) == [fx.Acknowledge(SPACE)]
    kept = here.record().hit
    assert kept is not None and kept.outcome is HitOutcome.EVICTING and kept.count == 1


def test_whom_the_kernel_would_not_kill_is_not_waited_for() -> None:
    """The client runs as another user by now: it lives until the module's own deadline, not ten of them."""
    here = world()
    see(here, record())
    here.wait(0.01).terminate_finished(10)
    here.do(ev.KillRefused(process(10), "it runs as another user"))
    kept = here.record().hit
    assert kept is not None and (kept.outcome, kept.why) == (HitOutcome.WITHHELD, "it runs as another user")
    see(here, replace(record(), faults=2))
    assert not here.made(fx.Acknowledge)
    kept = here.record().hit
    assert kept is not None and kept.outcome is HitOutcome.WITHHELD


def test_what_is_sunk_is_told_apart_from_what_a_guard_zone_absorbed() -> None:
    """The client may continue after a zone hit, and then makes a stray access where no zone is."""
    here = world(ZonePolicy.ABSORB)
    client = next(c.id for c in here.state.clients.values() if c.id.process == process(10))
    for _ in range(5):
        zone = replace(uvm(0x7F0000009000), fatal=False)
        here.do(ev.GuardHit(client, zone, ZoneRole.GUARD, 1, Liveness.RUNNING))
    see(here, record())
    found = here.record()
    assert found.hit is not None and (found.hit.role, found.hit.count) == (ZoneRole.SINK, 1)
    assert (found.fault_class, found.address) == ("mmu-invalid-address", 0x7F0000001000)
    assert [e.source for e in found.evidence] == [Source.KERNEL_PART]
    here.wait(0.009).terminate_finished(10)
    here.wait(0.1).die(10)
    assert [r.hit.outcome for r in here.records().values() if r.hit] == [
        HitOutcome.ENDED,
        HitOutcome.EVICTED,
    ]


def test_the_faults_of_two_address_spaces_of_one_process_add_up() -> None:
    here = world()
    for space, faults in ((77, 1), (78, 1), (77, 2), (78, 2), (77, 4), (77, 4)):
        see(here, replace(record(), space=space, faults=faults))
    kept = here.state.hits[0].hit
    assert kept is not None and kept.count == 6
    assert len(here.ever(fx.Terminate)) == 1
    assert {e.space for e in here.ever(fx.Acknowledge)} == {77, 78}


def test_a_step_against_one_that_mpsd_has_put_out_does_not_say_that_nobody_did() -> None:
    """The lease keeps its address space while its work runs, so the module still takes its steps."""
    here = world()
    see(here, record())
    here.wait(0.009).terminate_finished(10)
    here.wait(0.1).die(10)
    here.wait(20)
    see(here, record(KernelAction.KILL), Liveness.DEAD)
    text = here.record().evidence[-1].text
    assert "in time" not in text and "its work has not ended" in text


def test_a_step_that_was_not_taken_is_not_told_as_one() -> None:
    here = world()
    see(here, record())
    see(here, replace(record(KernelAction.KILL), why="failed"))
    assert "did not act" in here.record().evidence[-1].text


def test_a_step_that_is_heard_of_just_after_the_death_it_brought_tells_of_it() -> None:
    here = World(Policy()).ready(private=False)
    here.do(ev.ClientNoticed("d1", facts(12, uid=4242)))
    here.do(ev.ClientAttached("d1", process(12), 1, tracked=True))
    see(here, record(pid=12))
    here.wait(2.0).die(12)
    here.wait(0.001)
    see(here, record(KernelAction.KILL, pid=12), Liveness.DEAD)
    assert "killed the client" in here.record().evidence[-1].text


def test_work_of_the_dead_that_is_sunk_is_told_and_nobody_is_put_out() -> None:
    here = world()
    here.die(10)
    see(here, record(), Liveness.DEAD)
    kept = here.record().hit
    assert kept is not None and kept.outcome is HitOutcome.ENDED
    assert not here.ever(fx.Kill) and not here.ever(fx.Acknowledge)
    assert here.domain("d1").state is DomainState.ACTIVE


@pytest.mark.parametrize("action", [KernelAction.REPORTED, KernelAction.REFUSED])
@pytest.mark.parametrize("first", ["module", "tracker"])
def test_what_the_driver_answered_is_one_fault_whoever_tells_first(action: KernelAction, first: str) -> None:
    here = world()
    event = uvm(fault_type=UvmFaultType.WRITE)
    told = replace(record(action, event=event), why="permissions")
    if first == "module":
        see(here, told)
    here.fault(10, event)
    if first == "tracker":
        see(here, told)
    here.kernel(31, mmu_text(event.address), 11)
    here.nvml(31)
    (found,) = here.records().values()
    assert (found.fault_class, found.confidence) == ("mmu-permission", Confidence.CERTAIN)
    assert found.offender is not None and found.offender.id.process == process(10)
    assert here.pids(found.victims) == [11]
    (kept,) = here.state.open_faults
    assert {e.source for e in kept.evidence} == {
        Source.KERNEL_PART,
        Source.UVM,
        Source.KERNEL_LOG,
        Source.NVML,
    }
    assert here.domain("d1").state is DomainState.FAULTED


def test_a_client_without_a_tracker_is_named_by_the_module() -> None:
    here = World(Policy()).ready()
    here.do(ev.ClientNoticed("d1", facts(10)))
    here.do(ev.ClientNoticed("d1", facts(11)))
    see(here, record(KernelAction.REPORTED))
    found = here.record()
    assert found.offender is not None and found.offender.id.process == process(10)
    assert found.confidence is Confidence.CERTAIN


@pytest.mark.parametrize("pid", [None, 99])
def test_nobodys_client_moves_nothing(pid: int | None) -> None:
    here = world()
    for action in (KernelAction.SUNK, KernelAction.REPORTED, KernelAction.KILL):
        see(here, record(action, pid=pid))
    assert not here.records() and here.domain("d1").state is DomainState.ACTIVE
    assert here.state.counters["kernel_records_of_others"] == 3


def test_an_orphans_fault_is_told_at_once_and_joins_its_domains_fault() -> None:
    here = world()
    see(here, record(KernelAction.ORPHAN, pid=None))
    (told,) = (e for e in here.made(fx.Publish) if e.kind == "orphan-fault")
    assert told.data["gpu"] == GPU
    here.kernel(31, mmu_text(0x7F0000001000), 11)
    found = here.record()
    assert any(e.source is Source.KERNEL_PART and "is gone" in e.text for e in found.evidence)
