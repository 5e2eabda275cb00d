"""AddressSpace.map_sparse makes a range of a client's addresses harmless from outside, without an event."""

from __future__ import annotations

import pytest

from mpsd.base.errors import GpuError
from mpsd.base.model import ServerState
from mpsd.gpu.base import AddressSpace
from tests.support.gpunode import Node, next_event
from tests.support.program import Program

pytestmark = pytest.mark.timeout(300)
GRANULE, LARGE = 64 << 10, 4 << 30
UNMAPPED, LOW = 0x7E0000000000, 0x40000
"""Address that offenders of the kinds store, load and atomic access, and those of guard_low."""


@pytest.fixture
def opened(node: Node) -> tuple[Program, AddressSpace]:
    """A client that stores to UNMAPPED on command."""
    client = node.offender("store").ready()
    return client, node.open(client)


@pytest.mark.parametrize(
    ("kind", "base"), [("store", UNMAPPED), ("load", UNMAPPED), ("atomic", UNMAPPED), ("guard_low", LOW)]
)
def test_a_stray_access_in_it_is_nobodys_fault(node: Node, kind: str, base: int) -> None:
    stray, survivor = node.offender(kind), node.survivor()
    stray.ready()
    survivor.ready()
    space = node.open(stray)
    tracker = node.track(space)
    space.map_sparse(base, GRANULE, node.gpu.uuid)
    stray.go()
    assert stray.failure() == 0
    assert tracker.drain().events == ()
    assert node.domain.state() is ServerState.ACTIVE
    survivor.unharmed()


def test_taken_away_it_protects_no_longer(node: Node, opened: tuple[Program, AddressSpace]) -> None:
    client, space = opened
    tracker = node.track(space)
    space.map_sparse(UNMAPPED, GRANULE, node.gpu.uuid)
    space.unmap_sparse(UNMAPPED, GRANULE)
    client.go()
    assert next_event(tracker).address == UNMAPPED
    assert client.failure() == 700


def test_next_to_it_nothing_is_protected(node: Node, opened: tuple[Program, AddressSpace]) -> None:
    client, space = opened
    tracker = node.track(space)
    space.map_sparse(UNMAPPED - GRANULE, GRANULE, node.gpu.uuid)
    space.map_sparse(UNMAPPED + GRANULE, GRANULE, node.gpu.uuid)
    client.go()
    assert next_event(tracker).address == UNMAPPED
    assert client.failure() == 700


def test_it_may_be_large(node: Node, opened: tuple[Program, AddressSpace]) -> None:
    client, space = opened
    space.map_sparse(UNMAPPED - LARGE, 2 * LARGE, node.gpu.uuid)
    client.go()
    assert client.failure() == 0
    space.unmap_sparse(UNMAPPED - LARGE, 2 * LARGE)


@pytest.mark.parametrize(
    ("base", "length"),
    [(0, GRANULE), (UNMAPPED + 0x1000, GRANULE), (UNMAPPED, 0x1000), (UNMAPPED, 0)],
    ids=["base 0", "base of 4 KiB", "length of 4 KiB", "empty"],
)
def test_odd_bounds_are_refused(
    node: Node, opened: tuple[Program, AddressSpace], base: int, length: int
) -> None:
    _, space = opened
    with pytest.raises(GpuError) as refusal:
        space.map_sparse(base, length, node.gpu.uuid)
    assert refusal.value.status != 0
    space.map_sparse(UNMAPPED, GRANULE, node.gpu.uuid)


def test_another_gpus_name_is_refused_and_leaves_nothing(
    node: Node, opened: tuple[Program, AddressSpace]
) -> None:
    client, space = opened
    with pytest.raises(GpuError):
        space.map_sparse(UNMAPPED, GRANULE, "GPU-00000000-0000-0000-0000-00000000dead")
    space.map_sparse(UNMAPPED, GRANULE, node.gpu.uuid)
    client.go()
    assert client.failure() == 0


def test_an_overlapping_range_is_refused_without_harm(
    node: Node, opened: tuple[Program, AddressSpace]
) -> None:
    client, space = opened
    space.map_sparse(UNMAPPED, 2 * GRANULE, node.gpu.uuid)
    for base in (UNMAPPED - GRANULE, UNMAPPED, UNMAPPED + GRANULE):
        with pytest.raises(GpuError):
            space.map_sparse(base, 2 * GRANULE, node.gpu.uuid)
    client.go()
    assert client.failure() == 0
    assert node.domain.state() is ServerState.ACTIVE


def test_a_range_that_was_never_laid_cannot_be_taken_away(
    node: Node, opened: tuple[Program, AddressSpace]
) -> None:
    client, space = opened
    space.map_sparse(UNMAPPED, GRANULE, node.gpu.uuid)
    with pytest.raises(GpuError):
        space.unmap_sparse(UNMAPPED + 16 * GRANULE, GRANULE)
    client.go()
    assert client.failure() == 0


def test_the_next_holder_of_the_descriptors_takes_it_away(
    node: Node, opened: tuple[Program, AddressSpace]
) -> None:
    client, space = opened
    space.map_sparse(UNMAPPED, GRANULE, node.gpu.uuid)
    adopted = node.restarted(space)
    tracker = node.track(adopted)
    adopted.unmap_sparse(UNMAPPED, GRANULE)
    client.go()
    assert next_event(tracker).address == UNMAPPED
    assert client.failure() == 700


def test_a_healthy_client_does_not_notice(node: Node) -> None:
    client = node.survivor().ready()
    space = node.open(client)
    for n in range(1, 33):
        space.map_sparse(n * GRANULE, GRANULE, node.gpu.uuid)
    for n in range(2, 33, 2):
        space.unmap_sparse(n * GRANULE, GRANULE)
    client.unharmed()
