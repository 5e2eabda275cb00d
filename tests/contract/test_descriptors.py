"""Uvm.open and Uvm.adopt: find, duplicate, keep and adopt the descriptors of a client."""

from __future__ import annotations

import os

import pytest

from mpsd.base.errors import GpuError, NotFoundError, NotReadyError
from mpsd.gpu.base import AddressSpace
from mpsd.os.pinned import Pinned
from tests.support.gpunode import Node, duplicates
from tests.support.program import Program
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)
ILLEGAL_ACTION = 0x16


@pytest.fixture
def client(node: Node) -> Program:
    """An idle client."""
    return node.offender("clean_exit").ready()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_client_has_two_and_they_are_close_on_exec(node: Node, client: Program) -> None:
    space = node.open(client)
    assert set(space.fds) == {"va", "mm"}
    fds = list(space.fds.values())
    assert not any(os.get_inheritable(fd) for fd in fds)
    tracker = node.track(space)
    assert not os.get_inheritable(tracker.fileno())
    tracker.close()
    space.close()
    assert not any(is_open(fd) for fd in fds)
    space.close()


def test_only_one_of_them_accepts_a_tracker(node: Node, client: Program) -> None:
    space = node.open(client)
    swapped = node.adopt(
        duplicates([("va", space.fds["mm"]), ("mm", space.fds["va"])]),
    )
    with pytest.raises(GpuError) as refusal:
        node.track(swapped)
    assert refusal.value.status == ILLEGAL_ACTION
    node.track(space)


def test_a_process_without_context_is_not_ready(node: Node) -> None:
    process = node.bystander()
    with node.own(Pinned.open(process.pid)) as pinned, pytest.raises(NotReadyError):
        node.backend.uvm.open(pinned.instance, pinned.fileno())


def test_asked_again_and_again_it_answers_once_there_is_a_context(node: Node) -> None:
    client = node.survivor()

    def attempt() -> list[AddressSpace]:
        try:
            return list(node.backend.uvm.open(client.instance, client.pinned.fileno()))
        except NotReadyError:
            return []

    (space,) = until(attempt, "an address space")
    node.track(space)
    client.ready()
    space.close()
    client.unharmed()


def test_a_dead_process_is_not_found(node: Node, client: Program) -> None:
    instance, pidfd = client.instance, client.pinned.fileno()
    client.kill()
    with pytest.raises(NotFoundError):
        node.backend.uvm.open(instance, pidfd)


def test_kept_descriptors_are_adopted(node: Node, client: Program) -> None:
    space = node.open(client)
    kept = duplicates(list(space.fds.items()))
    for fd in kept.values():
        os.set_inheritable(fd, True)
    space.close()
    adopted = node.adopt(kept)
    assert dict(adopted.fds) == kept
    assert not any(os.get_inheritable(fd) for fd in kept.values())
    node.track(adopted)
    adopted.close()
    assert not any(is_open(fd) for fd in kept.values())


def test_an_incomplete_set_is_refused_and_stays_the_callers(node: Node, client: Program) -> None:
    kept = duplicates(list(node.open(client).fds.items()))
    with pytest.raises(GpuError, match="va"):
        node.backend.uvm.adopt({"mm": kept["mm"]})
    for fd in kept.values():
        os.close(fd)


def test_closing_all_duplicates_of_a_living_client_harms_nobody(node: Node) -> None:
    client = node.survivor().ready()
    for _ in range(3):
        space = node.open(client)
        space.track().close()
        space.close()
    client.unharmed()
