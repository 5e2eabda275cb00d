"""AddressSpace.track: a fatal fault shows on the tracker of the client that caused it, and on no other."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from mpsd.base.model import Access, ServerState, UvmEvent, UvmFaultType
from mpsd.gpu.base import Tracker
from tests.support.gpunode import Node, faulted_at, next_event
from tests.support.program import Program

pytestmark = pytest.mark.timeout(300)
UNMAPPED = 0x7E0000000000
"""Address that the harness's offenders access."""


@dataclass(frozen=True, slots=True)
class Mmu:
    """An MMU fault: fields of the event, and the CUDA errors. `address` None: not known in advance."""

    kind: str
    access: Access
    fault_type: UvmFaultType
    address: int | None
    error: int = 700

    def __str__(self) -> str:
        return self.kind


MMU = (
    Mmu("store", Access.WRITE, UvmFaultType.INVALID_PDE, UNMAPPED),
    Mmu("load", Access.READ, UvmFaultType.INVALID_PDE, UNMAPPED),
    Mmu("atomic", Access.ATOMIC, UvmFaultType.INVALID_PDE, UNMAPPED),
    Mmu("null", Access.WRITE, UvmFaultType.INVALID_PDE, 0),
    Mmu("use_after_unmap", Access.WRITE, UvmFaultType.INVALID_PDE, None),
    Mmu("read_only", Access.WRITE, UvmFaultType.WRITE, None),
    Mmu("wild_call", Access.READ, UvmFaultType.INVALID_PDE, None),
    Mmu("pbdma", Access.WRITE, UvmFaultType.INVALID_PDE, None, error=719),
)


def tracked_pair(node: Node, kind: str) -> tuple[Program, Tracker, Program, Tracker]:
    """An offender of this kind and an innocent client, both ready and tracked."""
    guilty, innocent = node.offender(kind), node.survivor()
    guilty.ready()
    innocent.ready()
    return guilty, node.track(node.open(guilty)), innocent, node.track(node.open(innocent))


@pytest.mark.parametrize("fault", MMU, ids=str)
def test_an_mmu_fault_shows_on_the_guilty_tracker_alone(node: Node, fault: Mmu) -> None:
    guilty, its_tracker, innocent, other_tracker = tracked_pair(node, fault.kind)
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    guilty.go()
    event = next_event(its_tracker)
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    assert event.fatal
    assert (event.access, event.fault_type) == (fault.access, fault.fault_type)
    assert before <= event.timestamp_ns <= after
    assert (guilty.failure(), innocent.failure()) == (fault.error, fault.error)
    assert other_tracker.drain().events == ()
    check_address(node, fault, event)


def check_address(node: Node, fault: Mmu, event: UvmEvent) -> None:
    """Check that the kernel log names the same address, also where it was not known in advance."""
    addresses = {faulted_at(line) for line in node.xids(31) if line.xid == 31}
    assert addresses == {event.address}
    if fault.address is not None:
        assert event.address == fault.address


@pytest.mark.parametrize(("kind", "own", "others"), [("trap", 719, 719), ("misaligned", 0, 716)])
def test_an_exception_of_the_sm_shows_on_no_tracker(node: Node, kind: str, own: int, others: int) -> None:
    guilty, its_tracker, innocent, other_tracker = tracked_pair(node, kind)
    node.holder()
    guilty.go()
    assert (guilty.failure(), innocent.failure()) == (own, others)
    node.domain.becomes(ServerState.FAULT)
    assert its_tracker.drain().events == ()
    assert other_tracker.drain().events == ()


def test_clients_that_do_nothing_wrong_show_nothing(node: Node) -> None:
    clients = [node.survivor(), node.survivor()]
    trackers = [node.track(node.open(client.ready())) for client in clients]
    for client in clients:
        client.unharmed()
    assert [tracker.drain().events for tracker in trackers] == [(), ()]


def test_every_tracker_of_a_space_sees_the_fault(node: Node) -> None:
    guilty = node.offender("store").ready()
    space = node.open(guilty)
    trackers = [node.track(space), node.track(space)]
    guilty.go()
    assert [next_event(tracker).address for tracker in trackers] == [UNMAPPED, UNMAPPED]
    assert guilty.failure() == 700


def test_a_tracker_on_an_adopted_space_sees_the_fault(node: Node) -> None:
    guilty = node.offender("store").ready()
    space = node.open(guilty)
    tracker = node.track(node.restarted(space))
    guilty.go()
    assert next_event(tracker).address == UNMAPPED
    assert guilty.failure() == 700
