"""A log that does not announce every client: no suspect is named, and an empty domain is replaced."""

from __future__ import annotations

import pytest

from mpsd.base.model import Confidence, ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.domains import QUIET_REPLACED_S
from mpsd.core.failover.participants import Standing
from mpsd.core.lists import LIST_WAIT_S, QUIET_LOG
from mpsd.core.state import ClientState, DomainState, LogState, Policy
from tests.support.core import SLOT, World, facts, mmu_text, server_of
from tests.unit.test_core_failover import Site, site
from tests.unit.test_core_trial import trying

QUIET, INCOMPLETE, WORKS = LogState.QUIET, LogState.INCOMPLETE, LogState.WORKS
UNSURE = [QUIET, INCOMPLETE]


def say(world: World, domain: str, log: LogState) -> tuple[fx.Effect, ...]:
    return world.do(ev.LogStateSeen(domain, log, "a client has no line"))


def listed(world: World, domain: str, *pids: int, began: float | None = None) -> None:
    world.do(ev.ClientsListed(domain, world.now if began is None else began, frozenset(pids)))


def published(world: World) -> list[str]:
    return [e.kind for e in world.made(fx.Publish)]


# Names


@pytest.mark.parametrize("log", [WORKS, *UNSURE])
def test_a_lone_suspect_is_named_only_while_the_log_announces_every_client(log: LogState) -> None:
    world = World().ready()
    world.join(10)
    say(world, "d1", log)
    world.kernel(31, mmu_text(0x7F0000001000), pid=10, name="program10")
    named = log is WORKS
    record = world.record()
    assert record.confidence is (Confidence.LIKELY if named else Confidence.UNKNOWN)
    assert (record.offender is not None) == named
    assert world.pids(record.suspects) == ([] if named else [10])
    assert world.path() == "d2"


@pytest.mark.parametrize("count", [0, 1])
def test_a_lone_suspect_is_not_named_while_a_listed_client_is_not_shown(count: int) -> None:
    world = World().ready()
    world.join(10)
    world.do(ev.ClientsUnpinned("d1", 1))
    world.do(ev.ClientsUnpinned("d1", count))
    world.do(ev.ClientsUnpinned("d9", 1))
    world.kernel(31, mmu_text(0x7F0000001000), pid=10, name="program10")
    assert world.record().confidence is (Confidence.UNKNOWN if count else Confidence.LIKELY)
    assert (world.record().offender is None) == bool(count)


def test_a_retired_domain_does_not_end_under_a_client_that_is_not_shown() -> None:
    world = World().ready()
    world.join(10)
    say(world, "d1", QUIET)
    world.die(10)
    assert world.domain("d1").state is DomainState.RETIRED
    world.do(ev.ClientsUnpinned("d1", 1))
    say(world, "d1", WORKS)
    world.work_ended(10)
    world.wait(1)
    listed(world, "d1", 11)
    assert not world.ever(fx.StopDomain)
    world.wait(1)
    world.do(ev.ClientsUnpinned("d1", 0))
    listed(world, "d1")
    assert [e.domain for e in world.ever(fx.StopDomain)] == ["d1"]


@pytest.mark.parametrize("log", [WORKS, *UNSURE])
def test_the_only_client_that_died_in_flight_is_named_only_then(log: LogState) -> None:
    world = World().ready()
    world.join(11)
    world.do(ev.ClientNoticed("d1", facts(10)))
    say(world, "d1", log)
    world.die(10)
    world.kernel(31, mmu_text(0x7F0000001000), pid=server_of("d1").pid, name="server")
    record = world.record()
    assert (record.fault_class == "death-in-flight") == (log is WORKS)
    assert (record.confidence is Confidence.LIKELY) == (log is WORKS)


@pytest.mark.parametrize("log", [WORKS, *UNSURE])
def test_the_fault_of_a_tracker_names_its_client_all_the_same(log: LogState) -> None:
    world = World().ready()
    world.join(10)
    say(world, "d1", log)
    world.fault(10)
    assert world.record().confidence is Confidence.CERTAIN


@pytest.mark.parametrize("log", [WORKS, *UNSURE])
def test_endless_work_beside_unknown_clients_is_likely_at_most(log: LogState) -> None:
    world = World().ready()
    world.join(10)
    say(world, "d1", log)
    world.die(10)
    world.lingers(10)
    wanted = Confidence.CERTAIN if log is WORKS else Confidence.LIKELY
    assert (world.record().fault_class, world.record().confidence) == ("hang", wanted)


@pytest.mark.parametrize("log", [WORKS, *UNSURE])
def test_a_trial_names_its_suspect_only_if_no_unknown_client_can_be_there(log: LogState) -> None:
    world = trying()
    say(world, "d3", log)
    world.wait(0.1)
    world.server_state("d3", ServerState.FAULT)
    named = [r.offender.id.process.pid for r in world.records().values() if r.domain == "d3" and r.offender]
    assert named == ([10] if log is WORKS else [])


@pytest.mark.parametrize("log", [WORKS, *UNSURE])
def test_the_offender_is_not_sought_among_participants_beside_unknown_clients(log: LogState) -> None:
    world: Site = site(10)
    world.attach(11, "d1")
    world.hello(11)
    world.is_ready(11, 2)
    say(world, "d1", log)
    world.server_state("d1", ServerState.FAULT)
    world.kernel(13, "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Out Of Range Address")
    among = {m.among for m in world.state.members.values() if m.standing is Standing.MOVING}
    assert log is WORKS or True not in among


# Replacing


def test_an_empty_domain_with_a_quiet_log_is_replaced_at_once() -> None:
    world = World().ready()
    say(world, "d1", QUIET)
    assert world.path() == "d2"
    assert world.domain("d1").state is DomainState.RETIRED
    assert published(world)[0] == "domain-log-quiet"
    assert [e.domain for e in world.made(fx.StartDomain)] == ["d3"]
    assert not world.made(fx.StopDomain), "a client may have come that mpsd does not know"
    listed(world, "d1", began=world.now)
    assert not world.made(fx.StopDomain), "the list is not later than the switch of the path"
    world.wait(1)
    listed(world, "d1")
    assert [e.domain for e in world.made(fx.StopDomain)] == ["d1"]


def test_a_server_that_lists_nothing_is_waited_for_so_long_and_no_longer() -> None:
    world = World().ready()
    say(world, "d1", QUIET)
    *_, timer = [e for e in world.made(fx.ArmTimer) if e.kind == QUIET_LOG]
    world.wait(timer.delay_s - 1)
    listed(world, "d1", 10)
    world.wait(1)
    world.timer(QUIET_LOG, "d1")
    assert not world.ever(fx.StopDomain), "it has named a client meanwhile"
    world.wait(timer.delay_s)
    world.timer(QUIET_LOG, "d1")
    assert [e.domain for e in world.ever(fx.StopDomain)] == ["d1"]


def test_a_client_that_the_list_names_keeps_its_domain() -> None:
    world = World().ready()
    say(world, "d1", QUIET)
    world.wait(1)
    listed(world, "d1", 10)
    assert not world.made(fx.StopDomain)
    world.join(10)
    world.wait(1)
    listed(world, "d1", 10)
    assert not world.ever(fx.StopDomain)
    world.die(10)
    world.work_ended(10)
    assert [e.domain for e in world.ever(fx.StopDomain)] == ["d1"]


def test_a_domain_with_clients_is_replaced_when_the_last_has_gone() -> None:
    world = World().ready()
    world.join(10, 11)
    say(world, "d1", QUIET)
    world.die(10)
    assert world.path() == "d1" and world.domain("d1").state is DomainState.ACTIVE
    world.die(11)
    assert world.path() == "d2"
    assert world.client_states() == {10: ClientState.LINGERING, 11: ClientState.LINGERING}


def test_a_slot_without_standby_keeps_its_domain_until_another_has_started() -> None:
    world = World(Policy(spare=False))
    world.want()
    world.started("d1")
    say(world, "d1", QUIET)
    assert world.path() == "d1"
    world.wait(1)
    listed(world, "d1")
    assert not world.ever(fx.StopDomain)
    world.started("d2")
    assert world.path() == "d2" and not world.ever(fx.StopDomain)
    # A client may have come until the path was switched.
    world.wait(1)
    listed(world, "d1")
    assert [e.domain for e in world.ever(fx.StopDomain)] == ["d1"]


def test_domains_are_replaced_once_a_minute_at_most() -> None:
    world = World().ready()
    say(world, "d1", QUIET)
    world.started("d3")
    world.wait(1)
    say(world, "d2", QUIET)
    assert world.path() == "d2"
    (timer,) = [e for e in world.made(fx.ArmTimer) if e.kind == QUIET_LOG]
    assert (timer.subject, timer.delay_s) == ("d2", QUIET_REPLACED_S - 1)
    world.wait(timer.delay_s)
    world.timer(QUIET_LOG, "d2")
    assert world.path() == "d3"


def test_a_quiet_standby_domain_is_replaced_and_never_takes_over_from_a_quiet_domain() -> None:
    world = World().ready()
    say(world, "d2", QUIET)
    assert world.domain("d2").state is DomainState.RETIRED
    assert world.state.slots[SLOT].spare == "d3"
    world.started("d3")
    say(world, "d3", QUIET)
    world.wait(QUIET_REPLACED_S)
    say(world, "d1", QUIET)
    assert world.path() == "d1"
    world.timer(QUIET_LOG, "d3")
    world.started("d4")
    world.wait(QUIET_REPLACED_S)
    world.timer(QUIET_LOG, "d1")
    assert world.path() == "d4"


def both_quiet() -> World:
    """Return a world in which the log of d1 is quiet, and so is that of its standby domain d3."""
    world = World().ready()
    world.join(10)
    say(world, "d2", QUIET)
    world.started("d3")
    say(world, "d1", QUIET)
    world.wait(1)
    say(world, "d3", QUIET)
    world.die(10)
    world.work_ended(10)
    world.wait(QUIET_REPLACED_S)
    assert world.path() == "d1"
    return world


def test_a_domain_beside_a_quiet_standby_domain_is_replaced_once_a_better_one_is_warm() -> None:
    world = both_quiet()
    world.timer(QUIET_LOG, "d3")
    assert world.state.slots[SLOT].spare == "d4"
    world.started("d4")
    timers = [t for t in world.made(fx.ArmTimer) if (t.kind, t.subject) == (QUIET_LOG, "d1")]
    assert world.path() == "d1" and [t.delay_s for t in timers] == [QUIET_REPLACED_S]
    world.wait(QUIET_REPLACED_S).timer(QUIET_LOG, "d1")
    assert world.path() == "d4" and world.domain("d1").state is DomainState.RETIRED


def test_a_domain_beside_a_quiet_standby_domain_is_replaced_once_that_log_works() -> None:
    world = both_quiet()
    say(world, "d3", WORKS)
    assert world.path() == "d3" and world.domain("d1").state is DomainState.RETIRED


def test_an_exclusive_gpu_admits_no_other_domain() -> None:
    world = World().ready(exclusive=True)
    say(world, "d1", QUIET)
    assert world.domain("d1").state is DomainState.ACTIVE


def test_an_incomplete_log_replaces_nothing_but_a_retired_domain_waits_for_a_list() -> None:
    world = World().ready()
    say(world, "d1", INCOMPLETE)
    assert world.path() == "d1" and not published(world)
    world.do(ev.ServerDied("d1", server_of("d1")))
    assert world.path() == "d2"
    assert [e.domain for e in world.ever(fx.StopDomain)] == ["d1"], "no server, no clients"


def test_a_log_that_works_again_does_not_end_the_wait_before_a_list() -> None:
    world = World().ready()
    say(world, "d1", QUIET)
    world.wait(1)
    say(world, "d1", WORKS)
    assert published(world)[0] == "domain-log-works"
    assert not world.ever(fx.StopDomain)
    listed(world, "d1")
    assert [e.domain for e in world.ever(fx.StopDomain)] == ["d1"]


def test_a_list_that_completes_the_log_and_names_an_unknown_client_ends_no_domain() -> None:
    """The list makes the log work before mpsd has noticed the clients of that list."""
    world = World().ready()
    say(world, "d1", INCOMPLETE)
    world.do(ev.DomainUnreachable("d1", "its socket was removed"))
    world.wait(LIST_WAIT_S - 0.5)
    listed(world, "d1", 11)
    say(world, "d1", WORKS)
    assert not world.ever(fx.StopDomain)
    world.wait(0.5).timer(QUIET_LOG, "d1")
    assert not world.ever(fx.StopDomain)
    world.do(ev.ClientNoticed("d1", facts(11), listed=True))
    world.wait(1)
    listed(world, "d1", 11)
    assert not world.ever(fx.StopDomain) and world.domain("d1").list_after is None
    world.die(11)
    assert [e.domain for e in world.ever(fx.StopDomain)] == ["d1"]


def test_each_list_with_an_unknown_client_extends_the_wait_also_of_a_working_log() -> None:
    world = World().ready()
    say(world, "d1", QUIET)
    say(world, "d1", WORKS)
    world.wait(LIST_WAIT_S - 0.5)
    listed(world, "d1", 11)
    world.wait(0.5).timer(QUIET_LOG, "d1")
    assert not world.ever(fx.StopDomain)


def test_the_same_state_twice_is_told_once() -> None:
    world = World().ready()
    world.join(10)
    say(world, "d1", QUIET)
    assert published(world) == ["domain-log-quiet"]
    assert not say(world, "d1", QUIET)
    assert not world.do(ev.LogStateSeen("d9", QUIET, ""))


def test_mpsd_that_stops_its_domains_does_not_wait() -> None:
    world = World().ready()
    say(world, "d1", QUIET)
    world.do(ev.StopRequested())
    assert "d1" in [e.domain for e in world.ever(fx.StopDomain)]
