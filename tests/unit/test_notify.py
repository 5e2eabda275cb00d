"""Talking to the service manager: messages, watchdog, barrier, passed descriptors."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mpsd.base.errors import StoreError
from mpsd.fdstore.notify import Channel, Notifier, listen_fds, watchdog_interval_s
from tests.support.manager import DEADLINE_S, Manager


@pytest.mark.parametrize("abstract", [False, True])
def test_messages_arrive(tmp_path: Path, abstract: bool) -> None:
    with Manager(tmp_path, abstract=abstract) as manager:
        environ = manager.environment()
        notifier = Notifier.from_environ(environ)
        assert "NOTIFY_SOCKET" not in environ
        assert notifier.ready("2 GPUs")
        assert manager.wait_for("READY", "1") == {"READY": "1", "STATUS": "2 GPUs"}
        assert notifier.watchdog()
        manager.wait_for("WATCHDOG", "1")
        assert notifier.extend_timeout(1.5)
        manager.wait_for("EXTEND_TIMEOUT_USEC", "1500000")
        assert notifier.stopping()
        manager.wait_for("STOPPING", "1")
        notifier.close()


def test_status_text_cannot_add_an_assignment(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        notifier = Notifier.from_environ(manager.environment())
        notifier.status("client a\nFDSTOREREMOVE=1\x1b[31m")
        assert manager.wait_for("STATUS") == {"STATUS": "client a FDSTOREREMOVE=1 [31m"}
        notifier.close()


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:9"}])
def test_without_a_manager_nothing_happens(environ: dict[str, str]) -> None:
    notifier = Notifier.from_environ(environ)
    assert not notifier.ready("up")
    notifier.close()


def test_a_manager_that_has_gone_is_survived(tmp_path: Path) -> None:
    notifier = Notifier.from_environ({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    assert not notifier.watchdog()
    notifier.close()


def test_barrier_waits_for_what_was_sent_before(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        channel = Channel(manager.address)
        for number in range(20):
            channel.send(f"STATUS={number}")
        assert channel.barrier(DEADLINE_S) == ""
        assert len(manager.messages) == 20
        channel.close()


def test_barrier_has_a_deadline(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        manager.answering = False
        channel = Channel(manager.address)
        with pytest.raises(TimeoutError):
            channel.barrier(0.05)
        channel.close()


def test_watchdog_interval_is_half_and_only_ours() -> None:
    assert watchdog_interval_s({"WATCHDOG_USEC": "3000000"}) == 1.5
    assert watchdog_interval_s({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}) == 1.5
    assert watchdog_interval_s({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}) is None
    assert watchdog_interval_s({"WATCHDOG_USEC": "x"}) is None
    assert watchdog_interval_s({}) is None


def test_descriptors_for_another_process_are_left_alone() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a", "PATH": "/bin"}
    assert listen_fds(environ) == {}
    assert environ == {"PATH": "/bin"}


def test_announced_descriptors_must_fit_their_names() -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a"}
    with pytest.raises(StoreError, match="does not match"):
        listen_fds(environ)


def test_announced_descriptors_must_be_open() -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "4000"}
    with pytest.raises(StoreError, match="announced but is not open"):
        listen_fds(environ)


SERVICE = """
import json, os, sys
from mpsd.fdstore.notify import listen_fds
passed = listen_fds(os.environ)
left = [key for key in os.environ if key.startswith("LISTEN_")]
with open(sys.argv[1], "w") as out:
    json.dump([passed, [os.get_inheritable(fd) for fds in passed.values() for fd in fds], left], out)
"""


def test_passed_descriptors_become_close_on_exec_and_variables_go(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        manager.stored = [(name, os.open(os.devnull, os.O_RDONLY)) for name in ("a", "b", "a")]
        out = tmp_path / "out"
        process = manager.start([sys.executable, "-c", SERVICE, str(out)], os.environ)
        assert process.wait(DEADLINE_S) == 0
        assert json.loads(out.read_text()) == [{"a": [3, 5], "b": [4]}, [False] * 3, []]
