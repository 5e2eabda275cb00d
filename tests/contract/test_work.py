"""WorkInspector: when a dead client's kernels have ended, which the driver does not list anywhere."""

from __future__ import annotations

import os

import pytest

from mpsd.gpu.base import WorkView
from tests.support.gpunode import Node, duplicates
from tests.support.program import Program
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)
LOOKS = 20


@pytest.fixture(params=["same holder", "next holder"])
def held(request: pytest.FixtureRequest) -> bool:
    """Return whether one process keeps the descriptors at the death; False: a new daemon takes them over."""
    return bool(request.param == "same holder")


def view_after_death(node: Node, client: Program, *, same_holder: bool) -> WorkView:
    """Look at a leased client, let it run its kernel and die; return the view that outlives it."""
    view = node.inspect(client)
    assert not any(os.get_inheritable(fd) for fd in view.fds.values())
    kept = duplicates(list(view.fds.items()))
    if same_holder:
        for fd in kept.values():
            os.close(fd)
    else:
        view.close()
    client.go()
    client.gone()
    return view if same_holder else node.adopt_work(client, kept)


def test_work_in_flight_is_pending_until_it_has_ended(node: Node, held: bool) -> None:
    client = node.offender("sigkill_running", "--busy-s", "1.0").ready()
    node.open(client)
    view = view_after_death(node, client, same_holder=held)
    assert view.pending()
    until(lambda: view.pending() == "", "the end of the dead client's work")
    assert [view.pending() for _ in range(LOOKS)] == [""] * LOOKS


@pytest.mark.parametrize("kind", ["sigkill_idle", "clean_exit"])
def test_after_an_idle_end_nothing_is_pending(node: Node, held: bool, kind: str) -> None:
    client = node.offender(kind).ready()
    node.open(client)
    view = view_after_death(node, client, same_holder=held)
    until(lambda: view.pending() == "", "nothing pending")


def test_a_kernel_that_never_ends_is_pending_for_ever(node: Node, held: bool) -> None:
    client = node.offender("sigkill_running", "--variant", "endless").ready()
    space = node.open(client)
    view = view_after_death(node, client, same_holder=held)
    assert all(view.pending() for _ in range(LOOKS))
    # The kernel ends in a fault, which must be over before the next test.
    space.close()
    node.xids(31)
    node.domain.spoilt = True


def test_a_view_is_closed_twice_without_harm(node: Node) -> None:
    view = node.inspect(node.offender("clean_exit").ready())
    view.close()
    view.close()


def test_a_client_that_has_launched_work_is_not_taken_for_unused(node: Node) -> None:
    view = node.inspect(node.offender("clean_exit").ready())
    assert view.launched() is not False
    view.close()
