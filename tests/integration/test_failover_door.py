"""The fail-over socket: garbage, wrong order, peers that do not read, many at once. Its loop serves on."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from mpsd.base.model import FailoverMode, ProcessInstance, SnapshotBudget
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Excess, SavingCost
from mpsd.failover.messages import LAYOUT, Kind, Message, pack
from mpsd.os import procfs
from mpsd.peers.failoverserver import FailoverServer, FailoverServerLimits
from tests.support.failovering import Speaker
from tests.support.site import DEADLINE_S, until
from tests.support.vaulting import kernel_refuses_descriptors

T = TypeVar("T")
ME = ProcessInstance(os.getpid(), procfs.start_ticks(os.getpid()))


class RunningDoor:
    """A fail-over socket on a loop of its own."""

    def __init__(self, path: Path, limits: FailoverServerLimits) -> None:
        self.path = path
        self.events: list[ev.Event] = []
        self._limits = limits
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> RunningDoor:
        self._thread.start()

        async def start() -> FailoverServer:
            door = FailoverServer(self.path, self.events.append, self._limits)
            door.start()
            return door

        self.door = asyncio.run_coroutine_threadsafe(start(), self._loop).result(DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.look(self.door.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def look(self, what: Callable[[], T]) -> T:
        async def ask() -> T:
            return what()

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(DEADLINE_S)

    def counted(self, name: str) -> int:
        return self.look(lambda: self.door.counters[name])

    def of(self, kind: type[ev.Event]) -> list[ev.Event]:
        return self.look(lambda: [e for e in self.events if isinstance(e, kind)])


@pytest.fixture
def door() -> Iterator[RunningDoor]:
    with (
        tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where,
        RunningDoor(
            Path(where) / "f.sock", FailoverServerLimits(connections=8, rate=1e6, hello_s=60)
        ) as running,
    ):
        yield running


def come(door: RunningDoor) -> Speaker:
    speaker = Speaker(str(door.path))
    speaker.say(Kind.HELLO, mode=FailoverMode.EXACT)
    before = len(door.of(mev.MemberCame))
    until(lambda: len(door.of(mev.MemberCame)) >= max(before, 1), "HELLO was heard")
    return speaker


def ended(speaker: Speaker) -> bool:
    try:
        while True:
            speaker.hear()
    except EOFError:
        return True


def test_what_is_said_becomes_events_of_the_very_process(door: RunningDoor) -> None:
    speaker = come(door)
    speaker.say(Kind.READY, generation=2, values=(7, 8))
    speaker.say(Kind.UNREADY, generation=2, text="no memory")
    speaker.say(Kind.OPAQUE, text="cuGraphLaunch")
    speaker.say(Kind.OWN_ERROR, values=(719,))
    speaker.say(Kind.MOVED, generation=2, values=(1, 2, 3, 4, 5))
    speaker.say(Kind.MOVED, generation=2, values=(1, 2, 3, 700, 5, 1))
    speaker.say(Kind.MOVED, generation=2, values=(1, 2, 3, 700, 5, 2 + 40))
    speaker.say(Kind.LEFT, values=(1, 4096, 8192))
    speaker.say(Kind.HOLDS, values=(5, 6))
    speaker.say(Kind.COST, values=(7, 8, 9))
    speaker.say(Kind.EXPOSED, values=(1,), text="a wait for memory")
    speaker.say(Kind.EXPOSED)
    speaker.say(Kind.LEAVES, values=(1, 58, 100, 30, 1), text="too slow")
    speaker.say(Kind.LEAVES, values=(1, 58, 0, 30))
    speaker.say(Kind.LEAVES, values=(2, 14, 8), text="too large")
    speaker.say(Kind.LEAVES, values=(3,), text="switched off by hand")
    speaker.say(Kind.STAYED, generation=2, text="why")
    wanted = [
        mev.MemberCame(ME, os.getuid(), FailoverMode.EXACT),
        mev.MemberReady(ME, 2, 7, 8),
        mev.MemberUnready(ME, 2, "no memory"),
        mev.MemberOpaque(ME, "cuGraphLaunch"),
        mev.MemberError(ME, 719),
        mev.MemberMoved(ME, 2, 1, 2, 3, 4, 5),
        mev.MemberMoved(ME, 2, 1, 2, 3, 0, 5, waits=True, takes_ns=700),
        mev.MemberMoved(ME, 2, 1, 2, 3, 0, 5, waits=True, takes_ns=700, new_s=0.04),
        mev.MemberPages(ME, True, 4096, 8192),
        mev.MemberHolds(ME, 5, 6),
        mev.MemberCost(ME, SavingCost(7, 8, 9)),
        mev.MemberExposed(ME, "a wait for memory"),
        mev.MemberExposed(ME, None),
        mev.MemberExceeds(ME, Excess(SnapshotBudget.TIME, 580, 30, True)),
        mev.MemberExceeds(ME, Excess(SnapshotBudget.TIME, 58_000, 30)),
        mev.MemberExceeds(ME, Excess(SnapshotBudget.MEMORY, 14, 8)),
        mev.MemberExceeds(ME, Excess(SnapshotBudget.BY_HAND, 0, 0)),
        mev.MemberStayed(ME, 2, "why"),
    ]
    until(lambda: door.look(lambda: list(door.events)) == wanted, "all was heard")
    door.look(lambda: door.door.tell(ME, Message(Kind.MOVE, generation=2, text="a fault")))
    assert speaker.hear() == Message(Kind.MOVE, generation=2, text="a fault")
    speaker.close()
    until(lambda: door.of(mev.MemberLeft) == [mev.MemberLeft(ME)], "its end was seen")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x", "size"),
        (bytes(LAYOUT.size + 1), "size"),
        (bytes(LAYOUT.size), "magic"),
        (pack(Message(Kind.MOVE, generation=1)), "order"),
        (pack(Message(Kind.WELCOME)), "order"),
        (pack(Message(Kind.HELLO)), "order"),
        (pack(Message(Kind.LIMIT)), "order"),
        (pack(Message(Kind.LEAVES, values=(4, 1, 1))), "budget"),
        (pack(Message(Kind.READY))[:-1] + b"x", "text"),
    ],
)
def test_nonsense_ends_the_connection_and_is_counted(door: RunningDoor, data: bytes, reason: str) -> None:
    speaker = come(door)
    speaker.socket.send(data)
    assert ended(speaker)
    assert door.counted(f"closed_{reason}") == 1
    speaker.close()


def test_nothing_is_heard_before_hello(door: RunningDoor) -> None:
    speaker = Speaker(str(door.path))
    speaker.say(Kind.READY, generation=1)
    assert ended(speaker) and door.counted("closed_order") == 1
    assert not door.look(lambda: list(door.events))
    speaker.close()


def test_descriptors_are_refused_and_closed(door: RunningDoor) -> None:
    speaker = come(door)
    mine, theirs = os.pipe()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs]))]
    if kernel_refuses_descriptors():
        with pytest.raises(PermissionError):
            speaker.socket.sendmsg([pack(Message(Kind.READY, generation=1))], rights)
        os.close(theirs)
    else:
        speaker.socket.sendmsg([pack(Message(Kind.READY, generation=1))], rights)
        os.close(theirs)
        assert ended(speaker) and door.counted("closed_descriptors") == 1
    # Every copy of the other end is closed: the read returns end of file at once.
    os.set_blocking(mine, True)
    assert os.read(mine, 1) == b""
    os.close(mine)
    speaker.close()


def test_a_forked_child_is_not_the_program(door: RunningDoor) -> None:
    speaker = come(door)
    child = os.fork()
    if not child:
        speaker.say(Kind.READY, generation=1)
        os._exit(0)
    os.waitpid(child, 0)
    assert ended(speaker) and door.counted("closed_sender") == 1
    assert not door.of(mev.MemberReady)
    speaker.close()


def test_who_connects_again_takes_its_own_place(door: RunningDoor) -> None:
    first = come(door)
    second = Speaker(str(door.path))
    second.say(Kind.HELLO)
    assert ended(first)
    until(lambda: len(door.of(mev.MemberCame)) == 2, "it came again")
    assert not door.of(mev.MemberLeft)
    door.look(lambda: door.door.tell(ME, Message(Kind.WELCOME)))
    assert second.hear().kind is Kind.WELCOME
    for speaker in (first, second):
        speaker.close()


def test_who_does_not_read_is_let_go_and_holds_up_nobody(door: RunningDoor) -> None:
    speaker = come(door)

    def flood() -> None:
        for _ in range(100_000):
            door.door.tell(ME, Message(Kind.STANDBY, generation=1, path="/x", text="y"))

    door.look(flood)
    assert door.counted("closed_does_not_read") == 1
    assert door.counted("untold") > 0
    assert door.of(mev.MemberLeft) == [mev.MemberLeft(ME)]
    speaker.close()


def test_connections_of_one_user_are_bounded(door: RunningDoor) -> None:
    speakers = [Speaker(str(door.path)) for _ in range(12)]
    until(lambda: door.counted("closed_connections") == 4, "too many are refused")
    for speaker in speakers:
        speaker.close()
    until(lambda: door.look(lambda: not door.door.server.connections), "all have ended")
    come(door).close()


def test_messages_are_taken_in_at_a_rate() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where,
        RunningDoor(Path(where) / "f.sock", FailoverServerLimits(rate=1.0, burst=5.0)) as door,
    ):
        speaker = come(door)
        for _ in range(20):
            speaker.say(Kind.OWN_ERROR, values=(1,))
        until(lambda: door.counted("slowed") > 0, "it is slowed")
        assert len(door.of(mev.MemberError)) < 20
        speaker.close()


def test_silence_ends_too() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where,
        RunningDoor(Path(where) / "f.sock", FailoverServerLimits(hello_s=0.05)) as door,
    ):
        speaker = Speaker(str(door.path))
        assert ended(speaker) and door.counted("closed_silent") == 1
        speaker.close()
