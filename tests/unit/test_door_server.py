"""The server of a door: descriptors, displaced connections, and a socket whose file was removed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from mpsd.base.errors import AlreadyRunningError, ConfigError
from mpsd.os.descriptors import RESERVE, SHARES, DescriptorBudget, Purpose
from mpsd.peers import closing, server
from mpsd.peers.quotas import Account, Standing
from mpsd.peers.receive import Refused, receive
from mpsd.peers.server import HEADROOM, OVERDRAWN, Accepted, DoorLimits, Server, Surroundings
from tests.support.descriptors import open_descriptors

DEADLINE_S = 20.0
ROOT = 0


class Charged:
    """Charges connections to owners in turn, as the test lists them. Owner ROOT is privileged."""

    def __init__(self) -> None:
        self.owners: list[int] = []
        self.last = -1

    def of(self, *_: object) -> Account:
        self.last = self.owners.pop(0)
        return Account(self.last, self.last)

    def privileged(self, *_: object) -> bool:
        return self.last == ROOT


class Door:
    """A server on the running loop; its connections are never read."""

    def __init__(
        self, path: Path, budget: DescriptorBudget | None, around: Surroundings | None = None
    ) -> None:
        self.charged = charged = Charged()
        self.ended: list[int] = []
        headroom = [] if around is None else around.headroom
        budget = budget or DescriptorBudget.unlimited()
        around = Surroundings(charged, charged, budget, headroom)  # type: ignore[arg-type]
        self.server: Server[Accepted] = Server(
            path,
            socket.SOCK_SEQPACKET,
            "test",
            DoorLimits(100, 100, 10, 60.0),
            around,
            Accepted,
            lambda _: None,
            lambda connection: self.ended.append(connection.owner),
        )
        self.clients: list[socket.socket] = []

    async def come(self, *owners: int) -> None:
        """Connect once for each of these owners, and wait until the server has decided on all."""
        self.charged.owners += owners
        for _ in owners:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            client.connect(os.fspath(self.server.path))
            self.clients.append(client)
        await until(lambda: not self.charged.owners)

    def held(self) -> dict[int, int]:
        return dict(Counter(c.owner for c in self.server.connections))

    def close(self) -> None:
        self.server.close()
        for client in self.clients:
            client.close()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.001)


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where:
        yield Path(where) / "door.sock"


def scenario(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))  # type: ignore[arg-type]


def test_without_descriptors_newcomers_displace_and_root_enters(path: Path) -> None:
    async def work() -> None:
        budget = DescriptorBudget(RESERVE + 128)
        door = Door(path, budget)
        door.server.start()
        advance = budget.taken(Purpose.CONNECTION)
        assert advance == 4
        await door.come(1, 1, 1, 1, 1)
        # Clients take the rest: none is left for connections.
        assert budget.take(Purpose.CLIENT, budget.left)
        await door.come(1)
        assert door.held() == {1: 5} and door.server.counters["closed_connections"] == 1
        await door.come(2, 3)
        assert door.held() == {1: 3, 2: 1, 3: 1} and door.server.counters["closed_displaced"] == 2
        await door.come(ROOT, ROOT)
        assert door.held()[ROOT] == 2
        door.close()
        await until(lambda: not budget.taken(Purpose.CONNECTION))
        assert sorted(door.ended) == [ROOT, ROOT, 1, 1, 1, 1, 1, 2, 3]

    scenario(work)


def test_without_descriptors_an_idle_door_serves_newcomers(path: Path) -> None:
    """Leases, or connections at the other doors, took the part of this door before anybody came here."""

    async def work() -> None:
        budget = DescriptorBudget(1024, shares=SHARES)
        door = Door(path, budget)
        door.server.start()
        while budget.take(Purpose.LEASE):
            pass
        await door.come(5, 6, 7)
        assert door.held() == {5: 1, 6: 1, 7: 1}
        # One of each owner: the second one of an owner has no descriptor.
        await door.come(5)
        assert door.held() == {5: 1, 6: 1, 7: 1} and door.server.counters == {"closed_connections": 1}
        # Half of those taken in advance are for root alone. After these, silent connections make way.
        await door.come(*range(8, 8 + HEADROOM))
        assert len(door.held()) == HEADROOM // 2 and door.server.counters["closed_displaced"] == 11
        await door.come(*[ROOT] * (HEADROOM // 2))
        assert door.held()[ROOT] == HEADROOM // 2
        door.close()
        await until(lambda: not budget.taken(Purpose.CONNECTION))

    scenario(work)


def test_the_descriptor_of_a_displaced_connection_serves_the_newcomer(path: Path) -> None:
    async def work() -> None:
        budget = DescriptorBudget(RESERVE + 128)
        door = Door(path, budget)
        door.server.start()
        assert budget.take(Purpose.CLIENT, budget.left)
        # Root has all that the door took in advance.
        await door.come(*[ROOT] * 4)
        budget.release(Purpose.CLIENT, 5)
        await door.come(1, 1, 1, 1, 1)
        assert door.held() == {1: 5, ROOT: 4} and not budget.left
        await door.come(2)
        assert door.held() == {1: 4, 2: 1, ROOT: 4}
        door.close()
        await until(lambda: not budget.taken(Purpose.CONNECTION))

    scenario(work)


def test_a_door_takes_its_descriptors_before_leases_are_adopted(path: Path) -> None:
    async def work() -> None:
        budget = DescriptorBudget(256, 47, shares=SHARES)
        around = Surroundings.of("", budget, doors=3)
        assert budget.taken(Purpose.CONNECTION) == 12 and len(around.headroom) == 3
        # Adoption charges what is open already, even beyond the budget.
        budget.charge_open(Purpose.LEASE, budget.capacity)
        doors = [Door(path.with_name(name), budget, around=around) for name in "abcd"]
        for door in doors:
            door.server.start()
            await door.come(1, 1, 2, ROOT, ROOT)
            assert door.held() == {1: 1, 2: 1, ROOT: 2}
        # A door that was not announced takes its own.
        assert budget.taken(Purpose.CONNECTION) == 16 and not around.headroom
        for door in doors:
            door.close()
        await until(lambda: not budget.taken(Purpose.CONNECTION))

    scenario(work)


@pytest.fixture
def slow_closes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let threads close nothing until the event is set."""
    go_on, close = threading.Event(), os.close

    def wait(fd: int) -> None:
        assert go_on.wait(DEADLINE_S)
        close(fd)

    monkeypatch.setattr(closing, "os", SimpleNamespace(close=wait))
    yield go_on
    go_on.set()


def test_the_budget_has_what_peers_sent_until_it_is_closed(path: Path, slow_closes: threading.Event) -> None:
    async def work() -> None:
        budget = DescriptorBudget(RESERVE + 128)
        door = Door(path, budget)
        door.server.start()
        before = budget.left
        for _ in range(4):
            assert not door.server.closing_full(1)
            door.server.close_descriptors(1, [os.open("/dev/null", os.O_RDONLY)])
        assert door.server.closing_full(1) and not door.server.closing_full(2)
        assert budget.left == before - 4
        # Without a descriptor left, a user has one, and all users together a few.
        taken = budget.left
        assert budget.take(Purpose.LEASE, taken)
        for owner in range(2, 2 + OVERDRAWN - 4):
            assert not door.server.closing_full(owner)
            door.server.close_descriptors(owner, [os.open("/dev/null", os.O_RDONLY)])
            assert door.server.closing_full(owner)
        assert door.server.closing_full(77)
        slow_closes.set()
        await until(lambda: budget.left == before - taken)
        assert not door.server.closing_full(1) and not door.server.closing_full(77)
        door.close()

    scenario(work)


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_a_user_whose_closes_wait_stops_no_door(
    path: Path, slow_closes: threading.Event, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PAUSE_S", 0.001)

    async def work() -> None:
        door = Door(path, DescriptorBudget(RESERVE + 128))
        door.server.start()
        await door.come(*[1] * 14)
        door.server.close_descriptors(1, [os.open("/dev/null", os.O_RDONLY) for _ in range(8)])
        assert door.server.closing_full(1)
        if kernel == "old":
            # Descriptors may lie in any connection.
            monkeypatch.setattr(server, "holds_nothing", lambda _: False)
        await door.come(*[1] * (OVERDRAWN - 1), ROOT, 2)
        assert door.held() == {1: 13, ROOT: 1, 2: 1}
        if kernel == "old":
            left = door.server._budget.left
            await door.come(1)
            # Too many refused connections wait: the door waits for them.
            coming = asyncio.create_task(door.come(ROOT))
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not coming.done() and door.server._budget.left == left - 1
            slow_closes.set()
            await coming
            assert door.held()[ROOT] == 2
        door.close()

    scenario(work)


def test_a_small_limit_of_descriptors_bounds_the_door(path: Path) -> None:
    async def work() -> None:
        door = Door(path, DescriptorBudget(RESERVE + 64))
        door.server.start()
        await door.come(*[1] * 20)
        # A door takes an eighth of the budget, and an eighth of that is the reserve.
        assert door.held() == {1: 7}
        await door.come(ROOT)
        assert door.held() == {1: 7, ROOT: 1}
        door.close()

    scenario(work)


def test_without_a_free_descriptor_accept_pauses_and_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ENFILE, errno.ENOMEM]

    def accept_later(sock: socket.socket) -> Any:
        if failures:
            raise OSError(failures[0], os.strerror(failures.pop(0)))
        return accept(sock)

    async def work() -> None:
        door = Door(path, None)
        door.server.start()
        await door.come(1)
        assert door.held() == {1: 1} and door.server.counters == {"closed_no_descriptor": 3}
        door.close()

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    monkeypatch.setattr(server, "PAUSE_S", 0.001)
    with capture_logs() as lines:
        scenario(work)
    assert str(lines).count("no_descriptor") == 1


def test_working_connections_go_last(path: Path) -> None:
    async def work() -> None:
        door = Door(path, DescriptorBudget(RESERVE + 32))
        door.server.start()
        await door.come(1, 1, 1, 1)
        working, silent, *rest = door.server.connections
        for connection in (working, *rest):
            connection.standing = Standing.WORKING
        await door.come(2)
        assert not silent.open and working.open and all(connection.open for connection in rest)
        await door.come(2)
        assert working.open and rest[0].open and not rest[1].open
        door.close()

    scenario(work)


def test_a_removed_socket_is_made_again_and_waiting_peers_are_served(path: Path) -> None:
    async def work() -> None:
        door = Door(path, None)
        door.server.start()
        await door.come(1)
        door.charged.owners.append(2)
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        waiting.connect(os.fspath(path))
        door.clients.append(waiting)
        path.unlink()
        door.server.check()
        assert door.held() == {1: 1, 2: 1} and path.exists() and not door.server.problem
        await door.come(3)
        path.parent.joinpath("other").symlink_to(path)
        path.unlink()
        path.write_text("not a socket")
        door.server.check()
        await door.come(4)
        assert door.held() == {1: 1, 2: 1, 3: 1, 4: 1}
        door.close()
        assert not path.exists()

    scenario(work)


def test_without_a_free_descriptor_peers_at_a_removed_socket_wait(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED]

    def accept_later(sock: socket.socket) -> Any:
        if failures:
            raise OSError(failures[0], os.strerror(failures.pop(0)))
        return accept(sock)

    async def work() -> None:
        door = Door(path, None)
        door.server.start()
        door.charged.owners.append(1)
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        waiting.connect(os.fspath(path))
        door.clients.append(waiting)
        path.unlink()
        monkeypatch.setattr(socket.socket, "accept", accept_later)
        for held in ({}, {}, {1: 1}):
            door.server.check()
            assert door.held() == held
        assert not failures and not door.server.problem
        door.close()

    scenario(work)


def test_the_socket_of_another_daemon_stays(path: Path) -> None:
    async def work() -> None:
        door = Door(path, None)
        door.server.start()
        path.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.bind(os.fspath(path))
            other.listen()
            door.server.check()
            assert "a daemon answers" in door.server.problem
            with pytest.raises(AlreadyRunningError):
                Door(path, None).server.start()
            door.close()
            assert path.exists()

    scenario(work)


def test_a_folder_that_cannot_be_made_is_named(path: Path) -> None:
    async def work() -> None:
        with pytest.raises(ConfigError, match="/proc/mpsd"):
            Door(Path("/proc/mpsd/door.sock"), None).server.start()

    scenario(work)


def test_descriptors_beyond_those_expected_are_never_received() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    right.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    before = open_descriptors()
    with left, right, contextlib.ExitStack() as stack:
        socket.send_fds(left, [b"one"], [0])
        got = receive(right, 100, descriptors=1)
        assert got.data == b"one" and got.sender is not None and got.sender.pid == os.getpid()
        stack.callback(os.close, got.fds[0])
        for number, allowed in ((1, 0), (2, 1), (200, 1)):
            socket.send_fds(left, [b"many"], [0] * number)
            with pytest.raises(Refused, match="descriptors"):
                receive(right, 100, descriptors=allowed)
            right.recv(100)
        assert open_descriptors().keys() - before.keys() == {*got.fds}
