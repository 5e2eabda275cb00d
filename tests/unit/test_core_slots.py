"""Slots that were long unused: which slot makes way for a new user, and which never does."""

from __future__ import annotations

from mpsd.base.model import ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core import slots
from mpsd.core.state import DomainState, Policy
from tests.support.core import GPU, UID, World, facts, process, server_of

OLD, NEW, NEWER = "old", "new", "newer"
LONG = 601.0


def crowd(*, standby: bool = False) -> World:
    """Two slots are the limit: OLD with d1, unused for longer than NEW with the next domain."""
    world = World(Policy(spare=standby, max_slots=2))
    for slot, uid in ((OLD, UID), (NEW, UID + 1)):
        world.want(slot=slot, uid=uid)
        for name in [e.domain for e in world.made(fx.StartDomain)]:
            world.started(name)
            for spares in [e.domain for e in world.made(fx.StartDomain)]:
                world.started(spares)
        world.wait(1)
    return world


def third(world: World, uid: int | None = UID + 2) -> None:
    world.want(slot=NEWER, uid=uid)


def dropped(world: World) -> list[str]:
    return [e.slot for e in world.made(fx.DropPath)]


def test_while_all_slots_were_just_used_a_newcomer_is_refused() -> None:
    world = crowd()
    for pid, domain in ((10, "d1"), (11, "d2")):
        world.do(ev.ClientNoticed(domain, facts(pid), listed=True))
        world.do(ev.ClientAttached(domain, process(pid), 1, tracked=True))
        world.die(pid)
        world.work_ended(pid)
    third(world)
    assert not world.last and NEWER not in world.state.slots
    assert world.state.counters["slots_refused"] == 1
    # A user with a slot is served.
    world.want(slot=OLD)
    assert set(world.state.slots) == {OLD, NEW}


def test_the_longest_unused_makes_room_and_its_path_goes_first() -> None:
    world = crowd(standby=True).wait(LONG)
    third(world)
    assert dropped(world) == [OLD]
    assert [type(e) for e in world.last if isinstance(e, fx.DropPath | fx.StopDomain | fx.StartDomain)] == [
        fx.DropPath,
        fx.StopDomain,
        fx.StopDomain,
        fx.StartDomain,
    ]
    assert world.state.slots[OLD].retiring and NEWER in world.state.slots
    world.stopped("d1")
    assert OLD in world.state.slots
    world.stopped("d2")
    assert set(world.state.slots) == {NEW, NEWER}


def test_use_keeps_a_slot() -> None:
    world = crowd().wait(LONG)
    world.want(slot=OLD)
    third(world)
    assert dropped(world) == [NEW], "the older one was asked for just now"


def test_clients_keep_a_slot_and_for_a_while_after_they_have_gone() -> None:
    world = crowd()
    world.do(ev.ClientNoticed("d1", facts(10)))
    world.wait(LONG)
    third(world)
    assert dropped(world) == [NEW]
    world.stopped("d2")
    world.die(10)
    world.started("d3")
    world.do(ev.ClientNoticed("d3", facts(11), listed=True))
    world.wait(1).want(slot="fourth", uid=UID + 3)
    assert not dropped(world) and "fourth" not in world.state.slots
    world.die(11)
    world.wait(LONG).want(slot=NEWER, uid=UID + 2)
    world.want(slot="fourth", uid=UID + 3)
    assert dropped(world) == [OLD]


def test_work_of_the_dead_keeps_a_slot() -> None:
    world = crowd()
    world.join(10)
    world.die(10)
    world.wait(LONG)
    world.want(slot=NEW, uid=UID + 1)
    third(world)
    assert dropped(world) == [NEW]


def test_the_slot_of_everybody_is_never_retired() -> None:
    world = World(Policy(spare=False, max_slots=1))
    world.want(slot="all", uid=None)
    world.started("d1")
    world.wait(LONG)
    third(world)
    assert not world.last


def test_a_slot_that_is_asked_for_while_it_is_retired_serves_again() -> None:
    world = crowd().wait(LONG)
    third(world)
    world.timer("ensure", OLD)
    assert not world.last
    world.want(slot=OLD)
    (start,) = world.made(fx.StartDomain)
    world.stopped("d1")
    world.started(start.domain)
    assert world.path(OLD) == start.domain
    assert not world.state.slots[OLD].retiring


def test_a_domain_that_was_coming_up_is_ended() -> None:
    world = World(Policy(spare=False, max_slots=1))
    world.want(slot=OLD)
    world.wait(LONG)
    third(world)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]
    world.started("d1")
    assert world.domain("d1").state is DomainState.STOPPING
    world.stopped("d1")
    assert set(world.state.slots) == {NEWER}


def test_whatever_the_slot_still_has_is_ended() -> None:
    world = crowd()
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert world.domain("d1").state is DomainState.RETIRED
    world.wait(LONG)
    third(world)
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1", "d3"]


def restored(used: float | None, *, uid: int | None = UID) -> World:
    world = World(Policy(spare=False)).wait(200_000)
    world.do(ev.SlotWanted(OLD, (GPU,), uid, start=False, used=used))
    return world


def test_slots_are_started_again_only_if_somebody_used_them_of_late() -> None:
    for used, uid, again in (
        (200_000.0, UID, True),
        (1.0, UID, False),
        (1.0, None, True),
        (None, UID, True),
        (9e9, UID, True),
    ):
        world = restored(used, uid=uid)
        world.do(ev.AdoptionDone())
        assert bool(world.made(fx.StartDomain)) == again
        assert dropped(world) == ([] if again else [OLD])
        assert (OLD in world.state.slots) == again


def test_what_still_runs_is_kept_however_long_nobody_used_it() -> None:
    world = restored(1.0)
    control, server = process(5), process(6)
    world.do(
        ev.DomainAdopted(
            "d1", OLD, ev.DomainRole.ACTIVE, DomainState.ACTIVE, control, server, ServerState.ACTIVE
        )
    )
    world.do(ev.AdoptionDone())
    assert not dropped(world) and world.state.slots[OLD].active == "d1"


# Fair shares


def ask(world: World, uid: int | None, *, account: int | None = None, admin: bool = False) -> bool:
    """Ask for a user's slot as `env` does. Return whether there is one afterwards."""
    name = f"u{uid}"
    wanted = ev.SlotWanted(name, (GPU,), uid, account=account, admin=admin)
    refused = slots.refusal(world.state, wanted, world.now)
    world.do(wanted)
    served = name in world.state.slots and not world.state.slots[name].retiring
    assert served == (refused is None)
    for start in world.made(fx.StartDomain):
        world.started(start.domain)
    return served


def serving(world: World) -> set[str]:
    return {s.id for s in world.state.slots.values() if not s.retiring}


def join(world: World, uid: int, pid: int) -> None:
    domain = next(d.id for d in world.state.domains.values() if d.slot == f"u{uid}")
    world.do(ev.ClientNoticed(domain, facts(pid, uid=uid)))


def test_a_slot_that_no_client_used_makes_room_for_a_newcomer_the_oldest_first() -> None:
    world = World(Policy(spare=False, max_slots=4))
    for uid in range(1, 5):
        assert ask(world.wait(1), uid)
    join(world, 1, 11)
    world.die(11)
    assert ask(world.wait(1), 5)
    assert serving(world) == {"u1", "u3", "u4", "u5"}


def test_the_largest_account_gives_way_and_not_a_user_with_one_slot() -> None:
    world = World(Policy(spare=False, max_slots=8))
    assert ask(world, 1)
    for uid in range(100, 104):
        assert ask(world.wait(1), uid, account=9)
    for uid in range(2, 5):
        assert ask(world.wait(1), uid)
    assert ask(world.wait(1), 5)
    assert serving(world) == {"u1", "u101", "u102", "u103", *(f"u{uid}" for uid in range(2, 6))}


def test_an_account_has_half_of_the_slots_at_most_and_displaces_its_own() -> None:
    world = World(Policy(spare=False, max_slots=6))
    for uid in range(100, 104):
        assert ask(world.wait(1), uid, account=9)
    assert serving(world) == {"u101", "u102", "u103"}
    for uid in range(101, 104):
        join(world, uid, uid)
    assert not ask(world, 104, account=9)
    wanted = ev.SlotWanted("u104", (GPU,), 104, account=9)
    assert slots.refusal(world.state, wanted, world.now) is slots.SlotRefusal.SHARE
    assert ask(world, 1)


def test_two_accounts_with_clients_leave_a_quarter_of_the_slots() -> None:
    """Users with subordinate uids run a client in each slot that they get."""
    world = World(Policy(spare=False, max_slots=16))
    for account in (8, 9):
        for uid in range(account * 100, account * 100 + 16):
            if ask(world, uid, account=account):
                join(world, uid, uid)
    held = [sum(1 for s in world.state.slots.values() if s.account == account) for account in (8, 9)]
    assert held == [8, 4]
    for uid in range(1, 5):
        assert ask(world, uid)
        join(world, uid, uid)
    wanted = ev.SlotWanted("u999", (GPU,), 999, account=9)
    assert slots.refusal(world.state, wanted, world.now) is slots.SlotRefusal.SHARE


def test_slots_that_are_long_idle_count_as_free() -> None:
    world = World(Policy(spare=False, max_slots=8))
    for uid in range(1, 6):
        assert ask(world, uid)
    world.wait(world.state.policy.slot_idle_s + 1)
    for uid in range(100, 104):
        assert ask(world, uid, account=9)
        join(world, uid, uid)
    assert len(serving(world)) == 8
    assert not ask(world, 104, account=9)


def test_used_slots_of_an_account_with_many_make_room_after_a_while() -> None:
    world = World(Policy(spare=False, max_slots=4))
    for uid, account in ((100, 9), (101, 9), (1, None), (2, None)):
        assert ask(world, uid, account=account)
        join(world, uid, uid)
        world.die(uid)
    assert not ask(world.wait(slots.USED_GRACE_S), 3)
    assert ask(world.wait(1), 3)
    assert serving(world) == {"u101", "u1", "u2", "u3"}


def test_starts_of_accounts_without_clients_are_limited() -> None:
    world = World(Policy(spare=False, max_slots=200))
    assert all(ask(world, uid, account=9) for uid in range(slots.STARTS_PER_ACCOUNT))
    assert not ask(world, 1000, account=9)
    assert ask(world, 1001)
    others = range(2000, 2000 + slots.STARTS - slots.STARTS_PER_ACCOUNT - 1)
    assert all(ask(world, uid) for uid in others)
    # From then on an account gets its equal share, which is one here.
    assert not ask(world, 6000, account=2000) and ask(world, 3000) and not ask(world, 3001, account=3000)
    assert ask(world, 3000, admin=True)
    assert ask(world, None)
    # A user with a client, and one with a path, is served all the same.
    join(world, others[-1], 7)
    assert ask(world, 4000, account=others[-1]) and ask(world, others[-2])
    assert len(world.state.slot_starts) == slots.STARTS + 1
    assert ask(world.wait(slots.START_WINDOW_S), 3001)
    assert len(world.state.slot_starts) == 1


def test_six_accounts_at_their_limit_keep_no_other_user_out() -> None:
    """S5: users with subordinate uids ask for as many paths as they may, in each minute anew."""
    world = World(Policy(spare=False))
    for minute in range(3):
        for number in range(6 * slots.STARTS_PER_ACCOUNT):
            ask(world, 100_000 + number, account=2000 + number % 6)
        assert ask(world, 3000 + minute)
        # Nor do they get more than their limit.
        assert not any(ask(world, 200_000 + n, account=2000 + n) for n in range(6))
        world.wait(slots.START_WINDOW_S)


def test_starts_of_all_accounts_without_clients_have_a_limit() -> None:
    world = World(Policy(spare=False, max_slots=1000))
    assert all(ask(world, uid) for uid in range(1000, 1000 + 2 * slots.STARTS))
    assert not ask(world, 5000)
    assert ask(world, 5000, admin=True)
    assert ask(world.wait(slots.START_WINDOW_S), 5001)


def test_administrators_have_a_reserve() -> None:
    world = World(Policy(spare=False, max_slots=2))
    for uid in (1, 2):
        assert ask(world, uid)
        join(world, uid, uid)
    assert not ask(world, 3)
    assert all(ask(world, uid, admin=True) for uid in range(10, 10 + slots.ADMIN_RESERVE))
    assert ask(world, 11, admin=True)
    assert serving(world) >= {"u1", "u2"}


def test_a_retired_slot_is_admitted_again_like_a_new_one() -> None:
    world = World(Policy(spare=False, max_slots=2))
    for uid in (1, 2):
        assert ask(world.wait(1), uid)
    assert ask(world.wait(1), 3)
    join(world, 2, 2)
    join(world, 3, 3)
    assert world.state.slots["u1"].retiring
    assert not ask(world, 1)


def test_80_users_that_ask_once_lock_nobody_out() -> None:
    world = World(Policy())
    assert ask(world, 5)
    join(world, 5, 5)
    assert all(ask(world.wait(0.1), uid) for uid in range(1000, 1080))
    assert ask(world, 6) and ask(world, 7)
    join(world, 6, 6)
    assert len(serving(world)) == world.state.policy.max_slots
    assert {"u5", "u6", "u7", "u1079"} <= serving(world)
