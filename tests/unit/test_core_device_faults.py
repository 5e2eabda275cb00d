"""A fault of the device takes servers with it: that is nobody's doing, whoever is told of it first."""

from __future__ import annotations

import pytest

from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.state import DomainState
from mpsd.model import Confidence, ServerState
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
    # Its server is lost all the same: who comes now goes to the spare.
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
