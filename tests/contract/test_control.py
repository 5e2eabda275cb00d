"""ControlDaemon on the stock binary and on its stand-in: start, commands, adoption, shutdown."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from mpsd.base.errors import AlreadyRunningError, AmbiguousError, DeadlineError, NotFoundError
from mpsd.base.model import ProcessInstance, ServerState
from mpsd.mps import log as mpslog
from mpsd.mps import pipedir
from mpsd.mps.control import (
    OUTPUT_FILE,
    ControlCommands,
    ControlDaemon,
    ControlGoneError,
    TerminateOutcome,
)
from mpsd.mps.reachability import check_apart
from mpsd.os.pinned import Pinned
from tests.support.gpunode import Domain, Node
from tests.support.program import Program
from tests.support.waiting import DEADLINE_S, readable, until

pytestmark = pytest.mark.timeout(300)


def another_front_end(domain: Domain) -> ControlCommands:
    """Return a second ControlDaemon as another process would have it: the two share no state."""
    return ControlCommands(
        domain.control.binary,
        domain.control.pipe_dir,
        domain.control.log_dir,
        environment=domain.machine.harness.environment,
    )


def adopted(domain: Domain, instance: ProcessInstance, pipe_dir: str | None = None) -> ControlDaemon:
    control = domain.control
    return ControlDaemon.adopt(
        control.binary,
        pipe_dir or control.pipe_dir,
        control.log_dir,
        instance,
        gpus=control.gpus,
        environment=domain.machine.harness.environment,
    )


def instance_of(domain: Domain) -> ProcessInstance:
    instance = domain.control.instance
    assert instance is not None
    return instance


# -- life -----------------------------------------------------------------------------------------------


def test_started_it_answers_and_has_no_server_yet(node: Node) -> None:
    domain = node.new_domain()
    node.run(domain.control.start(DEADLINE_S))
    assert domain.control.alive()
    assert not readable(domain.control, 0)
    assert node.run(domain.control.servers()) == ()
    assert domain.control.server_instances() == ()
    assert node.run(domain.control.server_state(os.getpid())) is ServerState.GONE


def test_a_server_is_started_before_its_first_client(node: Node) -> None:
    domain = node.new_domain().start()
    assert node.run(domain.control.servers()) == (domain.server,)
    assert [server.pid for server in domain.control.server_instances()] == [domain.server]
    assert domain.clients() == set()


def test_a_server_is_a_child_as_soon_as_its_start_was_accepted(node: Node) -> None:
    """mpsd takes a start for failed if the log has a sign of it and no server is left then."""
    domain = node.new_domain()
    node.run(domain.control.start(DEADLINE_S))
    node.run(domain.control.start_server(os.getuid()))
    assert len(domain.control.server_instances()) == 1


def test_a_probe_of_its_socket_neither_reaches_nor_hinders_it(node: Node) -> None:
    """A probe tells whether users get to the socket, each second."""
    domain = node.domain
    path = pipedir.socket_path(domain.control.pipe_dir)
    log = Path(domain.control.log_dir) / OUTPUT_FILE
    before = log.read_bytes()
    for _ in range(30):
        assert check_apart(os.getuid(), path) is None
    assert log.read_bytes() == before
    assert node.run(domain.control.servers()) == (domain.server,)
    node.survivor(domain.environment).ready().unharmed()


def test_a_directory_has_one_daemon_at_a_time(node: Node) -> None:
    domain = node.domain
    second = ControlDaemon(
        domain.control.binary,
        domain.control.pipe_dir,
        str(node.base / "l"),
        environment=domain.machine.harness.environment,
    )
    with pytest.raises(AlreadyRunningError):
        node.run(second.start(DEADLINE_S))
    assert domain.state() is ServerState.ACTIVE


def test_quit_ends_it_and_its_server(node: Node) -> None:
    domain = node.new_domain().start()
    server = node.own(Pinned.open(domain.server))
    node.run(domain.control.quit(DEADLINE_S))
    assert not domain.control.alive()
    assert readable(domain.control, 0)
    assert not server.alive()
    assert domain.control.reap() is not None
    with pytest.raises(ControlGoneError):
        node.run(domain.control.servers())


def test_quit_waits_for_clients_no_longer_than_told(node: Node) -> None:
    domain = node.new_domain().start()
    client = node.survivor(domain.environment).ready()
    with pytest.raises(DeadlineError):
        node.run(domain.control.quit(0.5))
    assert domain.control.alive()
    client.unharmed()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_death_takes_the_server_and_every_client(node: Node, number: signal.Signals) -> None:
    domain = node.new_domain().start()
    server = node.own(Pinned.open(domain.server))
    client = node.survivor(domain.environment).ready()
    os.kill(instance_of(domain).pid, number)
    assert node.run(domain.control.ended(DEADLINE_S))
    assert client.failure() == 806
    until(lambda: not server.alive(), "the end of the server")


def test_where_a_dead_one_left_its_files_a_new_one_starts(node: Node) -> None:
    domain = node.new_domain().start()
    assert node.run(domain.control.kill(DEADLINE_S))
    assert os.path.lexists(os.path.join(domain.control.pipe_dir, "control"))
    domain.control.close()
    domain.start()
    node.survivor(domain.environment).ready().unharmed()


def test_a_client_of_a_dead_daemon_runs_outside_mps(node: Node) -> None:
    domain = node.new_domain().start()
    assert node.run(domain.control.kill(DEADLINE_S))
    client = node.survivor(domain.environment).ready()
    listed = {p.pid: p.mps for p in node.backend.devices.processes(node.gpu.uuid)}
    assert listed[client.pid] is False
    client.unharmed()


# -- commands -------------------------------------------------------------------------------------------


def test_settings_are_read_back(node: Node) -> None:
    control = node.new_domain().start().control
    assert node.run(control.default_active_thread_percentage()) == 100.0
    node.run(control.set_default_active_thread_percentage(25))
    node.run(control.set_default_client_priority(1))
    node.run(control.set_default_device_pinned_mem_limit("0", 2048))
    assert node.run(control.default_active_thread_percentage()) == 25.0
    assert node.run(control.default_client_priority()) == 1
    limit = node.run(control.command("get_default_device_pinned_mem_limit 0")).strip()
    assert limit in ("2048M", "2G")


def test_clients_are_listed_while_they_are_there(node: Node) -> None:
    first, second = node.survivor(), node.survivor()
    assert node.domain.clients() <= {first.pid, second.pid}
    pids = {first.ready().pid, second.ready().pid}
    assert node.domain.clients() == pids
    first.unharmed()
    until(lambda: node.domain.clients() == {second.pid}, "the client that left off the list")
    second.unharmed()


def test_two_front_ends_at_once_are_both_answered(node: Node) -> None:
    ours, theirs = node.domain.control, another_front_end(node.domain)

    async def crowd() -> list[float]:
        asked = [c.default_active_thread_percentage(DEADLINE_S) for c in (ours, theirs) for _ in range(8)]
        return await asyncio.gather(*asked)

    assert node.run(crowd()) == [100.0] * 16


def terminate(node: Node, pid: int) -> TerminateOutcome:
    return node.run(node.domain.control.terminate_client(node.domain.server, pid, DEADLINE_S)).outcome


def test_a_client_is_terminated_and_the_others_go_on(node: Node) -> None:
    client, survivor = node.survivor(), node.survivor()
    client.ready()
    survivor.ready()
    assert terminate(node, client.pid) is TerminateOutcome.DONE
    assert client.failure() == 810
    # The real server lists the client until its process has exited.
    client.gone()
    until(lambda: client.pid not in node.domain.clients(), "the server to forget the client")
    survivor.unharmed()


@pytest.mark.parametrize("grid", [(), ("--fill",)], ids=["SMs left free", "GPU full"])
def test_an_endless_kernel_is_terminated_and_the_others_go_on(node: Node, grid: tuple[str, ...]) -> None:
    hanging, survivor = node.offender("endless", *grid), node.survivor()
    hanging.ready()
    survivor.ready()
    space = node.open(hanging)
    hanging.go()
    hanging.require("fire")
    assert terminate(node, hanging.pid) is TerminateOutcome.DONE
    assert hanging.failure() == 810
    hanging.kill()
    space.close()
    assert node.domain.state() is ServerState.ACTIVE
    survivor.unharmed()


def test_the_dead_and_strangers_are_no_clients(node: Node) -> None:
    survivor, dead, stranger = node.survivor(), node.offender("clean_exit"), node.bystander()
    survivor.ready()
    dead.ready().kill()
    assert terminate(node, dead.pid) is TerminateOutcome.NOT_A_CLIENT
    assert terminate(node, stranger.pid) is TerminateOutcome.NOT_A_CLIENT
    assert stranger.poll() is None
    survivor.unharmed()


def test_an_empty_server_is_shut_down_and_replaced(node: Node) -> None:
    domain = node.new_domain().start()
    node.run(domain.control.shutdown_server(domain.server, force=False))
    until(lambda: domain.state() is ServerState.GONE, "the end of the server")
    client = node.survivor(domain.environment).ready()
    replaced = node.run(domain.control.wait_active(DEADLINE_S))
    assert replaced != domain.server
    domain.server = replaced
    assert domain.clients() == {client.pid}
    client.unharmed()


def test_one_without_a_server_starts_it_for_its_first_client(node: Node) -> None:
    """mpsd starts control daemons alone: the limits and the log lines must be those of a server asked for."""
    domain = node.new_domain()
    node.run(domain.control.start(DEADLINE_S))
    node.run(domain.control.set_default_active_thread_percentage(50))
    assert domain.control.server_instances() == ()
    client = node.survivor(domain.environment).ready()
    domain.server = node.run(domain.control.wait_active(DEADLINE_S))
    assert [server.pid for server in domain.control.server_instances()] == [domain.server]
    assert domain.clients() == {client.pid}
    percentage = node.run(domain.control.command(f"get_active_thread_percentage {domain.server}"))
    assert float(percentage) == 50.0
    parser, log = mpslog.LogParser(), Path(domain.control.log_dir, OUTPUT_FILE)
    events = [parser.feed(line).event for line in log.read_text().splitlines()]
    begun = mpslog.ServerStarted(domain.server, os.getuid())
    assert events.index(mpslog.NewClient(client.pid, os.getuid(), pending=True)) < events.index(begun)
    assert mpslog.ServerReady(domain.server) in events
    other = node.survivor(domain.environment).ready()
    assert domain.clients() == {client.pid, other.pid}
    client.unharmed()
    other.unharmed()


def test_a_path_that_changes_while_clients_come_always_leads_to_a_server(node: Node) -> None:
    """An idle domain is replaced by a fresh control daemon, and ends when no client has taken its path."""
    link = node.base / "slot"
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(link)}
    before = None
    for _ in range(2):
        domain = node.new_domain()
        node.run(domain.control.start(DEADLINE_S))
        draft = link.with_name("draft")
        draft.symlink_to(domain.control.pipe_dir)
        draft.rename(link)
        if before is not None:
            node.run(before.control.quit(DEADLINE_S))
        client = node.survivor(environment).ready()
        domain.server = node.run(domain.control.wait_active(DEADLINE_S))
        assert domain.clients() == {client.pid}
        client.unharmed()
        client.gone()
        before = domain


# -- adoption -------------------------------------------------------------------------------------------


def computing(node: Node, domain: Domain) -> Program:
    return node.survivor(domain.environment).ready()


def test_left_running_it_is_adopted(node: Node) -> None:
    domain = node.new_domain().start()
    client, instance = computing(node, domain), instance_of(domain)
    domain.control.close()
    domain.control = adopted(domain, instance)
    assert domain.control.instance == instance
    assert domain.state() is ServerState.ACTIVE
    assert [server.pid for server in domain.control.server_instances()] == [domain.server]
    assert domain.clients() == {client.pid}
    client.unharmed()


def test_adoption_proves_who_it_is(node: Node) -> None:
    domain, stranger = node.domain, node.bystander()
    instance = instance_of(domain)
    later = ProcessInstance(instance.pid, instance.start_ticks + 1)
    other = node.own(Pinned.open(stranger.pid)).instance
    for claimed in (later, other):
        with pytest.raises(AmbiguousError):
            adopted(domain, claimed)
    with pytest.raises(AmbiguousError):
        adopted(domain, instance, pipe_dir=str(node.base / "elsewhere"))
    assert domain.state() is ServerState.ACTIVE


def test_a_dead_one_is_not_adopted(node: Node) -> None:
    domain = node.new_domain().start()
    instance = instance_of(domain)
    assert node.run(domain.control.kill(DEADLINE_S))
    with pytest.raises(NotFoundError):
        adopted(domain, instance)
