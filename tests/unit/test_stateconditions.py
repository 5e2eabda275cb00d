"""The conditions that the daemon's state shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.api.failoverview import moves_programs
from mpsd.api.stateconditions import state_conditions
from mpsd.base.conditions import Code, Condition, refusing
from mpsd.base.model import FailoverMode, ServerState, SnapshotBudget
from mpsd.clients.pins import NO_DESCRIPTOR
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover.participants import Excess
from mpsd.core.failover.reports import MemberCame, MemberExceeds, MemberStayed
from mpsd.core.state import DomainState, Policy
from tests.support.core import GPU, SLOT, UID, World, facts, process
from tests.unit.test_core_failover import site


@pytest.fixture
def world() -> World:
    return World().ready()


def found(world: World) -> list[Condition]:
    return state_conditions(world.state, [GPU])


def test_a_healthy_node_has_none(world: World) -> None:
    world.join(10)
    assert found(world) == []


def test_clients_that_a_fault_left_behind_are_lost(world: World) -> None:
    for pid in (10, 11, 12):
        world.join(pid)
    world.fault(10)
    world.die(10)
    assert world.path() == "d2"
    assert found(world) == [Condition(Code.CLIENTS_LOST, "d1", count=2)]
    world.die(11)
    assert found(world) == [Condition(Code.CLIENTS_LOST, "d1", count=1)]
    world.die(12)
    assert found(world) == []


def test_an_active_domain_that_faulted_is_said_with_its_clients() -> None:
    world = World(Policy(spare=False))
    world.want(SLOT, exclusive=True)
    world.started("d1")
    world.join(10)
    world.join(11)
    world.fault(10)
    assert world.path() == "d1" and world.domain("d1").state is DomainState.FAULTED
    assert Condition(Code.DOMAIN_FAULTED, "d1", count=2) in found(world)


def test_an_active_domain_that_takes_no_clients_is_said(world: World) -> None:
    poisoned = replace(world.domain("d1"), state=DomainState.POISONED)
    world.state = replace(world.state, domains={**world.state.domains, "d1": poisoned})
    assert found(world) == [Condition(Code.DOMAIN_NOT_SERVING, "d1", "poisoned")]


@pytest.mark.parametrize("reason", ["the driver refused", NO_DESCRIPTOR])
def test_a_client_without_a_lease_is_said_once(world: World, reason: str) -> None:
    """A client that waits for a descriptor is counted where it waits."""
    world.join(10)
    world.do(ev.ClientNoticed("d1", facts(11)))
    world.do(ev.AttachFailed("d1", process(11), reason))
    expected = [] if reason == NO_DESCRIPTOR else [Condition(Code.CLIENTS_UNPROTECTED, "d1", count=1)]
    assert found(world) == expected


def test_clients_that_are_not_shown_are_counted(world: World) -> None:
    world.do(ev.ClientsUnpinned("d1", 3))
    assert found(world) == [Condition(Code.CLIENTS_NOT_SHOWN, count=3)]


def test_a_drained_gpu_refuses_and_does_not_degrade(world: World) -> None:
    world.do(ev.DrainRequested((), True))
    (drained,) = [c for c in found(world) if c.code is Code.GPU_DRAINED]
    assert refusing(found(world)) == drained
    assert not drained.kind.degrades and GPU in drained.remedy
    world.do(ev.DrainRequested((), False))
    assert refusing(found(world)) is None


def test_a_lost_gpu_refuses_and_degrades_before_a_drain(world: World) -> None:
    world.kernel(79, "GPU has fallen off the bus.")
    world.do(ev.DrainRequested((GPU,), True))
    lost = refusing(found(world))
    assert lost is not None and lost.code is Code.GPU_LOST and lost.kind.degrades
    assert "Xid 79" in lost.text and "reset the GPU" in lost.remedy
    assert state_conditions(world.state, ["GPU-other"]) == []


def test_a_server_that_ended_is_no_condition_once_another_domain_serves(world: World) -> None:
    world.server_state("d1", ServerState.FAULT)
    assert world.path() == "d2" and found(world) == []


def test_a_client_that_fails_over_is_not_lost() -> None:
    """N6: neither while it moves nor afterwards. A client that stays is lost."""
    world = site(10, 11)
    world.join(12)
    world.fault(12)
    assert sorted(world.told()) == [10, 11]
    world.die(12)
    assert found(world) == []
    world.moved(10, 2)
    assert found(world) == []
    world.do(MemberStayed(process(11), 2, "it cannot replay"))
    assert found(world) == [Condition(Code.CLIENTS_LOST, "d1", count=1)]


def test_victims_are_reported_once_it_is_known_which_ones_move() -> None:
    world = site(10, 11)
    world.join(12)
    world.fault(12)
    world.timer("laggards", "d1")
    assert world.last == (fx.ArmTimer("laggards", "d1", world.state.policy.move_wait_s),)
    world.moved(10, 2)
    world.do(MemberStayed(process(11), 2, "it cannot replay"))
    world.timer("laggards", "d1")
    (told,) = world.made(fx.Publish)
    assert told.kind == "victims-stay" and 11 in told.data["pids"] and 10 not in told.data["pids"]


def test_the_reach_of_a_fault_follows_the_protection() -> None:
    """N6: "all clients" stands only where no program would move."""
    protected, plain = site(10, 11), World().ready()
    assert moves_programs(protected.state, protected.domain("d1"), protected.now)
    assert not moves_programs(protected.state, protected.domain("d2"), protected.now)
    assert not moves_programs(plain.state, plain.domain("d1"), plain.now)


def test_a_leased_client_that_lacks_a_protection_is_counted(world: World) -> None:
    world.do(ev.ClientNoticed("d1", facts(10)))
    world.do(ev.ClientAttached("d1", process(10), 1, tracked=False, problem="the driver has no tracker"))
    assert found(world) == [Condition(Code.CLIENTS_LIMITED, "d1", count=1)]
    world.die(10)
    world.work_ended(10)
    assert found(world) == []


def test_an_exited_client_with_a_kernel_that_never_ends_is_told_and_degrades_nothing(world: World) -> None:
    world.join(10, 11)
    world.die(10)
    world.lingers(10)
    held = [c for c in found(world) if c.code is Code.MEMORY_HELD]
    assert held == [Condition(Code.MEMORY_HELD, "d1", count=1)] and not held[0].kind.degrades


def test_a_decision_that_was_dropped_is_told(world: World) -> None:
    world.state = world.state.counted("internal_errors", 2)
    assert found(world) == [Condition(Code.DECISION_DROPPED, count=2)]


def test_clients_beyond_a_budget_are_counted_and_so_are_those_beyond_the_standby_contexts() -> None:
    there = site(policy=Policy(failover=FailoverMode.EXACT, standby_contexts=1))
    for pid in (10, 11, 12, 13):
        there.attach(pid, "d1")
        there.do(MemberCame(process(pid), UID, FailoverMode.EXACT, budgets=True))
    assert found(there) == [Condition(Code.STANDBY_CAP, GPU, "1", 3)]
    for pid, budget in ((11, SnapshotBudget.TIME), (12, SnapshotBudget.MEMORY), (13, SnapshotBudget.TIME)):
        there.do(MemberExceeds(process(pid), Excess(budget, 58, 3)))
    (condition,) = found(there)
    assert condition == Condition(Code.SNAPSHOT_BUDGET, "d1", "memory: 1, time: 2", 3)
    assert (
        condition.text
        == "3 client(s) of domain d1 have left fail-over: saving exceeds a budget (memory: 1, time: 2)"
    )
