"""Processes that only log lines name: forgotten when the server does not list them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import ClientId, FailoverMode, ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.clients import MAX_UNLISTED
from mpsd.core.failover import reports as mev
from mpsd.core.lists import UNSURE, UNSURE_MOST_S, UNSURE_S
from mpsd.core.proof import may_be_client
from mpsd.core.state import DomainState, Policy
from tests.support.core import UID, World, facts, process, server_of


def listed(world: World, *pids: int, began: float | None = None) -> None:
    world.do(ev.ClientsListed("d1", world.now if began is None else began, frozenset(pids)))


def test_a_process_that_its_server_never_lists_is_forgotten_after_the_deadline() -> None:
    world = World().ready()
    for pid in (10, 11, 12):
        world.do(ev.ClientNoticed("d1", facts(pid)))
    world.do(ev.AttachFailed("d1", process(12), "no address space"))
    listed(world.wait(59))
    assert set(world.client_states()) == {10, 11, 12}, "the deadline has not passed"
    listed(world.wait(1), 11)
    assert set(world.client_states()) == {11}, "the list names 11: a notice that says so follows"
    assert world.made(fx.Forget) == [fx.Forget(process(10)), fx.Forget(process(12))]
    assert world.state.counters["clients_never_listed"] == 2
    assert not world.state.departed, "it was no client, so no fault can be its own"


def test_a_leased_client_of_a_private_domain_or_a_listed_one_stays_when_a_list_lacks_it() -> None:
    world = World().ready()
    world.join(10)
    world.do(ev.ClientNoticed("d1", facts(11), listed=True))
    listed(world.wait(600))
    assert set(world.client_states()) == {10, 11}


@pytest.mark.parametrize("uid", [None, UID])
def test_a_leased_process_that_an_open_domain_never_lists_is_no_client(uid: int | None) -> None:
    world = World().ready(uid=uid, private=False)
    world.join(10, 11)
    world.do(ev.ClientNoticed("d1", facts(10), listed=True))
    listed(world.wait(59), 10)
    assert set(world.client_states()) == {10, 11}, "the deadline has not passed"
    listed(world.wait(1))
    assert set(world.client_states()) == {10}, "a listed client stays"
    assert [e.client for e in world.made(fx.ReleaseLease)] == [ClientId("d1", process(11))]
    assert world.made(fx.Forget) == [fx.Forget(process(11))]
    assert not world.state.departed, "it was no client, so no fault can be its own"


def test_a_stranger_with_a_lease_does_not_end_the_slot_of_an_exclusive_gpu() -> None:
    world = World().ready(True, uid=None)
    world.do(ev.ClientNoticed("d1", facts(10), listed=True))
    world.join(77)
    world.server_state("d1", ServerState.FAULT)
    world.die(10)
    world.server_state("d1", ServerState.ACTIVE)
    assert world.domain("d1").state is DomainState.FAULTED, "77 may be a client"
    listed(world.wait(60))
    world.server_state("d1", ServerState.ACTIVE)
    assert world.domain("d1").state is DomainState.ACTIVE


def test_a_stranger_with_a_lease_does_not_hold_a_domain_that_has_lost_its_server() -> None:
    world = World().ready(True, uid=None)
    world.do(ev.ClientNoticed("d1", facts(10), listed=True))
    world.join(77)
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.die(10)
    world.server_state("d1", ServerState.GONE)
    assert 77 in world.client_states()
    world.wait(60).server_state("d1", ServerState.GONE)
    assert not world.state.clients and [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_a_participant_at_home_and_a_client_during_adoption_stay() -> None:
    world = World(Policy(failover=FailoverMode.EXACT)).ready(uid=None)
    world.join(10, 11)
    world.do(mev.MemberRestored(process(10), UID, FailoverMode.EXACT, "d1"))
    world.do(mev.MemberCame(process(11), UID, FailoverMode.EXACT))
    assert world.state.members[process(11)].home is None, "its own word is no proof"
    world.adopt("d9", ev.DomainRole.OLD, DomainState.RETIRED)
    listed(world.wait(60))
    assert set(world.client_states()) == {10, 11}
    world.do(ev.AdoptionDone())
    world.do(mev.MemberRestored(process(10), UID, FailoverMode.EXACT, "d1"))
    listed(world)
    assert set(world.client_states()) == {10}


def test_a_list_that_was_asked_for_earlier_says_nothing() -> None:
    world = World().ready()
    world.do(ev.ClientNoticed("d1", facts(10)))
    listed(world.wait(600), began=99.0)
    assert set(world.client_states()) == {10}


def test_a_domain_out_of_service_stops_once_its_last_unlisted_process_is_forgotten() -> None:
    world = World().ready()
    world.do(ev.ClientNoticed("d1", facts(10)))
    world.server_state("d1", ServerState.FAULT)
    assert not world.ever(fx.StopDomain)
    listed(world.wait(60))
    assert not world.state.clients and [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_a_domain_with_a_foreign_process_in_its_log_is_not_stopped_before_a_list_can_tell() -> None:
    world = World().ready()
    world.do(ev.ForeignNoticed("d1"))
    assert world.state.counters["notices_foreign"] == 1
    (timer,) = world.made(fx.ArmTimer)
    world.server_state("d1", ServerState.FAULT)
    assert not world.ever(fx.StopDomain)
    world.wait(timer.delay_s).timer(timer.kind, timer.subject)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_a_foreign_process_that_the_list_shows_keeps_its_domain() -> None:
    world = World().ready()
    world.do(ev.ForeignNoticed("d1"))
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.do(ev.ClientNoticed("d1", facts(10, uid=9), listed=True))
    world.wait(60).timer(UNSURE, "d1")
    assert not world.ever(fx.StopDomain) and set(world.client_states()) == {10}


def test_a_later_line_prolongs_the_wait_for_a_list() -> None:
    world = World().ready()
    world.do(ev.ForeignNoticed("d1"))
    world.do(ev.DomainUnreachable("d1", "its socket was removed"))
    world.wait(4.9).do(ev.ForeignNoticed("d1"))
    world.wait(0.1).timer(UNSURE, "d1")
    assert not world.ever(fx.StopDomain)
    (timer,) = world.made(fx.ArmTimer)
    assert (timer.kind, timer.delay_s) == (UNSURE, pytest.approx(UNSURE_S - 0.1))
    world.wait(timer.delay_s + 0.001).timer(UNSURE, "d1")
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"], "its server answers no list"


def test_only_a_list_that_was_asked_for_later_than_the_line_ends_the_wait() -> None:
    world = World().ready()
    world.do(ev.ForeignNoticed("d1"))
    world.do(ev.DomainUnreachable("d1", "its socket was removed"))
    line = world.now
    listed(world.wait(0.1), began=line)
    listed(world, 10)
    assert not world.ever(fx.StopDomain), "10 is a client that mpsd does not know yet"
    listed(world)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_a_flood_of_foreign_lines_holds_a_domain_for_a_bounded_time() -> None:
    world = World().ready()
    world.do(ev.ForeignNoticed("d1"))
    world.do(ev.DomainUnreachable("d1", "its socket was removed"))
    armed = 0
    for _ in range(400):
        world.wait(0.1).do(ev.ForeignNoticed("d1"))
        armed += len(world.made(fx.ArmTimer))
        if world.now - 100.0 > UNSURE_MOST_S:
            break
    assert not armed, "one timer is enough"
    world.timer(UNSURE, "d1")
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_a_foreign_line_does_not_delay_the_question_about_a_faulted_domain() -> None:
    world = World().ready(True)
    world.server_state("d1", ServerState.FAULT)
    world.do(ev.ForeignNoticed("d1"))
    assert [e.kind for e in world.made(fx.ArmTimer)] == [UNSURE]


def test_of_many_processes_that_only_lines_name_the_oldest_are_forgotten() -> None:
    world = World().ready()
    world.join(1)
    for pid in range(10, 10 + MAX_UNLISTED):
        world.wait(0.001).do(ev.ClientNoticed("d1", facts(pid)))
    assert not world.ever(fx.Forget)
    world.wait(0.001).do(ev.ClientNoticed("d1", facts(5000)))
    assert world.made(fx.Forget) == [fx.Forget(process(10))]
    assert {1, 11, 5000} <= set(world.client_states())


def test_a_user_with_many_processes_does_not_push_out_that_of_another_user() -> None:
    world = World()
    world.want("shared", uid=None)
    world.started("d1")
    world.do(ev.ClientNoticed("d1", facts(10)))
    for pid in range(1000, 1000 + 2 * MAX_UNLISTED):
        world.wait(0.001).do(ev.ClientNoticed("d1", facts(pid, uid=2000)))
    assert 10 in world.client_states() and len(world.client_states()) == MAX_UNLISTED


def test_a_line_is_believed_of_processes_whose_user_may_be_in_the_domain() -> None:
    world = World().ready()
    own = world.domain("d1")
    users = (UID, 0, 77, 4242)
    assert [may_be_client(own, uid, 77) for uid in users] == [True, False, False, False]
    is_open = replace(own, private=False)
    assert [may_be_client(is_open, uid, 77) for uid in users] == [True, True, True, False]
    world.want("shared", uid=None)
    shared = next(d for d in world.state.domains.values() if d.uid is None)
    assert may_be_client(shared, 4242, 77)
