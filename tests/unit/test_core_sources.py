"""Sources of decisions: text that every local user can write only asks, whatever it says and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsd.base.model import ClientId, Confidence, FailoverMode, Liveness, ServerState, ZoneRole
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core import lists, proof, slots, victims
from mpsd.core.clients import UNLISTED, UNLISTED_STEP_S
from mpsd.core.failover import plan
from mpsd.core.failover import reports as mev
from mpsd.core.faults import servers, sources, taxonomy
from mpsd.core.faults.records import Source
from mpsd.core.faults.signs import SUSPECTED, SUSPECTED_STEP_S
from mpsd.core.faults.sources import Claim, Forger
from mpsd.core.state import DomainState, InvariantViolation, Policy, State
from tests.support.core import SLOT, UID, World, control_of, facts, process, server_of, uvm

STRANGER = UID + 1
FATAL = "Server is handling a fatal GPU error."
HARMLESS = (fx.AskServer, fx.Attach, fx.Forget, fx.ArmTimer)
VICTIM, PARTICIPANT = 10, 11


def open_world(uid: int | None, *, exclusive: bool = False) -> World:
    """Return a domain that every user can enter, with two clients that its server lists."""
    policy = Policy(kill_victims_after_s=1.0, failover=FailoverMode.EXACT)
    world = World(policy).ready(exclusive, uid=uid, private=False)
    for pid in (VICTIM, PARTICIPANT):
        world.do(ev.ClientNoticed("d1", facts(pid), listed=True))
        world.do(ev.ClientAttached("d1", process(pid), 1, tracked=True, apart=True))
    world.do(ev.DriverFilesSeen(""))
    world.do(mev.MemberCame(process(PARTICIPANT), UID, FailoverMode.EXACT))
    return world


def decided(state: State) -> object:
    """Return what only a decision changes."""
    return (
        tuple((d.id, d.state, d.server, d.last_fault) for d in state.domains.values()),
        tuple((s.id, s.active, s.spare) for s in state.slots.values()),
        tuple((m.process, m.home, m.standing) for m in state.members.values()),
        (state.next_fault, state.next_domain, state.next_failover),
        tuple(c.id for c in state.clients.values() if c.eviction is not None),
    )


# -- the table -------------------------------------------------------------------------------------------


def test_every_source_has_a_row_in_the_table_and_in_the_text() -> None:
    assert set(sources.FORGERS) == {*Source, *Claim}
    text = taxonomy.explain("sources")
    assert all(f"  {source.value}: " in text for source in (*Source, *Claim))
    assert text.count("forged by") == len(sources.FORGERS)


@pytest.mark.parametrize(
    ("uid", "private", "forger"),
    [(UID, True, Forger.OWNER), (UID, False, Forger.EVERYBODY), (None, False, Forger.EVERYBODY)],
    ids=["private", "open", "shared"],
)
def test_only_the_log_of_a_private_domain_may_decide(uid: int | None, private: bool, forger: Forger) -> None:
    domain = World().ready(uid=uid, private=private).domain("d1")
    assert sources.forger(Source.SERVER_LOG, domain) is forger
    assert sources.may_decide(Source.SERVER_LOG, domain) == private
    for source in (Source.UVM, Source.KERNEL_LOG, Source.NVML, Source.PROCESS, Source.SERVER_STATE):
        assert sources.may_decide(source, domain)
    assert not sources.may_decide(Claim.CLIENT_REPORT, domain)


# -- logs that every user can write ----------------------------------------------------------------------

lines = st.one_of(
    st.just(ev.ServerFatalLogged("d1", FATAL)),
    st.just(ev.ServerFatalLogged("d2", FATAL)),
    st.builds(ev.ClientRefused, st.sampled_from(("d1", "d2")), st.integers(1, 20)),
    st.builds(
        lambda domain, pid, uid: ev.ClientNoticed(domain, facts(pid, uid=uid)),
        st.sampled_from(("d1", "d2", "d9")),
        st.integers(1, 20),
        st.sampled_from((0, UID, STRANGER)),
    ),
    st.builds(ev.TimerFired, st.sampled_from((SUSPECTED, UNLISTED)), st.sampled_from(("d1", "d2"))),
)


@settings(max_examples=60, deadline=None)
@given(
    uid=st.sampled_from((None, UID)),
    exclusive=st.booleans(),
    history=st.lists(st.tuples(lines, st.sampled_from((0.0, 0.01, 0.3, 3.0))), max_size=30),
)
def test_no_text_of_an_open_log_does_more_than_ask(
    uid: int | None, exclusive: bool, history: list[tuple[ev.Event, float]]
) -> None:
    world = open_world(uid, exclusive=exclusive)
    before = decided(world.state)
    for event, wait in history:
        world.wait(wait).do(event)
        assert [e for e in world.last if not isinstance(e, HARMLESS)] == []
    assert decided(world.state) == before


@pytest.mark.parametrize("uid", [None, UID])
def test_the_answer_decides_and_not_the_line(uid: int | None) -> None:
    world = open_world(uid)
    world.do(ev.ServerFatalLogged("d1", FATAL))
    assert [e.domain for e in world.made(fx.AskServer)] == ["d1"], "at once"
    assert not world.made(fx.AskServer)[0].patient
    assert world.domain("d1").state is DomainState.ACTIVE and world.path() == "d1"
    world.server_state("d1", ServerState.ACTIVE)
    assert world.domain("d1").state is DomainState.ACTIVE and not world.records()
    world.wait(0.004).server_state("d1", ServerState.FAULT)
    assert world.domain("d1").state is DomainState.FAULTED and world.path() == "d2"
    assert [e.source for e in world.record().evidence] == [Source.SERVER_STATE]


def test_a_flood_of_lines_asks_twenty_times_a_second_and_stops_soon_after_it() -> None:
    world = open_world(None)
    asked, due = 0, 0.0
    for n in range(4000):
        world.now = 100.0 + n / 1000
        if n < 2000:
            world.do(ev.ServerFatalLogged("d1", FATAL))
            asked += len(world.made(fx.AskServer))
            due = next((world.now + t.delay_s for t in world.made(fx.ArmTimer)), due)
        if due and world.now >= due:
            due = 0.0
            world.timer(SUSPECTED, "d1")
            asked += len(world.made(fx.AskServer))
            due = next((world.now + t.delay_s for t in world.made(fx.ArmTimer)), due)
    assert 20 <= asked <= 3 / SUSPECTED_STEP_S + 2
    assert not due, "it asks no more"


def test_a_client_is_one_once_the_server_lists_it() -> None:
    world = World().ready(uid=None)
    world.do(ev.ClientNoticed("d1", facts(20)))
    world.do(ev.ClientAttached("d1", process(20), 1, tracked=True))
    assert [e.clients for e in world.made(fx.AskServer)] == [True]
    assert not world.state.is_member(world.client("d1", 20))
    world.wait(0.05).timer(UNLISTED, "d1")
    assert [e.clients for e in world.made(fx.AskServer)] == [True]
    world.wait(10).timer(UNLISTED, "d1")
    assert not world.made(fx.AskServer), "the regular list finds it later"
    world.do(ev.ClientNoticed("d1", facts(20), listed=True))
    assert world.state.is_member(world.client("d1", 20))


def test_the_server_is_asked_for_a_client_that_has_no_lease() -> None:
    world = World().ready(uid=None)
    for event in (ev.ClientNoticed("d1", facts(20)), ev.AttachFailed("d1", process(20), "not permitted")):
        world.do(event)
        assert [e.clients for e in world.made(fx.AskServer)] == [True]
        assert [t.kind for t in world.made(fx.ArmTimer)] == [UNLISTED]


def test_the_youngest_unlisted_client_sets_the_pace_of_the_questions() -> None:
    world = World().ready(uid=None)
    world.join(20)
    world.wait(4.0).join(21)
    world.wait(UNLISTED_STEP_S).timer(UNLISTED, "d1")
    assert [t.delay_s for t in world.made(fx.ArmTimer)] == [pytest.approx(UNLISTED_STEP_S)]


@pytest.mark.parametrize("state_first", [True, False])
def test_a_memory_fault_of_an_unlisted_client_only_asks_and_the_answers_name_it(state_first: bool) -> None:
    world = open_world(None)
    world.join(20)
    world.fault(20)
    assert world.domain("d1").state is DomainState.ACTIVE and not world.records()
    assert any(e.clients for e in world.made(fx.AskServer))
    world.wait(0.05)
    answers: list[ev.Event] = [
        ev.ServerStateSeen("d1", ServerState.FAULT),
        ev.ClientNoticed("d1", facts(20), listed=True),
    ]
    for answer in answers if state_first else reversed(answers):
        world.do(answer)
    (record,) = world.records().values()
    assert record.offender is not None and record.offender.id.process == process(20)
    assert record.confidence is Confidence.CERTAIN
    assert Source.UVM in {e.source for e in record.evidence}
    assert world.pids(record.victims) == [VICTIM, PARTICIPANT]
    assert world.domain("d1").state is DomainState.FAULTED


def test_a_fault_of_a_process_outside_mps_is_no_fault_of_the_domain_that_a_line_names() -> None:
    world = open_world(None)
    world.join(77)
    world.fault(77)
    assert not world.records(), "d1 has not faulted"
    world.wait(1.5).server_state("d1", ServerState.FAULT)
    (record,) = world.records().values()
    assert record.offender is None and record.confidence is Confidence.UNKNOWN
    assert world.pids(record.suspects) == world.pids(record.victims) == [VICTIM, PARTICIPANT]
    assert Source.UVM not in {e.source for e in record.evidence}
    world.wait(1.0).do(ev.ClientNoticed("d1", facts(77), listed=True))
    assert world.record().offender is None, "its own fault was too long ago"
    assert world.pids(world.record().suspects) == [VICTIM, PARTICIPANT, 77]


def test_text_of_an_open_log_chooses_no_suspect_and_no_victim() -> None:
    for died in (False, True):
        world = World().ready(uid=None)
        world.do(ev.ClientNoticed("d1", facts(10), listed=True))
        world.do(ev.ClientNoticed("d1", facts(77)))
        world.wait(2.0).do(ev.ClientsListed("d1", world.now, frozenset({10})))
        if died:
            world.die(77)
        world.server_state("d1", ServerState.FAULT)
        record = world.record()
        assert record.offender is not None and record.offender.id.process == process(10)
        assert record.confidence is Confidence.LIKELY and not record.suspects and not record.victims


def test_while_no_list_has_told_a_lone_client_is_not_named_beside_an_unlisted_one() -> None:
    for died in (False, True):
        world = World().ready(uid=None)
        world.do(ev.ClientNoticed("d1", facts(10), listed=True))
        world.do(ev.ClientNoticed("d1", facts(20)))
        world.do(ev.ClientsListed("d1", world.now, frozenset({10})))
        if died:
            world.die(20)
        world.server_state("d1", ServerState.FAULT)
        record = world.record()
        assert record.offender is None and world.pids(record.suspects) == [10]


def test_only_a_member_that_exited_in_flight_is_named_for_it() -> None:
    world = World().ready(uid=None)
    for pid in (10, 11):
        world.do(ev.ClientNoticed("d1", facts(pid), listed=True))
    world.do(ev.ClientNoticed("d1", facts(77)))
    world.wait(2.0).do(ev.ClientsListed("d1", world.now, frozenset({10, 11})))
    world.die(77)
    world.die(10)
    world.kernel(31, pid=server_of("d1").pid)
    offender = world.record().offender
    assert offender is not None and offender.id.process == process(10)


def test_a_line_cannot_draw_a_fault_of_another_domain_into_this_one() -> None:
    """A stranger names its own client in the log of d1. It faults in its own domain, and not in d1."""
    world = open_world(None)
    world.want("theirs", uid=STRANGER)
    theirs = world.state.slots["theirs"].active or ""
    world.started(theirs)
    world.do(ev.ClientNoticed(theirs, facts(30, uid=STRANGER)))
    world.do(ev.ClientAttached(theirs, process(30), 1, tracked=True))
    world.do(ev.ClientNoticed("d1", facts(30, uid=STRANGER)))
    world.do(ev.ClientAttached("d1", process(30), 1, tracked=True))
    world.fault(30, domain="d1")
    assert not world.records()
    world.kernel(31, pid=30)
    assert world.domain("d1").state is DomainState.ACTIVE
    assert world.domain(theirs).state is DomainState.FAULTED


def test_a_kernel_line_with_the_pid_of_an_unlisted_client_waits_for_the_answer() -> None:
    world = open_world(None)
    world.join(20)
    world.kernel(31, pid=20)
    assert world.domain("d1").state is DomainState.ACTIVE and world.made(fx.AskServer)
    world.server_state("d1", ServerState.FAULT)
    assert {e.source for e in world.record().evidence} == {Source.KERNEL_LOG, Source.SERVER_STATE}


def test_a_kernel_line_with_the_pid_of_a_process_that_the_list_lacks_is_no_sign_of_the_domain() -> None:
    world = open_world(None)
    world.join(77)
    world.wait(2.0).do(ev.ClientsListed("d1", world.now, frozenset({VICTIM, PARTICIPANT})))
    world.kernel(31, pid=77)
    world.server_state("d1", ServerState.FAULT)
    assert {e.source for e in world.record().evidence} == {Source.SERVER_STATE}


def test_endless_work_of_an_unlisted_process_poisons_no_domain() -> None:
    world = open_world(None)
    world.join(20)
    world.die(20)
    world.wait(30).lingers(20)
    assert world.domain("d1").state is DomainState.ACTIVE and not world.records()


def test_an_unlisted_client_that_is_alone_is_not_named() -> None:
    world = World().ready(uid=None)
    world.join(20)
    world.server_state("d1", ServerState.FAULT)
    assert world.record().offender is None and not world.record().suspects
    world.do(ev.ClientNoticed("d1", facts(20), listed=True))
    assert world.record().offender is None and world.pids(world.record().suspects) == [20]
    world = World().ready(uid=None)
    world.join(20)
    world.do(ev.ClientNoticed("d1", facts(20), listed=True))
    world.server_state("d1", ServerState.FAULT)
    assert world.record().confidence is Confidence.LIKELY


@pytest.mark.parametrize("uid", [None, UID])
def test_a_victim_that_no_server_lists_is_not_killed(uid: int | None) -> None:
    """Not even one of the domain's own user: any process of that user could be named."""
    world = World(Policy(kill_victims_after_s=1.0)).ready(uid=uid, private=False)
    world.join(20)
    world.server_state("d1", ServerState.FAULT)
    world.wait(1).timer("kill-victims", "d1")
    assert not world.ever(fx.Kill)
    assert [e.clients for e in world.made(fx.AskServer)] == [True]
    world.do(ev.ClientNoticed("d1", facts(20), listed=True))
    world.wait(10).timer("kill-victims", "d1")
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [20]


def test_the_home_of_a_participant_is_no_domain_that_a_stranger_named() -> None:
    world = open_world(None)
    world.want("mine", uid=UID)
    mine = world.state.slots["mine"].active or ""
    world.started(mine)
    world.do(ev.ClientNoticed("d1", facts(20)))
    world.do(ev.ClientNoticed(mine, facts(20)))
    world.do(mev.MemberCame(process(20), UID, FailoverMode.KEEP))
    assert world.state.members[process(20)].home == mine


def test_no_question_is_put_before_the_end_of_an_adoption() -> None:
    """The death of an earlier server must be known before the server that has followed it is seen."""
    world = World()
    world.do(ev.SlotWanted(SLOT, ("GPU-0",), None, start=False))
    control, server = control_of("d1"), server_of("d1")
    role, state = ev.DomainRole.ACTIVE, DomainState.ACTIVE
    world.do(ev.DomainAdopted("d1", SLOT, role, state, control, server, ServerState.ACTIVE))
    world.join(20)
    assert not world.ever(fx.AskServer)
    world.do(ev.AdoptionDone())
    world.timer(UNLISTED, "d1")
    assert [e.clients for e in world.made(fx.AskServer)] == [True]


def test_a_named_offender_is_killed_by_the_domain_that_lists_it() -> None:
    """The domain to which it has moved need not list it yet."""
    world = open_world(None)
    world.do(ev.ClientNoticed("d2", facts(PARTICIPANT)))
    world.do(ev.ClientAttached("d2", process(PARTICIPANT), 1, tracked=True, apart=True))
    world.timer(plan.EVICT_OFFENDER, f"{process(PARTICIPANT)} d2")
    assert [e.client for e in world.made(fx.Kill)] == [ClientId("d1", process(PARTICIPANT))]


def test_a_guard_hit_is_evidence_of_its_own_against_an_unlisted_client() -> None:
    """It hit a guard that its own process laid: no text of a log names it."""
    world = open_world(None)
    world.join(20)
    hit = replace(uvm(), fatal=False)
    world.do(ev.GuardHit(ClientId("d1", process(20)), hit, ZoneRole.GUARD, 1, Liveness.RUNNING))
    assert [e.process for e in world.made(fx.Terminate)] == [process(20)]
    world.terminate_finished(20)
    assert [e.client.process for e in world.made(fx.Kill)] == [process(20)]


# -- private domains -------------------------------------------------------------------------------------


def test_the_log_of_a_private_domain_decides_at_once() -> None:
    world = World().ready()
    world.join(10, 11)
    world.do(ev.ServerFatalLogged("d1", FATAL))
    assert world.domain("d1").state is DomainState.FAULTED and world.path() == "d2"
    assert [e.source for e in world.record().evidence] == [Source.SERVER_LOG]


def test_beside_a_client_of_root_the_log_of_a_private_domain_only_asks() -> None:
    world = World().ready()
    world.join(10)
    world.do(ev.ClientNoticed("d1", facts(12, uid=0), listed=True))
    world.do(ev.ServerFatalLogged("d1", FATAL))
    assert world.domain("d1").state is DomainState.ACTIVE and world.made(fx.AskServer)


@pytest.mark.parametrize("borrowed", [False, True])
def test_the_log_of_a_private_domain_names_processes_of_its_user_alone(borrowed: bool) -> None:
    world = World().ready()
    named = replace(facts(30, uid=UID if borrowed else STRANGER), borrowed=borrowed)
    world.do(ev.ClientNoticed("d1", named))
    assert [type(e) for e in world.last] == [fx.ArmTimer, fx.Forget]
    assert not world.state.clients and world.state.counters["notices_foreign"] == 1
    world.do(ev.ClientNoticed("d1", named, listed=True))
    assert list(world.state.clients) == [ClientId("d1", process(30))]


def test_a_setuid_program_that_only_a_line_names_keeps_its_domain_until_a_list() -> None:
    world = World().ready()
    world.do(ev.ClientNoticed("d1", replace(facts(30), borrowed=True)))
    world.do(ev.DomainUnreachable("d1", "its socket was removed"))
    assert world.domain("d1").state is DomainState.RETIRED and not world.ever(fx.StopDomain)


@pytest.mark.parametrize("private", [True, False])
def test_a_line_before_the_domain_has_started_makes_no_client_of_a_stranger(private: bool) -> None:
    world = World()
    world.want()
    for pid, uid in ((1, 0), (30, STRANGER), (31, STRANGER), (10, UID)):
        world.do(ev.ClientNoticed("d1", facts(pid, uid=uid)))
    for pid in (30, 10):
        world.do(ev.ClientAttached("d1", process(pid), 1, tracked=True))
    world.do(ev.ClientNoticed("d1", facts(31, uid=STRANGER), listed=True))
    world.started("d1", private=private)
    if private:
        assert [e.client for e in world.made(fx.ReleaseLease)] == [ClientId("d1", process(30))]
        assert world.made(fx.Forget) == [fx.Forget(process(1)), fx.Forget(process(30))]
        assert set(world.client_states()) == {31, 10}
        assert lists.is_unsure(world.domain("d1"), world.now)
    else:
        assert set(world.client_states()) == {1, 30, 31, 10}


def test_a_shared_domain_is_never_private() -> None:
    world = World()
    world.want(uid=None)
    world.started("d1", private=True)
    assert not world.domain("d1").private


@pytest.mark.parametrize(
    "effect",
    [
        fx.Kill(ClientId("d1", process(10)), "why", None),
        fx.Kill(ClientId("d2", process(10)), "why", UID),
        fx.Terminate("d2", server_of("d2"), process(10), 0.05),
        fx.Freeze(ClientId("d1", process(10)), UID),
        fx.SwitchPath("another", "d1"),
        fx.StopDomain("d3", 1.0),
    ],
    ids=lambda effect: type(effect).__name__,
)
def test_an_effect_of_log_text_beyond_its_domain_drops_the_decision(effect: fx.Effect) -> None:
    world = World().ready()
    world.want("another", uid=STRANGER)
    with pytest.raises(InvariantViolation, match="log text"):
        proof.check_log(world.state, ev.ServerFatalLogged("d1", FATAL), [effect])
    shared = World().ready(uid=None)
    with pytest.raises(InvariantViolation, match="log text"):
        proof.check_log(shared.state, ev.ServerFatalLogged("d1", FATAL), [fx.SwitchPath(SLOT, "d2")])


# -- programs of other users in an open domain -----------------------------------------------------------


def test_a_server_that_makes_way_for_a_stranger_costs_its_user_no_domain() -> None:
    """S8: the stock control daemon ends an idle server when a program of another user joins."""
    world = World().ready(private=False)
    server = server_of("d1")
    for turn in range(14):
        world.do(ev.ClientNoticed("d1", facts(30 + turn, uid=STRANGER)))
        world.do(ev.ServerDied("d1", server))
        server = process(9000 + turn)
        world.wait(0.01).do(ev.ServerSeen("d1", server, STRANGER))
        world.do(ev.ClientNoticed("d1", facts(30 + turn, uid=STRANGER), listed=True))
        world.wait(0.5).timer(servers.SUCCESSOR, "d1")
        world.die(30 + turn)
    assert set(world.state.domains) == {"d1", "d2"} and world.path() == "d1"
    assert f"runs for user {STRANGER}" in world.domain("d1").problem
    world.do(ev.ServerSeen("d1", process(9999), UID))
    assert not world.domain("d1").problem


def test_an_idle_server_without_a_successor_retires_its_domain() -> None:
    world = World().ready(private=False)
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.server_state("d1", ServerState.GONE)
    assert world.domain("d1").state is DomainState.ACTIVE, "the control daemon gets a moment"
    world.wait(servers.SUCCESSOR_S).timer(servers.SUCCESSOR, "d1")
    assert world.made(fx.AskServer)
    world.server_state("d1", ServerState.GONE)
    assert world.path() == "d2"


@pytest.mark.parametrize("private", [False, True])
def test_a_server_with_clients_of_its_user_is_replaced_at_once(private: bool) -> None:
    world = World().ready(private=private)
    world.do(ev.ClientNoticed("d1", facts(10), listed=True))
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert world.path() == "d2"


def test_a_client_with_a_lease_loses_its_work_with_its_server_before_a_list_names_it() -> None:
    """A server with such a client did not make way for another program: it crashed."""
    world = World().ready(private=False)
    world.join(10)
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert world.path() == "d2"
    world.do(ev.ServerSeen("d1", process(9000), UID))
    assert [c.id.process.pid for c in victims.victims_of(world.state, "d1")] == [10]


def test_a_stranger_with_a_lease_costs_the_user_of_an_open_domain_nothing() -> None:
    world = World().ready(private=False)
    world.do(ev.ClientNoticed("d1", facts(20, uid=STRANGER)))
    world.do(ev.ClientAttached("d1", process(20), 1, tracked=True))
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert world.path() == "d1"


def test_a_forged_line_that_names_a_client_of_another_domain_costs_no_domain() -> None:
    """S8: the process has a lease, but it works where a server lists it."""
    world = World().ready(private=False)
    world.want("other", gpu="GPU-1")
    world.started("d3")
    world.do(ev.ClientNoticed("d3", facts(10), listed=True))
    world.do(ev.ClientAttached("d3", process(10), 1, tracked=True))
    world.join(10)
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert world.path() == "d1" and not world.domain("d1").bereft


def test_many_starts_of_one_slot_are_delayed_visibly_and_go_on() -> None:
    world = World(Policy(spare=False))
    world.want()
    for n in range(1, slots.STARTS_PER_MINUTE + 1):
        world.started(f"d{n}")
        world.wait(0.1).do(ev.ServerDied(f"d{n}", server_of(f"d{n}")))
        world.stopped(f"d{n}")
    assert len(world.ever(fx.StartDomain)) == slots.STARTS_PER_MINUTE
    (told,) = [e for e in world.ever(fx.Publish) if e.kind == "domain-start-delayed"]
    assert told.owner == UID and told.data["starts"] == slots.STARTS_PER_MINUTE
    assert world.state.slots[SLOT].delayed
    world.timer("ensure", SLOT)
    assert not world.made(fx.StartDomain)
    world.wait(1.0).timer("ensure", SLOT)
    assert world.made(fx.StartDomain) and not world.state.slots[SLOT].delayed


def test_a_stranger_that_is_stopped_is_evicted_by_name_only() -> None:
    world = open_world(UID)
    world.join(20)
    world.evict(20, liveness=Liveness.STOPPED)
    assert [e.client.process.pid for e in world.made(fx.Kill)] == [20], "a requester named it"
