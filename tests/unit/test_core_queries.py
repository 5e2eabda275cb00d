"""A client that takes no part in a fail-over denies a trap by the SM queries of its driver."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from mpsd.base.model import Confidence, ExceptionOwner, FailoverMode, Liveness, ReplayMode
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Turn
from mpsd.core.failover.programcounter import HAD_ITS_ERROR
from mpsd.core.failover.queries import WATCHED_MOST
from tests.support.core import facts, process, server_of
from tests.unit.test_core_failover import Site, again, turns_of
from tests.unit.test_core_programcounter import (
    FIRST,
    NO_SIGN,
    OTHERS,
    OWN,
    exception,
    killed,
    moves,
    offender,
)
from tests.unit.test_core_serialreplay import all_told, another, turns
from tests.unit.test_core_trial import arrives

STRANGER, SECOND_STRANGER = 9, 8


def trapped(*strangers: int) -> Site:
    """Clients 10 and 11 were told to move after a trap in d1. The strangers take no part."""
    world = all_told(10, 11)
    for pid in strangers:
        another(world, pid, "a stranger")
    trap(world)
    return world


def trap(world: Site, domain: str = "d1") -> None:
    world.do(ev.ServerFatalLogged(domain, "Server is handling a fatal GPU error."))
    world.kernel(43, "channel 0x1", server_of(domain).pid, "nvidia-cuda-mps")
    record = max(world.records().values(), key=lambda r: r.id)
    assert (record.domain, record.fault_class) == (domain, "sm-trap")


def finds(world: Site, pid: int, whose: ExceptionOwner) -> None:
    world.do(mev.MemberFoundCode(process(pid), 2, whose))


def queries(world: Site, pid: int = STRANGER, domain: str = "d1") -> None:
    world.do(mev.ClientQueried(domain, process(pid)))


def held(world: Site) -> list[set[int]]:
    return [{p.pid for p in e.clients} for e in world.ever(fx.HoldQueries) if e.domain == "d1"]


def released(world: Site) -> bool:
    return fx.ReleaseQueries("d1") in world.ever(fx.ReleaseQueries)


@pytest.mark.parametrize("order", ["claim, query, move", "claim, move, query"])
def test_the_claimant_is_named_without_a_trial_once_the_stranger_has_queried(order: str) -> None:
    world = trapped(STRANGER)
    assert held(world) == [{STRANGER}]
    finds(world, 11, NO_SIGN)
    finds(world, 10, FIRST)
    if order == "claim, query, move":
        queries(world)
    moves(world, {11: NO_SIGN, 10: FIRST})
    if order == "claim, move, query":
        assert killed(world) == set() and turns_of(world)[10] is Turn.WAITS
        queries(world)
    assert killed(world) == {10} and offender(world) == (10, Confidence.LIKELY)
    record = max(world.records().values(), key=lambda r: r.id)
    assert record.evidence[-1].text.startswith(HAD_ITS_ERROR)
    assert {v.id.process.pid for v in record.victims} == {STRANGER}
    # The innocent participant replays at once, and 10 never.
    assert turns(world) == [11]
    world.started("d3")
    assert again(world) == {}


def test_a_stranger_that_does_not_query_may_be_the_author() -> None:
    world = trapped(STRANGER)
    moves(world, {10: FIRST, 11: NO_SIGN})
    assert killed(world) == set() and offender(world)[0] is None
    world.started("d3")
    world.is_ready(10, 3)
    assert again(world) == {10: ReplayMode.IN_TURN}
    # It says no more once the suspect has left for its trial.
    queries(world)
    assert killed(world) == set() and offender(world)[0] is None
    arrives(world)
    assert turns_of(world)[10] is Turn.HAS


def test_every_stranger_has_to_query() -> None:
    world = trapped(STRANGER, SECOND_STRANGER)
    moves(world, {10: FIRST, 11: NO_SIGN})
    queries(world)
    queries(world)
    assert killed(world) == set()
    queries(world, SECOND_STRANGER)
    assert killed(world) == {10}


def test_a_stranger_that_has_just_ended_denies_nothing() -> None:
    world = all_told(10, 11)
    another(world, STRANGER, "a stranger")
    another(world, SECOND_STRANGER, "one that has just ended")
    trap(world)
    moves(world, {10: FIRST, 11: NO_SIGN})
    queries(world)
    assert killed(world) == set()
    # Its end does not make it deny the trap later, either.
    world.wait(world.state.policy.evidence_window_s + 1.0)
    queries(world)
    assert killed(world) == set() and offender(world)[0] is None


def test_a_participant_has_to_deny_the_trap_as_well() -> None:
    world = trapped(STRANGER)
    finds(world, 10, FIRST)
    queries(world)
    moves(world, {10: FIRST, 11: OTHERS})
    assert killed(world) == set() and offender(world)[0] is None


@pytest.mark.parametrize("claim", [(FIRST, NO_SIGN), (OWN, OTHERS)])
def test_queries_say_nothing_about_an_exception_with_an_address(
    claim: tuple[ExceptionOwner, ExceptionOwner],
) -> None:
    """The driver of its author queries the SMs as well, and may clear the address before others look."""
    world = all_told(10, 11)
    another(world, STRANGER, "a stranger")
    exception(world)
    moves(world, {10: claim[0], 11: claim[1]})
    assert held(world) == [{STRANGER}]
    queries(world)
    assert killed(world) == set() and offender(world)[0] is None


def test_an_address_in_its_own_code_is_no_claim_to_a_trap() -> None:
    """Another client may have its code at the same address, and cleared that address with its queries."""
    world = trapped(STRANGER)
    moves(world, {10: OWN, 11: OTHERS})
    queries(world)
    assert killed(world) == set() and offender(world)[0] is None


@pytest.mark.parametrize("later_s", [0.0, 2.5])
def test_in_a_burst_the_line_of_an_exception_may_belong_to_the_fault_that_seems_a_trap(
    later_s: float,
) -> None:
    """The driver logged it while a fault of another domain was open, so it was attributed to that."""
    world = all_told(10, 11)
    trap(world)
    moves(world, {10: NO_SIGN, 11: NO_SIGN}, resting=(10, 11))
    world.started("d3")
    for pid in (10, 11):
        world.is_ready(pid, 3)
    world.attach(SECOND_STRANGER, "d2")
    world.kernel(13, "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Out Of Range Address", None, "")
    world.do(ev.ServerFatalLogged("d2", "Server is handling a fatal GPU error."))
    world.kernel(43, "channel 0x1", server_of("d2").pid, "nvidia-cuda-mps")
    queries(world, SECOND_STRANGER, "d2")
    for pid, whose in ((10, NO_SIGN), (11, FIRST)):
        world.do(mev.MemberFoundCode(process(pid), 3, whose))
    world.now += later_s
    for pid in (10, 11):
        arrives(world, pid, 3)
    newest = max(world.records().values(), key=lambda r: r.id)
    assert (newest.domain, newest.fault_class) == ("d2", "sm-trap")
    assert killed(world) == set() and offender(world)[0] is None


def test_an_exception_of_unknown_kind_is_no_trap() -> None:
    world = all_told(10, 11)
    another(world, STRANGER, "a stranger")
    world.do(ev.ServerFatalLogged("d1", "Server is handling a fatal GPU error."))
    moves(world, {10: FIRST, 11: NO_SIGN})
    queries(world)
    assert killed(world) == set() and offender(world)[0] is None


def test_nobody_is_named_where_a_participant_came_late() -> None:
    """The late one was no participant at the fault. Its claim is not checked against the others' findings."""
    world = all_told(10, 11)
    world.attach(12, "d1")
    trap(world)
    finds(world, 10, FIRST)
    world.hello(12, FailoverMode.EXACT)
    queries(world, 12)
    world.is_ready(12, 2)
    moves(world, {12: FIRST, 10: FIRST})
    queries(world, 12)
    assert killed(world) == set() and offender(world)[0] is None


def test_a_trial_after_an_earlier_fault_does_not_keep_queries_from_denying_the_next_one() -> None:
    world = all_told(10, 11, 12)
    another(world, STRANGER, "a stranger")
    trap(world)
    moves(world, {10: FIRST, 11: NO_SIGN, 12: NO_SIGN})
    world.started("d3")
    world.is_ready(10, 3)
    arrives(world)
    for pid, generation in ((10, 3), (11, 2), (12, 2)):
        world.do(mev.MemberDone(process(pid), generation))
    assert killed(world) == set()
    world.started("d4")
    for pid in (11, 12):
        world.is_ready(pid, 4)
    world.attach(SECOND_STRANGER, "d2")
    trap(world, "d2")
    queries(world, SECOND_STRANGER, "d2")
    for pid, whose in ((12, NO_SIGN), (11, FIRST)):
        world.do(mev.MemberFoundCode(process(pid), 4, whose))
        arrives(world, pid, 4)
    assert killed(world) == {11}


@pytest.mark.parametrize("how", ["one in mode keep", "one that is not ready"])
def test_a_participant_that_takes_no_part_in_replays_is_not_held_and_denies_nothing(how: str) -> None:
    """Its proxy makes such calls itself."""
    world = all_told(10, 11)
    if how == "one in mode keep":
        another(world, STRANGER, how)
    else:
        world.attach(STRANGER, "d1")
        world.hello(STRANGER, FailoverMode.EXACT)
    trap(world)
    moves(world, {10: FIRST, 11: NO_SIGN})
    queries(world)
    assert held(world) == [] and killed(world) == set() and offender(world)[0] is None


def test_a_query_of_a_process_that_has_left_denies_nothing() -> None:
    world = trapped(STRANGER)
    moves(world, {10: FIRST, 11: NO_SIGN})
    world.do(ev.ClientLeft(process(STRANGER), "exec"))
    queries(world)
    assert killed(world) == set() and offender(world)[0] is None


def test_a_client_that_is_evicted_is_not_held() -> None:
    world = all_told(10, 11)
    another(world, STRANGER, "a stranger")
    world.do(ev.EvictRequested(process(STRANGER), Liveness.RUNNING, "r1", "asked"))
    trap(world)
    assert held(world) == [] and world.ever(fx.Terminate)


def test_no_process_is_held_that_only_an_open_log_names() -> None:
    """Its user could write that line for any process."""
    world = all_told(10, 11)
    domains = {**world.state.domains, "d1": replace(world.domain("d1"), private=False)}
    world.state = replace(world.state, domains=MappingProxyType(domains))
    world.do(ev.ClientNoticed("d1", facts(STRANGER)))
    world.do(ev.ClientAttached("d1", process(STRANGER), 1, tracked=True))
    trap(world)
    assert world.ever(fx.Move) and held(world) == []


def test_no_queries_are_held_where_the_offender_is_certain_or_the_server_died() -> None:
    world = all_told(10, 11)
    another(world, STRANGER, "a stranger")
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert world.told() == [10, 11] and held(world) == []


def test_two_claims_are_no_proof() -> None:
    world = trapped(STRANGER)
    moves(world, {10: FIRST, 11: FIRST})
    queries(world)
    assert killed(world) == set() and offender(world)[0] is None


def test_queries_are_held_until_all_participants_have_moved() -> None:
    world = trapped(STRANGER)
    moves(world, {10: NO_SIGN})
    assert held(world) == [{STRANGER}] and not released(world)
    moves(world, {11: NO_SIGN})
    assert released(world) and len(world.ever(fx.ReleaseQueries)) == 1


def test_queries_are_held_until_a_suspect_has_its_context() -> None:
    world = trapped(STRANGER)
    moves(world, {10: OWN, 11: OTHERS})
    world.started("d3")
    assert not released(world)
    world.is_ready(10, 3)
    assert world.told() == [10] and released(world)


@pytest.mark.parametrize("how", ["dies", "stays", "has no trial"])
def test_a_participant_that_needs_them_no_longer_releases_queries(how: str) -> None:
    world = trapped(STRANGER)
    if how == "has no trial":
        moves(world, {11: OTHERS, 10: OWN}, takes_ms=5)
        (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-trial")
        assert not released(world)
        world.timer(timer.kind, timer.subject)
    else:
        moves(world, {11: OTHERS})
        assert not released(world)
        gone = ev.ClientDied(process(10)) if how == "dies" else mev.MemberStayed(process(10), 2, "no context")
        world.do(gone)
    assert released(world)


def test_queries_of_too_many_strangers_are_not_held() -> None:
    assert held(trapped(*range(20, 20 + WATCHED_MOST))) != []
    assert held(trapped(*range(20, 20 + WATCHED_MOST + 1))) == []


def test_no_queries_are_held_where_nobody_moves_or_nobody_stays() -> None:
    assert held(trapped()) == []
    world = Site()
    world.attach(STRANGER, "d1")
    exception(world)
    assert world.ever(fx.HoldQueries) == []


def test_what_nobody_was_asked_about_is_ignored() -> None:
    world = trapped(STRANGER)
    finds(world, 10, FIRST)
    ignored = world.state.counters.get("failover_words_ignored", 0)
    for pid, domain in ((11, "d1"), (STRANGER, "d2"), (STRANGER, "d9")):
        queries(world, pid, domain)
    assert world.state.counters["failover_words_ignored"] == ignored + 3
    assert world.domain("d1").without_denial == frozenset({process(STRANGER)})
