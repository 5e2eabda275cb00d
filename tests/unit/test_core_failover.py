"""Fail-over decisions: which clients core offers a standby context, which it moves, and the record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import ClientId, Confidence, FailoverMode, ReplayMode, ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.domains import ABANDONED_STOP_S
from mpsd.core.failover import plan
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import FailoverRecord, Outcome, Standing, Turn
from mpsd.core.faults.records import Source
from mpsd.core.state import DomainState, Policy
from tests.support.core import GPU, SLOT, UID, World, process, server_of, uvm

KEEP = FailoverMode.KEEP
ON = Policy(failover=KEEP, linger_limit_s=30.0)


class Site(World):
    """A world in which clients send messages."""

    def attach(self, pid: int, domain: str) -> None:
        from tests.support.core import facts

        self.do(ev.ClientNoticed(domain, facts(pid)))
        self.do(ev.ClientAttached(domain, process(pid), 1, tracked=True, apart=True))

    def hello(self, pid: int, mode: FailoverMode = KEEP, generation: int = 0) -> None:
        self.do(mev.MemberCame(process(pid), UID, mode, generation))

    def is_ready(self, pid: int, generation: int, domain: str | None = None) -> None:
        self.attach(pid, domain or f"d{generation}")
        self.do(mev.MemberReady(process(pid), generation, 5_000_000, 1 << 20))

    def moved(self, pid: int, generation: int) -> None:
        self.do(mev.MemberMoved(process(pid), generation, 1_000_000, 2_000_000, 3_000_000, 4, 5))

    def standing(self, pid: int) -> Standing:
        return self.state.members[process(pid)].standing

    def told(self) -> list[int]:
        """Return the clients that the last event told to move."""
        return [e.process.pid for e in self.made(fx.Move)]

    def failover(self) -> FailoverRecord:
        return self.ever(fx.RecordFailover)[-1].record

    def outcomes(self) -> dict[int, Outcome]:
        return {f.process.pid: f.outcome for f in self.failover().fates}


def site(*pids: int, policy: Policy = ON) -> Site:
    """d1 active, d2 its standby domain, in which these clients of d1 are ready."""
    world = Site(policy)
    world.ready()
    world.do(ev.DriverFilesSeen(""))
    for pid in pids:
        world.attach(pid, "d1")
        world.hello(pid)
    for pid in pids:
        world.is_ready(pid, 2)
    return world


def test_a_program_is_offered_the_spare_once_its_context_is_leased() -> None:
    world = Site(ON)
    world.ready()
    world.do(ev.DriverFilesSeen(""))
    world.hello(10)
    assert world.made(fx.Welcome) == [fx.Welcome(process(10), KEEP)]
    world.join(10)
    assert world.ever(fx.OfferStandby) == [fx.OfferStandby(process(10), 2, "d2")]
    assert not world.ever(fx.StandDown)


@pytest.mark.parametrize(
    ("asked", "most", "given"),
    [("exact", "keep", "keep"), ("keep", "exact", "keep"), ("off", "exact", "off"), ("exact", "off", "off")],
)
def test_nobody_has_more_than_is_allowed(asked: str, most: str, given: str) -> None:
    world = Site(Policy(failover=FailoverMode(most)))
    world.ready()
    world.join(10)
    world.hello(10, FailoverMode(asked))
    assert world.made(fx.Welcome) == [fx.Welcome(process(10), FailoverMode(given))]
    assert (process(10) in world.state.members) == (given != "off")


def test_without_copies_nothing_is_offered_until_there_are_some() -> None:
    world = Site(ON)
    world.ready()
    world.join(10)
    world.hello(10)
    assert not world.ever(fx.OfferStandby)
    world.do(ev.DriverFilesSeen(""))
    assert [e.generation for e in world.made(fx.OfferStandby)] == [2]


def test_without_a_spare_of_its_own_one_is_started_for_the_willing_and_given_up_after_them() -> None:
    world = Site(replace(ON, spare=False))
    world.want()
    world.started("d1")
    world.do(ev.DriverFilesSeen(""))
    assert not world.state.slots[SLOT].spare
    world.attach(10, "d1")
    world.hello(10)
    assert world.state.slots[SLOT].spare == "d2"
    world.started("d2")
    assert [e.generation for e in world.made(fx.OfferStandby)] == [2]
    world.do(mev.MemberLeft(process(10)))
    assert [e for e in world.made(fx.ArmTimer) if e.kind == "standby-linger"]
    world.timer("standby-linger", SLOT)
    assert world.state.slots[SLOT].spare is None
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d2"]


def test_survivors_are_told_in_the_decision_that_switches_the_path_and_the_offender_is_not() -> None:
    world = site(10, 11, 12)
    world.fault(12)
    assert world.told() == [10, 11] and world.path() == "d2"
    kinds = [type(e) for e in world.last]
    assert kinds.index(fx.Move) < kinds.index(fx.SwitchPath) < kinds.index(fx.Record)
    assert world.record().confidence is Confidence.CERTAIN
    assert [e.process.pid for e in world.made(fx.StandDown)] == [12]
    assert world.standing(12) is Standing.LEFT_BEHIND
    record = world.failover()
    assert (record.domain, record.to, record.generation, record.fault) == ("d1", "d2", 2, world.record().id)
    assert world.outcomes() == {10: Outcome.TOLD, 11: Outcome.TOLD, 12: Outcome.NOT_TOLD}
    assert not world.record().victims and world.pauses(world.record()) == {10: None, 11: None}
    # Its standby context is where the participants are going: the client is killed after they have moved.
    assert not world.made(fx.Kill)
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-put-out")
    world.timer(timer.kind, timer.subject)
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [12]


def test_the_offender_lives_on_where_it_is_where_that_is_wanted() -> None:
    world = site(10, 12, policy=replace(ON, evict_offender=False))
    world.fault(12)
    assert world.told() == [10] and not world.made(fx.Kill)
    assert "failover-put-out" not in {e.kind for e in world.ever(fx.ArmTimer)}


def test_after_a_move_the_old_context_holds_up_nothing() -> None:
    world = site(10)
    world.attach(11, "d1")
    world.fault(11)
    world.moved(10, 2)
    assert world.made(fx.ReleaseLease) == [fx.ReleaseLease(ClientId("d1", process(10)))]
    assert world.state.members[process(10)].home == "d2"
    # Only the offender is left there. The old context may exist for good: mpsd does not wait for it.
    world.die(11)
    assert world.made(fx.StopDomain) == [fx.StopDomain("d1", ABANDONED_STOP_S)]
    world.stopped("d1")
    assert {c.id.domain for c in world.state.spaces_of(process(10))} == {"d2"}
    world.started("d3")
    assert world.made(fx.OfferStandby) == [fx.OfferStandby(process(10), 3, "d3")]


def test_suspects_are_all_told_and_recorded_as_such() -> None:
    world = site(10, 11)
    world.kernel(43, "channel 0x1", server_of("d1").pid, "nvidia-cuda-mps")
    assert world.told() == [10, 11]
    assert [f.suspect for f in world.failover().fates] == [True, True]


def exact(*pids: int) -> Site:
    """As site(), in mode exact, except for the last client."""
    world = Site(replace(ON, failover=FailoverMode.EXACT))
    world.ready()
    world.do(ev.DriverFilesSeen(""))
    for pid in pids:
        world.attach(pid, "d1")
        world.hello(pid, KEEP if pid == pids[-1] else FailoverMode.EXACT)
    for pid in pids:
        world.is_ready(pid, 2)
    return world


LOST, AGAIN, IN_TURN, AT_ONCE = ReplayMode


def again(world: Site) -> dict[int, ReplayMode]:
    """Return how each client that was told to move replays. No client is told of a guess."""
    told = {e.process: e.again for e in world.made(fx.Move)}
    known = {process: world.state.members[process].again for process in told}
    assert all(said is (IN_TURN if known[p] is AT_ONCE else known[p]) for p, said in told.items())
    return {process.pid: mode for process, mode in known.items()}


def test_what_was_in_flight_is_done_again_where_it_is_known_whose_fault_it_was() -> None:
    world = exact(10, 11, 12, 13)
    world.fault(12)
    assert again(world) == {10: AGAIN, 11: AGAIN, 13: LOST}


def suspected(*pids: int) -> Site:
    """No client is named, and all have moved; all but the last wait for their turns.

    One of the waiting clients has to be the youngest.
    """
    world = exact(*pids)
    world.kernel(43, "channel 0x1", server_of("d1").pid, "nvidia-cuda-mps")
    assert again(world) == {pid: LOST if pid == pids[-1] else IN_TURN for pid in pids}
    for pid in pids:
        world.do(mev.MemberMoved(process(pid), 2, 1, 2, 3, waits=pid != pids[-1]))
    return world


def turns_of(world: Site) -> dict[int, Turn]:
    return {p.pid: m.turn for p, m in world.state.members.items() if m.turn is not Turn.NONE}


def test_suspects_do_their_work_again_one_after_the_other() -> None:
    world = suspected(10, 11, 12, 9)
    assert [e.process.pid for e in world.ever(fx.GrantTurn)] == [10]
    assert turns_of(world) == {10: Turn.HAS, 11: Turn.WAITS, 12: Turn.WAITS}
    world.do(mev.MemberDone(process(12), 1))
    assert turns_of(world)[12] is Turn.WAITS
    world.do(mev.MemberDone(process(10), 2, 5, 6))
    assert world.made(fx.GrantTurn) == [fx.GrantTurn(process(11), 2)]
    (entry,) = (f for f in world.failover().fates if f.process.pid == 10)
    assert (entry.restored_bytes, entry.replayed, entry.why) == (5, 6, "")
    # One client abandons its replay, and one ends.
    world.do(mev.MemberDone(process(12), 2, missing="nobody knows"))
    assert turns_of(world) == {11: Turn.HAS}
    world.do(mev.MemberLeft(process(11)))
    assert turns_of(world) == {}


def test_a_fault_during_a_turn_names_no_client() -> None:
    """Other clients work in the domain of the turn."""
    world = suspected(10, 11, 9)
    world.started("d3")
    world.is_ready(9, 3)
    world.kernel(43, "channel 0x1", server_of("d2").pid, "nvidia-cuda-mps")
    assert again(world) == {9: LOST}
    assert max(world.records().values(), key=lambda r: r.id).offender is None
    # The others had no standby context: they move there once they have one, and replay again.
    assert turns_of(world) == {11: Turn.WAITS}
    assert [e.process.pid for e in world.ever(fx.OfferStandby) if e.generation == 3] == [9, 10, 11]
    for pid in (10, 11):
        world.is_ready(pid, 3)
        assert again(world) == {pid: IN_TURN}


@pytest.mark.parametrize("says", [True, False])
def test_who_has_work_to_do_again_is_offered_its_next_standby_after_that(says: bool) -> None:
    """A client that prepares a standby context cannot receive its turn."""
    world = suspected(10, 11, 9)
    (timer,) = (e for e in world.ever(fx.ArmTimer) if e.kind == "failover-turn")
    world.started("d3")
    assert [e.process.pid for e in world.made(fx.OfferStandby)] == [9]
    if says:
        world.do(mev.MemberDone(process(10), 2, 5, 6))
    else:
        world.timer("failover-turn", timer.subject)
    assert [e.process.pid for e in world.made(fx.OfferStandby)] == [10]
    world.do(mev.MemberDone(process(11), 2, 5, 6))
    assert [e.process.pid for e in world.made(fx.OfferStandby)] == [11]


def test_the_end_of_a_server_is_nobodys_fault() -> None:
    world = exact(10, 11, 12)
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert again(world) == {10: AGAIN, 11: AGAIN, 12: LOST}


def test_what_cannot_be_undone_is_shown_once_by_name() -> None:
    world = exact(10, 11)
    for name in ("pinned", "peer", "pinned"):
        world.do(mev.MemberUnsure(process(10), name))
    world.do(mev.MemberUnsure(process(99), "nobody's"))
    assert world.state.members[process(10)].unsure == ("pinned", "peer")
    for number in range(100):
        world.do(mev.MemberUnsure(process(10), str(number)))
    assert len(world.state.members[process(10)].unsure) == 64


def test_what_may_be_missing_is_recorded() -> None:
    world = exact(10, 11, 12)
    world.fault(11)
    world.is_ready(10, 2)
    world.do(mev.MemberMoved(process(10), 2, 1, 2, 3, 0, 0, "memory of another process"))
    (entry,) = (f for f in world.failover().fates if f.process.pid == 10)
    assert entry.outcome is Outcome.MOVED
    assert entry.why == "work in flight may be missing: memory of another process"


def test_who_is_named_after_all_were_told_does_not_stay_among_them() -> None:
    world = site(10, 11)
    world.do(ev.ServerFatalLogged("d1", "fatal GPU error"))
    assert world.told() == [10, 11]
    # A fault in an old context that was cut off is attributed to no client.
    world.do(ev.UvmFatal(ClientId("d1", process(10)), uvm()))
    assert not world.made(fx.Kill)
    world.do(ev.UvmFatal(ClientId("d1", process(11)), uvm(), age_s=0.01))
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [11]
    assert "after it was told" in {f.process.pid: f.why for f in world.failover().fates}[11]


@pytest.mark.parametrize("sign", ["server", "control", "state"])
def test_the_end_of_a_server_or_control_daemon_is_a_trigger(sign: str) -> None:
    world = site(10)
    if sign == "server":
        world.do(ev.ServerDied("d1", server_of("d1")))
    elif sign == "control":
        from tests.support.core import control_of

        world.do(ev.ControlDied("d1", control_of("d1")))
    else:
        world.server_state("d1", ServerState.FAULT)
    assert world.told() == [10]
    assert world.failover().fault == world.record().id


def test_an_xid_of_somebody_else_is_none() -> None:
    world = site(10)
    world.kernel(43, "channel 0x1", 999, "python")
    world.nvml(43)
    world.timer("strays", GPU)
    assert not world.ever(fx.Move) and not world.ever(fx.RecordFailover)


def test_a_kernel_line_that_names_a_program_is_about_its_home() -> None:
    world = site(10)
    # A fault elsewhere in the standby domain would be its server's; lines naming the client mean its work.
    world.kernel(31, "MMU Fault: ENGINE GRAPHICS faulted @ 0x7f0000_00001000. Fault is of type FAULT_PTE", 10)
    assert world.domain("d1").state is DomainState.FAULTED
    assert world.domain("d2").state is DomainState.ACTIVE


def test_a_claim_of_an_own_error_asks_the_server_and_moves_nobody() -> None:
    world = site(10, 11)
    world.do(mev.MemberError(process(10), 719))
    assert world.last == (fx.AskServer("d1"),)


@pytest.mark.parametrize("lost", ["fault", "died"])
def test_a_lost_standby_is_taken_back_recorded_as_nobodys_and_replaced(lost: str) -> None:
    world = site(10, 11)
    if lost == "fault":
        world.do(ev.ServerFatalLogged("d2", "fatal GPU error"))
    else:
        world.do(ev.ServerDied("d2", server_of("d2")))
    assert sorted(e.process.pid for e in world.made(fx.StandDown)) == [10, 11]
    assert not world.told() and not world.ever(fx.RecordFailover)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d2"]
    assert all(not e.record.victims for e in world.made(fx.Record))
    world.stopped("d2")
    world.started("d3")
    assert [e.generation for e in world.made(fx.OfferStandby)] == [3, 3]
    # Messages about the old standby context do not count for the new one.
    world.do(mev.MemberReady(process(10), 2))
    assert world.standing(10) is Standing.OFFERED


def test_one_context_in_waiting_is_not_named_for_being_alone() -> None:
    world = site(10)
    world.do(ev.ServerFatalLogged("d2", "fatal GPU error"))
    assert world.record().offender is None
    assert world.pids(world.record().suspects) == [10]


def test_who_becomes_ready_late_is_told_then() -> None:
    world = site(10)
    world.attach(11, "d1")
    world.hello(11)
    world.attach(12, "d1")
    world.fault(12)
    assert world.told() == [10] and world.outcomes()[11] is Outcome.NOT_TOLD
    world.wait(0.2).is_ready(11, 2)
    assert world.told() == [11]
    entry = {f.process.pid: f for f in world.failover().fates}[11]
    assert (entry.outcome, entry.told_ms) == (Outcome.TOLD, 200.0)


def test_standby_dead_at_the_time_of_need_the_next_one_serves() -> None:
    world = site(10)
    world.do(ev.ServerDied("d2", server_of("d2")))
    world.attach(11, "d1")
    world.fault(11)
    assert not world.told()
    assert "no standby" in world.failover().fates[0].why
    world.started("d3")
    assert [e.generation for e in world.made(fx.OfferStandby)] == [3]
    world.is_ready(10, 3)
    assert world.told() == [10]


def test_moves_are_bounded_per_minute() -> None:
    world = site(10, policy=replace(ON, moves_per_minute=1))
    world.attach(11, "d1")
    world.fault(11)
    world.moved(10, 2)
    world.started("d3")
    world.is_ready(10, 3)
    world.attach(12, "d2")
    world.wait(5).fault(12, domain="d2")
    assert not world.told() and world.standing(10) is Standing.LEFT_BEHIND
    assert "per_minute = 1" in world.failover().fates[0].why


def test_a_minute_later_it_may_move_again() -> None:
    world = site(10, policy=replace(ON, moves_per_minute=1))
    world.attach(11, "d1")
    world.fault(11)
    world.moved(10, 2)
    world.started("d3")
    world.is_ready(10, 3)
    world.attach(12, "d2")
    world.wait(61).fault(12, domain="d2")
    assert world.told() == [10]


def test_answers_and_silence_are_recorded() -> None:
    world = site(10, 11, 12)
    world.attach(13, "d1")
    world.fault(13)
    world.do(mev.MemberStayed(process(10), 2, "a graph"))
    world.die(11)
    number = world.failover().id
    world.timer("failover-wait", number)
    assert world.outcomes() == {10: Outcome.STAYED, 11: Outcome.ENDED, 12: Outcome.SILENT}
    assert world.standing(10) is Standing.LEFT_BEHIND
    world.moved(12, 2)
    entry = {f.process.pid: f for f in world.failover().fates}[12]
    assert (entry.outcome, entry.held_ms, entry.fence_ms, entry.first_ms) == (Outcome.MOVED, 1.0, 2.0, 3.0)
    assert (entry.restored_bytes, entry.replayed) == (4, 5)


def test_a_fault_of_the_device_moves_nobody() -> None:
    world = site(10)
    world.kernel(79, "GPU has fallen off the bus.")
    world.server_state("d1", ServerState.FAULT)
    assert not world.told()
    assert "GPU itself failed" in world.failover().fates[0].why


def test_victims_are_not_killed_while_they_move() -> None:
    world = site(10, policy=replace(ON, kill_victims_after_s=0.1))
    world.attach(11, "d1")
    world.fault(11)
    world.timer("kill-victims", "d1")
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [11]
    world.timer("failover-wait", world.failover().id)
    world.timer("kill-victims", "d1")
    assert 10 in [e.client.process.pid for e in world.made(fx.Kill)]


def test_whoever_has_moved_is_no_victim_of_what_it_left() -> None:
    world = site(10, policy=replace(ON, kill_victims_after_s=0.1))
    world.attach(11, "d1")
    world.fault(11)
    world.moved(10, 2)
    world.timer("kill-victims", "d1")
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [11]


def test_an_eviction_ends_it_in_both_domains() -> None:
    world = site(10)
    world.evict(10)
    assert [e.domain for e in world.made(fx.Terminate)] == ["d1", "d2"]
    world.die(10)
    assert process(10) not in world.state.members


def test_exclusive_mode_has_no_standby() -> None:
    world = Site(ON)
    world.ready(exclusive=True)
    world.do(ev.DriverFilesSeen(""))
    world.attach(10, "d1")
    world.hello(10)
    assert not world.ever(fx.OfferStandby)
    world.do(ev.ModeSeen(SLOT, False))
    world.started("d2")
    assert [e.generation for e in world.made(fx.OfferStandby)] == [2]
    world.do(ev.ModeSeen(SLOT, True))
    assert [e.generation for e in world.made(fx.StandDown)] == [2]


def test_drain_moves_who_is_ready_without_a_fault() -> None:
    world = site(10)
    world.attach(11, "d1")
    world.do(ev.DrainRequested((), True))
    assert world.told() == [10] and not world.made(fx.Record)
    assert world.failover().planned and world.domain("d1").state is DomainState.RETIRED
    world.moved(10, 2)
    # The other client stays where it is, and its lease is held.
    assert world.client("d1", 11).living and not world.made(fx.StopDomain)
    world.die(11)
    world.work_ended(11)
    assert world.ever(fx.StopDomain) == [fx.StopDomain("d1", ON.stop_deadline_s)]


def test_homes_outlive_the_daemon() -> None:
    world = Site(ON)
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
    for name, role, state in (
        ("d1", ev.DomainRole.OLD, DomainState.FAULTED),
        ("d2", ev.DomainRole.ACTIVE, DomainState.ACTIVE),
        ("d3", ev.DomainRole.SPARE, DomainState.WARM),
    ):
        world.adopt(name, role, state, server_state=ServerState.ACTIVE)
    world.do(mev.MemberRestored(process(10), UID, KEEP, "d2"))
    world.do(mev.MemberRestored(process(11), UID, KEEP, "d1"))
    world.do(mev.MemberRestored(process(12), UID, KEEP, "d1", "the client caused the fault"))
    for domain in ("d1", "d2"):
        for pid in (10, 11, 12):
            world.attach(pid, domain)
    world.do(ev.AdoptionDone())
    world.do(ev.DriverFilesSeen(""))
    assert {c.id.process.pid for c in world.state.living_of("d1")} == {11, 12}
    for pid in (10, 11, 12):
        world.hello(pid)
    assert {e.process.pid: e.generation for e in world.ever(fx.OfferStandby)} == {10: 3, 11: 2}
    world.do(mev.MemberReady(process(11), 2))
    assert world.told() == [11]


def test_a_program_says_itself_where_it_lives() -> None:
    world = site()
    for domain in ("d1", "d2"):
        world.attach(10, domain)
    world.hello(10, generation=2)
    assert world.state.members[process(10)].home == "d2"
    world.hello(10, generation=99)
    assert plan.find_home(world.state, process(10), 99) == "d1"


def test_words_about_what_it_was_not_told_change_nothing() -> None:
    world = site(10)
    before = world.state.members
    for event in (
        mev.MemberReady(process(10), 7),
        mev.MemberUnready(process(10), 7, "no"),
        mev.MemberStayed(process(10), 2, "not asked"),
        mev.MemberMoved(process(10), 7),
        mev.MemberReady(process(99), 2),
        mev.MemberOpaque(process(99), "cuX"),
        mev.MemberError(process(99), 1),
    ):
        world.do(event)
    assert world.state.members == before and not world.ever(fx.Move)


def test_names_of_what_cannot_be_carried_over_are_bounded() -> None:
    world = site(10)
    for number in range(200):
        world.do(mev.MemberOpaque(process(10), f"cu{number % 150}"))
    assert len(world.state.members[process(10)].opaque) == 64


def test_evidence_has_the_time_of_the_decision() -> None:
    world = site(10)
    world.attach(11, "d1")
    world.fault(11)
    assert world.failover().decision_ms == 0.0
    assert world.record().evidence[0].source is Source.UVM


def test_a_hang_of_a_dead_program_is_none_of_its_second_context() -> None:
    world = site(10, 11)
    world.die(10)
    world.lingers(10)
    assert world.domain("d1").state is DomainState.POISONED
    assert world.domain("d2").state is DomainState.ACTIVE and len(world.records()) == 1
    # Only new clients live in its former standby domain; both leases end with its work.
    world.work_ended(10)
    assert not list(world.state.spaces_of(process(10)))


def test_the_lease_of_a_second_context_is_held_until_the_work_has_ended() -> None:
    world = site(10)
    world.attach(11, "d1")
    world.attach(12, "d2")
    world.die(10)
    assert not world.made(fx.ReleaseLease)
    assert len(world.made(fx.ProbeWork)) == 2
