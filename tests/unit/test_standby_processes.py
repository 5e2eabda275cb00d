"""The processes of mpsd-standby, without a daemon: their leftovers, and the end of their children."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mpsd_client.standby import processes
from mpsd_client.standby.command import _remaining_of
from mpsd_client.standby.processes import ProcessTree
from mpsd_client.standby.schedule import RemainingWork
from tests.support.descriptors import open_descriptors
from tests.support.site import alive, until

# Reports its child's pid over the socket; the child has a session of its own.
PARENT = """
import os, socket, subprocess, sys
child = subprocess.Popen(["sleep", "3004"], start_new_session=True)
line = socket.socket(fileno=int(os.environ["MPSD_TURN"].split()[0]))
line.sendall(f"{child.pid}\\n".encode())
print(flush=True)
line.recv(1)
"""


@pytest.fixture
def actor() -> Iterator[ProcessTree]:
    before = open_descriptors()
    made = ProcessTree([sys.executable, "-c", PARENT], dict(os.environ), "first")
    yield made
    made.kill()
    made.finish()
    made.close()
    assert set(open_descriptors()) == set(before)


def test_all_that_it_has_started_is_found_and_killed(actor: ProcessTree) -> None:
    (said,) = until(actor.messages, "it says who its child is")
    child = int(said)
    assert set(actor.living()) == {actor.pid, child}
    assert actor.kill()
    assert not actor.living() and not alive(child)
    assert select.select([actor], [], [], 10)[0]
    assert actor.finish() == -signal.SIGKILL
    # The pids are remembered, because the daemon may still hold memory of them.
    assert {pid for pid, _ in actor.known} == {actor.pid, child}


def test_it_is_killed_at_once_and_what_is_in_other_sessions_after_that(actor: ProcessTree) -> None:
    (said,) = until(actor.messages, "it says who its child is")
    child = int(said)
    actor.living()
    actor.kill_group()
    assert select.select([actor], [], [], 10)[0] and alive(child)
    assert actor.kill() and not alive(child)
    assert actor.finish() == -signal.SIGKILL
    actor.kill_group()


def test_two_that_kill_it_at_a_time_may_each_find_more_of_it(
    actor: ProcessTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpsd-standby kills the process when it is to end, and again when it has ended, in one thread each."""
    until(actor.messages, "it says who its child is")
    actor.living()
    look = processes._row

    def find_more(pid: int) -> Any:
        actor.known.add((1 << 30, len(actor.known)))
        return look(pid)

    monkeypatch.setattr(processes, "_row", find_more)
    assert actor.kill()


def test_the_end_of_its_line_is_told_from_nothing_said(actor: ProcessTree) -> None:
    until(actor.messages, "it says who its child is")
    assert actor.messages() == []
    actor.kill()
    assert actor.messages() is None


def test_what_the_daemon_still_has_of_it(actor: ProcessTree) -> None:
    until(actor.messages, "it says who its child is")
    actor.living()
    (pid, start), *_ = sorted(actor.known)
    mine: Mapping[str, Any] = {"pid": pid, "start_ticks": start, "blind": False}
    other: Mapping[str, Any] = {"pid": None, "start_ticks": None, "command": "[another user's]"}
    reused: Mapping[str, Any] = {"pid": pid, "start_ticks": start + 1}

    assert _remaining_of(actor, [other, reused]) is RemainingWork.NOTHING
    assert _remaining_of(actor, [other, mine, other]) is RemainingWork.WORK
    assert _remaining_of(actor, [{**mine, "blind": True}]) is RemainingWork.UNKNOWN
    assert _remaining_of(actor, [{**mine, "blind": True}, mine]) is RemainingWork.WORK
