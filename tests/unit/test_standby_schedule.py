"""The schedule of mpsd-standby: one process works, one waits, and two never work at once."""

from __future__ import annotations

import pytest

from mpsd_client import turns
from mpsd_client.standby.schedule import (
    STEADY_S,
    End,
    GiveTurn,
    Leave,
    RemainingWork,
    Role,
    Say,
    Scheduler,
    Settle,
    Start,
)
from tests.support.rotas import Play, both


def test_a_domain_that_was_lost_and_is_in_service_again_is_worked_in() -> None:
    """The server recovers when it is empty, and is used again if no other domain exists."""
    play = Play(warm=False).begin().ready(100).lose("d1")
    assert play.alive == {101: Role.AGAIN}
    play.lost.clear()
    play.domain = 1
    play.exits(101, 1)
    working = play.rota.working
    assert working is not None and (working.number, working.domain, working.end_reason) == (102, "d1", "")


def test_the_standby_is_started_when_the_first_is_ready_and_takes_its_turn_when_the_domain_is_lost() -> None:
    play = Play().begin()
    assert play.alive == {100: Role.FIRST}
    play.ready(100)
    assert play.alive == {100: Role.FIRST, 101: Role.STANDBY}
    play.ready(101)
    play.domain = 2
    play.lose("d1")
    order = [type(a) for a in play.did if not isinstance(a, Say)]
    assert order == [Start, Start, End, Settle, GiveTurn]
    working = play.rota.working
    assert working is not None and (working.number, working.domain) == (101, "d2")
    # The next process starts to wait once this one has taken over the old one's memory.
    play.do(play.rota.ready(101, play.now))
    assert play.alive == {101: Role.STANDBY, 102: Role.STANDBY}


def test_one_that_is_not_ready_yet_has_its_turn_all_the_same() -> None:
    play = Play().begin().ready(100).lose("d1")
    assert GiveTurn(101) in play.did and play.alive == {101: Role.STANDBY}


def test_a_lost_standby_is_replaced_and_nobody_else_is_touched() -> None:
    play = both().lose("d2", work_too=False)
    assert play.alive == {100: Role.FIRST, 102: Role.STANDBY} and GiveTurn(101) not in play.did


def test_a_domain_that_is_only_left_is_worked_in_to_the_end() -> None:
    play = both().lose("d1", work_too=False).lose("d9")
    assert play.alive == {100: Role.FIRST, 101: Role.STANDBY}


@pytest.mark.parametrize("status", [1, -11])
def test_who_ends_with_an_error_is_followed(status: int) -> None:
    play = both().exits(100, status)
    assert GiveTurn(101) in play.did
    cold = Play(warm=False).begin().ready(100).exits(100, status)
    assert cold.did[-1] == Start(Role.AGAIN) and cold.alive == {101: Role.AGAIN}


def test_who_ends_well_ends_all() -> None:
    play = both().exits(100, 0)
    assert (play.status, play.alive) == (0, {})
    assert Play().begin().exits(100, 0).status == 0


def test_a_program_that_fails_all_the_time_is_left_with_its_status() -> None:
    play = Play(warm=False, restarts=3).begin()
    for pid in range(100, 103):
        play.exits(pid, 7)
    assert play.status is None
    play.exits(103, 7)
    assert play.status == 7 and play.said[-1] == "given-up"
    assert play.rota.pause_s == 2.0, "0.25, then twice as long each time"
    ready = Play(warm=False).begin().ready(100).exits(100, 7)
    assert ready.rota.pause_s == 0.0
    killed = Play(warm=False, restarts=1).begin().exits(100, -11).exits(101, -11)
    assert killed.status == -11, "the signal's, for who maps it"
    slow = Play(warm=False, restarts=3).begin()
    for pid in range(100, 120):
        slow.now += 30.0
        slow.exits(pid, 7)
    assert slow.status is None


def test_standbys_that_never_become_ready_are_given_up_and_restarts_are_cold() -> None:
    play = Play().begin().ready(100)
    for pid in (101, 102, 103):
        play.exits(pid, 1)
    assert play.alive == {100: Role.FIRST} and play.said[-1] == "cold"
    assert not play.rota.wants_standby()
    play.exits(100, 1)
    assert play.did[-1] == Start(Role.AGAIN)


def test_standbys_that_are_ready_and_die_soon_are_given_up_too() -> None:
    play = Play().begin().ready(100)
    for pid in (101, 102, 103):
        play.ready(pid).exits(pid, 1)
    assert play.alive == {100: Role.FIRST} and play.said[-1] == "cold"
    steady = Play().begin().ready(100)
    for pid in range(101, 110):
        steady.ready(pid)
        steady.now += STEADY_S
        steady.exits(pid, 1)
    assert steady.alive == {100: Role.FIRST, 110: Role.STANDBY}


def test_both_in_one_domain_that_is_lost_are_ended_and_a_third_comes() -> None:
    play = Play().begin().ready(100)
    assert play.rota.waiting is not None
    play.rota.waiting.domain = "d1"
    play.domain = 3
    play.lose("d1")
    assert play.alive == {102: Role.AGAIN} and not any(isinstance(a, GiveTurn) for a in play.did)


def test_who_is_just_being_started_when_the_turn_is_due_gets_it() -> None:
    rota = Scheduler(warm=True)
    rota.begin()
    rota.started(100, "d1")
    assert rota.ready(100, 0.0) == [Start(Role.STANDBY)]
    assert rota.domain_left("d1", "fault", 0.0)[1:] == [End(100)]
    assert rota.ended(100, -9, 1.0) == [Settle(100)]
    assert rota.settled(100, RemainingWork.NOTHING) == []
    assert rota.started(101, "d2") == [GiveTurn(101)]
    # If that process could not be started, mpsd-standby starts a new process, to work.
    again = Scheduler(warm=True)
    again.begin()
    again.started(100, "d1")
    again.ready(100, 0.0)
    again.ended(100, 1, 1.0)
    again.settled(100, RemainingWork.NOTHING)
    assert again.not_started(127) == [Start(Role.AGAIN)]
    # A process in a domain that faulted meanwhile is ended.
    again.domain_left("d5", "fault", 1.0)
    assert again.started(102, "d5") == [End(102)]
    assert again.ended(102, -9, 2.0) == [Settle(102)]
    assert again.settled(102, RemainingWork.NOTHING) == [Start(Role.AGAIN)]
    assert again.not_started(69) == [Leave(69)]


def test_unseen_work_holds_up_nobody_for_good_and_is_said() -> None:
    play = both()
    del play.alive[100]
    assert play.rota.ended(100, 1, 0.0) == [Settle(100)]
    play.do(play.rota.settled(100, RemainingWork.UNKNOWN))
    assert "unseen" in play.said and GiveTurn(101) in play.did


def test_without_a_standby_domain_it_is_asked_for_again() -> None:
    rota = Scheduler(warm=True)
    assert rota.begin() == [Start(Role.FIRST)]
    rota.started(100, "d1")
    assert rota.ready(100, 0.0) == [Start(Role.STANDBY)]
    assert not rota.not_started()
    assert rota.wants_standby() == [Start(Role.STANDBY)]


def test_nobody_goes_on_beside_work_that_does_not_end() -> None:
    play = both()
    del play.alive[100]
    assert play.rota.ended(100, 1, 0.0) == [Settle(100)]
    play.do(play.rota.settled(100, RemainingWork.WORK))
    assert (play.status, play.alive) == (1, {}) and play.said[-1] == "given-up"


def test_a_stop_ends_both_and_starts_nobody() -> None:
    play = both()
    play.do(play.rota.stop(143))
    assert (play.status, play.alive) == (143, {})
    assert not play.rota.stop(130)


def test_a_process_is_looked_for_less_often_the_longer_it_lasts() -> None:
    waits = [turns.poll_pause(waited) for waited in (0.0, 0.05, 30.0)]
    assert waits == [turns.FIRST_POLL_S, 0.01, turns.LONGEST_POLL_S]
