"""Isolation: a fault that the patched nvidia-uvm absorbs stays with its client; offenders end in time."""

from __future__ import annotations

import select
import signal
from collections.abc import Iterator

import pytest

from mpsd.base.model import Access, IsolationMode, KernelAction, KernelFault, ServerState
from mpsd.gpu.base import Isolation
from tests.support.gpunode import Node, next_event
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.timeout(300)
UNMAPPED = 0x7E0000000000


@pytest.fixture
def door(node: Node) -> Iterator[Isolation]:
    """The isolation device in mode isolate, after all earlier records were read."""
    isolation = node.machine.isolation()
    if isolation is None:
        pytest.skip(node.machine.backend.no_isolation.why)
    isolation.set_mode(IsolationMode.ISOLATE)
    isolation.drain()
    yield isolation
    isolation.set_mode(IsolationMode.REPORT)
    isolation.close()


def told(door: Isolation, action: KernelAction, seq: int = 0) -> KernelFault:
    """Return the next record of this kind, from number `seq` on."""
    poll = select.poll()
    poll.register(door.fileno(), select.POLLIN)
    while poll.poll(DEADLINE_S * 1000):
        for record in door.drain():
            if record.action is action and record.seq >= seq:
                return record
    raise AssertionError(f"no record of {action} within {DEADLINE_S:g} s")


@pytest.mark.parametrize(("kind", "access"), [("store", Access.WRITE), ("load", Access.READ)])
def test_a_sunk_fault_is_recorded_and_harms_nobody(
    node: Node, door: Isolation, kind: str, access: Access
) -> None:
    survivor, guilty = node.survivor().ready(), node.offender(kind, "--stay").ready()
    who = guilty.instance
    tracker = node.track(node.open(guilty))
    guilty.go()
    record = told(door, KernelAction.SUNK)
    assert (record.process, record.event.access, record.event.address) == (who, access, UNMAPPED)
    assert record.sink_bytes >= 65536 and not record.why and record.gpu_uuid == node.machine.gpu.uuid
    assert tracker.drain().events == ()
    assert node.domain.state() is ServerState.ACTIVE
    survivor.unharmed()
    guilty.kill()


def test_what_is_not_sunk_is_recorded_and_answered_as_ever(node: Node, door: Isolation) -> None:
    survivor, guilty = node.survivor().ready(), node.offender("read_only").ready()
    tracker = node.track(node.open(guilty))
    guilty.go()
    record, event = told(door, KernelAction.REFUSED), next_event(tracker)
    assert record.why == "permissions" and record.event.address == event.address
    assert (guilty.failure(), survivor.failure()) == (700, 700)


def test_mode_report_changes_nothing_but_tells(node: Node, door: Isolation) -> None:
    door.set_mode(IsolationMode.REPORT)
    assert door.state().mode is IsolationMode.REPORT
    survivor, guilty = node.survivor().ready(), node.offender("store").ready()
    guilty.go()
    assert told(door, KernelAction.REPORTED).event.address == UNMAPPED
    assert (guilty.failure(), survivor.failure()) == (700, 700)


def test_who_is_alone_meets_its_own_error(node: Node, door: Isolation) -> None:
    guilty = node.offender("store").ready()
    guilty.go()
    record = told(door, KernelAction.REFUSED)
    assert (record.process, record.why) == (guilty.instance, "alone")
    assert guilty.failure() == 700


def test_whom_nobody_puts_out_is_killed(node: Node, door: Isolation) -> None:
    survivor, guilty = node.survivor().ready(), node.offender("store", "--stay").ready()
    guilty.go()
    sunk = told(door, KernelAction.SUNK)
    assert told(door, KernelAction.KILL).space == sunk.space
    assert guilty.gone() == -signal.SIGKILL
    survivor.unharmed()


def test_kill_now_is_for_the_guilty_and_acknowledging_too(node: Node, door: Isolation) -> None:
    survivor, guilty = node.survivor().ready(), node.offender("store", "--stay").ready()
    guilty.go()
    space = told(door, KernelAction.SUNK).space
    assert not door.acknowledge(1 << 40) and not door.kill(1 << 40)
    assert door.acknowledge(space) and door.kill(space)
    assert guilty.gone() == -signal.SIGKILL
    assert not door.kill(space)
    survivor.unharmed()


def test_a_second_reader_reads_what_is_kept(node: Node, door: Isolation) -> None:
    survivor, guilty = node.survivor().ready(), node.offender("store", "--stay").ready()
    guilty.go()
    first = told(door, KernelAction.SUNK)
    other = node.machine.isolation()
    assert other is not None
    try:
        assert told(other, KernelAction.SUNK, first.seq) == first
    finally:
        other.close()
    survivor.unharmed()
    guilty.kill()
