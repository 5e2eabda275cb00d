"""A domain poisoned by a dead client's endless kernel: participants leave it as by a drain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.domains import ABANDONED_STOP_S
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Standing
from mpsd.core.faults.records import Source
from mpsd.core.state import DomainState
from tests.support.core import process, server_of
from tests.unit.test_core_failover import ON, Site, site


def poisoned(*pids: int) -> Site:
    """The domain of these ready clients, poisoned by 12, which exited and left an endless kernel."""
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
    # The dead client's kernel ends with the domain. Its memory is held until then: it would fault.
    assert world.ever(fx.StopDomain) == [fx.StopDomain("d1", ABANDONED_STOP_S)]
    assert process(12) not in [e.client.process for e in world.ever(fx.ReleaseLease)]
    world.do(ev.DomainStopped("d1"))
    assert process(12) in [e.client.process for e in world.made(fx.ReleaseLease)]


def test_who_was_not_ready_then_leaves_it_later() -> None:
    world = poisoned(10)
    world.attach(11, "d1")
    world.hello(11)
    world.moved(10, 2)
    assert [e.process.pid for e in world.ever(fx.OfferStandby)] == [10, 11]
    world.is_ready(11, 2)
    assert world.told() == [11] and world.failover().planned
    world.moved(11, 2)
    assert world.ever(fx.StopDomain) == [fx.StopDomain("d1", ABANDONED_STOP_S)]


def test_who_stays_in_it_is_told_once_unless_it_is_drained() -> None:
    world = poisoned(10)
    world.do(mev.MemberStayed(process(10), 2, "its work did not end in time"))
    assert world.standing(10) is Standing.OFFERED
    world.is_ready(10, 2)
    assert not world.told() and world.standing(10) is Standing.READY
    world.do(ev.DrainRequested((), True))
    assert world.told() == [10]


def mmu_fault(world: Site, pid: int) -> None:
    world.kernel(31, "MMU Fault: ENGINE GRAPHICS", pid, "python3")


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("later_s", [0.0, 300.0])
@pytest.mark.parametrize("pid", [None, 10, 12, 11])
def test_the_end_of_such_a_kernel_is_no_other_fault(pid: int | None, later_s: float, is_gone: bool) -> None:
    """The driver reports the kernel's end as a fault through NVML and the kernel log.

    The line may name the pid of any client of that server, and comes when the server ends, at any later
    time.
    """
    world = poisoned(10)
    world.attach(11, "d1")
    world.moved(10, 2)
    assert not world.ever(fx.StopDomain)
    world.wait(later_s)
    world.die(11)
    world.work_ended(11)
    assert [e.domain for e in world.ever(fx.StopDomain)] == ["d1"]
    if is_gone:
        world.do(ev.DomainStopped("d1"))
    if pid is not None:
        mmu_fault(world, pid)
    world.nvml(31)
    assert not world.state.strays and [r.fault_class for r in world.records().values()] == ["hang"]
    assert world.domain("d2").state is DomainState.ACTIVE
    # Each source reports it once: a further sign belongs to another fault.
    mmu_fault(world, 10)
    assert (world.domain("d2").state is DomainState.ACTIVE) == (pid is None)


def test_it_is_told_with_the_record_of_that_kernel() -> None:
    world = poisoned(10)
    world.moved(10, 2)
    mmu_fault(world, 10)
    world.nvml(31)
    (hang,) = world.state.open_faults
    assert {e.source for e in hang.evidence} == {Source.PROCESS, Source.KERNEL_LOG, Source.NVML}
    assert world.state.counters["endings_told"] == 2


@pytest.mark.parametrize("change", ["another exception", "of a stranger", "long after", "its work ended"])
def test_what_is_not_its_end_is_told_as_ever(change: str) -> None:
    world = poisoned(10)
    world.moved(10, 2)
    if change == "its work ended":
        world.work_ended(12)
    if change in ("long after", "its work ended"):
        world.do(ev.DomainStopped("d1"))
    if change == "long after":
        world.wait(world.state.policy.evidence_window_s + 1)
    if change == "another exception":
        world.kernel(13, "Graphics SM Warp Exception: Misaligned Address")
        assert len(world.state.strays) == 1
    elif change == "of a stranger":
        mmu_fault(world, 77)
        world.nvml(31)
        assert [s.foreign for s in world.state.strays] == [True, True]
    else:
        mmu_fault(world, 10)
        assert world.domain("d2").state is DomainState.FAULTED


def test_who_faults_where_it_has_gone_is_seen_while_the_old_domain_lives_on() -> None:
    world = poisoned(10)
    world.attach(11, "d1")
    world.moved(10, 2)
    mmu_fault(world, 10)
    assert world.domain("d2").state is DomainState.FAULTED and world.client("d1", 11).living


@pytest.mark.parametrize("is_dead", [False, True])
def test_who_drained_a_domain_beside_work_of_the_dead_is_not_blamed_for_its_end(is_dead: bool) -> None:
    world = site(10)
    world.attach(12, "d1")
    world.die(12)
    if not is_dead:
        world.work_ended(12)
    world.do(ev.DrainRequested((), True))
    world.wait(2.5)
    world.moved(10, 2)
    assert [e.domain for e in world.ever(fx.StopDomain)] == ["d1"]
    released = [e.client.process for e in world.ever(fx.ReleaseLease)]
    assert (process(12) in released) == (not is_dead)
    mmu_fault(world, 10)
    assert (world.domain("d2").state is DomainState.ACTIVE) == is_dead


def test_the_memory_of_the_dead_outlives_the_control_daemon_too() -> None:
    world = poisoned(10)
    world.attach(11, "d1")
    world.moved(10, 2)
    world.do(ev.ControlDied("d1", world.domain("d1").control))
    assert world.domain("d1").state is DomainState.HEADLESS
    world.die(11)
    assert process(12) not in [e.client.process for e in world.ever(fx.ReleaseLease)]
    mmu_fault(world, 10)
    assert world.domain("d2").state is DomainState.ACTIVE
    world.do(ev.DomainStopped("d1"))
    assert process(12) in [e.client.process for e in world.made(fx.ReleaseLease)]


def test_the_death_of_its_server_ends_it_too() -> None:
    world = poisoned(10)
    world.attach(11, "d1")
    world.moved(10, 2)
    world.wait(60)
    world.do(ev.ServerDied("d1", server_of("d1")))
    mmu_fault(world, 10)
    assert world.domain("d2").state is DomainState.ACTIVE


def test_who_was_moved_too_often_is_not_left_behind_in_a_domain_that_is_well() -> None:
    world = poisoned(10)
    participant = world.state.members[process(10)]
    assert participant.standing is Standing.MOVING
    world = site(10, policy=replace(ON, moves_per_minute=1))
    world.state = replace(
        world.state, members={process(10): replace(world.state.members[process(10)], told=(world.now,))}
    )
    world.attach(12, "d1")
    world.die(12)
    world.lingers(12)
    assert not world.told() and world.standing(10) is Standing.READY
    world.wait(61)
    world.do(ev.DrainRequested((), True))
    assert world.told() == [10]


def test_the_record_of_the_move_tells_of_the_kernel() -> None:
    world = poisoned(10)
    assert world.failover().fault == world.record().id and world.record().fault_class == "hang"


def stopping(*others: int) -> Site:
    """Clients 10 and `others` have left a poisoned domain, which is stopping under a dead client's kernel."""
    world = poisoned(10, *others)
    for pid in (10, *others):
        world.moved(pid, 2)
    assert world.domain("d1").state is DomainState.STOPPING
    return world


def test_where_a_kernel_is_ended_with_its_domain_nothing_is_held_of_those_who_live() -> None:
    world = stopping(11)
    assert [(c.id.process.pid, c.living) for c in world.state.clients_of("d1")] == [(12, False)]
    assert {e.client.process.pid for e in world.ever(fx.ReleaseLease)} == {10, 11}
    # The driver may still name them for the end of that kernel.
    mmu_fault(world, 11)
    assert world.domain("d2").state is DomainState.ACTIVE


@pytest.mark.parametrize("is_done", [False, True])
def test_who_has_left_such_a_domain_can_be_evicted_while_it_is_being_stopped(is_done: bool) -> None:
    world = stopping(11)
    world.evict(10)
    world.terminate_finished(10, done=is_done)
    world.die(10)
    assert [(e.request, e.ok) for e in world.ever(fx.Answer)] == [("r1", True)]
    world.work_ended(10)
    assert {c.id for c in world.state.spaces_of(process(10))} == set()
    assert world.domain("d2").state is DomainState.ACTIVE and world.client("d2", 11).living


def test_who_has_left_such_a_domain_can_come_anew_while_it_is_being_stopped() -> None:
    world = stopping()
    world.do(mev.MemberLeft(process(10)))
    world.hello(10, generation=2)
    participant = world.state.members[process(10)]
    assert (participant.home, participant.connected) == ("d2", True)
    world.hello(10)
    assert world.state.members[process(10)].home == "d2"
