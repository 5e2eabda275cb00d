"""Slots of users who have long been away: who makes room for whom, and who never does."""

from __future__ import annotations

from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.state import DomainState, Policy
from mpsd.model import ServerState
from tests.support.core import GPU, UID, World, facts, process, server_of

OLD, NEW, NEWER = "old", "new", "newer"
LONG = 601.0


def crowd(*, spare: bool = False) -> World:
    """Two slots are all that may be: OLD with d1, unused for longer than NEW with the next domain."""
    world = World(Policy(spare=spare, max_slots=2))
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


def test_while_all_slots_are_fresh_a_newcomer_is_refused() -> None:
    world = crowd()
    third(world)
    assert not world.last and NEWER not in world.state.slots
    assert world.state.counters["slots_refused"] == 1
    # Who has one already is served.
    world.want(slot=OLD)
    assert set(world.state.slots) == {OLD, NEW}


def test_the_longest_unused_makes_room_and_its_path_goes_first() -> None:
    world = crowd(spare=True).wait(LONG)
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
    world.wait(1).want(slot="fourth", uid=UID + 3)
    assert not dropped(world) and "fourth" not in world.state.slots
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
    assert not dropped(world)


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
