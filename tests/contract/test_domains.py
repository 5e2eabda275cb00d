"""A fault domain as its clients and its control daemon see it: ACTIVE, FAULT, exit, and its log."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from mpsd.base.model import ServerState
from mpsd.mps import log as mpslog
from mpsd.mps.control import OUTPUT_FILE
from mpsd.mps.logfollow import LogFollower
from tests.support.gpunode import Node
from tests.support.waiting import DEADLINE_S, until

pytestmark = pytest.mark.timeout(300)


class Log:
    """The domain's log from now on, parsed."""

    def __init__(self, node: Node) -> None:
        path = os.path.join(node.domain.control.log_dir, OUTPUT_FILE)
        self._follower = LogFollower(path, from_start=False)
        self._parser = mpslog.LogParser()
        self._events: list[mpslog.Event] = []

    def events(self) -> list[mpslog.Event]:
        """Return all events of the log so far."""
        self._events += [self._parser.feed(line).event for line in self._follower.drain()]
        return self._events

    def says(self, *wanted: mpslog.Event) -> bool:
        return all(event in self.events() for event in wanted)

    def close(self) -> None:
        self._follower.close()


@pytest.fixture
def log(node: Node) -> Iterator[Log]:
    opened = Log(node)
    try:
        yield opened
    finally:
        opened.close()


def test_a_domain_is_reached_through_a_symbolic_link(node: Node) -> None:
    link = node.base / "link"
    link.symlink_to(node.domain.control.pipe_dir)
    client = node.survivor({"CUDA_MPS_PIPE_DIRECTORY": str(link)}).ready()
    assert node.domain.clients() == {client.pid}
    client.unharmed()


@pytest.mark.parametrize("kind", ["store", "trap"])
def test_a_fault_lasts_until_the_last_client_has_left(node: Node, log: Log, kind: str) -> None:
    guilty, innocent = node.offender(kind), node.survivor()
    guilty.ready()
    innocent.ready()
    holder = node.holder()
    guilty.go()
    assert guilty.failure() == innocent.failure()
    node.domain.becomes(ServerState.FAULT)
    assert holder.pid in node.domain.clients()
    newcomer = node.survivor()
    assert newcomer.failure() == 807
    until(lambda: log.says(mpslog.ClientRefused(newcomer.pid, 807)), "the refusal in the log")
    assert node.domain.state() is ServerState.FAULT
    holder.go()
    for program in (guilty, innocent, holder, newcomer):
        program.gone()
    node.domain.becomes(ServerState.ACTIVE)
    assert node.run(node.domain.control.servers()) == (node.domain.server,)
    node.survivor().ready().unharmed()


def test_a_fault_stays_in_its_domain(node: Node) -> None:
    other = node.new_domain().start()
    survivor = node.survivor(other.environment)
    guilty, innocent = node.offender("store"), node.survivor()
    for program in (survivor, guilty, innocent):
        program.ready()
    guilty.go()
    assert (guilty.failure(), innocent.failure()) == (700, 700)
    assert other.state() is ServerState.ACTIVE
    survivor.unharmed()


def test_a_fault_outside_mps_is_nobody_elses_affair(node: Node) -> None:
    nowhere = {"CUDA_MPS_PIPE_DIRECTORY": str(node.base / "none"), "CUDA_VISIBLE_DEVICES": node.gpu.uuid}
    guilty, survivor = node.offender("store", environment=nowhere), node.survivor()
    guilty.ready()
    survivor.ready()
    guilty.go()
    assert guilty.failure() == 700
    assert node.domain.state() is ServerState.ACTIVE
    survivor.unharmed()


def test_a_dead_server_is_replaced_for_the_next_client(node: Node) -> None:
    domain = node.new_domain().start()
    client = node.survivor(domain.environment).ready()
    os.kill(domain.server, signal.SIGKILL)
    assert client.failure() == 806
    client.gone()
    newcomer = node.survivor(domain.environment).ready()
    replaced = node.run(domain.control.wait_active(DEADLINE_S))
    assert replaced != domain.server
    domain.server = replaced
    assert domain.clients() == {newcomer.pid}
    newcomer.unharmed()


def test_the_log_names_newcomers_and_those_who_left(node: Node, log: Log) -> None:
    client = node.survivor().ready()
    newcomer = mpslog.NewClient(client.pid, os.getuid(), pending=False)
    until(lambda: log.says(newcomer), "the newcomer in the log")
    client.unharmed()
    until(lambda: log.says(mpslog.ClientGone(client.pid)), "its leaving in the log")
    # To the server an orderly exit looks like a broken connection.
    lost = [e for e in log.events() if isinstance(e, mpslog.ClientDisconnected) and e.pid == client.pid]
    assert {event.status for event in lost} == {806}
    assert mpslog.ServerFatal() not in log.events()


def test_the_log_lists_whom_a_fault_hit(node: Node, log: Log) -> None:
    guilty, innocent = node.offender("store"), node.survivor()
    guilty.ready()
    innocent.ready()
    guilty.go()
    assert (guilty.failure(), innocent.failure()) == (700, 700)
    hit = [mpslog.AffectedClient(program.pid) for program in (guilty, innocent)]
    until(lambda: log.says(mpslog.ServerFatal(), mpslog.AffectedDevice(0), *hit), "the fault in the log")
