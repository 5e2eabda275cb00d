"""The processes of mpsd-standby, without a daemon: what they leave, and what becomes of what they started."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mpsd_client import actors
from mpsd_client.actors import Actor
from mpsd_client.rota import Left
from mpsd_client.standby import _left_by
from tests.support.descriptors import open_descriptors
from tests.support.site import alive, until

# Says who its child is, by its line; the child is in a session of its own.
PARENT = """
import os, socket, subprocess, sys
child = subprocess.Popen(["sleep", "3004"], start_new_session=True)
line = socket.socket(fileno=int(os.environ["MPSD_TURN"].split()[0]))
line.sendall(f"{child.pid}\\n".encode())
print(flush=True)
line.recv(1)
"""


@pytest.fixture
def actor() -> Iterator[Actor]:
    before = open_descriptors()
    made = Actor([sys.executable, "-c", PARENT], dict(os.environ), "first")
    yield made
    made.kill()
    made.finish()
    made.close()
    assert set(open_descriptors()) == set(before)


def test_all_that_it_has_started_is_found_and_killed(actor: Actor) -> None:
    (said,) = until(actor.lines, "it says who its child is")
    child = int(said)
    assert set(actor.members()) == {actor.pid, child}
    assert actor.kill()
    assert not actor.members() and not alive(child)
    assert select.select([actor], [], [], 10)[0]
    assert actor.finish() == -signal.SIGKILL
    # It is remembered, for what the daemon still has of it.
    assert {pid for pid, _ in actor.known} == {actor.pid, child}


def test_it_is_killed_at_once_and_what_is_in_other_sessions_after_that(actor: Actor) -> None:
    (said,) = until(actor.lines, "it says who its child is")
    child = int(said)
    actor.members()
    actor.strike()
    assert select.select([actor], [], [], 10)[0] and alive(child)
    assert actor.kill() and not alive(child)
    assert actor.finish() == -signal.SIGKILL
    actor.strike()


def test_two_that_kill_it_at_a_time_may_each_find_more_of_it(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpsd-standby kills it when it is to end, and once more when it has: each in a thread."""
    until(actor.lines, "it says who its child is")
    actor.members()
    look = actors._row

    def find_more(pid: int) -> Any:
        actor.known.add((1 << 30, len(actor.known)))
        return look(pid)

    monkeypatch.setattr(actors, "_row", find_more)
    assert actor.kill()


def test_the_end_of_its_line_is_told_from_nothing_said(actor: Actor) -> None:
    until(actor.lines, "it says who its child is")
    assert actor.lines() == []
    actor.kill()
    assert actor.lines() is None


def test_what_the_daemon_still_has_of_it(actor: Actor) -> None:
    until(actor.lines, "it says who its child is")
    actor.members()
    (pid, start), *_ = sorted(actor.known)
    mine: Mapping[str, Any] = {"pid": pid, "start_ticks": start, "blind": False}
    other: Mapping[str, Any] = {"pid": None, "start_ticks": None, "command": "[another user's]"}
    reused: Mapping[str, Any] = {"pid": pid, "start_ticks": start + 1}

    assert _left_by(actor, [other, reused]) is Left.NOTHING
    assert _left_by(actor, [other, mine, other]) is Left.WORK
    assert _left_by(actor, [{**mine, "blind": True}]) is Left.UNKNOWN
    assert _left_by(actor, [{**mine, "blind": True}, mine]) is Left.WORK
