"""Budgets of mode exact in core, between accounts: what one user's programs leave those of another one."""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import effects as fx
from mpsd.core.failover import budgets
from mpsd.core.failover import reports as mev
from mpsd.core.failover.budgets import PLACE, PLACE_S
from mpsd.core.state import State
from tests.support.core import GPU, UID, process
from tests.unit.test_core_budgets import FIRST, GIB, ON, POOL, Node


def test_a_claim_to_hold_more_than_was_granted_takes_nothing_from_another_account() -> None:
    world = Node().takes_part(10)
    assert world.holds(10, 1 << 62) == {10: POOL - FIRST}
    world.other_account(11)
    assert world.limit(11) == FIRST
    assert world.holds(11, FIRST, GIB * 3 // 2) == {10: POOL - GIB * 3 // 2, 11: GIB * 3 // 2}
    world.holds(10, 1 << 62, 1 << 62)
    world.other_account(12, uid=1002)
    assert world.limit(12) == FIRST
    assert world.holds(12, FIRST, POOL)[12] == POOL // 3
    assert world.limit(11) == GIB * 3 // 2


def test_a_program_that_left_with_a_false_claim_keeps_no_more_than_its_share() -> None:
    world = Node().takes_part(10)
    world.holds(10, 1 << 62, 1 << 62)
    world.holds(10, 1 << 62)
    world.leaves(10)
    world.other_account(11)
    assert world.holds(11, 0, POOL) == {11: POOL // 2}


def test_a_wish_beside_another_account_is_met_up_to_the_share() -> None:
    world = Node().takes_part(10, 11).other_account(12)
    assert world.fills(10, POOL) == {10: POOL // 2, 11: 0}
    assert world.limit(12) == FIRST
    assert world.holds(12, 0, POOL) == {12: POOL // 2}
    assert world.holds(10, POOL // 2, POOL) == {10: POOL // 2}
    world.die(12)
    assert world.holds(10, POOL // 2, POOL) == {10: POOL - FIRST}


def test_no_account_falls_below_its_first_limit_because_of_others() -> None:
    world = Node().takes_part(10)
    for uid in range(1001, 1020):
        world.other_account(uid, uid=uid)
        world.holds(uid, 0, POOL)
    assert world.limit(10) == FIRST and world.limit(1001) == FIRST


def test_many_programs_of_one_account_leave_another_one_its_share() -> None:
    world = Node().takes_part(*range(10, 40)).other_account(50)
    assert world.limit(50) == FIRST
    assert world.holds(50, 0, POOL)[50] == POOL // 2


def test_what_nobody_holds_goes_before_what_is_held() -> None:
    world = Node().takes_part(10, 11)
    world.holds(10, 0, 6 * GIB)
    world.holds(10, 5 * GIB)
    world.fills(11, 10 * GIB)
    world.other_account(12)
    assert (world.limit(10), world.limit(11)) == (5 * GIB, 10 * GIB)
    assert world.holds(12, 0, 3 * GIB) == {11: 8 * GIB, 12: 3 * GIB}


def test_a_lowered_limit_that_crosses_what_its_program_says_stays_lowered() -> None:
    """The program has not read LIMIT when it says HOLDS."""
    world = Node().takes_part(10)
    world.fills(10, POOL)
    world.other_account(11)
    assert world.holds(11, 0, POOL) == {10: POOL // 2, 11: POOL // 2}
    assert world.holds(10, POOL) == {10: POOL // 2}
    assert world.holds(11, POOL // 2) == {}


def test_subordinate_users_share_with_the_user_that_answers_for_them() -> None:
    world = Node().takes_part(10).other_account(11, uid=100_000, account=UID)
    assert world.holds(11, 0, POOL) == {11: POOL - FIRST}


# -- standby contexts ------------------------------------------------------------------------------------


def capped(world: Node) -> set[int]:
    return {p.pid for p, m in world.state.members.items() if m.capped == GPU}


def test_a_place_without_a_standby_context_is_taken_back_in_time() -> None:
    world = Node(replace(ON, standby_contexts=2)).takes_part(10, 11, 12)
    assert (world.with_standby(), capped(world)) == ({10, 11}, {12})
    assert fx.ArmTimer(PLACE, f"{process(10)} 2", PLACE_S) in world.effects
    world.attach(10, "d2")
    for pid in (10, 11):
        world.timer(PLACE, f"{process(pid)} 2")
    assert world.offered() == [12] and world.with_standby() == {10, 12}
    # It is ready after all, and waits for a place.
    world.is_ready(11, 2)
    assert [e.process.pid for e in world.made(fx.StandDown)] == [11] and capped(world) == {11}


def test_the_timer_of_a_place_says_nothing_of_a_ready_or_of_a_later_standby_context() -> None:
    world = Node(replace(ON, standby_contexts=2)).takes_part(10, 11).are_ready(10)
    world.timer(PLACE, f"{process(10)} 2")
    world.timer(PLACE, f"{process(11)} 1")
    assert world.with_standby() == {10, 11}


def test_free_places_go_to_an_account_with_less_than_its_share() -> None:
    world = Node(replace(ON, standby_contexts=4)).takes_part(10, 11, 12, 13, 14).are_ready(10, 11, 12, 13)
    world.other_account(20, 21, 22)
    assert capped(world) == {14, 20, 21, 22}
    for ends, gets in ((10, 20), (11, 21), (12, 14)):
        world.die(ends)
        assert world.offered() == [gets]
    assert capped(world) == {22} and world.with_standby() == {13, 14, 20, 21}


def test_an_account_that_waits_alone_may_have_more_than_a_share() -> None:
    world = Node(replace(ON, standby_contexts=2)).takes_part(10, 11, 12).other_account(20)
    world.die(10)
    assert world.offered() == [20] and capped(world) == {12}
    world.die(20)
    assert world.offered() == [12] and capped(world) == set()


def test_connecting_again_takes_no_place_from_an_account_that_waits() -> None:
    world = Node(replace(ON, standby_contexts=2)).takes_part(10, 11).other_account(20)
    assert capped(world) == {20}
    world.do(mev.MemberLeft(process(11)))
    assert world.offered() == [20]
    world.greet(11)
    assert capped(world) == {11} and world.with_standby() == {10, 20}


def test_whether_one_more_client_would_get_a_place_and_a_limit() -> None:
    world = Node(replace(ON, standby_contexts=3)).takes_part(10)
    world.fills(10, POOL)
    assert budgets.obstacle(world.state, [GPU], UID) == ("", "")
    world.takes_part(11)
    world.holds(11, FIRST)
    assert budgets.obstacle(world.state, [GPU], UID) == (GPU, "has no memory left for snapshots")
    assert not budgets.lacks_memory(world.state, GPU, 1001)
    world.takes_part(12)
    assert budgets.obstacle(world.state, [GPU], UID) == (GPU, "already has its limit of 3 standby contexts")
    assert not budgets.lacks_memory(State(), GPU, UID), "a GPU without a pool has no limits"
