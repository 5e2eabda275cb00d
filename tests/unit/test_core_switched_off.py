"""Fail-over of one program is switched off while it runs: mpsd-ctl protect PID guard."""

from __future__ import annotations

import pytest

from mpsd.api.failoverview import require_switchable, switch_steps
from mpsd.api.stateconditions import state_conditions
from mpsd.base.conditions import Code
from mpsd.base.errors import MpsdError, NotReadyError, UnsupportedError, UsageError
from mpsd.base.model import FailoverMode, SnapshotBudget
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import SWITCHED_OFF, Excess, Outcome, Standing
from mpsd.core.state import Policy
from tests.support.core import GPU, UID, process, server_of
from tests.unit.test_core_failover import Site

MIB = 1 << 20
MODES = pytest.mark.parametrize("mode", [FailoverMode.KEEP, FailoverMode.EXACT])
TOO_LARGE = Excess(SnapshotBudget.MEMORY, 700 * MIB, 300 * MIB)


def came(world: Site, pid: int, mode: FailoverMode, *, knows: bool = True, generation: int = 0) -> None:
    world.do(mev.MemberCame(process(pid), UID, mode, generation, budgets=knows, switches=knows))


def site(mode: FailoverMode = FailoverMode.EXACT, *, knows: bool = True) -> Site:
    """Client 10 of d1 is ready in d2; it knows the order if `knows`."""
    world = Site(Policy(failover=FailoverMode.EXACT, gpu_memory={GPU: 64 << 30}))
    world.ready()
    world.do(ev.DriverFilesSeen(""))
    world.attach(10, "d1")
    came(world, 10, mode, knows=knows)
    world.is_ready(10, 2)
    assert world.standing(10) is Standing.READY
    return world


def switch_off(world: Site, pid: int = 10) -> None:
    world.do(mev.MemberSwitchedOff(process(pid)))


def lose(world: Site, domain: str) -> None:
    world.kernel(43, "channel 0x1", server_of(domain).pid, "nvidia-cuda-mps")


@MODES
def test_it_is_told_loses_its_offer_and_does_not_move_any_more(mode: FailoverMode) -> None:
    world = site(mode)
    switch_off(world)
    assert world.made(fx.SwitchOff) == [fx.SwitchOff(process(10))]
    assert [(e.generation, e.why) for e in world.made(fx.StandDown)] == [(2, SWITCHED_OFF.why)]
    (event,) = [e for e in world.made(fx.Publish) if e.kind == "failover-left"]
    assert (event.owner, dict(event.data)) == (UID, {"pid": 10, "reason": "switched off by hand"})
    world.started("d3")
    assert len(world.ever(fx.OfferStandby)) == 1
    lose(world, "d1")
    assert world.told() == [] and world.outcomes() == {10: Outcome.NOT_TOLD}
    (fate,) = world.failover().fates
    assert fate.left is SnapshotBudget.BY_HAND
    assert fate.why == "the client had left fail-over (switched off by hand)"
    assert world.state.counters["failover_switched_off"] == 1
    assert "failover_budgets_exceeded" not in world.state.counters


@MODES
def test_its_answer_changes_nothing(mode: FailoverMode) -> None:
    world = site(mode)
    switch_off(world)
    before = world.state
    world.do(mev.MemberExceeds(process(10), SWITCHED_OFF))
    assert world.state.members == before.members and not world.made(fx.Publish)
    # It had left for a budget just before it was told.
    world.do(mev.MemberExceeds(process(10), TOO_LARGE))
    assert world.state.members[process(10)].excess == SWITCHED_OFF


def test_a_program_that_had_left_for_a_budget_keeps_that_reason() -> None:
    world = site()
    world.do(mev.MemberExceeds(process(10), TOO_LARGE))
    switch_off(world)
    assert not world.made(fx.SwitchOff)
    assert world.state.members[process(10)].excess == TOO_LARGE
    assert world.state.counters["failover_switches_ignored"] == 1


def test_it_completes_a_move_that_it_was_told_to_make() -> None:
    world = site()
    lose(world, "d1")
    assert world.told() == [10]
    switch_off(world)
    assert world.made(fx.SwitchOff) and world.standing(10) is Standing.MOVING
    world.moved(10, 2)
    assert world.state.members[process(10)].home == "d2"
    world.started("d3")
    assert not [e for e in world.ever(fx.OfferStandby) if e.generation == 3]


@pytest.mark.parametrize("knows", [True, False])
def test_a_program_that_connects_again_is_told_again_if_it_knows_the_order(knows: bool) -> None:
    world = site()
    switch_off(world)
    world.do(mev.MemberLeft(process(10)))
    came(world, 10, FailoverMode.EXACT, knows=knows)
    assert [type(e) for e in world.last if isinstance(e, fx.ProgramCommand)][:2] == (
        [fx.Welcome, fx.SwitchOff] if knows else [fx.Welcome]
    )
    assert not world.made(fx.OfferStandby)


def test_a_daemon_that_lost_its_state_hears_of_it_from_the_program() -> None:
    world = site()
    world.do(mev.MemberExceeds(process(10), SWITCHED_OFF))
    assert world.made(fx.StandDown) and world.state.members[process(10)].excess == SWITCHED_OFF


def test_an_earlier_program_cannot_say_so() -> None:
    world = site(knows=False)
    world.do(mev.MemberExceeds(process(10), SWITCHED_OFF))
    assert world.standing(10) is Standing.READY
    assert world.state.counters["failover_words_ignored"] == 1


def test_after_an_exec_the_next_program_takes_part() -> None:
    world = site()
    switch_off(world)
    world.do(ev.ClientLeft(process(10), "exec"))
    participant = world.state.members[process(10)]
    assert participant.excess is None and participant.switches


def test_it_is_no_client_beyond_a_budget() -> None:
    world = site()
    switch_off(world)
    assert Code.SNAPSHOT_BUDGET not in {c.code for c in state_conditions(world.state, [GPU])}


def refusal(world: Site, level: str = "guard", pid: int = 10) -> MpsdError | None:
    try:
        require_switchable(world.state, process(pid), level)
    except MpsdError as error:
        assert error.remedy
        return error
    return None


def test_what_cannot_be_switched_off_is_refused_with_the_remedy() -> None:
    world = site()
    world.attach(11, "d1")
    assert refusal(world) is None
    assert isinstance(refusal(world, level="failover"), UsageError)
    nothing = refusal(world, pid=11)
    assert isinstance(nothing, UsageError) and "takes no part in fail-over" in nothing.message
    switch_off(world)
    again = refusal(world)
    assert isinstance(again, UsageError) and "already at guard (switched off by hand)" in again.message
    gone = site()
    gone.do(mev.MemberLeft(process(10)))
    assert isinstance(refusal(gone), NotReadyError)
    old = refusal(site(knows=False))
    assert isinstance(old, UnsupportedError) and "earlier release" in old.message


def test_the_plan_says_that_a_move_under_way_is_completed() -> None:
    world = site()
    steps = switch_steps(world.state.members[process(10)])
    lose(world, "d1")
    assert switch_steps(world.state.members[process(10)])[1:] == steps
