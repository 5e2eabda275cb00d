"""Proof that a process is a client of a domain: without proof mpsd kills nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import ClientId, Liveness
from mpsd.core import effects as fx
from mpsd.core import engine
from mpsd.core import events as ev
from mpsd.core.proof import Proof, grounds, proofs, proven
from mpsd.core.state import ClientState, InvariantViolation, Policy
from tests.support.core import UID, World, facts, process, server_of

STRANGER = UID + 1
EVERY_PROOF = [(own, leased, listed) for own in (0, 1) for leased in (0, 1) for listed in (0, 1)]


def noticed(world: World, pid: int, *, domain: str = "d1", uid: int = STRANGER, listed: bool = False) -> None:
    world.do(ev.ClientNoticed(domain, facts(pid, uid=uid), listed))


def shared() -> World:
    world = World()
    world.want(uid=None)
    world.started("d1")
    return world


def killed(world: World) -> list[int]:
    return [e.client.process.pid for e in world.made(fx.Kill)]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("own", "leased", "listed"), EVERY_PROOF)
def test_what_is_enough(is_shared: bool, own: bool, leased: bool, listed: bool) -> None:
    world = World().ready(private=False)
    noticed(world, 10, uid=UID if own else STRANGER)
    domain = replace(world.domain("d1"), uid=None if is_shared else UID)
    client = replace(world.client("d1", 10), leased=bool(leased), listed=bool(listed))
    ours = bool(own) and not is_shared
    assert (Proof.OWN in proofs(domain, client)) == ours
    assert proven(domain, client, asked=True) == bool(ours or leased or listed)
    assert proven(domain, client, asked=False) == bool(ours or (is_shared and (leased or listed)))


def test_the_word_of_a_log_kills_nobody_who_is_asked_for() -> None:
    world = World().ready(private=False)
    noticed(world, 1)
    world.evict(1)
    (answer,) = world.made(fx.Answer)
    assert (answer.ok, answer.data["code"]) == (False, "unproven")
    assert not world.made(fx.Kill) and not world.made(fx.Terminate)
    assert world.client("d1", 1).state is ClientState.NOTICED
    assert "evictions" not in world.state.counters
    # The server lists it: an eviction by name is allowed.
    noticed(world, 1, listed=True)
    assert not world.last
    world.evict(1, "r2")
    assert world.made(fx.Terminate)
    world.terminate_finished(1)
    assert killed(world) == [1]


def test_a_stranger_in_a_users_domain_is_no_victim_whatever_that_user_makes_its_server_say() -> None:
    world = World(Policy(kill_victims_after_s=1)).ready()
    world.join(10)
    noticed(world, 11, listed=True)
    world.do(ev.ClientAttached("d1", process(11), 1, True))
    world.fault(10)
    world.timer("kill-victims", "d1")
    assert killed(world) == [10]
    assert ("kill-victims", "d1") in [(t.kind, t.subject) for t in world.made(fx.ArmTimer)]


def test_stop_spares_who_is_not_proven_and_ends_it_once_it_is() -> None:
    world = shared()
    noticed(world, 10)
    world.do(ev.StopRequested())
    assert not killed(world) and [e.domain for e in world.made(fx.StopDomain)] == ["d2"], "only the spare"
    (told,) = [e for e in world.made(fx.Publish) if e.kind == "clients-unproven"]
    assert (told.owner, told.data["pids"]) == (None, [10])
    # Every local user can write the log, and name a process with a GPU address space of another domain.
    world.do(ev.ClientAttached("d1", process(10), 2, True))
    assert not killed(world)
    noticed(world, 10, listed=True)
    assert killed(world) == [10]
    world.die(10)


def test_a_newcomer_that_the_server_lists_goes_at_once_while_stopping() -> None:
    world = shared()
    noticed(world, 10)
    world.do(ev.StopRequested())
    noticed(world, 11)
    assert not killed(world)
    noticed(world, 12, listed=True)
    assert killed(world) == [12]


def two_domains() -> World:
    """d1 and d2 of one user, d3 and d4 of another. 10 is a client of d1, and named by the log of d3."""
    world = World(Policy(kill_victims_after_s=1)).ready()
    world.want(slot="theirs", uid=STRANGER)
    world.started("d3")
    world.started("d4")
    world.join(10)
    noticed(world, 10, domain="d3", uid=UID)
    return world


def test_a_client_of_one_domain_is_no_victim_of_another_that_merely_names_it() -> None:
    world = two_domains()
    world.join(20, domain="d3")
    world.fault(20, domain="d3")
    world.timer("kill-victims", "d3")
    assert not killed(world), "20 is of the first user as well: nothing proves it"
    assert world.client("d1", 10).state is ClientState.ATTACHED


def test_an_eviction_asks_only_servers_that_have_the_client() -> None:
    world = two_domains()
    world.evict(10)
    assert [e.domain for e in world.made(fx.Terminate)] == ["d1"]
    world.terminate_finished(10)
    assert [e.client for e in world.made(fx.Kill)] == [ClientId("d1", process(10))]
    assert {c.state for c in world.state.clients.values()} == {ClientState.KILLING}
    world.die(10)
    assert [e.ok for e in world.made(fx.Answer)] == [True]


def test_where_the_servers_cannot_be_asked_the_proven_client_is_killed() -> None:
    world = two_domains()
    world.evict(10, liveness=Liveness.STOPPED)
    assert [e.client for e in world.made(fx.Kill)] == [ClientId("d1", process(10))]


def test_a_kill_says_whose_own_the_process_has_to_be_when_nothing_else_speaks_for_it() -> None:
    world = World(Policy(kill_victims_after_s=1)).ready()
    world.join(10, 11)
    world.fault(10)
    world.timer("kill-victims", "d1")
    assert {e.owner for e in world.made(fx.Kill)} == {UID}
    world = World().ready()
    world.join(10)
    world.evict(10, liveness=Liveness.STOPPED)
    assert [e.owner for e in world.made(fx.Kill)] == [None]
    world = World().ready()
    noticed(world, 10, uid=UID)
    world.evict(10, liveness=Liveness.STOPPED)
    assert [e.owner for e in world.made(fx.Kill)] == [UID]


def test_one_that_has_borrowed_the_users_id_is_not_the_users_own() -> None:
    world = World().ready(private=False)
    world.do(ev.ClientNoticed("d1", replace(facts(10), borrowed=True), False))
    assert proofs(world.domain("d1"), world.client("d1", 10)) == frozenset()
    world.evict(10)
    assert [e.data["code"] for e in world.made(fx.Answer)] == ["unproven"]


def test_a_kill_that_was_withheld_is_told_once_and_the_process_lives_as_no_proven_client() -> None:
    world = World().ready()
    noticed(world, 10, uid=UID)
    world.evict(10, liveness=Liveness.STOPPED)
    # The process becomes a client of another domain meanwhile.
    noticed(world, 10, domain="d2", uid=UID)
    world.do(ev.KillRefused(process(10), "not uid 1000's own"))
    (answer,) = world.made(fx.Answer)
    assert (answer.request, answer.ok, answer.data["code"]) == ("r1", False, "unproven")
    assert [e.kind for e in world.made(fx.Publish)] == ["kill-refused"]
    assert world.state.counters["kills_refused"] == 1
    assert "not uid 1000's own" in world.client("d1", 10).problem
    assert not proofs(world.domain("d1"), world.client("d1", 10))
    assert world.client("d2", 10).state is ClientState.NOTICED
    # No signal was sent, so the process cannot be stuck after one.
    world.timer("kill-wait", process(10))
    assert not world.last


def test_a_policy_kill_that_was_withheld_leaves_nobody_waiting() -> None:
    world = World(Policy(kill_victims_after_s=1)).ready()
    world.join(10, 11)
    world.fault(10)
    world.timer("kill-victims", "d1")
    world.do(ev.KillRefused(process(11), "setuid"))
    assert [e.kind for e in world.made(fx.Publish)] == ["kill-refused"]
    assert not world.made(fx.Answer)
    world.do(ev.KillRefused(process(99), "not known"))
    assert not world.last


def test_a_kill_that_forgets_whose_it_must_be_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World().ready()
    noticed(world, 10, uid=UID)
    world.evict(10, liveness=Liveness.STOPPED)
    made = fx.Kill(ClientId("d1", process(10)), "asked")
    monkeypatch.setitem(engine._HANDLERS, ev.AdoptionDone, lambda d, e: d.emit(made))
    with pytest.raises(InvariantViolation, match="without a check of its owner"):
        world.do(ev.AdoptionDone())


def test_grounds_are_living_clients_only() -> None:
    world = World().ready()
    world.join(10)
    assert grounds(world.state, process(10), asked=False) is not None
    world.die(10)
    assert grounds(world.state, process(10), asked=True) is None


def test_effects_without_proof_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World().ready()
    world.join(10, 11)
    noticed(world, 12)
    world.evict(10)
    exited = World().ready()
    exited.join(10)
    exited.evict(10)
    exited.die(10)
    wrong: list[tuple[World, fx.Effect]] = [
        (world, fx.Terminate("d1", server_of("d1"), process(12), 0.05)),
        (world, fx.Terminate("d2", server_of("d2"), process(10), 0.05)),
        (world, fx.Kill(ClientId("d2", process(10)), "as a client of another domain")),
        (exited, fx.Kill(ClientId("d1", process(10)), "dead")),
    ]
    for where, effect in wrong:
        monkeypatch.setitem(engine._HANDLERS, ev.AdoptionDone, lambda d, e, made=effect: d.emit(made))
        with pytest.raises(InvariantViolation, match="without proof"):
            where.do(ev.AdoptionDone())


@pytest.mark.parametrize("liveness", [Liveness.STOPPED, Liveness.RUNNING])
def test_a_user_has_only_what_is_his_own_at_that_moment_killed(liveness: Liveness) -> None:
    world = World().ready()
    world.join(10)
    world.evict(10, liveness=liveness, owner=UID)
    if liveness is Liveness.RUNNING:
        world.terminate_finished(10)
    assert [e.owner for e in world.made(fx.Kill)] == [UID]
