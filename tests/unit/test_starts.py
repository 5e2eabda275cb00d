"""How clients were started: read once, in threads, and never waited for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping

import pytest

from mpsd.base.model import ClientId, ProcessInstance
from mpsd.base.protection import ProtectionLevel
from mpsd.clients import starts
from mpsd.clients.starts import Start, Starts, start_of
from mpsd.core.state import Client, ClientState
from mpsd.os import procfs
from tests.support.core import facts, process
from tests.support.waiting import DEADLINE_S

MAPS = """
import mmap, os, sys
if sys.argv[1:] == ["proxy"]:
    fd = os.memfd_create("mpsd-libcuda")
    os.ftruncate(fd, 4096)
    kept = mmap.mmap(fd, 4096)
print("ready", flush=True)
sys.stdin.read()
"""


def program(*arguments: str, **environ: str) -> subprocess.Popen[bytes]:
    started = subprocess.Popen(
        [sys.executable, "-c", MAPS, *arguments],
        env={"PATH": os.environ["PATH"], **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert started.stdout is not None and started.stdout.readline() == b"ready\n"
    return started


def client(pid: int, start: int) -> Client:
    found = facts(pid, start, os.getuid())
    return Client(ClientId("d1", found.instance), found, ClientState.ATTACHED, 0.0)


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ([], {}, Start(None, proxy=False)),
        ([], {"MPSD_PROTECTION": "failover"}, Start(ProtectionLevel.FAILOVER, proxy=False)),
        (["proxy"], {"MPSD_PROTECTION": "guard"}, Start(ProtectionLevel.GUARD, proxy=True)),
        (["proxy"], {"MPSD_PROTECTION": "none of them"}, Start(None, proxy=True)),
    ],
)
def test_environment_and_mappings_tell(
    arguments: list[str], environ: Mapping[str, str], expected: Start
) -> None:
    started = program(*arguments, **environ)
    try:
        ticks = procfs.start_ticks(started.pid)
        assert start_of(ProcessInstance(started.pid, ticks)) == expected
        assert start_of(ProcessInstance(started.pid, ticks + 1)) is None, "another process with this pid"
    finally:
        started.kill()
        started.communicate()
    assert start_of(ProcessInstance(started.pid, ticks)) is None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[int]]]:
    """Reads of process 11 that end when the test says so, and the pids that were read."""
    opened, read = threading.Event(), list[int]()

    def look(one: ProcessInstance) -> Start | None:
        read.append(one.pid)
        if one.pid == 11:
            opened.wait()
        return None if one.pid == 12 else Start(None, proxy=False)

    monkeypatch.setattr(starts, "start_of", look)
    yield opened, read
    opened.set()


def test_each_client_is_read_once_and_a_blocked_one_delays_none(
    gate: tuple[threading.Event, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, read = gate
    monkeypatch.setattr(starts, "DEADLINE_S", 60.0)
    clients = [client(pid, 1) for pid in (10, 11, 12)]

    async def play() -> None:
        known, plain = Starts(), Start(None, proxy=False)

        async def answers(*pids: int) -> bool:
            return await known.of(clients) == {process(pid): plain for pid in pids}

        async with asyncio.timeout(DEADLINE_S):
            while not await answers(10) or 12 not in read:
                await asyncio.sleep(0)
            opened.set()
            while not await answers(10, 11):
                await asyncio.sleep(0)
            assert sorted(read) == [10, 11, 12], "neither one is read again, nor the unreadable one"
            assert await known.of(clients[2:]) == {}
            while not await answers(10, 11):
                await asyncio.sleep(0)
            assert (read.count(10), read.count(12)) == (2, 1), "a process that left is forgotten"

    asyncio.run(play())
