"""Faults of processes outside MPS: named as the kernel log does, at once, and no domain moves for them."""

from __future__ import annotations

import pytest

from mpsd.base.model import Confidence
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.faults.records import LoggedProcess, Source
from mpsd.core.state import DomainState
from tests.support.core import (
    GPU,
    MISALIGNED,
    OUT_OF_RANGE,
    REGISTER,
    World,
    facts,
    mmu_text,
    server_of,
)
from tests.unit.test_core_faults import ADDRESS, server_xid, three_clients

OUTSIDE = 4242
PYTHON = LoggedProcess(OUTSIDE, "python")
TRAP = "Ch 00000008"


def line(world: World, xid: int = 43, text: str = TRAP, pid: int = OUTSIDE, name: str = "python") -> None:
    world.kernel(xid, text, pid=pid, name=name)


def answer(world: World, *, lives: bool = True, on_mps: bool | None = False, pid: int = OUTSIDE) -> None:
    """Answer the look at the process that the last line named."""
    (asked,) = world.made(fx.Identify)
    assert (asked.gpu, asked.logged.pid, asked.at) == (GPU, pid, world.now)
    world.do(ev.ProcessIdentified(GPU, asked.logged, facts(pid) if lives else None, on_mps))


def test_a_living_process_is_pinned_and_named_at_once() -> None:
    world = three_clients()
    line(world)
    assert not world.made(fx.Record) and world.path() == "d1"
    answer(world)
    record = world.record()
    assert (record.fault_class, record.domain, record.gpus) == ("unattributed-xid", None, (GPU,))
    assert record.offender is not None and record.offender.facts == facts(OUTSIDE)
    assert (record.logged, record.confidence) == (PYTHON, Confidence.LIKELY)
    assert not record.suspects and not record.victims and not world.state.strays
    assert world.domain("d1").state is DomainState.ACTIVE
    world.wait(2).timer("strays", GPU)
    assert len(world.ever(fx.Record)) == 1


def test_a_process_that_has_exited_is_named_by_the_kernel_log_alone() -> None:
    world = three_clients()
    line(world)
    answer(world, lives=False, on_mps=None)
    assert (world.record().offender, world.record().logged) == (None, PYTHON)
    assert world.record().confidence is Confidence.LIKELY


def test_without_an_answer_the_record_comes_after_the_window() -> None:
    world = three_clients()
    line(world, 31, mmu_text(ADDRESS))
    world.nvml(31)
    assert not world.made(fx.Record)
    world.wait(2).timer("strays", GPU)
    record = world.record()
    assert (record.offender, record.logged, record.confidence) == (None, PYTHON, Confidence.LIKELY)
    assert [e.source for e in record.evidence] == [Source.KERNEL_LOG, Source.NVML]
    assert not world.state.strays
    # A late answer finds nothing to record.
    world.do(ev.ProcessIdentified(GPU, PYTHON, facts(OUTSIDE), False))
    assert len(world.records()) == 1


@pytest.mark.parametrize("lives", [True, False])
def test_a_client_of_another_mps_server_may_be_innocent_and_is_not_named(lives: bool) -> None:
    world = three_clients()
    line(world)
    answer(world, lives=lives, on_mps=True)
    record = world.record()
    assert (record.offender, record.logged, record.confidence) == (None, None, Confidence.UNKNOWN)


def test_a_server_outside_mpsd_is_not_named_for_its_clients() -> None:
    world = three_clients()
    line(world, name="nvidia-cuda-mps")
    answer(world)
    assert (world.record().offender, world.record().logged) == (None, None)


@pytest.mark.parametrize("on_mps", [None, False])
def test_where_a_domain_may_have_unknown_clients_nvml_has_to_tell(on_mps: bool | None) -> None:
    world = three_clients()
    world.do(ev.ClientsUnpinned("d1", 1))
    line(world)
    answer(world, on_mps=on_mps)
    assert (world.record().offender is not None) == (on_mps is False)


def test_a_process_that_has_joined_since_is_not_named() -> None:
    world = three_clients()
    line(world)
    world.join(OUTSIDE)
    world.wait(2).timer("strays", GPU)
    assert (world.record().offender, world.record().logged) == (None, None)


def test_all_signs_of_one_fault_outside_are_one_record() -> None:
    world = three_clients()
    line(world, 13, OUT_OF_RANGE)
    answer(world)
    line(world, 13, REGISTER)
    line(world.wait(0.1))
    for xid in (13, 13, 43):
        world.wait(0.04).nvml(xid)
    # A line without a pid, and a source that came before the line, join it after the window.
    world.kernel(13, MISALIGNED)
    assert not world.made(fx.Identify)
    world.timer("fault-revision", 1)
    assert world.record().revision == 2
    world.wait(2).timer("strays", GPU)
    world.timer("fault-revision", 1)
    record = world.record()
    assert list(world.records()) == [1] and record.revision == 3 and not world.state.strays
    assert [(e.source, e.xid) for e in record.evidence] == [
        (Source.KERNEL_LOG, 13),
        (Source.KERNEL_LOG, 13),
        (Source.KERNEL_LOG, 43),
        (Source.NVML, 13),
        (Source.NVML, 43),
        (Source.KERNEL_LOG, 13),
    ]


def test_nvml_may_come_before_the_answer_and_before_the_line() -> None:
    world = three_clients()
    world.nvml(43)
    line(world)
    (asked,) = world.made(fx.Identify)
    line(world, 13, MISALIGNED)
    assert not world.made(fx.Identify), "one look is enough"
    world.wait(0.04).nvml(13)
    world.do(ev.ProcessIdentified(GPU, asked.logged, facts(OUTSIDE), False))
    assert [e.xid for e in world.record().evidence] == [43, 13, 13]
    world.wait(2).timer("strays", GPU)
    assert len(world.records()) == 1 and not world.state.strays


def test_two_processes_outside_are_two_records() -> None:
    world = three_clients()
    line(world)
    answer(world)
    line(world, pid=4343, name="other")
    answer(world, pid=4343)
    assert [r.logged.pid for r in world.records().values() if r.logged] == [OUTSIDE, 4343]


def test_a_further_fault_of_the_same_process_is_a_further_record_later() -> None:
    world = three_clients()
    line(world)
    answer(world)
    line(world.wait(10))
    answer(world)
    assert list(world.records()) == [1, 2]


def test_a_process_that_faults_all_the_time_is_bounded() -> None:
    world = three_clients()
    line(world, 31, "first")
    answer(world)
    for n in range(100):
        line(world, 31, f"again {n}")
    assert len(world.state.open_faults[0].evidence) == 16 and not world.state.strays
    for pid in range(5000, 5100):
        line(world, 31, "x", pid=pid)
    assert len(world.state.strays) == 64
    assert world.state.counters["strays_dropped"] == 36


def test_the_same_sign_of_nvml_alone_is_another_fault() -> None:
    world = three_clients()
    line(world, 31, mmu_text(ADDRESS))
    answer(world)
    world.wait(0.04).nvml(31)
    world.wait(1.5).nvml(31)
    world.wait(2).timer("strays", GPU)
    assert len(world.records()) == 2 and world.record().logged is None


def test_a_line_about_a_process_outside_never_joins_the_fault_of_a_domain() -> None:
    world = three_clients()
    line(world, 13, MISALIGNED)
    answer(world)
    server_xid(world)
    assert (world.record().domain, world.record().fault_class) == ("d1", "sm-trap")
    line(world, 13, OUT_OF_RANGE)
    assert [len(r.evidence) for r in world.state.open_faults] == [2, 1]


def test_where_the_line_names_a_client_nothing_changes() -> None:
    world = three_clients()
    world.kernel(31, mmu_text(ADDRESS), pid=10, name="program10")
    assert not world.ever(fx.Identify)
    assert world.record().domain == "d1" and world.record().logged is None


@pytest.mark.parametrize("later_s", [0.3, 3.0, 30.0])
def test_a_server_whose_domain_has_ended_is_no_process_outside(later_s: float) -> None:
    world = three_clients()
    world.fault(11)
    for pid in (10, 11, 12):
        world.die(pid)
    world.stopped("d1")
    assert "d1" not in world.state.domains
    world.wait(later_s).kernel(43, TRAP, pid=server_of("d1").pid, name="nvidia-cuda-mps")
    assert not world.ever(fx.Identify)
    world.wait(2).timer("strays", GPU)
    assert len(world.records()) == (1 if later_s < 1 else 2)
    assert world.record().logged is None
