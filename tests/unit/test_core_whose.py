"""Who is the offender by what programs have found at the SMs themselves: named, or the last one to go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core import memberevents as mev
from mpsd.core.failover import FAULTED_AGAIN
from mpsd.core.standby import Turn
from mpsd.core.whose import IN_ITS_CODE
from mpsd.model import Confidence, FailoverMode, ServerState, Whose
from tests.support.core import process
from tests.unit.test_core_failover import Site, turns_of
from tests.unit.test_core_turns import all_told, another, comes, lose, turns

UNKNOWN, OWN, OTHERS, FIRST = Whose


def exception(world: Site) -> None:
    """A kernel's exception that names nobody."""
    world.kernel(13, "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Misaligned Address", None, "")
    world.do(ev.ServerFatalLogged("d1", "Server is handling a fatal GPU error."))


def moves(world: Site, whose: dict[int, Whose], *, takes_ms: int = 30, resting: tuple[int, ...] = ()) -> None:
    """They move, in that order. `resting`: who has nothing in flight."""
    for pid, found in whose.items():
        if found is not UNKNOWN:
            world.do(mev.MemberLooked(process(pid), 2, found))
        comes(world, pid, takes_ms, waits=pid not in resting)


def killed(world: Site) -> set[int]:
    return {e.client.process.pid for e in world.ever(fx.Kill)}


def offender(world: Site) -> tuple[int | None, Confidence]:
    record = max(world.records().values(), key=lambda r: r.id)
    return record.offender.id.process.pid if record.offender else None, record.confidence


@pytest.mark.parametrize("pids", [(10, 11, 12), (12, 11, 10), (11, 12, 10)])
@pytest.mark.parametrize("resting", [(), (11,)])
def test_one_in_whose_code_it_was_is_named_when_all_have_moved(
    pids: tuple[int, ...], resting: tuple[int, ...]
) -> None:
    """10, the oldest, who waits even if its own wait had succeeded as if nothing had happened."""
    world = all_told(10, 11, 12)
    exception(world)
    found = {10: OWN, 11: OTHERS, 12: OTHERS}
    for pid in pids:
        assert killed(world) == set()
        moves(world, {pid: found[pid]}, resting=resting)
    assert killed(world) == {10}
    assert offender(world) == (10, Confidence.LIKELY)
    record = max(world.records().values(), key=lambda r: r.id)
    assert record.evidence[-1].text.startswith(IN_ITS_CODE) and record.suspects == ()
    assert {p.id.process.pid for p in record.victims} == {11, 12}
    # It does nothing again, and the others do theirs at once, side by side.
    others = {11, 12} - {*resting}
    assert turns_of(world) == dict.fromkeys(others, Turn.HAS)
    assert set(turns(world)) == others
    # Its line ends first, as a rule.
    world.do(mev.MemberLeft(process(10)))
    world.do(ev.ClientDied(process(10)))
    # What it had in flight looks as if it did not end, but it did nothing where it is now.
    assert {e.client.domain for e in world.made(fx.ReleaseLease) if e.client.process == process(10)} >= {"d2"}
    assert not [e for e in world.ever(fx.ProbeWork) if e.client.process == process(10)]
    fates = {f.process.pid: f for f in world.failover().fates}
    assert [fates[pid].whose for pid in (10, 11, 12)] == [OWN, OTHERS, OTHERS]
    assert "made the fault" in fates[10].why


def test_nobody_is_named_by_what_is_done_again_side_by_side() -> None:
    world = all_told(10, 11, 12)
    exception(world)
    moves(world, {10: OWN, 11: OTHERS, 12: OTHERS})
    world.do(ev.ClientDied(process(10)))
    world.started("d3")
    lose(world, "d2")
    assert not [f for f in world.failover().fates if f.why == FAULTED_AGAIN]
    assert offender(world)[0] is None


def test_who_is_not_to_be_ended_does_its_work_again_last() -> None:
    world = all_told(10, 11)
    world.state = replace(world.state, policy=replace(world.state.policy, evict_offender=False))
    exception(world)
    moves(world, {10: OWN, 11: OTHERS})
    assert killed(world) == set() and offender(world) == (10, Confidence.LIKELY)
    assert turns_of(world) == {10: Turn.WAITS, 11: Turn.HAS}


@pytest.mark.parametrize("found", [{10: OWN, 11: OWN, 12: OTHERS}, {10: OTHERS, 11: OTHERS, 12: OTHERS}])
def test_where_it_is_not_one_alone_nobody_is_named(found: dict[int, Whose]) -> None:
    world = all_told(10, 11, 12)
    exception(world)
    moves(world, found)
    assert killed(world) == set() and offender(world)[0] is None
    assert Turn.HAS in turns_of(world).values()


@pytest.mark.parametrize(
    ("found", "last"),
    [
        ({10: FIRST, 11: UNKNOWN, 12: UNKNOWN}, 10),
        ({10: UNKNOWN, 11: FIRST, 12: OTHERS}, 11),
        ({10: OTHERS, 11: UNKNOWN, 12: OTHERS}, 11),
        ({10: UNKNOWN, 11: UNKNOWN, 12: UNKNOWN}, 12),
    ],
)
def test_the_likeliest_by_what_they_found_is_the_last(found: dict[int, Whose], last: int) -> None:
    """Though others are younger, and what they launched is new."""
    world = all_told(10, 11, 12)
    exception(world)
    for pid, whose in found.items():
        if whose is not UNKNOWN:
            world.do(mev.MemberLooked(process(pid), 2, whose))
        comes(world, pid, 30, new_s=0.0 if pid != last and last != 12 else None)
    for _ in range(2):
        (who,) = (pid for pid, turn in turns_of(world).items() if turn is Turn.HAS)
        assert who != last
        world.do(mev.MemberDone(process(who), 2))
    assert turns_of(world) == {last: Turn.WAITS}
    assert killed(world) == set()


def test_nobody_is_named_where_somebody_says_nothing() -> None:
    """The other one's look may have come too late. It goes on last all the same."""
    world = all_told(10, 11, 12)
    exception(world)
    moves(world, {10: OWN, 11: OTHERS}, takes_ms=5)
    assert turns(world) == [11]
    world.do(mev.MemberDone(process(11), 2))
    # It waits until all have been heard, however long that takes.
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-last" and "10 " in e.subject)
    world.timer(timer.kind, timer.subject)
    assert turns(world) == [11] and killed(world) == set()
    moves(world, {12: UNKNOWN})
    assert killed(world) == set() and offender(world)[0] is None
    assert turns_of(world) in ({10: Turn.WAITS, 12: Turn.HAS}, {10: Turn.HAS, 12: Turn.WAITS})


@pytest.mark.parametrize("how", ["a stranger", "one in mode keep", "one that is not ready"])
def test_nobody_is_named_where_another_one_was_there(how: str) -> None:
    world = all_told(10, 11)
    another(world, 9, how) if "not ready" not in how else world.attach(9, "d1")
    if "not ready" in how:
        world.hello(9, FailoverMode.EXACT)
    exception(world)
    moves(world, {10: OWN, 11: OTHERS})
    assert killed(world) == set() and offender(world)[0] is None


def test_who_has_ended_takes_back_nothing_that_it_said() -> None:
    """Two that were forked from one."""
    world = all_told(10, 11, 12)
    exception(world)
    moves(world, {10: OWN, 11: OWN})
    world.do(ev.ClientDied(process(11)))
    moves(world, {12: OTHERS})
    assert killed(world) == set() and offender(world)[0] is None


def test_who_has_had_its_turn_is_not_named_by_what_comes_later() -> None:
    world = all_told(10, 11)
    exception(world)
    moves(world, {10: OWN}, takes_ms=5)
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-wait")
    world.timer(timer.kind, timer.subject)
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-last")
    world.timer(timer.kind, timer.subject)
    assert turns(world) == [10]
    world.do(mev.MemberDone(process(10), 2))
    moves(world, {11: OTHERS})
    assert killed(world) == set()


@pytest.mark.parametrize("how", ["its turn", "its kill"])
def test_what_one_may_have_begun_is_waited_for(how: str) -> None:
    """It was named, and not ended at once."""
    world = all_told(10, 11)
    exception(world)
    moves(world, {10: OWN, 11: OTHERS})
    assert killed(world) == {10}
    if how == "its kill":
        world.do(ev.KillRefused(process(10), "no reason"))
    else:
        world.do(mev.MemberDone(process(10), 2, missing="nobody said anything"))
    world.do(ev.ClientDied(process(10)))
    assert "d2" in [e.client.domain for e in world.made(fx.ProbeWork)]


def test_a_server_that_died_is_no_exception() -> None:
    """What its clients find then is an old one."""
    world = all_told(10, 11)
    world.do(ev.ServerStateSeen("d1", ServerState.FAULT))
    moves(world, {10: OWN, 11: OTHERS})
    assert killed(world) == set()


def test_a_word_that_nobody_was_to_say_is_ignored() -> None:
    world = all_told(10, 11)
    world.do(mev.MemberLooked(process(10), 2, OWN))
    assert world.state.members[process(10)].whose is UNKNOWN
    exception(world)
    world.do(mev.MemberLooked(process(10), 7, OWN))
    world.do(mev.MemberLooked(process(99), 2, OWN))
    assert world.state.members[process(10)].whose is UNKNOWN


def test_what_was_found_once_is_forgotten_with_the_next_fault() -> None:
    world = all_told(10, 11)
    exception(world)
    moves(world, {10: OTHERS, 11: OTHERS})
    world.do(mev.MemberDone(process(turns(world)[0]), 2))
    world.started("d3")
    for pid in (10, 11):
        if turns_of(world).get(process(pid).pid) is None:
            world.is_ready(pid, 3)
    lose(world, "d2")
    told = world.told()
    assert told and all(world.state.members[process(pid)].whose is UNKNOWN for pid in told)
