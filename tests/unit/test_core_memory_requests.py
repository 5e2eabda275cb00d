"""Memory requests: which clients core asks for memory, and in which order, before an allocation fails."""

from __future__ import annotations

import pytest

from mpsd.base.model import FailoverMode, Reclaimable
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.memory import ASK_S, BACK, REOFFER_S, REQUEST_LIMIT_S, WAIT, watched_gpus
from mpsd.core.failover.participants import Standing
from mpsd.core.state import Policy
from tests.support import core
from tests.support.core import GPU, UID, process, server_of
from tests.unit.test_core_failover import Site, site

EXACT = FailoverMode.EXACT
MIB = 1 << 20
OTHER = UID + 1
ANOTHER = "another program needed its memory"


def crowd(*pids: int, gives: bool = True) -> Site:
    """These clients are ready in d2, each with a standby context of pid MiB; 9, which asks, has none."""
    world = Site(Policy(failover=EXACT, linger_limit_s=30.0))
    world.ready()
    world.do(ev.DriverFilesSeen(""))
    for pid in (9, *pids):
        world.attach(pid, "d1")
        world.do(mev.MemberCame(process(pid), UID, EXACT, gives=gives))
    for pid in pids:
        world.attach(pid, "d2")
        world.do(mev.MemberReady(process(pid), 2, 5_000_000, pid * MIB))
    return world


def ask(world: Site, wanted: int = MIB, free: int = 0, number: int = 1) -> None:
    world.do(mev.MemberWantsMemory(process(9), wanted, free, number))


def asked(world: Site) -> list[tuple[int, Reclaimable]]:
    """Return the clients that the last event asked."""
    return [(e.process.pid, e.spared) for e in world.made(fx.RequestMemory)]


def answered(world: Site) -> list[tuple[int, int]]:
    return [(e.process.pid, e.bytes) for e in world.made(fx.GrantMemory)]


def gave(world: Site, pid: int, given: int = 0, spared: Reclaimable | None = None) -> None:
    """Report a release of what was asked for last, unless `spared` says otherwise."""
    last = [e.spared for e in world.ever(fx.RequestMemory) if e.process.pid == pid]
    world.do(mev.MemberReleasedMemory(process(pid), given, last[-1] if spared is None else spared))


def ask_all(world: Site) -> list[tuple[int, Reclaimable]]:
    """Return the order of all further requests if no client has anything to release."""
    order = []
    while said := asked(world):
        ((pid, _),) = said
        order += said
        gave(world, pid)
    return order


def test_room_for_copies_is_asked_for_before_a_standby_and_one_at_a_time() -> None:
    world = crowd(10, 11)
    ask(world)
    order = ask_all(world)
    assert order == [
        (11, Reclaimable.ROOM),
        (10, Reclaimable.ROOM),
        (11, Reclaimable.STANDBY),
        (10, Reclaimable.STANDBY),
    ]
    assert answered(world) == [(9, 0)]


def test_what_one_gives_is_tried_before_the_next_one_is_asked() -> None:
    world = crowd(10, 11)
    ask(world)
    gave(world, 11, 64 * MIB)
    assert (asked(world), answered(world)) == ([], [(9, 64 * MIB)])
    ask(world)
    assert asked(world) == [(10, Reclaimable.ROOM)]
    assert world.state.counters["failover_memory_given"] == 1


def test_nobody_is_asked_for_the_same_twice_for_one_allocation() -> None:
    """An allocation that cannot succeed ends, even if clients take memory again meanwhile."""
    world = crowd(10)
    ask(world)
    gave(world, 10, MIB)
    ask(world)
    assert asked(world) == [(10, Reclaimable.STANDBY)]
    gave(world, 10, MIB)
    ask(world)
    assert answered(world) == [(9, 0)]
    ask(world, number=2)
    assert asked(world) == [(10, Reclaimable.ROOM)]


@pytest.mark.parametrize(
    ("free", "wanted", "is_asked"), [(0, 21, True), (0, 22, False), (5, 26, True), (5, 27, False)]
)
def test_no_standby_goes_for_an_allocation_that_all_of_them_do_not_make_fit(
    free: int, wanted: int, is_asked: bool
) -> None:
    world = crowd(10, 11)
    ask(world, wanted * MIB, free * MIB)
    gave(world, 11)
    gave(world, 10)
    assert bool(asked(world)) == is_asked == (not answered(world))


def test_where_one_does_not_say_what_its_standby_takes_it_may_be_enough() -> None:
    world = crowd(10)
    world.attach(12, "d1")
    world.do(mev.MemberCame(process(12), UID, EXACT, gives=True))
    world.attach(12, "d2")
    world.do(mev.MemberReady(process(12), 2))
    ask(world, 1 << 40)
    for pid in (10, 12):
        gave(world, pid)
    assert asked(world) == [(10, Reclaimable.STANDBY)]


def test_who_does_not_answer_is_passed_over() -> None:
    world = crowd(10, 11)
    ask(world)
    (timer,) = (e for e in world.made(fx.ArmTimer) if e.kind == WAIT)
    assert timer.delay_s == ASK_S
    world.timer(WAIT, timer.subject)
    assert asked(world) == [(10, Reclaimable.ROOM)]
    # A late answer of the first client counts for nothing, and neither does its timer.
    gave(world, 11, MIB)
    assert answered(world) == []
    world.timer(WAIT, timer.subject)
    assert (asked(world), answered(world)) == ([], [])


def test_so_is_who_goes_away() -> None:
    world = crowd(10, 11)
    ask(world)
    world.do(mev.MemberLeft(process(11)))
    assert asked(world) == [(10, Reclaimable.ROOM)]
    world.die(10)
    assert answered(world) == [(9, 0)]


def test_two_that_ask_have_the_same_answer() -> None:
    world = crowd(10)
    ask(world)
    world.attach(8, "d1")
    world.do(mev.MemberCame(process(8), UID, EXACT, gives=True))
    world.do(mev.MemberWantsMemory(process(8), MIB, 0))
    assert asked(world) == [(10, Reclaimable.ROOM)]
    gave(world, 10, MIB)
    assert sorted(answered(world)) == [(8, MIB), (9, MIB)]


def test_who_cannot_be_asked_is_not() -> None:
    world = crowd(10, gives=False)
    ask(world)
    assert answered(world) == [(9, 0)]


def test_who_moves_is_not_asked() -> None:
    world = crowd(10)
    world.kernel(43, "channel 0x1", server_of("d1").pid, "nvidia-cuda-mps")
    assert world.standing(10) is Standing.MOVING
    ask(world)
    assert answered(world) == [(9, 0)]


def test_who_is_no_member_is_told_that_nobody_gives() -> None:
    """The client need not wait for a message that does not come."""
    world = site()
    ask(world)
    assert (asked(world), answered(world)) == ([], [(9, 0)])
    gave(world, 10, MIB, Reclaimable.ROOM)
    assert world.state.counters["failover_words_ignored"] == 1


def test_what_is_given_answers_who_asked_for_that() -> None:
    world = crowd(10)
    ask(world)
    gave(world, 10, 0)
    assert asked(world) == [(10, Reclaimable.STANDBY)]
    # A late answer, for the snapshot buffers.
    gave(world, 10, MIB, Reclaimable.ROOM)
    assert (asked(world), answered(world)) == ([], [])
    gave(world, 10, MIB, Reclaimable.STANDBY)
    assert answered(world) == [(9, MIB)]
    assert [e.number for e in world.made(fx.GrantMemory)] == [1]


def test_threads_that_ask_in_turns_ask_nobody_twice() -> None:
    world = crowd(10)
    for number in (1, 2):
        ask(world, number=number)
        gave(world, 10, MIB)
    for number in (1, 2):
        ask(world, number=number)
        gave(world, 10, MIB)
    for number in (1, 2):
        ask(world, number=number)
        assert (asked(world), answered(world)) == ([], [(9, 0)])


def test_nobody_is_asked_when_the_program_does_not_wait_any_more() -> None:
    world = crowd(10, 11)
    ask(world)
    world.wait(REQUEST_LIMIT_S)
    gave(world, 11)
    assert (asked(world), answered(world)) == ([], [(9, 0)])


def elsewhere(world: Site, gpu: str = GPU, uid: int = OTHER) -> None:
    """Client 20 asks, in a slot of its own; 10, in the first slot, has a standby context of 10 MiB."""
    world.want("another", gpu, uid)
    theirs = world.state.slots["another"].active or ""
    world.started(theirs)
    world.do(ev.ClientNoticed(theirs, core.facts(20), listed=True))
    world.attach(20, theirs)
    world.do(mev.MemberCame(process(20), uid, EXACT, gives=True))


@pytest.mark.parametrize(
    ("gpu", "uid", "order"),
    [(GPU, UID, [Reclaimable.ROOM, Reclaimable.STANDBY]), (GPU, OTHER, []), ("GPU-2", UID, [])],
    ids=["its own", "a stranger's", "on another GPU"],
)
def test_in_another_slot_it_takes_from_its_own_user_s_programs_on_its_gpu(
    gpu: str, uid: int, order: list[Reclaimable]
) -> None:
    world = crowd(10)
    elsewhere(world, gpu, uid)
    world.do(mev.MemberWantsMemory(process(20), MIB, 0))
    given = ask_all(world)
    assert [spared for pid, spared in given if pid == 10] == order
    assert answered(world) == [(20, 0)]


@pytest.mark.parametrize(("uid", "goes"), [(UID, []), (OTHER, [(10, Reclaimable.STANDBY)])])
def test_a_stranger_s_standby_goes_where_the_gpu_is_seen_to_be_full(
    uid: int, goes: list[tuple[int, Reclaimable]]
) -> None:
    """A foreign client's request has no effect. Clients that can ask each other do so without mpsd's look."""
    world = crowd(10)
    elsewhere(world, GPU, uid)
    assert bool(watched_gpus(world.state, world.now)) == bool(goes)
    assert full(world) == goes


def silent(world: Site, pid: int = 30, domain: str = "d1") -> None:
    """Attach a client that runs without mpsd's libcuda."""
    world.attach(pid, domain)


def full(world: Site, gpu: str = GPU) -> list[tuple[int, Reclaimable]]:
    world.do(ev.GpuFull(gpu))
    return asked(world)


def test_a_gpu_is_looked_at_while_somebody_cannot_ask_and_a_standby_would_go() -> None:
    world = crowd(10)
    # Clients 9 and 10 can ask for themselves.
    assert not watched_gpus(world.state, world.now) and not full(world)
    silent(world)
    assert watched_gpus(world.state, world.now) == {GPU}
    world.do(mev.MemberCame(process(30), UID, EXACT, gives=True))
    assert not watched_gpus(world.state, world.now)
    silent(world, 31)
    world.do(mev.MemberUnready(process(10), 2, ANOTHER, for_memory=True))
    assert not watched_gpus(world.state, world.now)


def test_one_that_has_mpsd_s_libcuda_and_is_not_connected_cannot_ask() -> None:
    world = crowd(10)
    world.do(mev.MemberLeft(process(9)))
    assert watched_gpus(world.state, world.now) == {GPU}


def test_standbys_go_one_at_a_time_the_largest_first_until_the_gpu_is_not_full() -> None:
    world = crowd(10, 11)
    silent(world)
    assert full(world) == [(11, Reclaimable.STANDBY)]
    assert full(world) == [], "it has not answered yet"
    world.do(mev.MemberUnready(process(11), 2, ANOTHER, for_memory=True))
    gave(world, 11, 11 * MIB)
    assert not world.ever(fx.GrantMemory), "nobody waits for it"
    assert full(world) == [(10, Reclaimable.STANDBY)]
    world.do(mev.MemberUnready(process(10), 2, ANOTHER, for_memory=True))
    assert full(world) == [] and world.state.counters["failover_standbys_yielded"] == 2


def test_who_keeps_its_standby_is_passed_over_for_a_while() -> None:
    world = crowd(10, 11)
    silent(world)
    assert full(world) == [(11, Reclaimable.STANDBY)]
    gave(world, 11, 0)
    world.wait(ASK_S)
    assert full(world) == [(10, Reclaimable.STANDBY)]
    world.wait(ASK_S)
    assert full(world) == [] and not watched_gpus(world.state, world.now)
    world.wait(REOFFER_S)
    assert full(world) == [(11, Reclaimable.STANDBY)]


@pytest.mark.parametrize("is_new", [False, True])
def test_a_new_standby_may_be_asked_for_whatever_became_of_the_one_before(is_new: bool) -> None:
    world = crowd(10)
    silent(world)
    assert full(world) == [(10, Reclaimable.STANDBY)]
    if is_new:
        world.do(mev.MemberUnready(process(10), 2, ANOTHER, for_memory=True))
        world.timer(BACK, f"{process(10)} 2")
    world.do(mev.MemberReady(process(10), 2, 5_000_000, 10 * MIB))
    world.wait(ASK_S)
    assert full(world) == ([(10, Reclaimable.STANDBY)] if is_new else [])


def test_a_full_gpu_costs_no_standby_on_another_one() -> None:
    world = crowd(10)
    silent(world)
    assert full(world, "GPU-2") == []


def test_a_standby_that_went_for_its_memory_is_offered_again_after_a_while() -> None:
    world = crowd(10)
    world.do(mev.MemberUnready(process(10), 2, "another program needed its memory", for_memory=True))
    (timer,) = (e for e in world.made(fx.ArmTimer) if e.kind == BACK)
    assert timer.delay_s == REOFFER_S and world.standing(10) is Standing.UNREADY
    assert world.state.members[process(10)].bytes == 0
    world.timer(BACK, timer.subject)
    assert [(e.process.pid, e.generation) for e in world.made(fx.OfferStandby)] == [(10, 2)]
    # Only once: the standby context is being created.
    world.timer(BACK, timer.subject)
    assert not world.made(fx.OfferStandby)


def test_one_of_a_program_that_cannot_be_carried_over_is_not() -> None:
    world = crowd(10)
    world.do(mev.MemberUnready(process(10), 2, "its memory was needed", for_memory=True))
    world.do(mev.MemberOpaque(process(10), "cuMemAlloc outside the window"))
    world.timer(BACK, f"{process(10)} 2")
    assert not world.made(fx.OfferStandby) and world.standing(10) is Standing.UNREADY


def test_one_that_went_for_another_reason_is_not() -> None:
    world = crowd(10)
    world.do(mev.MemberUnready(process(10), 2, "cuInit of the second driver instance"))
    assert not [e for e in world.made(fx.ArmTimer) if e.kind == BACK]
