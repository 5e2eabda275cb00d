"""Budgets of mode exact in core: who gets which limit, who gets a standby context, and who has left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import FailoverMode, ProcessInstance, SnapshotBudget
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import budgets
from mpsd.core.failover import reports as mev
from mpsd.core.failover.budgets import FIRST_SHARE, POOL_SHARE, SETTLE
from mpsd.core.failover.participants import Excess, Outcome, SavingCost, SnapshotLimit, Standing
from mpsd.core.state import TIME_BUDGET, DomainState, Policy
from tests.support.core import GPU, UID, facts, process
from tests.unit.test_core_failover import Site

EXACT, KEEP = FailoverMode.EXACT, FailoverMode.KEEP
GIB = 1 << 30
POOL = 16 * GIB
FIRST = POOL // FIRST_SHARE
MEMORY = {GPU: POOL * POOL_SHARE, "GPU-1": POOL * POOL_SHARE}
ON = Policy(failover=EXACT, gpu_memory=MEMORY, linger_limit_s=30.0)
TOO_LARGE = Excess(SnapshotBudget.MEMORY, 14 * GIB, 8 * GIB)
TOO_SLOW = Excess(SnapshotBudget.TIME, 580, 30, True)


def start_all(world: Site) -> None:
    while names := [d.id for d in world.state.domains.values() if d.state is DomainState.STARTING]:
        world.started(names[0])


class Node(Site):
    """d1 active, d2 its standby domain."""

    def __init__(self, policy: Policy = ON) -> None:
        super().__init__(policy)
        self.ready()
        self.do(ev.DriverFilesSeen(""))

    def greet(self, pid: int, mode: FailoverMode = EXACT, *, knows: bool = True) -> None:
        self.do(mev.MemberCame(process(pid), UID, mode, budgets=knows))

    def takes_part(self, *pids: int) -> Node:
        for pid in pids:
            self.attach(pid, "d1")
            self.greet(pid)
        return self

    def are_ready(self, *pids: int) -> Node:
        for pid in pids:
            self.is_ready(pid, self.state.members[process(pid)].generation)
        return self

    def holds(self, pid: int, held: int, wants: int = 0) -> dict[int, int]:
        """Say HOLDS. Return the limits that core then tells."""
        self.do(mev.MemberHolds(process(pid), held, wants))
        return self.limits()

    def fills(self, pid: int, size: int) -> dict[int, int]:
        """Want a limit, then fill it. Return the limits that core told for the wish."""
        told = self.holds(pid, 0, size)
        self.holds(pid, min(size, self.limit(pid)))
        return told

    def other_account(self, *pids: int, uid: int = 1001, account: int | None = None) -> Node:
        """Let programs of another user take part on the same GPU."""
        slot = f"gpu0.uid{uid}"
        self.do(ev.SlotWanted(slot, (GPU,), uid, account=account))
        start_all(self)
        for pid in pids:
            home = self.state.slots[slot].active
            assert home is not None
            self.do(ev.ClientNoticed(home, facts(pid, uid=uid)))
            self.do(ev.ClientAttached(home, process(pid), 1, tracked=True, apart=True))
            self.do(mev.MemberCame(process(pid), uid, EXACT, budgets=True))
        return self

    def limits(self) -> dict[int, int]:
        return {e.process.pid: e.bytes for e in self.made(fx.LimitSnapshots)}

    def limit(self, pid: int) -> int:
        found = self.state.members[process(pid)].limit
        assert found is not None
        return found.bytes

    def leaves(self, pid: int, excess: Excess = TOO_LARGE) -> None:
        self.do(mev.MemberExceeds(process(pid), excess))

    def offered(self) -> list[int]:
        return [e.process.pid for e in self.made(fx.OfferStandby)]

    def with_standby(self) -> set[int]:
        return {p.pid for p in budgets.standbys_on(self.state, GPU)}

    def restarted(self) -> Node:
        """Return the next daemon, which adopted both domains and all clients."""
        new = Site.__new__(Node)
        Site.__init__(new, self.state.policy)
        new.want()
        for name in ("d1", "d2"):
            new.started(name)
        new.do(ev.DriverFilesSeen(""))
        for m in self.state.members.values():
            new.do(mev.MemberRestored(m.process, m.uid, m.mode, "d1", "", m.limit, m.excess))
        for c in self.state.clients.values():
            new.attach(c.id.process.pid, c.id.domain)
        return new


# -- memory ----------------------------------------------------------------------------------------------


def test_a_participant_gets_a_first_limit_as_soon_as_its_gpu_is_known() -> None:
    world = Node()
    world.greet(10)
    assert world.made(fx.Welcome) == [fx.Welcome(process(10), EXACT, TIME_BUDGET)]
    assert world.limits() == {}
    world.attach(10, "d1")
    assert [e for e in world.ever(fx.LimitSnapshots)] == [fx.LimitSnapshots(process(10), FIRST)]


def test_programs_without_budgets_get_no_limit() -> None:
    world = Node()
    for pid, mode, knows in ((10, KEEP, True), (11, EXACT, False)):
        world.attach(pid, "d1")
        world.greet(pid, mode, knows=knows)
        assert world.made(fx.Welcome)[0].time_budget is None
    assert world.ever(fx.LimitSnapshots) == []
    assert world.holds(11, GIB, 2 * GIB) == {}
    assert world.state.counters["failover_words_ignored"] == 1


def test_without_a_known_size_of_the_gpu_there_is_no_limit() -> None:
    """A limit of 0 would make every program leave."""
    world = Node(replace(ON, gpu_memory={GPU: 0})).takes_part(10)
    assert world.holds(10, 0, GIB) == {}
    assert world.ever(fx.LimitSnapshots) == [] and world.state.members[process(10)].limit is None
    old = SnapshotLimit(6 * GIB, frozenset({GPU}))
    world.do(mev.MemberRestored(process(11), UID, EXACT, "d1", "", old))
    world.takes_part(11)
    assert world.ever(fx.LimitSnapshots) == []


def test_a_wish_is_met_from_what_has_no_limit_first() -> None:
    world = Node().takes_part(10, 11)
    assert world.holds(10, 0, POOL - FIRST) == {10: POOL - FIRST}
    assert world.holds(10, POOL - FIRST) == {}
    assert world.limit(11) == FIRST
    # A wish beyond the pool is met as far as possible.
    world.holds(11, GIB // 4)
    assert world.holds(10, POOL - FIRST, 4 * POOL) == {10: POOL - FIRST}, "the rest is for the next one"


def test_a_program_that_takes_all_it_can_leaves_a_first_limit_for_the_next_one() -> None:
    world = Node().takes_part(10)
    assert world.holds(10, 0, 4 * POOL) == {10: POOL - FIRST}
    world.holds(10, POOL - FIRST)
    world.takes_part(11)
    assert world.limit(11) == FIRST
    # Up to a first limit a raise takes the last of the pool.
    world.holds(11, FIRST)
    world.takes_part(12)
    assert world.limit(12) == 0
    world.holds(11, FIRST // 4)
    assert world.holds(12, 0, 2 * FIRST) == {11: FIRST // 4, 12: FIRST - FIRST // 4}


def test_accounts_that_share_a_gpu_leave_no_reserve() -> None:
    world = Node().takes_part(10).other_account(20)
    for pid in (10, 20):
        world.fills(pid, 4 * POOL)
    assert (world.limit(10), world.limit(20)) == (POOL // 2, POOL // 2)


def test_a_wish_that_cannot_be_met_is_answered_with_the_same_limit() -> None:
    world = Node().takes_part(10, 11)
    world.fills(10, POOL - FIRST)
    world.holds(11, FIRST)
    assert world.holds(11, FIRST, 2 * FIRST) == {11: FIRST}
    assert world.limit(10) == POOL - FIRST


def test_a_limit_names_the_wish_that_it_answers() -> None:
    world = Node().takes_part(10, 11, 12)
    most = POOL - FIRST - FIRST // 2
    world.holds(10, 0, most)
    assert world.made(fx.LimitSnapshots) == [
        fx.LimitSnapshots(process(11), FIRST // 2),
        fx.LimitSnapshots(process(10), most, answers=most),
    ]
    world.holds(12, FIRST)
    # A limit on a new connection answers nothing; the wish said again has its own answer, also a refusal.
    world.greet(11)
    assert world.made(fx.LimitSnapshots) == [fx.LimitSnapshots(process(11), FIRST // 2)]
    world.holds(10, most)
    world.holds(11, 0, FIRST)
    assert world.made(fx.LimitSnapshots) == [fx.LimitSnapshots(process(11), FIRST // 2, answers=FIRST)]
    # The limit was raised while the wish was on its way.
    world.holds(10, 0)
    world.holds(11, 0, FIRST)
    world.holds(11, 0, FIRST // 2)
    assert world.made(fx.LimitSnapshots) == [fx.LimitSnapshots(process(11), FIRST, answers=FIRST // 2)]


def test_a_wish_takes_what_others_do_not_hold_most_from_the_one_with_most() -> None:
    world = Node().takes_part(10, 11, 12)
    for pid, granted, held in ((10, 8, 1), (11, 6, 5), (12, 2, 2)):
        world.holds(pid, 0, granted * GIB)
        world.holds(pid, held * GIB)
    assert world.holds(12, 2 * GIB, 8 * GIB) == {10: 2 * GIB, 12: 8 * GIB}
    assert world.holds(12, 8 * GIB, 11 * GIB) == {10: 1 * GIB, 12: 9 * GIB}
    assert world.holds(12, 8 * GIB, 11 * GIB) == {12: 9 * GIB}


def test_a_participant_that_says_nothing_of_its_buffers_after_a_restart_has_none() -> None:
    world = Node().takes_part(10)
    world.fills(10, 4 * GIB)
    world.leaves(10)
    new = world.restarted()
    assert budgets.free(new.state, GPU) == POOL - 4 * GIB
    new.greet(10)
    new.timer(SETTLE, process(10))
    assert budgets.free(new.state, GPU) == POOL


def test_a_program_that_holds_more_than_can_be_granted_is_told_to_release_it() -> None:
    world = Node().takes_part(10, 11)
    world.fills(10, POOL - FIRST)
    assert world.holds(11, 3 * GIB) == {11: FIRST}


def test_a_limit_comes_back_with_its_program_and_when_it_has_left() -> None:
    world = Node().takes_part(10, 11)
    world.fills(10, 6 * GIB)
    world.fills(11, 2 * GIB)
    world.leaves(10)
    assert budgets.free(world.state, GPU) == POOL - 8 * GIB, "it has not released its buffers yet"
    assert world.holds(10, 4 * GIB) == {}
    assert budgets.free(world.state, GPU) == POOL - 6 * GIB
    assert world.holds(10, 0) == {}
    world.die(11)
    assert budgets.free(world.state, GPU) == POOL


def test_limits_survive_a_restart_until_each_program_says_what_it_holds() -> None:
    world = Node().takes_part(10, 11)
    world.holds(10, 0, 6 * GIB)
    new = world.restarted()
    assert (new.limit(10), new.limit(11)) == (6 * GIB, FIRST)
    new.takes_part(12)
    assert new.holds(12, 0, POOL - 2 * FIRST) == {12: POOL - 6 * GIB - 2 * FIRST}
    new.greet(10)
    assert new.limits() == {10: 6 * GIB}
    assert new.holds(12, 0, POOL - 2 * FIRST) == {12: POOL - 6 * GIB - 2 * FIRST}
    new.holds(10, FIRST)
    new.greet(11)
    new.holds(11, 0)
    assert new.holds(12, 0, POOL - 2 * FIRST) == {10: FIRST, 12: POOL - 2 * FIRST}


def test_a_smaller_pool_cuts_the_limits_of_an_earlier_daemon() -> None:
    world = Node(replace(ON, gpu_memory={GPU: 32 * GIB}))
    world.do(mev.MemberRestored(process(10), UID, EXACT, "d1", "", SnapshotLimit(6 * GIB, frozenset({GPU}))))
    assert (world.limit(10), budgets.free(world.state, GPU)) == (4 * GIB, 0)


# -- programs that exceed a budget -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("excess", "why"),
    [
        (TOO_LARGE, "snapshot budget: needs 14 GiB, has 8"),
        (TOO_SLOW, "saving would slow it by 58 %, the budget is 3 %"),
        (replace(TOO_LARGE, needs=8 * GIB + 1), "snapshot budget: needs 8.1 GiB, has 8"),
        (replace(TOO_LARGE, needs=700 << 20, has=0), "snapshot budget: needs 700 MiB, has 0"),
        (replace(TOO_LARGE, needs=4096, has=1000), "snapshot budget: needs 4 KiB, has 0.9"),
        (replace(TOO_SLOW, needs=35), "saving would slow it by 3.5 %, the budget is 3 %"),
        (replace(TOO_SLOW, needs=60_000), "saving would slow it by 6000 %, the budget is 3 %"),
    ],
)
def test_the_reason_names_what_is_needed_and_what_there_is(excess: Excess, why: str) -> None:
    assert excess.why == why


def test_a_participant_that_left_has_no_standby_and_is_never_moved() -> None:
    world = Node().takes_part(10, 11).are_ready(10, 11)
    world.leaves(10)
    assert [e.process.pid for e in world.made(fx.StandDown)] == [10]
    assert world.state.counters["failover_budgets_exceeded"] == 1
    world.leaves(10)
    assert world.made(fx.StandDown) == [] and world.state.counters["failover_budgets_exceeded"] == 1
    world.attach(12, "d1")
    world.fault(12)
    assert world.told() == [11]
    fate = next(f for f in world.failover().fates if f.process.pid == 10)
    assert (fate.outcome, fate.why) == (Outcome.NOT_TOLD, f"the client had left fail-over ({TOO_LARGE.why})")
    world.moved(11, 2)
    world.started("d3")
    assert 10 not in world.offered() and world.standing(10) is Standing.WAITING


def test_the_record_of_a_fault_counts_lost_clients_that_had_left() -> None:
    world = Node().takes_part(10, 11, 12)
    world.leaves(10)
    world.leaves(11, TOO_SLOW)
    world.attach(20, "d1")
    world.fault(20)
    note = "Lost clients that had left fail-over before: 1 for the memory budget and 1 for the time budget"
    assert note in world.record().action
    world.die(10)
    world.wait(1).kernel(31, "MMU Fault", pid=20)
    world.timer("fault-revision", world.record().id)
    assert world.record().revision > 1 and note in world.record().action
    assert {f.process.pid: f.left for f in world.failover().fates} == {
        10: SnapshotBudget.MEMORY,
        11: SnapshotBudget.TIME,
        12: None,
    }


def test_a_participant_that_left_while_it_moved_arrives_and_gets_no_other_standby() -> None:
    world = Node().takes_part(10).are_ready(10)
    world.attach(12, "d1")
    world.fault(12)
    assert world.told() == [10]
    world.leaves(10, TOO_SLOW)
    world.moved(10, 2)
    assert world.outcomes()[10] is Outcome.MOVED
    world.started("d3")
    assert world.ever(fx.OfferStandby)[-1].generation == 2


def test_a_participant_that_left_needs_no_standby_domain() -> None:
    world = Node(replace(ON, spare=False)).takes_part(10).are_ready(10)
    world.leaves(10)
    assert fx.ArmTimer("standby-linger", "gpu0.uid1000", 60.0) in world.last
    world.timer("standby-linger", "gpu0.uid1000")
    assert world.domain("d2").state is not DomainState.WARM


def test_that_a_participant_left_survives_a_restart_and_not_an_exec() -> None:
    world = Node().takes_part(10).are_ready(10)
    world.leaves(10, TOO_SLOW)
    new = world.restarted()
    new.greet(10)
    assert new.offered() == [] and new.state.members[process(10)].excess == TOO_SLOW
    new.do(ev.ClientLeft(process(10), "exec"))
    another = new.state.members[process(10)]
    assert (another.excess, another.limit, another.budgets) == (None, None, True)


def test_the_youngest_client_is_no_suspect_for_its_replay_if_it_left() -> None:
    """A program that does not replay may be the offender, so the others replay at once."""
    world = Node().takes_part(10, 11).are_ready(10, 11)
    world.leaves(11)
    world.kernel(13, "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Misaligned Address")
    world.do(ev.ServerAtFault("d1", world.domain("d1").server or process(1), GPU))
    moves = world.ever(fx.Move)
    assert [m.process.pid for m in moves] == [10]


def test_costs_are_those_of_participants_alone() -> None:
    world = Node().takes_part(10)
    cost = SavingCost(3 * GIB, 1_000_000, 50_000_000)
    world.do(mev.MemberCost(process(10), cost))
    assert world.state.members[process(10)].cost == cost and cost.share == 0.02
    world.leaves(10)
    world.do(mev.MemberCost(process(10), cost))
    assert world.state.members[process(10)].cost is None
    world.do(mev.MemberCost(process(99), cost))
    assert SavingCost(0, 0, 0).share is None


# -- standby contexts ------------------------------------------------------------------------------------


def capped(world: Node) -> set[int]:
    return {p.pid for p, m in world.state.members.items() if m.capped == GPU}


def test_participants_beyond_the_most_standby_contexts_wait_in_their_order() -> None:
    world = Node(replace(ON, standby_contexts=2)).takes_part(10, 11, 12, 13).are_ready(10, 11)
    assert (world.with_standby(), capped(world)) == ({10, 11}, {12, 13})
    world.die(10)
    assert world.offered() == [12] and capped(world) == {13}
    world.leaves(12)
    assert world.offered() == [13] and capped(world) == set()


def test_a_standby_context_that_could_not_be_made_leaves_its_place() -> None:
    world = Node(replace(ON, standby_contexts=1)).takes_part(10, 11)
    world.do(mev.MemberUnready(process(10), 2, "no memory", for_memory=True))
    assert world.offered() == [11]
    # The place is taken when the first one is ready after all.
    world.do(mev.MemberReady(process(10), 2, 1, 1))
    assert [e.process.pid for e in world.made(fx.StandDown)] == [10] and capped(world) == {10}


def test_the_ones_with_a_standby_context_keep_it_over_a_fault() -> None:
    world = Node(replace(ON, standby_contexts=2)).takes_part(10, 11, 12).are_ready(11, 10)
    world.attach(20, "d1")
    world.fault(20)
    assert world.told() == [10, 11]
    fate = next(f for f in world.failover().fates if f.process.pid == 12)
    assert fate.why == "its GPU already has its limit of 2 standby contexts"
    for pid in (10, 11):
        world.moved(pid, 2)
    # They have none before the next standby domain runs, and keep their places.
    world.started("d3")
    assert set(world.offered()) == {10, 11}


def test_a_client_without_a_place_that_lost_its_context_gets_one_to_move_to() -> None:
    world = Node(replace(ON, standby_contexts=1)).takes_part(10, 11).are_ready(10)
    world.attach(20, "d1")
    world.fault(20)
    assert world.told() == [10] and world.offered() == [11]
    world.is_ready(11, 2)
    assert world.told() == [11]
    world.moved(11, 2)
    world.moved(10, 2)
    world.started("d3")
    assert world.offered() == [10] and capped(world) == {11}


def test_the_first_ones_keep_their_standby_contexts_if_a_restart_lowers_the_number() -> None:
    world = Node().takes_part(10, 11, 12, 13).are_ready(10, 11, 12, 13)
    world.state = replace(world.state, policy=replace(ON, standby_contexts=2))
    new = world.restarted()
    for pid in (13, 12, 11, 10):
        new.greet(pid)
    assert [e.process.pid for e in new.ever(fx.OfferStandby)] == [11, 10] and capped(new) == {12, 13}


def test_standby_contexts_of_an_earlier_daemon_count_before_their_programs_connect() -> None:
    world = Node(replace(ON, standby_contexts=2)).takes_part(10, 11).are_ready(10, 11)
    new = world.restarted()
    assert new.with_standby() == {10, 11}
    new.takes_part(12)
    assert new.offered() == [] and capped(new) == {12}
    new.greet(10)
    assert new.offered() == [10]


def test_a_program_that_is_not_connected_keeps_its_place_while_it_has_a_standby_context() -> None:
    world = Node(replace(ON, standby_contexts=1)).takes_part(10, 11).are_ready(10)
    world.do(mev.MemberLeft(process(10)))
    assert world.offered() == [] and world.with_standby() == {10}
    world.greet(10, FailoverMode.OFF)
    assert world.offered() == [] and world.with_standby() == {10}
    world.die(10)
    assert world.offered() == [11]


def test_a_standby_context_on_two_gpus_counts_on_each() -> None:
    world = Site(replace(ON, standby_contexts=1))
    for slot, gpus in (("both", (GPU, "GPU-1")), ("one", ("GPU-1",))):
        world.do(ev.SlotWanted(slot, gpus, UID))
    start_all(world)
    world.do(ev.DriverFilesSeen(""))
    for pid, slot in ((10, "both"), (11, "one")):
        world.attach(pid, world.state.slots[slot].active or "")
        world.do(mev.MemberCame(process(pid), UID, EXACT, budgets=True))
    assert world.state.members[ProcessInstance(11, 1)].capped == "GPU-1"
    assert [e.process.pid for e in world.ever(fx.OfferStandby)] == [10]
