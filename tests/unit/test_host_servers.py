"""mpsd follows a domain's server to its end, and reports the end before the next server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest

from mpsd.base.model import ProcessInstance, ServerState
from mpsd.core import events as ev
from mpsd.mps import log
from mpsd.mps.domains import Callbacks, RunningDomain, RunningDomains
from mpsd.os import processes, procfs
from mpsd.os.quietperiod import QuietPeriod

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
        """Return the servers that have not ended, as a real control daemon does."""
        found = (processes.facts(s.pid).instance for s in self.servers)
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


def told(
    control: Control, work: Callable[[RunningDomains, list[ev.Event]], Awaitable[None]]
) -> list[ev.Event]:
    """Return the events posted for one domain; at first its only server is the first of `control`."""
    posted: list[ev.Event] = []
    anything: Any = None

    async def run() -> None:

        async def list_clients(_: str) -> None:
            pass

        unused = [lambda *_: None] * 4
        callbacks = Callbacks(posted.append, *unused, lambda _: control.in_use, list_clients, lambda _: True)
        domains = RunningDomains(
            "none", {}, anything, anything, callbacks, QuietPeriod(), start_deadline_s=1.0
        )
        domains._domains["d1"] = RunningDomain("d1", None, cast("Any", control))
        control.servers = control.servers[:1]
        await work(domains, posted)
        domains._drop_server(domains._domains["d1"])

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    return posted


@pytest.mark.parametrize("asked_first", [True, False])
def test_the_end_of_a_server_is_told_once_and_before_the_next_one(
    control: Control, asked_first: bool
) -> None:
    """The loop sees the end first, or a look finds the next server first."""
    died, received = control.servers
    first, second = control.server_instances()

    async def work(domains: RunningDomains, posted: list[ev.Event]) -> None:
        await domains._ask("d1", clients=False)
        assert posted == [
            ev.ServerSeen("d1", first, os.geteuid()),
            ev.ServerStateSeen("d1", ServerState.ACTIVE),
        ]
        died.kill()
        died.wait()
        control.servers = [received]
        if asked_first:
            await domains._ask("d1", clients=False)
        while ev.ServerDied("d1", first) not in posted:
            await asyncio.sleep(0)
        if not asked_first:
            await domains._ask("d1", clients=False)
        # The end is not reported again.
        for _ in range(3):
            await asyncio.sleep(0)

    posted = told(control, work)
    assert posted[2:] == [
        ev.ServerDied("d1", first),
        ev.ServerSeen("d1", second, os.geteuid()),
        ev.ServerStateSeen("d1", ServerState.ACTIVE),
    ]


def kill(server: subprocess.Popen[bytes]) -> None:
    """End the server without collecting its status: its control daemon does not know."""
    server.kill()
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


def test_of_an_empty_domain_the_servers_end_is_waited_for(control: Control) -> None:
    died = control.servers[0]
    (first, _) = control.server_instances()

    async def work(domains: RunningDomains, posted: list[ev.Event]) -> None:
        control.state, control.in_use = ServerState.FAULT, False
        await domains._ask("d1", clients=False)
        kill(died)
        await domains._ask("d1", clients=False)
        assert posted[2:] == [ev.ServerSeen("d1", first, os.geteuid())]
        # Its pidfd reports the end.
        while ev.ServerDied("d1", first) not in posted:
            await asyncio.sleep(0)

    told(control, work)


@pytest.mark.parametrize("next_comes", [False, True])
def test_a_server_that_was_killed_is_dead_though_its_threads_are_still_in_the_driver(
    control: Control, next_comes: bool
) -> None:
    """Its control daemon reports FAULT, which would make suspects of all its clients."""
    died, received = control.servers
    first, second = control.server_instances()

    async def work(domains: RunningDomains, posted: list[ev.Event]) -> None:
        control.state = ServerState.FAULT
        await domains._ask("d1", clients=False)
        # For a living server the reported state counts.
        assert posted == [
            ev.ServerSeen("d1", first, os.geteuid()),
            ev.ServerStateSeen("d1", ServerState.FAULT),
        ]
        kill(died)
        await domains._ask("d1", clients=False)
        await domains._ask("d1", clients=False)
        if next_comes:
            control.servers, control.state = [received], ServerState.ACTIVE
            await domains._ask("d1", clients=False)
        # The pidfd does not report the end again.
        for _ in range(3):
            await asyncio.sleep(0)

    posted = told(control, work)
    came = [ev.ServerSeen("d1", second, os.geteuid()), ev.ServerStateSeen("d1", ServerState.ACTIVE)]
    assert posted[2:] == [
        ev.ServerSeen("d1", first, os.geteuid()),
        ev.ServerDied("d1", first),
        ev.ServerStateSeen("d1", ServerState.GONE),
        *(came if next_comes else []),
    ]


@pytest.mark.parametrize("next_comes", [False, True])
@pytest.mark.parametrize("state", [ServerState.ACTIVE, ServerState.FAULT])
def test_what_a_server_said_before_its_end_is_not_said_of_the_next_one(
    control: Control, monkeypatch: pytest.MonkeyPatch, state: ServerState, next_comes: bool
) -> None:
    died, received = control.servers
    first, second = control.server_instances()

    async def work(domains: RunningDomains, posted: list[ev.Event]) -> None:
        async def late(pid: int, deadline_s: float) -> ServerState:
            died.kill()
            while ev.ServerDied("d1", first) not in posted:
                await asyncio.sleep(0)
            if next_comes:
                control.servers = [received]
                domains._pin_server(domains._domains["d1"])
            return state

        monkeypatch.setattr(control, "server_state", late)
        await domains._ask("d1", clients=False)
        host = domains._domains["d1"]
        assert (host.server.instance if host.server else None) == (second if next_comes else None)

    posted = told(control, work)
    assert posted == [ev.ServerSeen("d1", first, os.geteuid()), ev.ServerDied("d1", first)]


def test_a_server_that_writes_what_it_likes_makes_no_counter_for_each(control: Control) -> None:
    async def work(domains: RunningDomains, posted: list[ev.Event]) -> None:
        for status in range(10_000):
            event = log.ClientRefused(1, status)
            domains._handle_line(domains._domains["d1"], log.LogLine("", "", None, "", event))

    counted = {name for e in told(control, work) if isinstance(e, ev.Counted) for name in e.counters}
    assert {"clients_refused_802", "clients_refused_other"} <= counted and len(counted) <= 1001


def test_a_refusal_by_a_full_server_is_posted(control: Control) -> None:
    async def work(domains: RunningDomains, posted: list[ev.Event]) -> None:
        for status in (807, 808):
            event = log.ClientRefused(7, status)
            domains._handle_line(domains._domains["d1"], log.LogLine("", "", None, "", event))

    refusals = [e for e in told(control, work) if isinstance(e, ev.ClientRefused)]
    assert refusals == [ev.ClientRefused("d1", 7), ev.ClientRefused("d1", None, full=True)]


def test_a_log_that_asks_for_looks_all_the_time_gets_one_after_the_other(control: Control) -> None:
    looks, running = [], [0]

    async def work(domains: RunningDomains, posted: list[ev.Event]) -> None:
        answer = asyncio.Event()

        async def counted(pid: int, deadline_s: float) -> ServerState:
            looks.append(pid)
            running[0] += 1
            assert running[0] == 1
            await answer.wait()
            running[0] -= 1
            return ServerState.ACTIVE

        control.server_state = counted  # type: ignore[method-assign]
        line = log.LogLine("", "", None, "", log.ServerReady(1))
        for _ in range(100):
            domains._handle_line(domains._domains["d1"], line)
            await asyncio.sleep(0)
        answer.set()
        await domains.idle()
        # The second began after all that the log told before.
        assert len(looks) == 2

    told(control, work)
