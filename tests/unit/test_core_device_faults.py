"""A device fault ends servers: no client is blamed, whichever sign arrives first."""

from __future__ import annotations

import pytest

from mpsd.base.model import Confidence, ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.faults import taxonomy
from mpsd.core.state import DomainState
from tests.support.core import GPU, World, mmu_text

FATAL = "Server is handling a fatal GPU error."


@pytest.fixture
def world() -> World:
    made = World().ready()
    made.join(11)
    return made


def test_what_a_server_says_after_its_gpu_fell_off_the_bus_blames_nobody(world: World) -> None:
    world.kernel(79, "GPU has fallen off the bus.")
    world.wait(0.002).do(ev.ServerFatalLogged("d1", FATAL))
    world.server_state("d1", ServerState.FAULT)
    (record,) = world.records().values()
    assert (record.fault_class, record.domain, record.offender) == ("device-bus", None, None)
    assert record.suspects == ()
    # Its server is lost in any case: new clients go to the standby domain.
    assert world.domain("d1").state is DomainState.FAULTED
    assert world.domain("d1").last_fault == record.id
    assert world.path() == "d2"


def test_a_server_that_spoke_before_its_gpu_takes_its_suspicion_back(world: World) -> None:
    world.do(ev.ServerFatalLogged("d1", FATAL))
    assert world.record().confidence is Confidence.LIKELY
    world.wait(0.002).kernel(79, "GPU has fallen off the bus.")
    own = next(r for r in world.records().values() if r.domain == "d1")
    assert (own.fault_class, own.offender, own.suspects) == ("device-bus", None, ())
    assert own.confidence is Confidence.UNKNOWN
    assert own.revision == 2


def test_a_harmless_device_xid_excuses_nobody(world: World) -> None:
    world.kernel(63, "Row remapper: new row marked for remapping")
    world.wait(0.002).do(ev.ServerFatalLogged("d1", FATAL))
    assert [r.fault_class for r in world.records().values()] == ["device-ecc", "sm-exception"]


def test_a_fault_long_after_a_device_fault_is_another_one(world: World) -> None:
    world.kernel(79, "GPU has fallen off the bus.")
    world.wait(10).do(ev.ServerFatalLogged("d1", FATAL))
    assert world.record().fault_class == "sm-exception"
    assert [e.domain for e in world.ever(fx.SwitchPath)][-1] == "d2"


def test_a_fault_of_another_gpu_excuses_nobody(world: World) -> None:
    world.kernel(79, "GPU has fallen off the bus.", gpu="GPU-1")
    world.wait(0.002).do(ev.ServerFatalLogged("d1", FATAL))
    assert world.record().fault_class == "sm-exception"


def test_a_late_line_of_the_kernel_log_joins_the_fault_of_a_domain_that_is_gone(world: World) -> None:
    world.fault(11)
    world.die(11)
    world.stopped("d1")
    assert "d1" not in world.state.domains
    world.wait(0.1).kernel(31, mmu_text(0x7F0000001000), pid=11, name="program11")
    world.timer("strays", GPU)
    world.wait(3).timer("strays", GPU)
    (record,) = world.records().values()
    assert record.fault_class == "mmu-invalid-address"
    assert not world.state.strays


@pytest.mark.parametrize("xid", sorted(taxonomy.LOST_XIDS))
def test_an_xid_after_which_the_gpu_runs_nothing_marks_it_as_lost(world: World, xid: int) -> None:
    world.kernel(xid, "GPU has fallen off the bus.")
    assert list(world.state.lost_gpus) == [GPU]
    assert world.state.lost_gpus[GPU].startswith(f"Xid {xid}: ")
    # Both sources report it, and a later Xid of its kind is its consequence.
    world.nvml(xid)
    world.kernel(119, "Timeout waiting for RPC from GSP!")
    assert world.state.lost_gpus[GPU].startswith(f"Xid {xid}: ")


@pytest.mark.parametrize("xid", [13, 31, 43, 48, 62, 63, 74, 94, 119, 120])
def test_a_gpu_that_works_on_is_not_lost(world: World, xid: int) -> None:
    world.kernel(xid, "text")
    assert not world.state.lost_gpus


def test_a_lost_gpu_of_an_earlier_mpsd_stays_lost(world: World) -> None:
    world.do(ev.GpuLost(GPU, "Xid 79: gone"))
    assert world.state.lost_gpus == {GPU: "Xid 79: gone"}
    assert not world.records()
