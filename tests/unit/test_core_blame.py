"""Blame during turns and late moves: no client is named, or left in a dead domain, for another's fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import Confidence, FailoverMode, ServerState
from mpsd.core import events as ev
from mpsd.core.draft import FAILOVERS_KEPT, Draft
from mpsd.core.failover import plan
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Outcome, Standing, Turn
from mpsd.core.state import DomainState
from tests.support.core import GPU, SLOT, UID, process, server_of
from tests.unit.test_core_failover import ON, Site, site, suspected, turns_of
from tests.unit.test_core_serialreplay import comes, suspects, turns


def why(world: Site, pid: int) -> str:
    return next(f.why for f in world.failover().fates if f.process.pid == pid)


@pytest.mark.parametrize("what", ["another is certain", "the server died", "the device failed"])
def test_who_has_its_turn_is_not_blamed_for_what_another_did(what: str) -> None:
    world = suspected(10, 11, 9)
    assert turns_of(world)[10] is Turn.HAS
    world.started("d3")
    world.is_ready(9, 3)
    # Late signs of the first domain are over.
    world.wait(3)
    if what == "another is certain":
        world.attach(12, "d2")
        world.fault(12, domain="d2")
    elif what == "the server died":
        world.do(ev.ServerDied("d2", server_of("d2")))
    else:
        world.kernel(79, "GPU has fallen off the bus.")
        world.server_state("d2", ServerState.FAULT)
    assert why(world, 10) != plan.FAULTED_AGAIN
    if what != "the device failed":
        assert world.standing(10) is not Standing.LEFT_BEHIND
        world.is_ready(10, 3)
        assert world.told() == [10]


def test_who_was_not_ready_for_a_drain_moves_when_the_old_server_dies() -> None:
    world = site(10)
    world.attach(11, "d1")
    world.hello(11)
    world.do(ev.DrainRequested((), True))
    world.moved(10, 2)
    world.is_ready(11, 2)
    assert world.told() == []
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert world.told() == [11]


def test_a_turn_is_had_once_for_each_move() -> None:
    """A client that reports a second time that it waits gets its turn at once and delays no other client."""
    world = suspects(10, 11)
    comes(world, 10, 1)
    comes(world, 11, 30)
    assert turns(world) == [10]
    world.wait(1.4)
    comes(world, 10, 1)
    assert turns(world) == [10, 10, 11]
    assert turns_of(world) == {11: Turn.HAS}


def test_who_faults_while_it_leaves_by_plan_is_named() -> None:
    world = site(10)
    world.attach(11, "d1")
    world.hello(11)
    world.do(ev.DrainRequested((), True))
    assert world.told() == [10]
    world.wait(0.1)
    world.fault(10)
    assert world.record().confidence is Confidence.CERTAIN
    assert world.pids([world.record().offender]) == [10]


def test_who_comes_after_a_restart_moves_where_the_server_died_meanwhile() -> None:
    world = Site(ON)
    world.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
    for name, role, state in (("d1", "ACTIVE", "ACTIVE"), ("d2", "SPARE", "WARM")):
        world.adopt(name, ev.DomainRole[role], DomainState[state])
    world.do(mev.MemberRestored(process(10), UID, FailoverMode.KEEP, "d1"))
    for name in ("d1", "d2"):
        world.attach(10, name)
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.do(ev.AdoptionDone())
    world.do(ev.DriverFilesSeen(""))
    world.hello(10)
    world.do(mev.MemberReady(process(10), 2))
    assert world.told() == [10]


def test_a_record_is_kept_for_as_long_as_somebodys_word_is_to_come() -> None:
    """The record stays however many newer records there are."""
    world = site(10)
    world.do(ev.DrainRequested((), True))
    waits = world.failover()
    (entry,) = waits.fates
    assert entry.outcome is Outcome.TOLD
    over = replace(waits, fates=(replace(entry, outcome=Outcome.MOVED),))
    draft = Draft(world.state, waits.at + 100)
    for number in range(300):
        draft.put_failover(replace(over, id=waits.id + 1 + number))
    newest = range(waits.id + 301 - FAILOVERS_KEPT, waits.id + 301)
    assert [r.id for r in draft.state.failovers] == [waits.id, *newest]
