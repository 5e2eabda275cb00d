"""The death lease: a dead client's address space exists while duplicates of its descriptors are open."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from mpsd.base.model import ServerState
from mpsd.gpu.base import WorkView
from tests.support.gpunode import MEMORY, Node
from tests.support.program import Program
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)
DEATHS = {
    "sigkill_running": -signal.SIGKILL,
    "exit_running": 7,
    "segfault_running": -signal.SIGSEGV,
}


def ended(view: WorkView) -> Callable[[], bool]:
    return lambda: view.pending() == ""


def processes(node: Node) -> set[int]:
    return {process.pid for process in node.backend.devices.processes(node.gpu.uuid)}


def pair(node: Node, kind: str, *args: str) -> tuple[Program, Program]:
    """A client that is to die and a client that is to survive it, both ready."""
    dying, survivor = node.offender(kind, *args), node.survivor()
    return dying.ready(), survivor.ready()


@pytest.mark.parametrize("kind", DEATHS)
def test_a_death_in_mid_kernel_under_lease_harms_nobody(node: Node, kind: str) -> None:
    dying, survivor = pair(node, kind)
    space, view = node.open(dying), node.inspect(dying)
    dying.go()
    assert dying.gone() == DEATHS[kind]
    until(ended(view), "the end of the dead client's work")
    space.close()
    assert node.domain.state() is ServerState.ACTIVE
    survivor.unharmed()


def test_a_lease_taken_over_by_another_holder_harms_nobody(node: Node) -> None:
    dying, survivor = pair(node, "sigkill_running")
    space, view = node.open(dying), node.inspect(dying)
    dying.go()
    dying.gone()
    adopted = node.restarted(space)
    until(ended(view), "the end of the dead client's work")
    adopted.close()
    assert node.domain.state() is ServerState.ACTIVE
    survivor.unharmed()


def test_without_a_lease_the_same_death_takes_everybody(node: Node) -> None:
    dying, survivor = pair(node, "sigkill_running")
    node.holder()
    dying.go()
    dying.gone()
    assert survivor.failure() == 700
    node.domain.becomes(ServerState.FAULT)


def test_an_idle_death_needs_no_lease(node: Node) -> None:
    dying, survivor = pair(node, "sigkill_idle")
    dying.go()
    dying.gone()
    until(lambda: dying.pid not in node.domain.clients(), "the dead client off the list")
    assert node.domain.state() is ServerState.ACTIVE
    survivor.unharmed()


def test_given_up_before_the_work_has_ended_it_takes_everybody(node: Node) -> None:
    dying, survivor = pair(node, "sigkill_running", "--variant", "endless")
    node.holder()
    space = node.open(dying)
    dying.go()
    dying.gone()
    until(lambda: dying.pid not in node.domain.clients(), "the dead client off the list")
    assert node.domain.state() is ServerState.ACTIVE
    space.close()
    assert survivor.failure() == 700
    node.domain.becomes(ServerState.FAULT)


def test_the_memory_of_the_dead_is_held_until_the_lease_is_closed(node: Node) -> None:
    client = node.offender("clean_exit").ready()
    space = node.open(client)
    client.kill()
    until(lambda: client.pid not in node.domain.clients(), "the dead client off the list")
    until(lambda: client.pid not in processes(node), "the dead client off the GPU's list")
    held = node.memory_used()
    space.close()
    until(lambda: node.memory_used() <= held - MEMORY, "the memory of the dead given back")


def test_without_a_lease_the_memory_of_the_dead_is_back(node: Node) -> None:
    client = node.offender("clean_exit").ready()
    held = node.memory_used()
    client.kill()
    until(lambda: node.memory_used() <= held - MEMORY, "the memory of the dead given back")
