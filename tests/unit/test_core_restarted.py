"""A daemon adopts the state of an earlier one: faults from before or during the restart still count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import ProcessInstance, ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Standing
from mpsd.core.state import DomainState, Policy
from mpsd.daemon import adoption
from tests.support.core import GPU, SLOT, UID, control_of, facts, process, server_of
from tests.unit.test_core_failover import KEEP, ON, Site
from tests.unit.test_core_replaced import ANOTHER, replaced, with_one_that_is_not_ready

ACTIVE, SPARE, OLD = ev.DomainRole.ACTIVE, ev.DomainRole.SPARE, ev.DomainRole.OLD


def started_anew(policy: Policy = ON, *, exclusive: bool = False) -> Site:
    world = Site(policy)
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, exclusive, start=False))
    return world


def adopted(world: Site) -> Site:
    world.do(ev.AdoptionDone())
    world.do(ev.DriverFilesSeen(""))
    return world


def test_its_server_died_and_another_one_came() -> None:
    """The new server lists 11, which may have started it; it does not list 10."""
    world = started_anew()
    world.adopt("d1", ACTIVE, DomainState.ACTIVE)
    world.adopt("d2", SPARE, DomainState.WARM)
    for pid in (10, 11):
        world.do(mev.MemberRestored(process(pid), UID, KEEP, "d1"))
        world.do(ev.ClientNoticed("d1", facts(pid), listed=pid == 11))
        world.do(ev.ClientAttached("d1", process(pid), 1, tracked=True, apart=True))
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.do(ev.ServerSeen("d1", ANOTHER))
    adopted(world)
    told = []
    for pid in (10, 11):
        world.hello(pid)
        world.is_ready(pid, 2)
        told += world.told()
    assert told == [10] and world.standing(11) is Standing.READY


def test_its_whole_domain_had_gone() -> None:
    world = started_anew()
    world.do(ev.DomainAdopted("d1", SLOT, OLD, DomainState.HEADLESS, None, None, ServerState.GONE))
    world.adopt("d2", SPARE, DomainState.WARM)
    world.do(mev.MemberRestored(process(10), UID, KEEP, "d1"))
    for name in ("d1", "d2"):
        world.attach(10, name)
    adopted(world)
    assert world.state.slots[SLOT].active == "d2"
    world.hello(10)
    world.is_ready(10, 2)
    assert world.told() == [10]
    world.moved(10, 2)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


@pytest.mark.parametrize("server", [None, ANOTHER], ids=["comes later", "has come"])
def test_who_was_not_ready_before_moves_when_it_is(server: ProcessInstance | None) -> None:
    before = with_one_that_is_not_ready()
    if server is None:
        before.do(ev.ServerDied("d1", server_of("d1")))
    else:
        replaced(before)
    rows = {row["id"]: row for row in adoption.to_file(before.state, {})["domains"]}
    known = frozenset(ProcessInstance(*row) for row in rows["d1"]["bereft"])
    assert known == {process(10), process(11)}
    world = started_anew()
    state = ServerState.ACTIVE if server else ServerState.GONE
    control = control_of("d1")
    world.do(ev.DomainAdopted("d1", SLOT, OLD, DomainState.RETIRED, control, server, state, known))
    world.adopt("d2", ACTIVE, DomainState.ACTIVE)
    world.do(mev.MemberRestored(process(11), UID, KEEP, "d1"))
    world.attach(11, "d1")
    adopted(world)
    world.do(ev.ServerSeen("d1", ANOTHER))
    world.hello(11)
    world.is_ready(11, 2)
    assert world.told() == [11]


@pytest.mark.parametrize("exclusive", [True, False])
def test_victims_of_a_fault_before_are_drained_all_the_same(exclusive: bool) -> None:
    """In exclusive mode only one server can exist, so the slot would stay empty otherwise."""
    world = started_anew(replace(ON, kill_victims_after_s=0.0 if exclusive else 5.0), exclusive=exclusive)
    world.adopt("d1", ACTIVE, DomainState.FAULTED, server_state=ServerState.FAULT)
    world.attach(10, "d1")
    adopted(world)
    limit = world.state.policy.exclusive_drain_s if exclusive else 5.0
    assert fx.ArmTimer("kill-victims", "d1", limit) in world.ever(fx.ArmTimer)
    world.wait(limit)
    world.timer("kill-victims", "d1")
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [10]


def test_a_standby_that_nobody_wants_any_more_ends() -> None:
    world = started_anew(replace(ON, spare=False))
    world.adopt("d1", ACTIVE, DomainState.ACTIVE)
    world.adopt("d2", SPARE, DomainState.WARM)
    adopted(world)
    world.timer("standby-linger", SLOT)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d2"]


@pytest.mark.parametrize("state", DomainState)
@pytest.mark.parametrize("role", ev.DomainRole)
def test_a_domain_is_adopted_in_any_state_and_role(role: ev.DomainRole, state: DomainState) -> None:
    """decide() checks the invariants."""
    world = started_anew()
    world.adopt("d1", role, state)
    world.attach(10, "d1")
    adopted(world)
    if role is ACTIVE and state in (DomainState.WARM, DomainState.ACTIVE, DomainState.FULL):
        assert world.state.slots[SLOT].active == "d1" and world.domain("d1").state is DomainState.ACTIVE
