"""A domain's server is followed to its end, which is told before the next one is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest

from mpsd import mpslog, procs
from mpsd.calm import Calm
from mpsd.core import events as ev
from mpsd.host import Callbacks, Host, Hosts
from mpsd.linux import procfs
from mpsd.model import ProcessInstance, ServerState

DEADLINE_S = 10.0


class Control:
    """A control daemon with these servers, which are processes."""

    def __init__(self) -> None:
        self.servers: list[subprocess.Popen[bytes]] = []
        self.state = ServerState.ACTIVE
        self.in_use = True

    def alive(self) -> bool:
        return True

    def server_instances(self) -> tuple[ProcessInstance, ...]:
        """Those that have not ended, as of a real one."""
        found = (procs.facts(s.pid).instance for s in self.servers)
        return tuple(i for i in found if procfs.stat(i.pid).state != "Z")

    async def server_state(self, pid: int, deadline_s: float) -> ServerState:
        return self.state


@pytest.fixture
def control() -> Iterator[Control]:
    made = Control()
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            server = stack.enter_context(subprocess.Popen(["sleep", "60"]))
            stack.callback(server.kill)
            made.servers.append(server)
        yield made


def told(control: Control, work: Callable[[Hosts, list[ev.Event]], Awaitable[None]]) -> list[ev.Event]:
    """What is posted of one domain, whose only server is the first one to begin with."""
    posted: list[ev.Event] = []
    anything: Any = None

    async def run() -> None:
        callbacks = Callbacks(posted.append, *([lambda *_: None] * 4), in_use=lambda _: control.in_use)
        hosts = Hosts("none", {}, anything, anything, callbacks, Calm(), start_deadline_s=1.0)
        hosts._hosts["d1"] = Host("d1", None, cast("Any", control))
        control.servers = control.servers[:1]
        await work(hosts, posted)
        hosts._drop_server(hosts._hosts["d1"])

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    return posted


@pytest.mark.parametrize("asked_first", [True, False])
def test_the_end_of_a_server_is_told_once_and_before_the_next_one(
    control: Control, asked_first: bool
) -> None:
    """Whether the loop comes to that end first, or to a look that finds the next one there."""
    died, heard = control.servers
    first, second = control.server_instances()

    async def work(hosts: Hosts, posted: list[ev.Event]) -> None:
        await hosts._ask("d1")
        assert posted == [ev.ServerSeen("d1", first), ev.ServerStateSeen("d1", ServerState.ACTIVE)]
        died.kill()
        died.wait()
        control.servers = [heard]
        if asked_first:
            await hosts._ask("d1")
        while ev.ServerDied("d1", first) not in posted:
            await asyncio.sleep(0)
        if not asked_first:
            await hosts._ask("d1")
        # Nobody else tells of it.
        for _ in range(3):
            await asyncio.sleep(0)

    posted = told(control, work)
    assert posted[2:] == [
        ev.ServerDied("d1", first),
        ev.ServerSeen("d1", second),
        ev.ServerStateSeen("d1", ServerState.ACTIVE),
    ]


def kill(server: subprocess.Popen[bytes]) -> None:
    """It has ended, and nobody has asked how: its control daemon does not know."""
    server.kill()
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


def test_of_an_empty_domain_the_servers_end_is_waited_for(control: Control) -> None:
    died = control.servers[0]
    (first, _) = control.server_instances()

    async def work(hosts: Hosts, posted: list[ev.Event]) -> None:
        control.state, control.in_use = ServerState.FAULT, False
        await hosts._ask("d1")
        kill(died)
        await hosts._ask("d1")
        assert posted[2:] == [ev.ServerSeen("d1", first)]
        # Its pidfd tells of it.
        while ev.ServerDied("d1", first) not in posted:
            await asyncio.sleep(0)

    told(control, work)


@pytest.mark.parametrize("next_comes", [False, True])
def test_a_server_that_was_killed_is_dead_though_its_threads_are_still_in_the_driver(
    control: Control, next_comes: bool
) -> None:
    """Its control daemon says that it is in FAULT: that would make suspects of all its clients."""
    died, heard = control.servers
    first, second = control.server_instances()

    async def work(hosts: Hosts, posted: list[ev.Event]) -> None:
        control.state = ServerState.FAULT
        await hosts._ask("d1")
        # One that lives is what it says.
        assert posted == [ev.ServerSeen("d1", first), ev.ServerStateSeen("d1", ServerState.FAULT)]
        kill(died)
        await hosts._ask("d1")
        await hosts._ask("d1")
        if next_comes:
            control.servers, control.state = [heard], ServerState.ACTIVE
            await hosts._ask("d1")
        # The pidfd tells nobody once more.
        for _ in range(3):
            await asyncio.sleep(0)

    posted = told(control, work)
    came = [ev.ServerSeen("d1", second), ev.ServerStateSeen("d1", ServerState.ACTIVE)]
    assert posted[2:] == [
        ev.ServerSeen("d1", first),
        ev.ServerDied("d1", first),
        ev.ServerStateSeen("d1", ServerState.GONE),
        *(came if next_comes else []),
    ]


@pytest.mark.parametrize("next_comes", [False, True])
@pytest.mark.parametrize("state", [ServerState.ACTIVE, ServerState.FAULT])
def test_what_a_server_said_before_its_end_is_not_said_of_the_next_one(
    control: Control, monkeypatch: pytest.MonkeyPatch, state: ServerState, next_comes: bool
) -> None:
    died, heard = control.servers
    first, second = control.server_instances()

    async def work(hosts: Hosts, posted: list[ev.Event]) -> None:
        async def late(pid: int, deadline_s: float) -> ServerState:
            died.kill()
            while ev.ServerDied("d1", first) not in posted:
                await asyncio.sleep(0)
            if next_comes:
                control.servers = [heard]
                hosts._pin_server(hosts._hosts["d1"])
            return state

        monkeypatch.setattr(control, "server_state", late)
        await hosts._ask("d1")
        host = hosts._hosts["d1"]
        assert (host.server.instance if host.server else None) == (second if next_comes else None)

    posted = told(control, work)
    assert posted == [ev.ServerSeen("d1", first), ev.ServerDied("d1", first)]


def test_a_server_that_writes_what_it_likes_makes_no_counter_for_each(control: Control) -> None:
    async def work(hosts: Hosts, posted: list[ev.Event]) -> None:
        for status in range(10_000):
            event = mpslog.ClientRefused(1, status)
            hosts._understand(hosts._hosts["d1"], mpslog.LogLine("", "", None, "", event))

    counted = {name for e in told(control, work) if isinstance(e, ev.Counted) for name in e.counters}
    assert {"clients_refused_802", "clients_refused_other"} <= counted and len(counted) <= 1001
