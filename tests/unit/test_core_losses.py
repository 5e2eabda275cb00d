"""Losses of a fault: victims lost their work, moved clients paused, and what would have saved the victims."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import ClientId, FailoverMode, ServerState
from mpsd.base.protection import ProtectionLevel
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.faults import taxonomy
from mpsd.core.state import DomainState, Policy
from tests.support.core import GPU, MISALIGNED, World, control_of, process, server_of, uvm
from tests.unit.test_core_failover import ON, Site, site
from tests.unit.test_core_faults import server_xid, three_clients
from tests.unit.test_core_poisoned import poisoned

EXACT = replace(ON, failover=FailoverMode.EXACT)


def revised(world: World) -> None:
    """Let the delayed revision of the newest record come."""
    world.wait(0.5).timer("fault-revision", world.record().id)


def lost(world: World) -> list[int]:
    return world.pids(world.record().victims)


# Victims and moved clients


def test_a_client_that_moves_is_no_victim_and_its_pause_comes_with_its_report() -> None:
    world = site(10, 11, 12)
    world.attach(20, "d1")
    world.fault(12)
    assert lost(world) == [20] and world.pauses(world.record()) == {10: None, 11: None}
    world.wait(0.04).moved(10, 2)
    world.moved(11, 2)
    assert len([t for t in world.ever(fx.ArmTimer) if t.kind == "fault-revision"]) == 1
    revised(world)
    record = world.record()
    assert record.revision == 2
    # From the first sign: decided at once, told at once, 3 ms until the calls went on.
    assert lost(world) == [20] and world.pauses(record) == {10: 3.0, 11: 3.0}
    world.timer("fault-revision", record.id)
    assert not world.made(fx.Record)


def test_a_client_that_stays_or_says_nothing_or_ends_is_a_victim() -> None:
    world = site(10, 11, 12, 13)
    world.fault(13)
    world.do(mev.MemberStayed(process(10), 2, "the fence was not reached"))
    world.die(11)
    world.wait(2).timer("failover-wait", world.failover().id)
    revised(world)
    assert sorted(lost(world)) == [10, 11, 12] and not world.record().moved
    # An answer that comes after all.
    world.moved(12, 2)
    revised(world)
    assert sorted(lost(world)) == [10, 11] and world.pauses(world.record()) == {12: 3.0}


def test_a_client_that_was_not_ready_is_a_victim_until_it_moves_late() -> None:
    world = site(10, 11)
    world.attach(12, "d1")
    world.hello(12)
    world.fault(11)
    assert lost(world) == [12] and world.pauses(world.record()) == {10: None}
    world.wait(1.0).is_ready(12, 2)
    assert world.told() == [12]
    world.moved(12, 2)
    revised(world)
    assert not lost(world) and world.pauses(world.record())[12] == 1003.0


def test_a_client_that_waits_for_its_turn_pauses_until_its_replay_has_ended() -> None:
    world = site(10, 11, policy=EXACT)
    for pid in (10, 11):
        world.hello(pid, FailoverMode.EXACT)
        world.is_ready(pid, 2)
    world.kernel(13, MISALIGNED)
    server_xid(world)
    moved = mev.MemberMoved(process(10), 2, 1_000_000, 2_000_000, 3_000_000, 0, 5, waits=True)
    world.do(moved)
    world.do(replace(moved, process=process(11)))
    revised(world)
    assert world.pauses(world.record()) == {10: None, 11: None} and not lost(world)
    for pid in (10, 11):
        world.wait(0.2).do(mev.MemberDone(process(pid), 2, 7, 5))
    revised(world)
    assert world.pauses(world.record()) == {10: 700.0, 11: 900.0}


def test_a_moved_client_that_misses_work_says_which() -> None:
    world = site(10, 11)
    world.fault(11)
    world.do(mev.MemberMoved(process(10), 2, 1, 2, 3_000_000, 4, 5, "cuMemcpyPeer"))
    revised(world)
    (moved,) = world.record().moved
    assert "cuMemcpyPeer" in moved.why and not lost(world)


def test_the_offender_is_in_no_list_though_it_was_told_with_the_others() -> None:
    world = site(10, 11)
    world.server_state("d1", ServerState.FAULT)
    assert world.pauses(world.record()) == {10: None, 11: None}
    # The tracker's event is older than the order to move.
    world.wait(0.1).do(ev.UvmFatal(ClientId("d1", process(11)), uvm(), False, 0.2))
    assert world.pauses(world.record()) == {10: None} and not lost(world)
    world.moved(10, 2)
    world.moved(11, 2)
    revised(world)
    assert world.pauses(world.record()) == {10: 3.0}


def test_an_endless_kernel_has_no_victims_and_its_record_lists_who_left() -> None:
    world = poisoned(10)
    world.moved(10, 2)
    revised(world)
    assert world.record().fault_class == "hang" and not lost(world)
    assert world.pauses(world.record()) == {10: 3.0}


def test_without_fail_over_every_other_client_is_a_victim() -> None:
    world = three_clients()
    world.fault(11)
    assert lost(world) == [10, 12] and not world.record().moved


def test_a_record_of_a_healthy_domain_is_kept_while_a_client_may_report() -> None:
    world = site(10, 11)
    world.do(ev.ServerDied("d1", server_of("d1")))
    world.wait(5).do(ev.Counted({}))
    assert world.state.open_faults, "the pause of 10 and 11 is not known"
    world.moved(10, 2)
    world.moved(11, 2)
    revised(world)
    assert world.pauses(world.record()) == {10: 3.0, 11: 3.0}
    world.wait(5).do(ev.Counted({}))
    assert not world.state.open_faults


# What would have saved the victims

UNDER_FAILOVER = 'With protect = "failover" and mpsd-run, these 2 clients could have moved.'


def test_without_fail_over_the_record_says_that_it_would_have_helped() -> None:
    world = three_clients()
    world.fault(11)
    assert world.record().action.endswith(UNDER_FAILOVER)
    world = World().ready()
    world.join(10, 11)
    world.fault(11)
    assert world.record().action.endswith("this client could have moved.")


def test_with_fail_over_on_only_clients_outside_it_are_told_so() -> None:
    world = site(10, 11)
    world.attach(20, "d1")
    world.fault(11)
    assert world.record().action.endswith("Under mpsd-run at level failover, this client could have moved.")
    world.do(mev.MemberStayed(process(10), 2, "the fence was not reached"))
    revised(world)
    assert lost(world) == [20, 10] and "this client could" in world.record().action


def test_where_all_moved_nothing_has_to_be_restarted() -> None:
    world = site(10, 11)
    world.fault(11)
    assert "restart" not in world.record().action and "could have" not in world.record().action
    world.do(mev.MemberStayed(process(10), 2, "the fence was not reached"))
    revised(world)
    assert "restart" in world.record().action and "could have" not in world.record().action


@pytest.mark.parametrize("reach", [ProtectionLevel.OBSERVE, ProtectionLevel.GUARD])
def test_a_level_that_the_machine_does_not_have_is_not_recommended(reach: ProtectionLevel) -> None:
    world = World(Policy(reach=reach)).ready()
    world.join(10, 11)
    world.fault(11)
    assert "could have" not in world.record().action


def test_in_exclusive_mode_no_client_could_have_moved() -> None:
    world = World().ready(exclusive=True)
    world.join(10, 11)
    world.fault(11)
    assert lost(world) == [10] and "could have" not in world.record().action


@pytest.mark.parametrize(
    ("reach", "says"),
    [
        (ProtectionLevel.OBSERVE, ""),
        (ProtectionLevel.GUARD, "guard"),
        (ProtectionLevel.FAILOVER, "guard"),
    ],
)
def test_the_offenders_guard_would_have_absorbed_a_null_pointer(reach: ProtectionLevel, says: str) -> None:
    world = World(Policy(reach=reach)).ready()
    world.join(10, 11)
    world.fault(11, uvm(address=16))
    assert world.record().fault_class == "mmu-null"
    assert ('With protect = "guard"' in world.record().action) == bool(says)
    assert "failover" not in world.record().action.split("(mpsd-ctl failovers)")[-1]


def test_of_an_offender_that_had_the_proxy_no_guard_is_promised() -> None:
    world = site(10)
    world.attach(20, "d1")
    world.fault(10, uvm(address=16))
    assert world.record().action.endswith("Under mpsd-run at level failover, this client could have moved.")


@pytest.mark.parametrize("name", sorted(taxonomy.CLASSES))
def test_the_table_says_for_each_class_which_level_saves_other_clients(name: str) -> None:
    row = taxonomy.CLASSES[name]
    assert (row.level is not None) == (row.scope is taxonomy.Scope.DOMAIN)
    assert (row.level is ProtectionLevel.GUARD) == (name == "mmu-null")
    saved = next(line for line in taxonomy.explain(name).splitlines() if "saved by" in line)
    assert (str(row.level) in saved) if row.level else (saved.split()[-2] in ("every", "no"))


@pytest.mark.parametrize("sign", ["trap", "server", "control"])
def test_every_fault_that_ends_a_domain_lets_ready_clients_move(sign: str) -> None:
    """The table promises fail-over for these classes: core keeps the promise for ready participants."""
    world: Site = site(10)
    match sign:
        case "trap":
            server_xid(world)
        case "server":
            world.do(ev.ServerDied("d1", server_of("d1")))
        case _:
            world.do(ev.ControlDied("d1", control_of("d1")))
    assert [e.process.pid for e in world.ever(fx.Move)] == [10]
    assert taxonomy.CLASSES[world.record().fault_class].level is ProtectionLevel.FAILOVER


@pytest.mark.parametrize("xid", [79, 48])
def test_no_level_saves_clients_from_a_failure_of_the_gpu(xid: int) -> None:
    world = three_clients()
    world.kernel(xid, "the GPU has failed")
    world.server_state("d1", ServerState.FAULT)
    assert all("could have" not in r.action for r in world.records().values())
    assert world.domain("d1").state is DomainState.FAULTED and world.state.domains["d1"].gpus == (GPU,)


def test_two_contexts_of_a_process_are_one_victim_in_the_sentence() -> None:
    world = World().ready()
    world.join(10, spaces=2)
    world.join(11)
    world.do(ev.UvmFatal(ClientId("d1", process(11)), uvm()))
    assert len(world.record().victims) == 2 and "this client could" in world.record().action
