"""Records of fail-over across a restart of mpsd: taken over, revised, and made for moves without a daemon."""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover import restart
from mpsd.core.failover.participants import FailoverRecord, Outcome
from mpsd.core.state import DomainState
from tests.support.core import GPU, SLOT, UID, process
from tests.unit.test_core_failover import KEEP, ON, Site, site

PIDS = (10, 11)


def told() -> FailoverRecord:
    """The record of a daemon that was killed right after it had told two programs to move."""
    before = site(*PIDS, 12)
    before.fault(12)
    return before.failover()


def next_daemon(*records: FailoverRecord, gone: tuple[int, ...] = (), home: str = "d1") -> Site:
    """A daemon that takes d1 (faulted) and d2 over, with the programs in both; their home was recorded."""
    world = Site(ON)
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
    world.adopt("d1", ev.DomainRole.OLD, DomainState.FAULTED, server_state=ServerState.ACTIVE)
    world.adopt("d2", ev.DomainRole.ACTIVE, DomainState.ACTIVE)
    for record in records:
        world.do(mev.FailoverRestored(record, frozenset(map(process, gone))))
    living = [pid for pid in PIDS if pid not in gone]
    for pid in living:
        world.do(mev.MemberRestored(process(pid), UID, KEEP, home))
    for pid in living:
        for domain in ("d1", "d2"):
            world.attach(pid, domain)
    world.do(ev.AdoptionDone())
    world.do(ev.DriverFilesSeen(""))
    return world


def waits(world: Site) -> list[str]:
    return [e.subject for e in world.ever(fx.ArmTimer) if e.kind == "failover-wait"]


def revisions(world: Site) -> list[tuple[int, int]]:
    return [(e.record.id, e.record.revision) for e in world.ever(fx.RecordFailover)]


def test_a_program_that_moved_before_it_connected_again_is_moved_in_its_old_record() -> None:
    record = told()
    world = next_daemon(record)
    assert waits(world) == [str(record.id)] and not revisions(world)
    world.hello(10, generation=2)
    assert world.outcomes() == {10: Outcome.MOVED, 11: Outcome.TOLD, 12: Outcome.NOT_TOLD}
    world.hello(11, generation=2)
    assert world.outcomes()[11] is Outcome.MOVED and not world.ever(fx.Move)
    assert revisions(world) == [(record.id, record.revision + 1), (record.id, record.revision + 2)]
    assert all(f.held_ms is None for f in world.failover().fates)


def test_a_program_that_reports_its_move_after_its_hello_gives_its_times() -> None:
    world = next_daemon(told())
    world.hello(10, generation=2)
    world.moved(10, 2)
    entry = next(f for f in world.failover().fates if f.process == process(10))
    assert (entry.outcome, entry.held_ms, entry.fence_ms) == (Outcome.MOVED, 1.0, 2.0)
    written = len(revisions(world))
    world.moved(10, 2)
    assert len(revisions(world)) == written


def test_a_program_without_an_answer_is_silent_until_it_connects_again() -> None:
    record = told()
    world = next_daemon(record)
    world.hello(10, generation=2)
    world.timer("failover-wait", str(record.id))
    assert world.outcomes() == {10: Outcome.MOVED, 11: Outcome.SILENT, 12: Outcome.NOT_TOLD}
    world.hello(11, generation=2)
    assert world.outcomes()[11] is Outcome.MOVED


def test_a_program_that_has_ended_meanwhile_has_ended_in_the_record() -> None:
    record = told()
    world = next_daemon(record, gone=(11,))
    assert world.outcomes() == {10: Outcome.TOLD, 11: Outcome.ENDED, 12: Outcome.NOT_TOLD}
    assert revisions(world) == [(record.id, record.revision + 1)]


def test_a_program_that_never_received_its_order_is_told_again_under_the_same_record() -> None:
    record = told()
    world = next_daemon(record)
    world.wait(1.5)
    world.hello(10)
    world.is_ready(10, 2)
    assert world.told() == [10] and world.failover().id == record.id
    assert [f.told_ms for f in world.failover().fates if f.process == process(10)] == [1500.0]
    world.moved(10, 2)
    assert world.outcomes()[10] is Outcome.MOVED


def test_numbers_continue_and_a_record_is_taken_over_once() -> None:
    record = replace(told(), id=7)
    world = next_daemon(record, record)
    assert world.state.next_failover == 8 and [r.id for r in world.state.failovers] == [7]
    assert world.state.counters["adoptions_ignored"] == 1


def test_moves_that_no_record_covers_are_written_as_one_record_for_each_domain() -> None:
    world = next_daemon()
    for pid in PIDS:
        world.hello(pid, generation=2)
    record = world.failover()
    assert revisions(world) == [(1, 1), (1, 2)] and world.outcomes() == dict.fromkeys(PIDS, Outcome.MOVED)
    assert (record.trigger, record.domain, record.to, record.generation) == (restart.UNSEEN, "d1", "d2", 2)
    assert not record.planned
    # The next HELLO of the same program is no news.
    world.hello(10, generation=2)
    assert len(revisions(world)) == 2


def test_a_program_at_its_recorded_home_makes_no_record() -> None:
    world = next_daemon(home="d2")
    for pid in PIDS:
        world.hello(pid, generation=2)
    assert not revisions(world)


def test_a_program_cannot_fill_the_journal_with_claims_about_its_home() -> None:
    world = next_daemon()
    for generation in (1, 2, 1, 2, 1):
        world.hello(10, generation=generation)
    assert len(revisions(world)) <= 1


def test_a_program_that_was_not_told_and_moved_by_itself_has_moved() -> None:
    """The next daemon found the fault before the program connected to it."""
    world = Site(ON)
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
    world.adopt("d1", ev.DomainRole.ACTIVE, DomainState.ACTIVE)
    world.adopt("d2", ev.DomainRole.SPARE, DomainState.WARM)
    world.do(mev.MemberRestored(process(10), UID, KEEP, "d1"))
    for domain in ("d1", "d2"):
        world.attach(10, domain)
    world.do(ev.AdoptionDone())
    world.do(ev.DriverFilesSeen(""))
    world.do(ev.ServerStateSeen("d1", ServerState.FAULT))
    assert world.outcomes() == {10: Outcome.NOT_TOLD}
    world.hello(10, generation=2)
    assert world.outcomes() == {10: Outcome.MOVED}
    assert [f.why for f in world.failover().fates] == ["the client moved without mpsd"]
    assert world.pauses(world.record()) == {} or world.record().victims == ()


def test_a_domain_whose_server_lists_nothing_is_asked_again_and_not_stopped_before() -> None:
    world = Site(ON)
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
    world.adopt("d1", ev.DomainRole.OLD, DomainState.RETIRED)
    world.adopt("d2", ev.DomainRole.ACTIVE, DomainState.ACTIVE)
    world.do(ev.AdoptionDone(frozenset({"d1", "d9"})))
    assert fx.AskServer("d1", clients=True) in world.last and not world.made(fx.StopDomain)
    world.wait(1.0).do(ev.ClientsListed("d1", world.now, frozenset()))
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]
