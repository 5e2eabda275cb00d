"""The steps against a condemned client, and the records of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsd.base.model import Access, UvmFaultType, UvmReason
from mpsd.gpu.nvidia.kernel_abi import Action, ClientType, Engine, Mode, Why
from tests.kmod import policydriver as driver
from tests.kmod.policydriver import Policy
from tests.kmod.policymodel import (
    ADDRESS,
    BIG_PAGE,
    COPY,
    MS,
    ORPHAN_INTERVAL,
    PATIENCE,
    READ,
    WIDEST,
    WILD,
    Answer,
    Around,
    Fault,
    Params,
)

D = 2000 * MS


def test_a_sink_that_cannot_be_made_condemns_nobody(policy: Policy) -> None:
    told = policy.fault(WILD, fails=True)
    assert (told.decision.action, told.decision.why, told.isolates) == (Action.REFUSED, Why.FAILED, False)
    assert (told.decision.bytes, told.decision.report) == (0, True)
    assert (told.condemned, told.sinks, told.next_step) == (False, 0, Action.NONE)


@pytest.mark.parametrize("stop", [False, True])
def test_the_steps_come_once_and_in_order(stop: bool, policy: Policy) -> None:
    policy.begin(Params(stop_channels=stop))
    policy.fault(WILD, now=100)
    assert policy.tell(driver.DEADLINE, 100 + D - 1).result == Action.NONE
    told = policy.tell(driver.DEADLINE, 100 + D)
    assert told.result == Action.KILL
    now = 100 + D
    if stop:
        now += D
        assert policy.tell(driver.DEADLINE, now - 1).result == Action.NONE
        assert policy.tell(driver.DEADLINE, now).result == Action.STOP
        now += (PATIENCE - 1) * D
    else:
        now += PATIENCE * D
    assert policy.tell(driver.DEADLINE, now - 1).result == Action.NONE
    assert not policy.tell(driver.DEADLINE, now - 1).released
    told = policy.tell(driver.DEADLINE, now)
    assert (told.result, told.released, told.next_step, told.deadline_ns) == (Action.GIVE_UP, True, 0, 0)
    assert policy.tell(driver.DEADLINE, (1 << 64) - 1).result == Action.NONE
    assert policy.fault(Fault(0, 2)).decision.why == Why.RELEASED


def test_a_late_timer_does_not_run_the_steps_together(policy: Policy) -> None:
    policy.begin(Params(stop_channels=True))
    policy.fault(WILD)
    late = 1000 * D
    assert policy.tell(driver.DEADLINE, late).result == Action.KILL
    told = policy.tell(driver.DEADLINE, late)
    assert (told.result, told.next_step, told.deadline_ns) == (Action.NONE, Action.STOP, late + D)


def test_who_acknowledges_gets_ten_deadlines_from_the_first_sink(policy: Policy) -> None:
    assert policy.tell(driver.ACKNOWLEDGE).result == Answer.INNOCENT
    policy.fault(WILD, now=5)
    told = policy.tell(driver.ACKNOWLEDGE)
    assert (told.result, told.acknowledged, told.deadline_ns) == (Answer.OK, True, 5 + PATIENCE * D)
    assert policy.tell(driver.ACKNOWLEDGE).deadline_ns == 5 + PATIENCE * D
    policy.fault(Fault(0, 2), now=D)
    assert policy.tell(driver.DEADLINE, 5 + PATIENCE * D - 1).result == Action.NONE
    assert policy.tell(driver.DEADLINE, 5 + PATIENCE * D).result == Action.KILL
    assert policy.tell(driver.ACKNOWLEDGE).result == Answer.ALREADY


def test_who_acknowledged_and_has_gone_is_not_waited_for(policy: Policy) -> None:
    policy.fault(WILD)
    policy.tell(driver.ACKNOWLEDGE)
    told = policy.tell(driver.ABANDONED, 3 * D)
    assert (told.acknowledged, told.next_step, told.deadline_ns) == (False, Action.KILL, 4 * D)
    assert policy.tell(driver.ACKNOWLEDGE).deadline_ns == PATIENCE * D
    assert policy.tell(driver.ABANDONED, (PATIENCE - 1) * D + 1).deadline_ns == PATIENCE * D
    assert policy.tell(driver.ABANDONED, 2 * D).deadline_ns == PATIENCE * D


def test_who_goes_after_the_kill_changes_no_step(policy: Policy) -> None:
    policy.fault(WILD)
    policy.tell(driver.ACKNOWLEDGE)
    policy.tell(driver.DEADLINE, PATIENCE * D)
    told = policy.tell(driver.ABANDONED, PATIENCE * D + 1)
    assert (told.acknowledged, told.next_step) == (False, Action.GIVE_UP)
    assert told.deadline_ns == 2 * PATIENCE * D


def test_kill_now(policy: Policy) -> None:
    assert policy.tell(driver.KILL, 1).result == Answer.INNOCENT
    assert policy.tell(driver.DEADLINE, (1 << 64) - 1).result == Action.NONE
    policy.fault(WILD, now=5)
    policy.tell(driver.ACKNOWLEDGE)
    told = policy.tell(driver.KILL, 6)
    assert (told.result, told.deadline_ns) == (Answer.OK, 6)
    assert policy.tell(driver.ACKNOWLEDGE).result == Answer.ALREADY
    again = policy.tell(driver.KILL, 7)
    assert (again.result, again.deadline_ns) == (Answer.ALREADY, 6)
    assert policy.tell(driver.DEADLINE, 6).result == Action.KILL
    assert policy.tell(driver.KILL, 8).result == Answer.ALREADY


def test_after_a_release_nothing_is_sunk_and_the_steps_come(policy: Policy) -> None:
    policy.fault(WILD)
    assert policy.tell(driver.RELEASE).released
    again = policy.fault(WILD, Around(sink=1))
    assert (again.decision.why, again.isolates) == (Why.RELEASED, False)
    assert policy.fault(Fault(0, 2)).decision.why == Why.RELEASED
    assert policy.tell(driver.DEADLINE, D).result == Action.KILL


def test_a_space_that_ends_has_its_faults_sunk_and_no_steps(policy: Policy) -> None:
    policy.fault(WILD)
    told = policy.tell(driver.ENDED)
    assert (told.ended, told.condemned, told.next_step, told.deadline_ns) == (True, True, 0, 0)
    assert policy.fault(Fault(0, 2)).decision.action == Action.SUNK
    assert policy.tell(driver.DEADLINE, (1 << 64) - 1).result == Action.NONE
    assert policy.tell(driver.KILL, 1).result == Answer.ALREADY
    assert policy.tell(driver.ACKNOWLEDGE).result == Answer.ALREADY


def test_the_first_fault_of_a_space_that_ends(policy: Policy) -> None:
    policy.tell(driver.ENDED)
    told = policy.fault(WILD, now=9)
    assert (told.decision.action, told.condemned, told.next_step) == (Action.SUNK, True, Action.NONE)


@pytest.mark.parametrize(
    ("asked", "taken"), [(0, 10), (9, 10), (10, 10), (60_000, 60_000), (1 << 31, 60_000)]
)
def test_a_deadline_has_bounds(asked: int, taken: int, policy: Policy) -> None:
    policy.begin(Params(deadline_ms=asked))
    assert policy.fault(WILD).deadline_ns == taken * MS
    assert policy.tell(driver.ACKNOWLEDGE).deadline_ns == PATIENCE * taken * MS


def test_switching_isolation_off_saves_no_condemned_client(policy: Policy) -> None:
    policy.fault(WILD)
    policy.tell(*driver.params_request(Params(mode=Mode.OFF)))
    assert policy.fault(Fault(0, 2)).decision.action == Action.NONE
    assert policy.tell(driver.DEADLINE, D).result == Action.KILL


# The records


def test_a_storm_is_told_in_few_records(policy: Policy) -> None:
    policy.begin(Params(max_sinks=1000))
    storm = [(Fault(number * WIDEST, number), Around()) for number in range(3000)]
    reported = [number + 1 for number, told in enumerate(policy.faults(storm)) if told.decision.report]
    sunk = [1 << bit for bit in range(10)]
    assert reported == sunk + [1000 + (1 << bit) for bit in range(11)]


def test_each_way_to_end_has_its_own_first_record(policy: Policy) -> None:
    told = [policy.fault(WILD, Around(range=kind)) for kind in (4, 4, 4, 5, 5)]
    assert [each.decision.report for each in told] == [True, True, False, True, True]


def test_orphans_are_told_at_once_and_then_now_and_then(policy: Policy) -> None:
    times = [0, 1, ORPHAN_INTERVAL - 1, ORPHAN_INTERVAL, ORPHAN_INTERVAL + 1, 5 * ORPHAN_INTERVAL]
    told = [policy.tell(driver.ORPHAN, now) for now in times]
    assert [each.result for each in told] == [1, 0, 0, 1, 0, 1]
    assert [each.orphan_faults for each in told] == [1, 2, 3, 4, 5, 6]
    policy.tell(*driver.params_request(Params(mode=Mode.OFF)))
    assert policy.tell(driver.ORPHAN, 50 * ORPHAN_INTERVAL).result == 0


def test_what_a_record_says_of_a_fault(policy: Policy) -> None:
    policy.fault(replace(COPY, access=READ), now=4)
    policy.tell(driver.ACKNOWLEDGE)
    policy.tell(driver.RELEASE)
    record = policy.record()
    assert (record.action, record.why, record.mode) == (Action.SUNK, Why.NONE, Mode.ISOLATE)
    assert (record.address, record.sink) == (ADDRESS, (ADDRESS // BIG_PAGE * BIG_PAGE, BIG_PAGE))
    assert (record.fault_type, record.reason) == (UvmFaultType.INVALID_PTE, UvmReason.INVALID_ADDRESS)
    assert (record.access, record.engine, record.client_type) == (Access.READ, Engine.CE, ClientType.HUB)
    assert (record.faults, record.sinks, record.deadline_ns) == (1, 1, 4 + PATIENCE * D)
    flags = (record.replayable, record.condemned, record.acknowledged, record.released)
    assert flags == (False, True, True, True)
    assert (record.channel, record.gpc, record.veid, record.pid) == (None, None, None, None)


def test_what_a_record_says_of_a_step(policy: Policy) -> None:
    policy.fault(WILD)
    policy.tell(driver.DEADLINE, D)
    record = policy.step_record(Action.KILL)
    assert (record.action, record.why, record.sink, record.address) == (Action.KILL, Why.NONE, None, 0)
    assert (record.engine, record.access, record.replayable) == (Engine.UNKNOWN, Access.UNKNOWN, False)
    assert (record.condemned, record.sinks, record.deadline_ns) == (True, 1, (1 + PATIENCE) * D)


def test_what_a_record_says_of_an_orphan(policy: Policy) -> None:
    policy.fault(replace(WILD, fatal=False))
    record = policy.step_record(Action.ORPHAN, with_fault=True)
    assert (record.action, record.address, record.access) == (Action.ORPHAN, ADDRESS, Access.WRITE)
    assert (record.engine, record.replayable, record.sink) == (Engine.GRAPHICS, True, None)
    assert (record.space, record.pid, record.condemned) == (0, None, False)
