"""The schedule of mpsd-standby for a process that releases its memory before it ends."""

from __future__ import annotations

import random

from mpsd_client.standby.schedule import End, GiveTurn, RemainingWork, Role, Settle
from tests.support.rotas import Play, both


def hearing(*, warm: bool = True, restarts: int = 5) -> Play:
    """100 works in d1, accepts the command to release and dies slowly; if warm, 101 waits in d2."""
    play = Play(warm=warm, restarts=restarts, hear=True)
    play.slow = {100}
    play.begin().ready(100)
    if warm:
        play.ready(101)
    play.domain = 2
    return play


def test_who_has_let_go_is_followed_at_once_and_ends_beside_the_next() -> None:
    play = hearing().lose("d1")
    assert play.told == {100} and not {End(100), GiveTurn(101)} & set(play.did)
    play.leaves(100)
    assert play.did[-2:] == [End(100), GiveTurn(101)]
    # Its message counts once, its deadline is void, and a third process waits once 100 has ended and settled.
    play.leaves(100).do(play.rota.release_overdue(100))
    play.ready(101)
    assert play.did[-1] == GiveTurn(101) and play.alive.keys() == {100, 101}
    del play.alive[100]
    assert play.rota.ended(100, -9, 0.0) == [Settle(100)]
    assert not play.rota.wants_standby(), "its memory may still be there"
    assert play.rota.settled(100, RemainingWork.NOTHING) == []
    play.do(play.rota.wants_standby())
    assert play.alive.keys() == {101, 102}


def test_who_has_let_go_is_followed_cold_as_well() -> None:
    play = hearing(warm=False).lose("d1")
    assert play.alive == {100: Role.FIRST}
    play.leaves(100)
    assert play.alive == {100: Role.FIRST, 101: Role.AGAIN}
    play.ready(101).die(100)
    assert play.rota.working is not None and play.rota.working.number == 101


def test_who_does_not_let_go_is_ended_in_time_and_followed_when_nothing_of_it_is_left() -> None:
    play = hearing().lose("d1")
    play.do(play.rota.release_overdue(100))
    assert play.did[-1] == End(100) and GiveTurn(101) not in play.did
    play.die(100)
    assert play.did[-2:] == [Settle(100), GiveTurn(101)]


def test_nobody_is_ended_who_was_not_told_to_let_go() -> None:
    play = hearing()
    assert not play.rota.release_overdue(100) and not play.rota.release_overdue(101)


def test_a_word_that_comes_late_counts_too() -> None:
    play = hearing().lose("d1")
    play.do(play.rota.release_overdue(100))
    play.leaves(100)
    assert play.did[-2:] == [End(100), GiveTurn(101)], "ended once"


def test_an_end_that_comes_before_the_word_counts() -> None:
    play = hearing().lose("d1").die(100)
    assert play.did[-2:] == [Settle(100), GiveTurn(101)]
    play.do([*play.rota.memory_released(100, 0.0), *play.rota.release_overdue(100)])
    assert play.did[-1] == GiveTurn(101)


def test_who_lets_go_by_itself_is_followed_when_the_loss_is_heard_of() -> None:
    play = hearing().leaves(100)
    assert GiveTurn(101) not in play.did and play.alive == {100: Role.FIRST, 101: Role.STANDBY}
    play.lose("d1")
    assert play.did[-2:] == [End(100), GiveTurn(101)] and not play.told
    # If mpsd reports no fault, the successor waits for its end.
    alone = hearing().leaves(100).die(100)
    assert alone.did[-2:] == [Settle(100), GiveTurn(101)]


def test_both_in_one_domain_and_the_first_has_let_go_by_itself() -> None:
    play = hearing()
    assert play.rota.waiting is not None
    play.rota.waiting.domain = "d1"
    play.leaves(100).lose("d1")
    assert play.alive == {100: Role.FIRST, 102: Role.AGAIN} and GiveTurn(101) not in play.did


def test_without_a_fault_or_an_ear_its_end_is_waited_for() -> None:
    server_died = hearing().lose("d1", faulted=False)
    assert server_died.did[-1] == End(100) and not server_died.told
    server_died.leaves(100)
    assert GiveTurn(101) not in server_died.did, "said, but not to be relied on"
    deaf = both().lose("d1")
    assert not deaf.told and GiveTurn(101) in deaf.did


def test_a_program_that_is_given_up_is_left_with_its_status_though_it_has_let_go() -> None:
    play = hearing(warm=False, restarts=1)
    play.slow = {100, 101}
    play.lose("d1").leaves(100).die(100).ready(101)
    play.domain = 3
    play.lose("d2").leaves(101)
    assert play.alive == {101: Role.AGAIN} and play.did[-1] == End(101)
    play.die(101)
    assert (play.status, play.said[-1]) == (-9, "given-up")


def test_nobody_leaves_before_who_has_let_go_has_ended() -> None:
    play = hearing().lose("d1").leaves(100)
    play.exits(101, 0)
    assert play.status is None and play.alive == {100: Role.FIRST}
    assert play.die(100).status == 0
    stopped = hearing().lose("d1").leaves(100)
    stopped.do(stopped.rota.stop(143))
    assert stopped.status is None and stopped.alive == {100: Role.FIRST}
    assert stopped.die(100).status == 143
    # A process told to release its memory while everything is being stopped has no successor.
    told = hearing().lose("d1")
    told.do(told.rota.stop(143))
    told.leaves(100).die(100)
    assert (told.status, told.alive) == (143, {}) and GiveTurn(101) not in told.did


def test_work_that_does_not_end_is_said_where_its_memory_was_let_go_of() -> None:
    play = hearing().lose("d1").leaves(100)
    del play.alive[100]
    assert play.rota.ended(100, -9, 0.0) == [Settle(100)]
    play.do(play.rota.settled(100, RemainingWork.WORK))
    assert play.said[-1] == "stays" and play.status is None and play.alive == {101: Role.STANDBY}


def test_whatever_happens_two_never_have_the_turn() -> None:
    """Random lives: at most one works, only a living process gets a turn, and everything ends."""
    for seed in range(600):
        choose = random.Random(seed)
        play = Play(restarts=100, hear=seed % 2 == 1).begin()
        for _ in range(60):
            if play.status is not None:
                break
            rota, pids = play.rota, sorted(play.alive)
            if choose.random() < 0.3:
                play.slow = set(pids)
            match choose.randrange(9):
                case 0 | 1:
                    play.ready(choose.choice(pids or [1]))
                case 2 if pids:
                    play.exits(choose.choice(pids), choose.choice((1, -9, 2)))
                case 3:
                    play.domain += choose.randrange(2)
                    if choose.random() < 0.2:
                        play.lost.clear()
                        play.domain = 1
                    play.lose(f"d{choose.randrange(1, 4)}", work_too=choose.random() < 0.7)
                case 4:
                    play.do(rota.wants_standby())
                case 5 if rota.working is not None and choose.random() < 0.05:
                    play.exits(rota.working.number, 0)
                case 6 if play.told & set(pids):
                    play.leaves(choose.choice(sorted(play.told & set(pids))))
                case 7 if play.told & set(pids):
                    play.do(rota.release_overdue(choose.choice(sorted(play.told & set(pids)))))
                case 8 if play.killed & set(pids):
                    play.die(choose.choice(sorted(play.killed & set(pids))))
            works = {a.number for a in (rota.working, rota.waiting) if a is not None}
            assert play.status is not None or works <= set(play.alive) <= works | play.killed & play.left
        if play.status is None:
            play.slow, over = set(), play.rota.stopping
            play.do(play.rota.stop(143))
            for pid in sorted(play.alive):
                if pid not in play.killed:
                    play.do(play.rota.release_overdue(pid))
            for pid in sorted(play.killed & set(play.alive)):
                play.die(pid)
            assert play.status is not None if over else play.status == 143
        assert not play.alive
