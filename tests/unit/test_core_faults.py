"""Faults: one record each, the right class, the right name or none, and the path is switched first."""

from __future__ import annotations

import pytest

from mpsd.base.model import Access, AddressKind, ClientId, Confidence, ServerState, UvmFaultType
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.faults.records import FaultRecord, Source
from mpsd.core.state import DomainState
from tests.support.core import (
    GPU,
    MISALIGNED,
    OUT_OF_RANGE,
    REGISTER,
    STACK,
    World,
    control_of,
    facts,
    mmu_text,
    process,
    server_of,
    uvm,
)

ADDRESS = 0x7F0000001000
ANOTHER_PAGE = 0x7E0000000000


def three_clients() -> World:
    world = World().ready()
    world.join(10, 11, 12)
    return world


def server_xid(world: World, xid: int = 43, text: str = "Ch 00000008", domain: str = "d1") -> None:
    world.kernel(xid, text, pid=server_of(domain).pid, name="nvidia-cuda-mps")


def offender(record: FaultRecord) -> int | None:
    return record.offender.id.process.pid if record.offender else None


def suspects(record: FaultRecord) -> list[int]:
    return [p.id.process.pid for p in record.suspects]


# MMU faults


def test_a_uvm_fault_names_the_offender_and_moves_the_path_first() -> None:
    world = three_clients()
    world.fault(11)
    kinds = [type(e) for e in world.last]
    assert kinds.index(fx.SwitchPath) < kinds.index(fx.Record) < kinds.index(fx.Inspect)
    assert world.path() == "d2"
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d3"]
    record = world.record()
    assert (record.id, record.revision, record.domain, record.gpus) == (1, 1, "d1", (GPU,))
    assert (record.fault_class, record.confidence) == ("mmu-invalid-address", Confidence.CERTAIN)
    assert offender(record) == 11
    assert record.offender is not None and record.offender.facts == facts(11)
    assert world.pids(record.victims) == [10, 12]
    assert (record.address, record.access, record.fault_type) == (ADDRESS, Access.WRITE, "invalid pte")
    assert record.source_ns == 123 and record.at == world.now
    assert [e.source for e in record.evidence] == [Source.UVM]
    assert record.action.startswith("new clients go to domain d2")
    assert world.domain("d1").state is DomainState.FAULTED
    assert world.domain("d1").last_fault == 1
    assert world.made(fx.Inspect) == [fx.Inspect(1, process(11), ADDRESS)]


def test_many_signals_of_one_fault_are_one_record() -> None:
    world = three_clients()
    world.fault(11)
    for n in range(40):
        world.fault(11, uvm(address=ADDRESS + 4096 * n))
    world.wait(0.142).nvml(31)
    world.kernel(31, mmu_text(ADDRESS), pid=10, name="program10")
    world.do(ev.ServerFatalLogged("d1", "fatal GPU error"))
    world.server_state("d1", ServerState.FAULT)
    world.wait(30).server_state("d1", ServerState.FAULT)
    assert len(world.records()) == 1
    assert len(world.ever(fx.Record)) == 1, "nothing a reader cares about has changed"
    assert len(world.state.open_faults[0].evidence) == 16
    assert world.state.counters["faults"] == 1


def test_what_lies_at_the_address_is_a_new_revision() -> None:
    world = three_clients()
    world.fault(11)
    world.do(ev.Inspected(1, AddressKind.FREED))
    record = world.record()
    assert (record.id, record.revision) == (1, 2)
    assert (record.fault_class, record.lies_there) == ("mmu-use-after-unmap", AddressKind.FREED)
    world.do(ev.Inspected(1, AddressKind.FREED))
    world.do(ev.Inspected(99, AddressKind.FREED))
    assert not world.last
    world.fault(12)
    world.do(ev.Inspected(2, AddressKind.HOST_MAPPING))
    assert world.record().fault_class == "mmu-invalid-address"


def test_a_null_pointer_needs_no_inspection() -> None:
    world = three_clients()
    world.fault(11, uvm(address=16))
    assert world.record().fault_class == "mmu-null"
    assert world.record().lies_there is AddressKind.NULL_PAGE
    assert not world.made(fx.Inspect)


def test_prefetches_and_strangers_are_no_faults() -> None:
    world = three_clients()
    world.fault(11, uvm(access=Access.PREFETCH))
    world.fault(99)
    world.fault(11, domain="d9")
    assert not world.effects[-1:] or not world.last
    assert world.state.counters["uvm_events_without_client"] == 3
    assert world.domain("d1").state is DomainState.ACTIVE


def test_two_offenders_at_once_are_two_records() -> None:
    world = three_clients()
    world.fault(10)
    world.fault(11, uvm(address=ANOTHER_PAGE, fault_type=UvmFaultType.WRITE))
    first, second = world.records().values()
    assert (offender(first), offender(second)) == (10, 11)
    assert (first.fault_class, second.fault_class) == ("mmu-invalid-address", "mmu-permission")
    assert [e.domain for e in world.ever(fx.SwitchPath)] == ["d1", "d2"]
    world.wait(0.1).kernel(31, mmu_text(ADDRESS, "GPCCLIENT_GCC"), pid=12, name="program12")
    assert (world.record().id, world.record().fault_class) == (1, "mmu-instruction-fetch")


def test_a_fault_of_a_dead_client_names_it() -> None:
    world = three_clients()
    world.die(11)
    world.fault(11)
    assert offender(world.record()) == 11
    assert world.pids(world.record().victims) == [10, 12]


def test_a_fault_of_an_unready_spare_starts_another() -> None:
    world = World()
    world.want()
    world.started("d1")
    world.join(10)
    world.fault(10)
    assert world.path() == "d1" and not world.made(fx.StartDomain)
    assert "fresh domain" in world.record().action
    world.started("d2")
    assert world.path() == "d2"


@pytest.mark.parametrize("first", ["uvm", "kernel"])
@pytest.mark.parametrize(
    ("words", "fault_class"),
    [
        ("GR0_PBDMA0", "pbdma-fault"),
        ("GPCCLIENT_GCC", "mmu-instruction-fetch"),
        ("GPCCLIENT_T1_0", "mmu-invalid-address"),
    ],
)
def test_the_kernel_line_refines_the_class_whichever_comes_first(
    first: str, words: str, fault_class: str
) -> None:
    world = three_clients()

    def line() -> None:
        world.kernel(31, mmu_text(ADDRESS, words), pid=10, name="program10")

    steps = [lambda: world.fault(11), line]
    for step in steps if first == "uvm" else reversed(steps):
        step()
    (record,) = world.records().values()
    assert record.fault_class == fault_class
    assert (offender(record), record.confidence) == (11, Confidence.CERTAIN)


def test_a_line_about_another_address_refines_nothing() -> None:
    world = three_clients()
    world.fault(11)
    world.kernel(31, mmu_text(ANOTHER_PAGE, "GPCCLIENT_GCC"), pid=10)
    world.kernel(31, "MMU Fault: GPCCLIENT_GCC faulted @ 0x__", pid=10)
    assert world.state.open_faults[0].fault_class == "mmu-invalid-address"


def test_xid_31_never_names_the_client_it_names() -> None:
    world = three_clients()
    world.kernel(31, mmu_text(ADDRESS), pid=10, name="program10")
    record = world.record()
    assert (record.fault_class, record.confidence) == ("mmu-invalid-address", Confidence.UNKNOWN)
    assert record.offender is None
    assert suspects(record) == [10, 11, 12]
    assert world.path() == "d2"
    world.fault(12)
    record = world.record()
    assert (record.id, record.revision, offender(record)) == (1, 2, 12)
    assert not record.suspects and world.pids(record.victims) == [10, 11]


def test_a_likely_offender_becomes_certain_once_its_tracker_speaks() -> None:
    world = World().ready()
    world.join(10)
    world.kernel(31, mmu_text(ADDRESS), pid=10)
    assert world.record().confidence is Confidence.LIKELY
    world.fault(10)
    record = world.record()
    assert (record.id, record.confidence, record.address) == (1, Confidence.CERTAIN, ADDRESS)


# SM exceptions


@pytest.mark.parametrize(
    ("lines", "fault_class"),
    [
        ((OUT_OF_RANGE, REGISTER), "sm-out-of-range"),
        ((MISALIGNED, REGISTER), "sm-misaligned"),
        ((STACK, REGISTER), "sm-stack-overflow"),
        ((), "sm-trap"),
    ],
)
def test_an_sm_exception_is_classed_by_its_strays_and_names_nobody(
    lines: tuple[str, ...], fault_class: str
) -> None:
    world = three_clients()
    for text in lines:
        world.kernel(13, text)
        world.nvml(13)
    assert not world.records() and world.path() == "d1"
    server_xid(world.wait(0.02))
    record = world.record()
    assert (record.fault_class, record.confidence) == (fault_class, Confidence.UNKNOWN)
    assert record.offender is None and suspects(record) == [10, 11, 12]
    assert world.pids(record.victims) == [10, 11, 12]
    assert world.path() == "d2" and not world.state.strays
    world.nvml(43)
    world.wait(2).timer("strays", GPU)
    assert len(world.records()) == 1


def test_a_line_that_comes_after_the_first_sign_refines_the_class() -> None:
    world = three_clients()
    world.do(ev.ServerFatalLogged("d1", "fatal GPU error"))
    assert world.record().fault_class == "sm-exception"
    world.kernel(13, MISALIGNED)
    assert (world.record().fault_class, world.record().revision) == ("sm-misaligned", 2)


@pytest.mark.parametrize(("xid", "fault_class"), [(31, "mmu-invalid-address"), (32, "pbdma-fault")])
def test_a_bare_number_says_something_where_nothing_else_is_known(xid: int, fault_class: str) -> None:
    world = three_clients()
    world.server_state("d1", ServerState.FAULT)
    world.nvml(xid)
    assert world.record().fault_class == fault_class


def test_the_only_client_is_likely_the_offender() -> None:
    world = World().ready()
    world.join(10, spaces=2)
    server_xid(world)
    record = world.record()
    assert (offender(record), record.confidence) == (10, Confidence.LIKELY)
    assert "inspect the offender" in record.action and "suspects" not in record.action
    assert not record.suspects and not record.victims


def test_an_offender_that_has_just_left_does_not_leave_an_innocent_to_blame() -> None:
    world = World().ready()
    world.join(10, 11)
    world.die(10)
    world.work_ended(10)
    server_xid(world.wait(0.04))
    record = world.record()
    assert record.offender is None and sorted(suspects(record)) == [10, 11]
    assert world.pids(record.victims) == [11]


def test_who_left_long_ago_is_no_suspect() -> None:
    world = World().ready()
    world.join(10, 11)
    world.die(10)
    world.work_ended(10)
    server_xid(world.wait(60))
    assert offender(world.record()) == 11


def test_a_name_that_a_process_gave_itself_makes_no_class() -> None:
    world = three_clients()
    world.kernel(13, REGISTER, pid=10, name="stack misaligned")
    assert world.record().fault_class == "sm-exception"
    other = three_clients()
    other.fault(11)
    other.kernel(31, mmu_text(ADDRESS), pid=10, name="PBDMA")
    assert other.state.open_faults[0].fault_class == "mmu-invalid-address"


# Attribution of signs


def test_a_fault_of_one_domain_leaves_the_other_on_that_gpu_alone() -> None:
    world = three_clients()
    world.want("gpu0.uid2000", uid=2000)
    world.started("d3")
    world.join(20, domain="d3")
    world.kernel(13, OUT_OF_RANGE)
    server_xid(world, domain="d3")
    assert (world.record().domain, world.record().fault_class) == ("d3", "sm-out-of-range")
    assert world.path() == "d1" and world.domain("d1").state is DomainState.ACTIVE
    # Two domains of that GPU have just faulted: a sign without a name belongs to neither for certain.
    world.fault(10)
    world.kernel(13, MISALIGNED)
    server_xid(world)
    assert world.domain("d1").state is DomainState.FAULTED
    assert not any("Misaligned" in e.text for r in world.state.open_faults for e in r.evidence)


def test_a_faulted_domain_whose_victims_stay_takes_no_signs_of_its_successor() -> None:
    world = three_clients()
    world.server_state("d1", ServerState.FAULT)
    world.join(20, domain="d2")
    world.wait(600).kernel(13, MISALIGNED)
    world.nvml(13)
    server_xid(world, domain="d2")
    assert (world.record().domain, world.record().fault_class) == ("d2", "sm-misaligned")
    assert len(world.records()[1].evidence) == 1


def test_a_pid_that_left_just_now_still_shows_the_domain() -> None:
    world = three_clients()
    world.die(10)
    world.work_ended(10)
    world.kernel(31, mmu_text(ADDRESS), pid=10)
    assert world.record().domain == "d1"
    other = three_clients()
    other.die(10)
    other.work_ended(10)
    other.wait(60).kernel(31, mmu_text(ADDRESS), pid=10)
    assert not other.records()


def test_a_pid_whose_domain_is_gone_joins_the_record_of_its_end() -> None:
    world = three_clients()
    world.do(ev.ControlDied("d1", control_of("d1")))
    for pid in (10, 11, 12):
        world.die(pid)
        world.work_ended(pid)
    world.stopped("d1")
    world.kernel(31, "x", pid=12)
    assert not world.state.strays
    (record,) = world.state.open_faults
    assert [e.xid for e in record.evidence] == [None, 31]
    world.wait(10).kernel(31, "x", pid=12)
    assert [s.foreign for s in world.state.strays] == [True]


def test_xids_of_unknown_gpus_and_other_numbers_are_counted() -> None:
    world = three_clients()
    world.kernel(31, "x", gpu=None)
    world.kernel(31, "x", pid=4242, gpu=None)
    world.kernel(45, "x")
    world.nvml(45)
    assert world.state.counters["xids_of_unknown_gpus"] == 2
    assert world.state.counters["xids_ignored"] == 1
    assert not world.last and not world.state.strays
    world.kernel(31, "x", pid=10, gpu=None)
    assert world.record().domain == "d1"


# Death in flight


def test_death_in_flight_without_a_lease_is_likely_and_no_survivor_is_a_suspect() -> None:
    world = World().ready()
    world.join(10, 11)
    world.do(ev.ClientNoticed("d1", facts(12)))
    world.die(12)
    world.wait(0.18).kernel(31, mmu_text(ADDRESS), pid=10)
    record = world.record()
    assert (record.fault_class, record.confidence) == ("death-in-flight", Confidence.LIKELY)
    assert offender(record) == 12 and not record.suspects
    assert world.pids(record.victims) == [10, 11]
    world.fault(11)
    record = world.record()
    assert (record.id, record.fault_class, offender(record)) == (1, "mmu-invalid-address", 11)


def test_two_deaths_at_once_leave_it_unknown() -> None:
    world = World().ready()
    world.join(10)
    for pid in (12, 13):
        world.do(ev.ClientNoticed("d1", facts(pid)))
        world.die(pid)
    world.kernel(31, mmu_text(ADDRESS), pid=10)
    assert world.record().offender is None
    assert suspects(world.record()) == [10, 12, 13]


# Faults of domains out of service, and late signs


def test_signs_that_follow_a_control_death_join_its_record() -> None:
    world = three_clients()
    world.do(ev.ControlDied("d1", control_of("d1")))
    world.do(ev.ServerDied("d1", server_of("d1")))
    server_xid(world.wait(0.1))
    world.nvml(43)
    assert [r.fault_class for r in world.records().values()] == ["control-death"]
    assert len(world.state.open_faults[0].evidence) == 3 and not world.state.strays


def test_a_headless_domain_that_faults_later_is_recorded() -> None:
    world = three_clients()
    world.do(ev.ControlDied("d1", control_of("d1")))
    server_xid(world.wait(60))
    assert [r.fault_class for r in world.records().values()] == ["control-death", "sm-trap"]
    assert world.domain("d1").state is DomainState.HEADLESS


def test_a_poisoned_domain_may_fault() -> None:
    world = three_clients()
    world.die(12)
    world.lingers(12)
    server_xid(world)
    assert world.domain("d1").state is DomainState.FAULTED
    assert world.record().fault_class == "sm-trap"
    assert [e.client.process.pid for e in world.made(fx.ReleaseLease)] == [12]


def test_a_late_sign_after_recovery_joins_its_record_and_the_domain_is_asked_again() -> None:
    world = World().ready(exclusive=True)
    world.join(10)
    server_xid(world)
    world.die(10)
    world.server_state("d1", ServerState.ACTIVE)
    world.nvml(43)
    assert world.domain("d1").state is DomainState.ACTIVE
    server_xid(world, text="late")
    assert world.made(fx.AskServer) and len(world.records()) == 1
    world.server_state("d1", ServerState.ACTIVE)
    assert world.domain("d1").state is DomainState.ACTIVE
    server_xid(world.wait(60), text="another")
    assert len(world.records()) == 2


def test_signs_of_a_domain_that_is_being_stopped_mean_nothing() -> None:
    world = World().ready()
    world.do(ev.ControlDied("d1", control_of("d1")))
    server_xid(world)
    world.server_state("d1", ServerState.FAULT)
    world.do(ev.ServerFatalLogged("d1", "x"))
    world.do(ev.ServerFatalLogged("d9", "x"))
    assert [r.fault_class for r in world.records().values()] == ["control-death"]


def test_refused_clients_are_in_the_next_revision() -> None:
    world = three_clients()
    world.fault(11)
    world.do(ev.ClientRefused("d1", 50))
    world.do(ev.Inspected(1, AddressKind.UNKNOWN))
    assert world.record().refused == 1


# Faults of the device


def test_a_device_fault_is_one_record_however_it_is_told() -> None:
    world = three_clients()
    world.nvml(79)
    assert world.record().fault_class == "device-bus"
    world.wait(0.1).kernel(79, "GPU has fallen off the bus.", pid=10, name="program10")
    world.kernel(79, "GPU has fallen off the bus.")
    assert len(world.records()) == 1
    record = world.record()
    assert (record.domain, record.gpus, record.offender) == (None, (GPU,), None)
    assert not record.suspects
    assert world.domain("d1").state is DomainState.ACTIVE
    world.nvml(48)
    world.nvml(79, gpu="GPU-1")
    world.kernel(79, "GPU has fallen off the bus.", gpu=None)
    assert len(world.records()) == 4
    world.wait(60).nvml(79)
    assert len(world.records()) == 5


def test_fault_numbers_go_on_where_the_journal_ended() -> None:
    world = three_clients()
    assert world.state.next_fault == 1
    world.nvml(79)
    world.fault(10)
    world.do(ev.UvmFatal(ClientId("d1", process(11)), uvm()))
    assert list(world.records()) == [1, 2, 3]
    assert world.state.next_fault == 4
