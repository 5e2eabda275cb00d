"""The stand-in of the control daemon and its servers: commands, files, starts and exits."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from mpsd.gpu.base import Backend
from mpsd.gpu.simulated.client import SimulatedDevice
from mpsd.os import procfs
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import (
    DEADLINE_S,
    Domain,
    short_domain,
    until,
)

__all__ = ["backend", "domain", "second"]

DOMAINS_ARE_NEW = True


def test_commands_come_by_standard_input_or_as_arguments(domain: Domain) -> None:
    for text in ("get_default_active_thread_percentage", "get_default_active_thread_percentage\n"):
        assert domain.run(text) == (0, "100.0")
    assert domain.run("", arguments=("get_default_active_thread_percentage",)) == (0, "100.0")
    assert domain.run("get_server_list\nget_default_client_priority\n") == (0, "0")


@pytest.mark.parametrize(
    ("command", "reply"),
    [
        ("nonsense 1", 'Unknown command "nonsense"'),
        ("ps", "Server not found"),
        ("get_server_status 999999", "Server 999999 not found"),
        ("get_client_list 999999", "Server 999999 not found"),
        ("get_server_status", "Invalid arguments for get_server_status"),
        ("set_default_active_thread_percentage 50", "50.0"),
        ("set_default_device_pinned_mem_limit 99 2G", "Invalid device identifier format: 99"),
        ("set_default_device_pinned_mem_limit 0 2G", ""),
        ("get_default_device_pinned_mem_limit 0", ""),
        ("terminate_client 999999 1", "Server 999999 not found\nServer 999999 not found!\n1"),
    ],
)
def test_replies(domain: Domain, command: str, reply: str) -> None:
    assert domain.run(command) == (0, reply)


def test_nobody_there_is_exit_status_1(backend: Backend) -> None:
    absent = short_domain(backend)
    assert absent.run("get_server_list") == (1, "Cannot find MPS control daemon process")
    absent.close()


def test_a_second_daemon_does_not_start(domain: Domain) -> None:
    assert domain.run("", arguments=("-f",)) == (1, "An instance of this daemon is already running")


def test_files_and_audit_lines(domain: Domain) -> None:
    assert domain.control is not None
    names = {path.name for path in (domain.base / "p").iterdir()}
    assert names == {"control", "control_privileged", "control_lock", "log", "nvidia-cuda-mps-control.pid"}
    assert (domain.base / "p/nvidia-cuda-mps-control.pid").read_text() == f"{domain.control.pid}\n"
    assert f" Control {domain.control.pid:5}] Cmd:get_server_list\n" in domain.log
    assert domain.backend.control_binary in procfs.command_line(domain.control.pid)[:3]
    assert Path(f"/proc/{domain.control.pid}/comm").read_text() == "nvidia-cuda-mps\n"


def test_settings_reach_clients(domain: Domain) -> None:
    domain.say("set_default_device_pinned_mem_limit 0 1G")
    assert domain.say("get_default_device_pinned_mem_limit 0") == "1G"
    client = domain.client().ready()
    assert client.error("dev.alloc(1 << 28)") == 2
    assert client.number("dev.alloc(1 << 20)")


def test_in_the_background_it_returns_when_it_answers_and_logs_to_files(backend: Backend) -> None:
    domain = short_domain(backend)
    (domain.base / "p").mkdir()
    assert domain.run("", arguments=("-d",)) == (0, "")
    pid = int((domain.base / "p/nvidia-cuda-mps-control.pid").read_text())
    pidfd = os.pidfd_open(pid)
    client = domain.client().ready()
    assert "NEW CLIENT" in (domain.base / "control.log").read_text()
    # The server serves by then, and reports it a moment later.
    until(lambda: "Server has started" in (domain.base / "server.log").read_text())
    client.kill()
    assert domain.run("quit") == (0, "")
    assert select.select([pidfd], [], [], DEADLINE_S)[0], "quit did not end the daemon"
    os.close(pidfd)
    assert [path.name for path in (domain.base / "p").iterdir()] == ["control_lock"]
    domain.close()


def test_quit_waits_for_clients_but_not_longer_than_told(domain: Domain) -> None:
    assert domain.control is not None
    client = domain.client().ready()
    with pytest.raises(subprocess.TimeoutExpired):
        domain.run("quit", deadline_s=0.5)
    client.kill()
    assert domain.control.wait(DEADLINE_S) == 0


def test_a_forced_quit_breaks_the_clients_connection(domain: Domain) -> None:
    client = domain.client().ready()
    domain.say("quit -t 0")
    assert client.error() == 806


def test_a_dead_server_is_replaced_for_the_next_client(domain: Domain) -> None:
    client = domain.client().ready()
    old = domain.server()
    os.kill(old, signal.SIGKILL)
    until(lambda: client.error() == 806)
    domain.client().ready()
    assert domain.server() != old
    assert f"Server {old} exited with status 0" in domain.log


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_dies_with_its_control_daemon(domain: Domain, how: signal.Signals) -> None:
    assert domain.control is not None
    client = domain.client().ready()
    domain.control.send_signal(how)
    assert domain.control.wait(DEADLINE_S) == -how
    until(lambda: client.error() == 806)
    assert (domain.base / "p/control").exists(), "nobody cleans up"
    assert domain.client().listen()["on_mps"] is False
    domain.start()
    assert domain.client().listen()["on_mps"] is True


def as_another_user(domain: Domain, uid: int) -> tuple[int, int]:
    """Start a client as this user. Return its pid, and a pipe that yields one byte once it has joined."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        # No exec: the user may be unable to read the interpreter.
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        SimulatedDevice.open(domain.environment)
        os.write(writer, b"!")
        signal.pause()
    finally:
        os._exit(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
def test_a_second_user_waits_for_the_first_and_gets_a_server_of_its_own(domain: Domain) -> None:
    for directory in (domain.base, Path(domain.backend.control_environment["MPSD_SIM_DIR"]).parent):
        directory.chmod(0o755)
    first = domain.client().ready()
    server = domain.server()
    pid, joined = as_another_user(domain, 65534)
    try:
        until(lambda: "from user 65534: Server is not ready, push client to pending list" in domain.log)
        assert not select.select([joined], [], [], 0.2)[0]
        first.kill()
        assert select.select([joined], [], [], DEADLINE_S)[0]
        assert os.read(joined, 1) == b"!"
        assert domain.server() != server
        assert os.stat(f"/proc/{domain.server()}").st_uid == 65534
    finally:
        os.close(joined)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
