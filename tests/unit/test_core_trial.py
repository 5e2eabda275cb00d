"""Trial domains: a suspect replays where no other client works, and only a fault there names it."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from mpsd.base.model import Confidence, ExceptionOwner, FailoverMode, ReplayMode, ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.domains import RECONNECT_S
from mpsd.core.failover import reports as mev
from mpsd.core.failover import suspects
from mpsd.core.failover.participants import Outcome, Standing, Turn
from mpsd.core.failover.plan import FAULTED_AGAIN
from mpsd.core.failover.trial import RETRY_S
from mpsd.core.state import DomainState
from tests.support.core import GPU, OUT_OF_RANGE, SLOT, UID, control_of, process, server_of
from tests.unit.test_core_failover import Site, again, turns_of
from tests.unit.test_core_programcounter import OTHERS, OWN, exception, killed, moves, offender
from tests.unit.test_core_serialreplay import all_told, another, comes, lose, turns


def claimed() -> Site:
    """Client 10 claims the fault of d1, and a client without the proxy cannot deny it: that is no proof.

    11 and 12 deny it. d3, which is starting, will be the trial domain.
    """
    world = all_told(10, 11, 12)
    another(world, 9, "a stranger")
    exception(world)
    moves(world, {10: OWN, 11: OTHERS, 12: OTHERS})
    return world


def coming() -> Site:
    """The suspect has a context in d3 and was told to move there. d4 is starting."""
    world = claimed()
    world.started("d3")
    world.is_ready(10, 3)
    assert again(world) == {10: ReplayMode.IN_TURN}
    return world


def trying() -> Site:
    """The suspect replays in d3. The others work in d2."""
    world = coming()
    arrives(world)
    assert turns_of(world)[10] is Turn.HAS
    return world


def arrives(world: Site, pid: int = 10, generation: int = 3) -> None:
    step = 1_000_000
    moved = mev.MemberMoved(process(pid), generation, step, 2 * step, 3 * step, waits=True, takes_ns=step)
    world.do(moved)


def offered(world: Site, generation: int) -> set[int]:
    return {e.process.pid for e in world.ever(fx.OfferStandby) if e.generation == generation}


def test_who_denies_the_fault_goes_on_at_once_and_who_claims_it_waits_for_a_domain_of_its_own() -> None:
    world = claimed()
    assert turns(world) == [11, 12] and killed(world) == set() and offender(world)[0] is None
    assert turns_of(world) == {10: Turn.WAITS, 11: Turn.HAS, 12: Turn.HAS}
    world.started("d3")
    assert offered(world, 3) == {10}
    # The others get the next standby domain at once, and the path never led to d3.
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d4"]
    assert world.path() == "d2" and world.state.slots[world.domain("d3").slot].spare == "d4"
    world.do(mev.MemberDone(process(11), 2))
    world.started("d4")
    assert offered(world, 4) == {11}


def test_a_fault_during_its_trial_names_the_suspect_and_harms_no_other_client() -> None:
    world = trying()
    assert [(e.process.pid, e.generation) for e in world.made(fx.GrantTurn)] == [(10, 3)]
    lose(world, "d3")
    assert offender(world) == (10, Confidence.LIKELY)
    (entry,) = world.failover().fates
    assert (entry.process, entry.outcome, entry.why) == (process(10), Outcome.NOT_TOLD, FAULTED_AGAIN)
    assert world.standing(10) is Standing.LEFT_BEHIND and world.ever(fx.StandDown)[-1].final
    assert world.told() == [] and world.domain("d2").state is DomainState.ACTIVE


def test_a_suspect_is_named_by_a_fault_that_comes_before_its_context_in_the_trial_domain_is_known() -> None:
    """Its messages may overtake the log of the trial domain, which announces that context."""
    world = claimed()
    world.started("d3")
    world.do(mev.MemberReady(process(10), 3, 5_000_000, 1 << 20))
    arrives(world)
    assert turns_of(world)[10] is Turn.HAS and not list(world.state.clients_of("d3"))
    lose(world, "d3")
    assert offender(world) == (10, Confidence.LIKELY)
    assert world.failover().fates[0].why == FAULTED_AGAIN and world.told() == []


def test_a_fault_of_another_domain_meanwhile_names_nobody() -> None:
    world = trying()
    world.started("d4")
    world.do(mev.MemberDone(process(11), 2))
    world.is_ready(11, 4)
    world.kernel(13, OUT_OF_RANGE)
    lose(world, "d2")
    assert offender(world)[0] is None and world.told() == [11]
    assert turns_of(world)[10] is Turn.HAS and world.domain("d3").trial == process(10)


def test_a_fault_whose_first_sign_came_before_the_trial_names_nobody() -> None:
    world = coming()
    world.wait(world.state.policy.evidence_window_s + 1.0)
    world.kernel(13, OUT_OF_RANGE)
    world.wait(0.01)
    arrives(world)
    world.wait(0.01)
    lose(world, "d3")
    assert world.standing(10) is not Standing.LEFT_BEHIND
    assert FAULTED_AGAIN not in {f.why for f in world.failover().fates}


def test_a_cleared_suspect_joins_the_others_and_its_trial_domain_ends() -> None:
    world = trying()
    world.do(mev.MemberDone(process(10), 3, 5, 6))
    assert turns_of(world) == {11: Turn.HAS, 12: Turn.HAS} and not world.state.members[process(10)].suspected
    # Its former context in d2 is unloaded first.
    assert world.made(fx.OfferStandby) == []
    (timer,) = (e for e in world.made(fx.ArmTimer) if e.kind == suspects.JOIN)
    world.wait(timer.delay_s).timer(timer.kind, timer.subject)
    assert [(e.process.pid, e.generation) for e in world.made(fx.OfferStandby)] == [(10, 2)]
    world.do(mev.MemberReady(process(10), 2))
    assert [(e.process.pid, e.generation, e.planned) for e in world.made(fx.Move)] == [(10, 2, True)]
    assert world.domain("d3").state is DomainState.RETIRED
    world.do(mev.MemberMoved(process(10), 2, 1, 2, 3))
    assert world.domain("d3").state is DomainState.STOPPING
    assert world.state.members[process(10)].home == "d2"


def test_a_cleared_suspect_that_cannot_leave_its_work_stays_where_it_is() -> None:
    world = trying()
    world.do(mev.MemberDone(process(10), 3, 5, 6))
    world.wait(suspects.JOIN_S).timer(suspects.JOIN, process(10))
    world.do(mev.MemberReady(process(10), 2))
    world.do(mev.MemberStayed(process(10), 2, "its work did not end in time"))
    world.do(mev.MemberReady(process(10), 2))
    assert world.told() == [] and world.domain("d3").state is DomainState.RETIRED


def test_moves_of_a_trial_do_not_count_as_moves_of_the_minute() -> None:
    world = trying()
    world.do(mev.MemberDone(process(10), 3, 5, 6))
    world.wait(suspects.JOIN_S).timer(suspects.JOIN, process(10))
    world.do(mev.MemberReady(process(10), 2))
    assert len(world.state.members[process(10)].told) == 1


def test_a_trial_takes_no_place_among_the_standby_contexts_of_its_gpu() -> None:
    world = claimed()
    world.state = replace(world.state, policy=replace(world.state.policy, standby_contexts=1))
    suspect = replace(world.state.members[process(10)], placed=False)
    members = MappingProxyType({**world.state.members, process(10): suspect})
    world.state = replace(world.state, members=members)
    world.started("d3")
    world.is_ready(10, 3)
    assert again(world) == {10: ReplayMode.IN_TURN} and not world.state.members[process(10)].placed


@pytest.mark.parametrize("what", ["died", "left", "gave up"])
def test_a_trial_domain_ends_with_its_suspect(what: str) -> None:
    world = claimed()
    world.started("d3")
    assert world.domain("d3").state is DomainState.RETIRED
    if what == "died":
        world.do(ev.ClientDied(process(10)))
    elif what == "left":
        world.do(mev.MemberLeft(process(10)))
    else:
        world.do(mev.MemberDone(process(10), 2, missing="it waited too long"))
    assert world.domain("d3").state is DomainState.STOPPING
    # The others are not kept from the next standby domain.
    world.do(mev.MemberDone(process(11), 2))
    world.started("d4")
    assert 11 in offered(world, 4)


def test_who_can_have_no_trial_domain_replays_beside_the_others_once() -> None:
    world = claimed()
    world.started("d3")
    world.do(mev.MemberUnready(process(10), 3, "no memory", True))
    assert turns(world) == [11, 12, 10] and world.domain("d3").state is DomainState.STOPPING
    for pid in (11, 12):
        world.do(mev.MemberDone(process(pid), 2))
    world.started("d4")
    for pid in (11, 12):
        world.is_ready(pid, 4)
    lose(world, "d2")
    # No evidence: all move once more. It does not replay beside them again.
    assert offender(world)[0] is None and world.told() == [11, 12]
    world.is_ready(10, 4)
    assert again(world) == {10: ReplayMode.IN_TURN}
    arrives(world, generation=4)
    world.started("d5")
    assert 10 in offered(world, 5)
    world.do(mev.MemberUnready(process(10), 5, "no memory", True))
    world.timer("failover-trial", f"10 {process(10).start_ticks} d4")
    assert turns_of(world) == {10: Turn.WAITS} and world.domain("d5").trial == process(10)
    (retry,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-back" and e.subject == "10@1 5")
    assert retry.delay_s == RETRY_S
    world.timer(retry.kind, retry.subject)
    world.is_ready(10, 5)
    assert again(world) == {10: ReplayMode.IN_TURN}


def test_a_suspect_stays_one_when_the_offender_of_a_later_fault_is_certain() -> None:
    world = claimed()
    world.started("d3")
    world.started("d4")
    world.attach(13, "d2")
    world.fault(13, domain="d2")
    assert 10 not in world.told()
    # It has lost its context: it moves into its trial domain as soon as it has one there.
    world.is_ready(10, 3)
    assert again(world) == {10: ReplayMode.IN_TURN}
    arrives(world)
    assert [(e.process.pid, e.generation) for e in world.made(fx.GrantTurn)] == [(10, 3)]


def test_each_of_two_that_claim_a_fault_has_a_domain_of_its_own() -> None:
    """Code of two clients can lie at one address."""
    world = all_told(10, 11, 12)
    exception(world)
    moves(world, {10: OWN, 11: OWN, 12: OTHERS})
    world.started("d3")
    world.started("d4")
    assert (world.domain("d3").trial, world.domain("d4").trial) == (process(10), process(11))
    assert offered(world, 3) == {10} and offered(world, 4) == {11}
    world.started("d5")
    world.do(mev.MemberDone(process(12), 2))
    assert offered(world, 5) == {12}


def test_the_others_get_the_next_standby_domain_beyond_the_most_trials() -> None:
    pids = tuple(range(10, 10 + suspects.TRIALS_MOST + 2))
    world = all_told(*pids)
    exception(world)
    moves(world, dict.fromkeys(pids[:-1], OWN) | {pids[-1]: OTHERS})
    world.do(mev.MemberDone(process(pids[-1]), 2))
    for number in range(3, 3 + suspects.TRIALS_MOST + 1):
        world.started(f"d{number}")
    assert offered(world, 3 + suspects.TRIALS_MOST) == {pids[-1]}


def test_a_fault_during_a_turn_makes_its_holder_a_suspect_unless_it_denies_that_fault() -> None:
    for whose, replays in ((ExceptionOwner.UNKNOWN, False), (OTHERS, True)):
        world = all_told(10, 11)
        another(world, 9, "one in mode keep")
        world.do(mev.MemberCame(process(9), 1000, FailoverMode.KEEP))
        lose(world, "d1")
        comes(world, 10, 5)
        comes(world, 11, 30)
        assert turns(world)[:1] == [10]
        world.started("d3")
        lose(world, "d2")
        assert offender(world)[0] is None
        world.is_ready(10, 3)
        if whose is not ExceptionOwner.UNKNOWN:
            world.do(mev.MemberFoundCode(process(10), 3, whose))
        before = len(turns(world))
        arrives(world)
        assert (10 in turns(world)[before:]) == replays


def test_what_a_suspect_finds_on_its_way_to_its_trial_is_ignored() -> None:
    """It leaves a domain that has not faulted."""
    world = coming()
    world.do(mev.MemberFoundCode(process(10), 3, OTHERS))
    arrives(world)
    assert world.state.members[process(10)].suspected and turns_of(world)[10] is Turn.HAS


def test_a_suspect_of_the_trial_domain_is_not_named_beside_another_client() -> None:
    world = trying()
    world.attach(14, "d3")
    lose(world, "d3")
    assert offender(world)[0] is None and world.standing(10) is not Standing.LEFT_BEHIND


def test_a_dead_server_names_no_suspect() -> None:
    world = trying()
    world.do(ev.ServerDied("d3", server_of("d3")))
    assert offender(world)[0] is None and world.standing(10) is not Standing.LEFT_BEHIND


def taking_turns(*pids: int) -> Site:
    """These clients have moved to d2 and know nothing of the fault: the first one has its turn."""
    world = all_told(*pids)
    world.attach(9, "d1")
    world.hello(9, FailoverMode.KEEP)
    world.is_ready(9, 2)
    lose(world, "d1")
    for number, pid in enumerate(pids):
        comes(world, pid, 5 + number)
    assert turns_of(world) == {pid: Turn.WAITS if pid != pids[0] else Turn.HAS for pid in pids}
    return world


def doubts(world: Site) -> dict[int, int]:
    return {p.pid: m.doubts for p, m in world.state.members.items() if m.doubts}


def end_turn_of(world: Site, pid: int) -> None:
    world.timer("failover-turn", f"{pid} {process(pid).start_ticks} d2")


def test_work_that_outlasts_its_turn_is_doubted_beside_the_next_turn() -> None:
    world = taking_turns(10, 11, 12)
    end_turn_of(world, 10)
    assert turns_of(world) == {11: Turn.HAS, 12: Turn.WAITS}
    lose(world, "d2")
    assert doubts(world) == {10: 1, 11: 1} and offender(world)[0] is None


def test_work_whose_end_is_told_after_its_turn_is_not_doubted() -> None:
    world = taking_turns(10, 11)
    end_turn_of(world, 10)
    world.do(mev.MemberDone(process(10), 2, 5, 6))
    lose(world, "d2")
    assert doubts(world) == {11: 1}


def test_work_that_runs_on_keeps_the_turn_until_it_has_ended_or_its_time_is_over() -> None:
    world = taking_turns(10, 11)
    world.do(mev.MemberDone(process(10), 2, 5, 6, runs_on=True))
    assert turns_of(world) == {10: Turn.HAS, 11: Turn.WAITS}
    world.do(mev.MemberDone(process(10), 2, 5, 6))
    assert turns_of(world) == {11: Turn.HAS}


def test_a_fault_beside_many_replays_says_too_little_about_each() -> None:
    pids = tuple(range(10, 10 + suspects.DOUBTED_MOST + 1))
    world = taking_turns(*pids)
    for pid in pids[:-1]:
        end_turn_of(world, pid)
    lose(world, "d2")
    assert doubts(world) == {}


def test_who_comes_after_the_others_is_not_named_for_its_own_claim_alone() -> None:
    """The offender has gone by then, and cannot claim the fault."""
    world = all_told(10)
    world.attach(11, "d1")
    exception(world)
    world.die(10)
    world.wait(world.state.policy.evidence_window_s + 1)
    world.hello(11, FailoverMode.EXACT)
    world.is_ready(11, 2)
    assert again(world) == {11: ReplayMode.IN_TURN}
    moves(world, {11: OWN})
    assert killed(world) == set() and offender(world)[0] is None


def test_who_has_a_new_context_where_it_lost_one_can_replay_there() -> None:
    """Its former context there died with an earlier server."""
    world = all_told(10, 11)
    world.state = replace(
        world.state,
        domains=MappingProxyType(
            {**world.state.domains, "d2": replace(world.domain("d2"), bereft=frozenset({process(10)}))}
        ),
    )
    exception(world)
    moves(world, {10: OTHERS})
    assert turns(world) == [10]


# A new mpsd


def restarted(home: str, *, is_trial: bool = True) -> Site:
    """mpsd starts again: a participant was last known to live in `home`, and d3 may be its trial domain."""
    world = Site(trying().state.policy)
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
    for name, role, state in (("d2", "ACTIVE", "ACTIVE"), ("d3", "OLD", "RETIRED"), ("d4", "SPARE", "WARM")):
        trial = process(10) if name == "d3" and is_trial else None
        servers = (control_of(name), server_of(name), ServerState.ACTIVE)
        where = (name, SLOT, ev.DomainRole[role], DomainState[state])
        world.do(ev.DomainAdopted(*where, *servers, private=True, trial=trial))
    world.do(mev.MemberRestored(process(10), UID, FailoverMode.EXACT, home))
    for name in ("d2", "d3"):
        world.attach(10, name)
    world.do(ev.AdoptionDone())
    world.do(ev.DriverFilesSeen(""))
    return world


@pytest.mark.parametrize("home", ["d2", "d3"])
def test_a_new_mpsd_keeps_the_trial_domain_for_a_suspect_that_works_there(home: str) -> None:
    """What is written down of its home may be older than its move."""
    world = restarted(home)
    assert world.domain("d3").state is DomainState.RETIRED
    world.hello(10, FailoverMode.EXACT, 3)
    assert world.state.members[process(10)].home == "d3"
    assert [(e.process.pid, e.generation) for e in world.made(fx.OfferStandby)] == [(10, 2)]
    world.do(mev.MemberReady(process(10), 2))
    assert [(e.generation, e.planned) for e in world.made(fx.Move)] == [(2, True)]


def test_a_new_mpsd_ends_the_trial_domain_of_a_suspect_that_has_not_moved_there() -> None:
    world = restarted("d2")
    world.hello(10, FailoverMode.EXACT, 2)
    assert world.domain("d3").state is DomainState.STOPPING


def test_a_new_mpsd_waits_for_what_programs_say_before_it_ends_a_domain_under_them() -> None:
    world = restarted("d2", is_trial=False)
    assert world.domain("d3").state is DomainState.RETIRED
    (timer,) = {(e.kind, e.subject) for e in world.ever(fx.ArmTimer) if e.subject == "d3" and e.kind == "ask"}
    world.wait(RECONNECT_S).timer(*timer)
    assert world.domain("d3").state is DomainState.STOPPING


def test_a_new_mpsd_names_no_client_for_being_the_only_one_that_it_knows() -> None:
    """It does not know the clients that ended just before."""
    world = restarted("d2")
    world.hello(10, FailoverMode.EXACT, 2)
    lose(world, "d2")
    assert offender(world)[0] is None


def test_a_program_that_moved_without_mpsd_is_a_suspect_in_the_domain_where_it_waits() -> None:
    """Before mpsd has seen the fault of d2, d4 is still the standby domain: it is no trial domain then."""
    world = restarted("d2")
    world.attach(10, "d4")
    world.hello(10, FailoverMode.EXACT, 4)
    arrives(world, generation=4)
    member = world.state.members[process(10)]
    assert (member.home, member.turn, member.suspected) == ("d4", Turn.WAITS, True)
    assert world.ever(fx.GrantTurn) == [] and world.domain("d4").trial is None
    lose(world, "d2")
    assert world.path() == "d4" and world.told() == []
    started = [e.domain for e in world.ever(fx.StartDomain)][-1]
    world.started(started)
    assert offered(world, int(started[1:])) == {10}
    world.is_ready(10, int(started[1:]))
    assert again(world) == {10: ReplayMode.IN_TURN}


def test_a_program_that_connects_again_while_it_waits_is_a_suspect() -> None:
    world = taking_turns(10, 11)
    world.do(mev.MemberLeft(process(11)))
    world.hello(11, FailoverMode.EXACT, 2)
    arrives(world, 11, 2)
    assert world.state.members[process(11)].suspected and turns(world) == [10]


@pytest.mark.parametrize("is_there", [False, True])
def test_no_standby_domain_becomes_a_trial_domain_in_which_an_unheard_program_may_work(
    is_there: bool,
) -> None:
    """mpsd was started again: by its records the program lives in d1, but it may have moved to d3 since."""
    world = all_told(10, 11)
    another(world, 9, "a stranger")
    if is_there:
        world.do(mev.MemberRestored(process(13), 1000, FailoverMode.EXACT, "d1"))
        world.attach(13, "d1")
    exception(world)
    world.started("d3")
    if is_there:
        world.attach(13, "d3")
    for pid, whose in ((10, ExceptionOwner.OWN), (11, OTHERS)):
        world.do(mev.MemberFoundCode(process(pid), 2, whose))
        comes(world, pid, 30)
    assert world.state.domains["d3"].trial == (None if is_there else process(10))
