"""A domain in which a dead client's kernel does not end is left by who can, as one that is drained."""

from __future__ import annotations

import pytest

from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core import memberevents as mev
from mpsd.core.domains import LEFT_STOP_S
from mpsd.core.records import Source
from mpsd.core.standby import Standing
from mpsd.core.state import DomainState
from tests.support.core import process
from tests.unit.test_core_failover import Site, site


def poisoned(*pids: int) -> Site:
    """The domain of these programs, which are ready, by 12, which ended and left a kernel that does not."""
    world = site(*pids)
    world.attach(12, "d1")
    world.die(12)
    world.lingers(12)
    assert world.domain("d1").state is DomainState.POISONED
    return world


def test_a_poisoned_domain_is_left_without_a_fault_of_those_who_go() -> None:
    world = poisoned(10)
    assert world.told() == [10] and world.failover().trigger == "poison" and world.failover().planned
    assert [m.planned for m in world.made(fx.Move)] == [True]
    world.moved(10, 2)
    # The kernel of the dead ends with the domain, and its memory is there until then: it would fault.
    assert world.ever(fx.StopDomain) == [fx.StopDomain("d1", LEFT_STOP_S)]
    assert process(12) not in [e.client.process for e in world.ever(fx.ReleaseLease)]
    world.do(ev.DomainStopped("d1"))
    assert process(12) in [e.client.process for e in world.made(fx.ReleaseLease)]


def test_what_the_kernel_log_says_of_who_has_left_it_is_of_that_domain() -> None:
    """Whoever has, or had, a context there is named where its kernel is ended."""
    world = poisoned(10)
    world.moved(10, 2)
    world.kernel(31, "MMU Fault: ENGINE GRAPHICS", 10, "python3")
    assert world.domain("d2").state is DomainState.ACTIVE and not world.told()


def test_who_was_not_ready_then_leaves_it_later() -> None:
    world = poisoned(10)
    world.attach(11, "d1")
    world.hello(11)
    world.moved(10, 2)
    assert [e.process.pid for e in world.ever(fx.OfferStandby)] == [10, 11]
    world.is_ready(11, 2)
    assert world.told() == [11] and world.failover().planned
    world.moved(11, 2)
    assert world.ever(fx.StopDomain) == [fx.StopDomain("d1", LEFT_STOP_S)]


def test_who_stays_in_it_is_told_once_unless_it_is_drained() -> None:
    world = poisoned(10)
    world.do(mev.MemberStayed(process(10), 2, "its work did not end in time"))
    assert world.standing(10) is Standing.OFFERED
    world.is_ready(10, 2)
    assert not world.told() and world.standing(10) is Standing.READY
    world.do(ev.DrainRequested((), True))
    assert world.told() == [10]


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("pid", [None, 10, 12])
def test_the_end_of_such_a_kernel_is_no_other_fault(pid: int | None, is_gone: bool) -> None:
    """The driver tells of it as of one: NVML, and the kernel log, by the pid of anybody."""
    world = poisoned(10)
    world.moved(10, 2)
    if is_gone:
        world.do(ev.DomainStopped("d1"))
    if pid is not None:
        world.kernel(31, "MMU Fault: ENGINE GRAPHICS", pid, "python3")
    world.nvml(31)
    assert not world.state.strays
    (hang,) = world.state.open_faults
    told = {Source.PROCESS, Source.NVML} | ({Source.KERNEL_LOG} if pid is not None else set())
    assert hang.fault_class == "hang" and {e.source for e in hang.evidence} == told
    assert world.domain("d2").state is DomainState.ACTIVE


@pytest.mark.parametrize("is_dead", [False, True])
def test_who_drained_a_domain_beside_work_of_the_dead_is_not_blamed_for_its_end(is_dead: bool) -> None:
    world = site(10)
    world.attach(12, "d1")
    world.die(12)
    if not is_dead:
        world.work_ended(12)
        world.wait(60)
    world.do(ev.DrainRequested((), True))
    world.moved(10, 2)
    assert [e.domain for e in world.ever(fx.StopDomain)] == ["d1"]
    released = [e.client.process for e in world.ever(fx.ReleaseLease)]
    assert (process(12) in released) == (not is_dead)
    world.kernel(31, "MMU Fault: ENGINE GRAPHICS", 10, "python3")
    # Where nobody else can have done it, it is of where the program is now.
    assert (world.domain("d2").state is DomainState.ACTIVE) == is_dead


def test_the_record_of_the_move_tells_of_the_kernel() -> None:
    world = poisoned(10)
    assert world.failover().fault == world.record().id and world.record().fault_class == "hang"


def test_long_after_it_an_xid_is_of_something_else() -> None:
    world = poisoned(10)
    world.moved(10, 2)
    world.do(ev.DomainStopped("d1"))
    world.wait(60)
    world.nvml(31)
    assert len(world.state.strays) == 1
