"""Attribution of SM exceptions by program counters: a client is named, or the likeliest replays last."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import Confidence, ExceptionOwner, FailoverMode, ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Turn
from mpsd.core.failover.plan import FAULTED_AGAIN
from mpsd.core.failover.programcounter import HAD_ITS_ERROR, IN_ITS_CODE
from tests.support.core import kernel_xid, process
from tests.unit.test_core_failover import Site, turns_of
from tests.unit.test_core_serialreplay import all_told, another, comes, lose, turns

UNKNOWN, OWN, OTHERS, FIRST, NO_SIGN = ExceptionOwner


def exception(world: Site) -> None:
    """Report an SM exception that names no client."""
    world.kernel(13, "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Misaligned Address", None, "")
    world.do(ev.ServerFatalLogged("d1", "Server is handling a fatal GPU error."))


def moves(
    world: Site, whose: dict[int, ExceptionOwner], *, takes_ms: int = 30, resting: tuple[int, ...] = ()
) -> None:
    """Move these clients, in that order. `resting`: clients without work in flight."""
    for pid, found in whose.items():
        if found is not UNKNOWN:
            world.do(mev.MemberFoundCode(process(pid), 2, found))
        comes(world, pid, takes_ms, waits=pid not in resting)


def killed(world: Site) -> set[int]:
    return {e.client.process.pid for e in world.ever(fx.Kill)}


def offender(world: Site) -> tuple[int | None, Confidence]:
    record = max(world.records().values(), key=lambda r: r.id)
    return record.offender.id.process.pid if record.offender else None, record.confidence


@pytest.mark.parametrize("pids", [(10, 11, 12), (12, 11, 10), (11, 12, 10)])
@pytest.mark.parametrize("resting", [(), (11,)])
@pytest.mark.parametrize(("claim", "denial"), [(OWN, OTHERS), (FIRST, NO_SIGN)])
def test_one_that_claims_the_fault_is_named_when_all_others_deny_it(
    pids: tuple[int, ...], resting: tuple[int, ...], claim: ExceptionOwner, denial: ExceptionOwner
) -> None:
    """Client 10, the oldest, waits even if its own wait succeeded as if there had been no fault."""
    world = all_told(10, 11, 12)
    if claim is OWN:
        exception(world)
    else:
        world.do(ev.ServerFatalLogged("d1", "Server is handling a fatal GPU error."))
    found = {10: claim, 11: denial, 12: denial}
    for pid in pids:
        assert killed(world) == set()
        moves(world, {pid: found[pid]}, resting=resting)
    assert killed(world) == {10}
    assert offender(world) == (10, Confidence.LIKELY)
    record = max(world.records().values(), key=lambda r: r.id)
    said = IN_ITS_CODE if claim is OWN else HAD_ITS_ERROR
    assert record.evidence[-1].text.startswith(said) and record.suspects == ()
    assert {m.party.id.process.pid for m in record.moved} == {11, 12} and not record.victims
    # It does not replay, and the other clients replay as soon as they have moved, in parallel.
    others = {11, 12} - {*resting}
    assert turns_of(world) == dict.fromkeys(others, Turn.HAS)
    assert set(turns(world)) == others
    # Its connection usually ends first.
    world.do(mev.MemberLeft(process(10)))
    world.do(ev.ClientDied(process(10)))
    # Its work in flight seems not to have ended, but it ran nothing in its present domain.
    assert {e.client.domain for e in world.made(fx.ReleaseLease) if e.client.process == process(10)} >= {"d2"}
    assert not [e for e in world.ever(fx.ProbeWork) if e.client.process == process(10)]
    entries = {f.process.pid: f for f in world.failover().fates}
    assert [entries[pid].whose for pid in (10, 11, 12)] == [claim, denial, denial]
    assert "caused the fault" in entries[10].why


def test_nobody_is_named_by_what_is_done_again_side_by_side() -> None:
    world = all_told(10, 11, 12)
    exception(world)
    moves(world, {10: OWN, 11: OTHERS, 12: OTHERS})
    world.do(ev.ClientDied(process(10)))
    world.started("d3")
    lose(world, "d2")
    assert not [f for f in world.failover().fates if f.why == FAULTED_AGAIN]
    assert offender(world)[0] is None


def test_who_is_not_to_be_ended_does_not_replay_beside_the_others() -> None:
    world = all_told(10, 11)
    world.state = replace(world.state, policy=replace(world.state.policy, evict_offender=False))
    exception(world)
    moves(world, {10: OWN, 11: OTHERS})
    assert killed(world) == set() and offender(world) == (10, Confidence.LIKELY)
    assert turns_of(world) == {10: Turn.WAITS, 11: Turn.HAS}


@pytest.mark.parametrize(
    "found",
    [
        {10: OWN, 11: OWN, 12: OTHERS},
        {10: OTHERS, 11: OTHERS, 12: OTHERS},
        {10: OWN, 11: OTHERS, 12: NO_SIGN},
        {10: FIRST, 11: NO_SIGN, 12: OTHERS},
        {10: FIRST, 11: NO_SIGN, 12: UNKNOWN},
        {10: FIRST, 11: OWN, 12: OTHERS},
    ],
)
def test_where_the_reports_are_no_proof_nobody_is_named(found: dict[int, ExceptionOwner]) -> None:
    """Clients that deny the fault go on at once, and clients that claim it replay nowhere beside them."""
    world = all_told(10, 11, 12)
    exception(world)
    moves(world, found)
    assert killed(world) == set() and offender(world)[0] is None
    for pid, whose in found.items():
        assert (pid in turns(world)) == (whose in (OTHERS, NO_SIGN, UNKNOWN))


@pytest.mark.parametrize(
    ("found", "last"),
    [
        ({10: FIRST, 11: UNKNOWN, 12: UNKNOWN}, 10),
        ({10: UNKNOWN, 11: FIRST, 12: OTHERS}, 11),
        ({10: OTHERS, 11: UNKNOWN, 12: OTHERS}, 11),
        ({10: UNKNOWN, 11: UNKNOWN, 12: UNKNOWN}, 12),
    ],
)
def test_the_likeliest_by_what_they_found_does_not_replay_beside_the_others(
    found: dict[int, ExceptionOwner], last: int
) -> None:
    """This holds even if other clients are younger, and their kernels are new."""
    world = all_told(10, 11, 12)
    exception(world)
    for pid, whose in found.items():
        if whose is not UNKNOWN:
            world.do(mev.MemberFoundCode(process(pid), 2, whose))
        comes(world, pid, 30, new_s=0.0 if pid != last and last != 12 else None)
    others = {10, 11, 12} - {last}
    while replaying := [pid for pid, turn in turns_of(world).items() if turn is Turn.HAS]:
        world.do(mev.MemberDone(process(replaying[0]), 2))
    assert set(turns(world)) == others and turns_of(world) == {last: Turn.WAITS}
    assert killed(world) == set()


def test_nobody_is_named_where_somebody_says_nothing() -> None:
    """The other client may have looked too late. Client 10 replays last in any case."""
    world = all_told(10, 11, 12)
    exception(world)
    moves(world, {10: OWN, 11: OTHERS}, takes_ms=5)
    assert turns(world) == [11]
    world.do(mev.MemberDone(process(11), 2))
    # It is offered its trial domain, and moves there only when all clients have reported.
    world.started("d3")
    world.is_ready(10, 3)
    assert turns(world) == [11] and killed(world) == set() and world.told() == []
    moves(world, {12: UNKNOWN})
    assert killed(world) == set() and offender(world)[0] is None
    assert world.told() == [10] and turns_of(world) == {10: Turn.WAITS, 12: Turn.HAS}


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
    """Two clients that were forked from one."""
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
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-trial")
    world.timer(timer.kind, timer.subject)
    assert turns(world) == [10]
    world.do(mev.MemberDone(process(10), 2))
    moves(world, {11: OTHERS})
    assert killed(world) == set()


@pytest.mark.parametrize("how", ["its turn", "its kill"])
def test_what_one_may_have_begun_is_waited_for(how: str) -> None:
    """The client was named, and not killed at once."""
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
    """A fault that its clients find then is an old one."""
    world = all_told(10, 11)
    world.do(ev.ServerStateSeen("d1", ServerState.FAULT))
    moves(world, {10: OWN, 11: OTHERS})
    assert killed(world) == set()


def test_a_word_that_nobody_was_to_say_is_ignored() -> None:
    world = all_told(10, 11)
    world.do(mev.MemberFoundCode(process(10), 2, OWN))
    assert world.state.members[process(10)].whose is UNKNOWN
    exception(world)
    world.do(mev.MemberFoundCode(process(10), 7, OWN))
    world.do(mev.MemberFoundCode(process(99), 2, OWN))
    assert world.state.members[process(10)].whose is UNKNOWN


def test_what_was_found_once_is_forgotten_with_the_next_fault() -> None:
    world = all_told(10, 11)
    exception(world)
    moves(world, {10: OTHERS, 11: OTHERS})
    world.started("d3")
    for pid in (10, 11):
        world.do(mev.MemberDone(process(pid), 2))
        world.is_ready(pid, 3)
    lose(world, "d2")
    told = world.told()
    assert told and all(world.state.members[process(pid)].whose is UNKNOWN for pid in told)


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("xid", [13, 31, None])
def test_programs_are_told_whether_the_driver_logged_an_exception(xid: int | None, is_read: bool) -> None:
    """A trap has no Xid 13. If mpsd does not read the kernel log there may have been one."""
    world = all_told(10, 11)
    world.do(mev.KernelLogFollowed(is_read))
    world.now += 5
    if xid is not None:
        world.kernel(xid, "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Misaligned Address", None, "")
    world.do(ev.ServerFatalLogged("d1", "Server is handling a fatal GPU error."))
    told = {e.process.pid: e.exception_logged for e in world.made(fx.Move)}
    assert told == dict.fromkeys((10, 11), xid == 13 or not is_read)


def test_a_log_that_mpsd_reads_only_lately_may_have_had_an_exception() -> None:
    """For instance it has started after the fault."""
    world = all_told(10)
    world.do(mev.KernelLogFollowed(True))
    world.now += 0.5
    world.do(ev.ServerFatalLogged("d1", "Server is handling a fatal GPU error."))
    assert [e.exception_logged for e in world.made(fx.Move)] == [True]


def test_an_exception_of_an_unknown_gpu_counts_for_each() -> None:
    world = all_told(10)
    world.do(kernel_xid(13, "Graphics SM Warp Exception", None, "", None))
    world.do(ev.ServerFatalLogged("d1", "Server is handling a fatal GPU error."))
    assert [e.exception_logged for e in world.made(fx.Move)] == [True]


def test_where_the_driver_logged_an_exception_nobody_has_the_error_of_a_trap() -> None:
    world = all_told(10, 11)
    exception(world)
    moves(world, {10: FIRST, 11: NO_SIGN})
    assert killed(world) == set() and offender(world)[0] is None


@pytest.mark.parametrize("denial", [OTHERS, NO_SIGN])
def test_a_program_that_goes_on_is_told_of_no_turn(denial: ExceptionOwner) -> None:
    world = all_told(10, 11, 12)
    exception(world)
    assert {e.process.pid for e in world.made(fx.Move) if e.may_go_on} == {10, 11, 12}
    world.do(mev.MemberFoundCode(process(11), 2, denial, goes_on=True))
    comes(world, 11, 30)
    assert turns(world) == [] and turns_of(world)[11] is Turn.HAS
    world.do(mev.MemberFoundCode(process(12), 2, denial))
    comes(world, 12, 30)
    assert turns(world) == [12]
    world.do(mev.MemberDone(process(11), 2))
    assert 11 not in turns_of(world)


def test_a_claim_goes_on_with_nothing() -> None:
    """mpsd does not take a program's word that it goes on if it claims the fault."""
    world = all_told(10, 11)
    exception(world)
    world.do(mev.MemberFoundCode(process(10), 2, OWN, goes_on=True))
    comes(world, 10, 30)
    assert turns_of(world)[10] is Turn.WAITS


def test_who_was_in_doubt_waits_for_its_turn_even_if_it_denies_the_next_fault() -> None:
    """Client 11 replayed beside another one when the next domain faulted."""
    world = all_told(10, 11)
    exception(world)
    for pid in (10, 11):
        world.do(mev.MemberFoundCode(process(pid), 2, OTHERS, goes_on=pid == 11))
        comes(world, pid, 30)
    world.do(mev.MemberDone(process(10), 2))
    world.started("d3")
    world.is_ready(10, 3)
    world.do(ev.ServerFatalLogged("d2", "Server is handling a fatal GPU error."))
    assert {e.process.pid: e.may_go_on for e in world.made(fx.Move)} == {10: True}
    world.is_ready(11, 3)
    assert {e.process.pid: e.may_go_on for e in world.made(fx.Move)} == {11: False}


@pytest.mark.parametrize("heard_before_fault", [True, False])
def test_a_replay_without_a_turn_counts_whenever_mpsd_hears_of_it(heard_before_fault: bool) -> None:
    """The domain faults while the program replays; its report may come after the sign of that."""
    world = all_told(10, 11)
    exception(world)
    world.started("d3")
    world.do(mev.MemberFoundCode(process(11), 2, OTHERS, goes_on=True))
    if heard_before_fault:
        comes(world, 11, 30)
    world.do(ev.ServerFatalLogged("d2", "Server is handling a fatal GPU error."))
    if not heard_before_fault:
        comes(world, 11, 30)
    assert world.state.members[process(11)].doubts == 1 and 11 not in turns_of(world)
    world.is_ready(11, 3)
    assert [e.may_go_on for e in world.made(fx.Move)] == [False]


def test_who_waits_for_its_turn_does_not_go_on_by_denying_the_next_fault() -> None:
    """Client 10 found nothing about the first fault, and has not replayed since."""
    world = all_told(10, 11, 12)
    exception(world)
    for pid, takes_ms in ((10, 50), (11, 15), (12, 20)):
        comes(world, pid, takes_ms)
    assert turns_of(world)[10] is Turn.WAITS
    world.started("d3")
    world.do(ev.ServerFatalLogged("d2", "Server is handling a fatal GPU error."))
    world.is_ready(10, 3)
    assert [(e.process.pid, e.may_go_on) for e in world.made(fx.Move)] == [(10, False)]


@pytest.mark.parametrize("later_s", [0.5, 5.0])
def test_a_participant_that_is_told_late_reads_the_sms(later_s: float) -> None:
    world = all_told(10)
    world.attach(11, "d1")
    world.hello(11, FailoverMode.EXACT)
    exception(world)
    world.now += later_s
    world.is_ready(11, 2)
    assert [(e.process.pid, e.exception_logged) for e in world.made(fx.Move)] == [(11, True)]


@pytest.mark.parametrize(("later_s", "logged"), [(0.5, True), (5.0, False)])
def test_an_exception_logged_for_an_earlier_fault_counts_for_a_while(later_s: float, logged: bool) -> None:
    """In a burst a line may be attributed to the fault of before."""
    world = all_told(10)
    exception(world)
    comes(world, 10, 30, waits=False)
    world.started("d3")
    world.is_ready(10, 3)
    world.now += later_s
    world.do(ev.ServerFatalLogged("d2", "Server is handling a fatal GPU error."))
    assert [e.exception_logged for e in world.made(fx.Move)] == [logged]


@pytest.mark.parametrize("heard", [False, True])
def test_nobody_is_named_beside_a_program_whose_present_home_is_not_known(heard: bool) -> None:
    """mpsd was started again: by its records 12 lives in d2, but it may have moved to d1 since."""
    world = all_told(10, 11)
    world.do(mev.MemberRestored(process(12), 1000, FailoverMode.EXACT, "d2"))
    for domain in ("d1", "d2"):
        world.attach(12, domain)
    if heard:
        world.hello(12, FailoverMode.EXACT, 2)
    exception(world)
    moves(world, {10: OWN, 11: OTHERS})
    assert killed(world) == ({10} if heard else set())
