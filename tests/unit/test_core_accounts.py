"""Budgets of mode exact in core, between accounts: what one user's programs leave those of another one."""

from __future__ import annotations

from tests.support.core import UID
from tests.unit.test_core_budgets import FIRST, GIB, POOL, Node


def test_a_claim_to_hold_more_than_was_granted_takes_nothing_from_another_account() -> None:
    world = Node().takes_part(10)
    assert world.holds(10, 1 << 62) == {10: POOL}
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
    assert world.holds(10, POOL // 2, POOL) == {10: POOL}


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
    assert world.holds(11, 0, POOL) == {10: 0, 11: POOL}
