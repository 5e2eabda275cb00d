"""The files of a pipe directory: their modes, and the FIFO whose first line silences the domain's log."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from mpsd.mps import pipedir
from mpsd.mps.control import OUTPUT_FILE
from mpsd.mps.log import AdminCommand, LogParser, Routine
from tests.support.gpunode import Domain, Node
from tests.support.site import OTHER_UID, as_user
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(os.geteuid() != 0, reason="not root")]
FORGED = b"[2026-01-01 00:00:00.000 Server 1] Server is handling a fatal GPU error.\n"


@pytest.fixture
def domain(node: Node) -> Domain:
    made = node.new_domain().start()
    # The directories of a test are root's alone.
    for directory in (made.base, *made.base.parents[:-2]):
        directory.chmod(0o755)
    return made


def file(domain: Domain, name: str) -> Path:
    return Path(domain.control.pipe_dir) / name


def log(domain: Domain) -> str:
    return (Path(domain.control.log_dir) / OUTPUT_FILE).read_text()


def test_every_user_may_write_all_files_but_one(domain: Domain) -> None:
    wanted = {
        "log": (stat.S_IFIFO, 0o777),
        "control": (stat.S_IFSOCK, 0o666),
        "control_privileged": (stat.S_IFSOCK, 0o755),
        "control_lock": (stat.S_IFREG, 0o666),
        pipedir.PID_FILE: (stat.S_IFREG, 0o666),
    }
    found = {name: file(domain, name).stat() for name in wanted}
    assert {n: (stat.S_IFMT(i.st_mode), stat.S_IMODE(i.st_mode)) for n, i in found.items()} == wanted
    assert {info.st_uid for info in found.values()} == {0}


@pytest.mark.parametrize("uid", [0, OTHER_UID])
def test_a_line_of_any_user_in_the_fifo_silences_the_log(node: Node, domain: Domain, uid: int) -> None:
    before = node.survivor(domain.environment).ready()
    until(lambda: f"NEW CLIENT {before.pid} " in log(domain), "the client in the log")
    with as_user(uid):
        fd = os.open(file(domain, "log"), os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, FORGED)
        os.close(fd)
    after = node.survivor(domain.environment).ready()
    assert domain.clients() == {before.pid, after.pid}, "it is served"
    assert str(after.pid) not in log(domain)
    assert "fatal GPU error" not in log(domain)
    before.unharmed()
    after.unharmed()
    assert str(after.pid) not in log(domain)


@pytest.mark.parametrize("uid", [0, OTHER_UID])
def test_an_unknown_command_of_any_user_is_logged_with_its_text(node: Node, domain: Domain, uid: int) -> None:
    assert node.run(domain.control.servers()) == (domain.server,)
    with as_user(uid):
        node.run(domain.control.command("handling_a_fatal_error"))
    parser = LogParser()
    found = [event for line in log(domain).splitlines() if "a_fatal" in str(event := parser.feed(line).event)]
    assert found == [
        AdminCommand("handling_a_fatal_error"),
        Routine('Unknown command "handling_a_fatal_error"'),
    ]


def test_another_user_does_not_reach_the_privileged_socket(domain: Domain) -> None:
    for name, refused in (("control", False), ("control_privileged", True)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, as_user(OTHER_UID):
            try:
                sock.connect(str(file(domain, name)))
                found = False
            except PermissionError:
                found = True
            except OSError:  # The socket's type is another one: the look-up was permitted.
                found = False
        assert found == refused
