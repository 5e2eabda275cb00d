"""Hostile peers of the vault: closed, counted, and without effect on other clients."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.peers import vaultserver
from mpsd.peers.vaultpeer import VaultPeer, identify
from mpsd.peers.vaultserver import VaultServerLimits
from mpsd.vault.messages import LAYOUT, Kind, Message, Status, pack
from tests.support import vaulting
from tests.support.descriptors import open_descriptors
from tests.support.site import until
from tests.support.vaultfixtures import LIMITS, counted, held, place, store, vault
from tests.support.vaulting import (
    MemoryStore,
    RunningVault,
    VaultClient,
    kernel_refuses_descriptors,
    lingering,
    memory,
)

__all__ = ["place", "store", "vault"]  # pytest finds fixtures by these names.


def refused(
    vault: RunningVault, reason: str, data: bytes, fds: tuple[int, ...] = (), greet: bool = True
) -> None:
    before = counted(vault, f"closed_{reason}")
    with VaultClient(vault.path, greet=greet) as client:
        client.send(data, fds)
        assert client.is_closed()
    assert counted(vault, f"closed_{reason}") == before + 1
    assert held(vault) == []


def test_nonsense_closes_the_connection_and_is_counted(vault: RunningVault) -> None:
    good, put = pack(Message(Kind.DROP, number=1)), pack(Message(Kind.PUT, number=1, size=4096))
    fd, null = memory(), os.open("/dev/null", os.O_RDWR)
    refused(vault, "size", b"x")
    refused(vault, "size", good + b"x")
    refused(vault, "size", b"\0" * 100_000)
    refused(vault, "magic", bytes(LAYOUT.size))
    refused(vault, "version", good[:4] + b"\xff\xff" + good[6:])
    refused(vault, "kind", good[:6] + b"\x63\x00" + good[8:])
    refused(vault, "name", good[:-64] + b"n" * 64)
    refused(vault, "order", good, greet=False)
    refused(vault, "order", pack(Message(Kind.HELLO)))
    refused(vault, "descriptors", put)
    refused(vault, "descriptors", put, (fd, fd))
    refused(vault, "descriptors", put, (fd,) * 200)
    refused(vault, "descriptors", good, (fd,))
    refused(vault, "not_memory", put, (null,))
    refused(vault, "not_memory", put, (0,))
    os.close(fd)
    os.close(null)


def test_ledgers_that_are_none_and_more_than_one_close_the_connection(vault: RunningVault) -> None:
    asks, fd = pack(Message(Kind.LEDGER)), memory()
    refused(vault, "descriptors", asks)
    refused(vault, "descriptors", asks, (fd, fd))
    if kernel_refuses_descriptors():
        with VaultClient(vault.path, greet=False) as early, pytest.raises(PermissionError):
            early.send(asks, (fd,))
    else:
        refused(vault, "order", asks, (fd,), greet=False)
    with VaultClient(vault.path) as client:
        # This vault grants no zones, so it does not even look at the descriptor.
        answer = client.ask(Message(Kind.LEDGER), [fd])
        assert (answer.status, answer.size, answer.count) == (Status.QUOTA, 0, 0)
        client.send(asks, [fd])
        assert client.is_closed()
    os.close(fd)


def test_a_process_cannot_change_its_owner(vault: RunningVault) -> None:
    with VaultClient(vault.path) as client:
        client.put(1)
        with VaultClient(vault.path, greet=False) as second:
            second.send(pack(Message(Kind.HELLO, token=b"t" * 32)))
            assert second.is_closed()
        assert counted(vault, "closed_another_owner") == 1
        assert client.ask(Message(Kind.DROP, number=1)).status == Status.OK


def test_those_who_say_nothing_are_closed(place: Path, store: MemoryStore) -> None:
    with (
        RunningVault(place, store, LIMITS, VaultServerLimits(hello_s=0.05)) as running,
        VaultClient(place, greet=False) as silent,
    ):
        assert silent.is_closed() and counted(running, "closed_silent") == 1


def test_a_silent_connection_costs_one_descriptor(vault: RunningVault) -> None:
    before = len(open_descriptors())
    silent = [VaultClient(vault.path, greet=False) for _ in range(10)]

    def identified() -> bool:
        connections = vault.door.server.connections
        return len(connections) == 10 and all(c.peer is not None for c in connections)

    until(lambda: vault.look(identified), "all peers are known")
    # Both ends are in this process.
    assert len(open_descriptors()) - before == 20
    assert silent[0].ask(Message(Kind.HELLO)).status == Status.OK
    # Another connection of the same process has the same pin.
    assert silent[1].ask(Message(Kind.HELLO)).status == Status.OK
    assert len(open_descriptors()) - before == 21
    for client in silent:
        client.close()


def test_those_who_do_not_listen_or_are_too_many_are_closed(place: Path, store: MemoryStore) -> None:
    with RunningVault(place, store, LIMITS, VaultServerLimits(connections=3)) as running:
        with VaultClient(place) as deaf:
            deaf.socket.setblocking(False)
            data = pack(Message(Kind.KEEP, name="x"))
            end_at = time.monotonic() + vaulting.DEADLINE_S
            while not counted(running, "closed_does_not_read") and time.monotonic() < end_at:
                try:
                    deaf.send(data)
                except OSError:
                    pass
            assert counted(running, "closed_does_not_read") == 1
        # The connection counts until a thread of the daemon has closed its descriptor.
        until(lambda: running.look(lambda: not running.door.server.connections), "the connection is closed")
        clients = [VaultClient(place) for _ in range(3)]
        with VaultClient(place, greet=False) as fourth:
            assert fourth.is_closed()
        assert counted(running, "closed_connections") == 1
        for client in clients:
            client.close()


def test_a_flood_is_slowed_and_others_are_served(place: Path, store: MemoryStore) -> None:
    slow = VaultServerLimits(rate=100.0, burst=10.0)
    with (
        RunningVault(place, store, LIMITS, slow) as running,
        VaultClient(place) as flooding,
        VaultClient(place) as other,
    ):
        for _ in range(15):
            flooding.send(pack(Message(Kind.DROP, number=1)))
        assert other.ask(Message(Kind.DROP, number=2)).status == Status.UNKNOWN
        assert [flooding.receive()[0].status for _ in range(15)] == [Status.UNKNOWN] * 15
        assert counted(running, "slowed") >= 1


def closes_pending(vault: RunningVault) -> int:
    closers = vault.door.server._closers
    assert closers is not None
    return closers.pending(os.getuid())


@pytest.mark.parametrize("how", ["one_of_many", "queued_behind_garbage", "never_greeted"])
def test_a_close_that_waits_holds_up_nobody_else(vault: RunningVault, how: str) -> None:
    if how == "never_greeted" and kernel_refuses_descriptors():
        with VaultClient(vault.path, greet=False) as early, pytest.raises(PermissionError):
            early.send(b"x", (0,))
        return
    slow, end = lingering()
    with end, VaultClient(vault.path) as other:
        stranger = VaultClient(vault.path, greet=how != "never_greeted")
        put = pack(Message(Kind.PUT, number=1, size=4096))

        def attack() -> None:
            """Run on the loop, which then reads only after all is sent; no other holder is left."""
            if how == "queued_behind_garbage":
                stranger.send(b"x")
            many = {"one_of_many": [0, 0], "never_greeted": [0] * 200}
            stranger.send(put, [*many.get(how, []), slow])
            os.close(slow)

        vault.look(attack)
        assert stranger.is_closed()
        stranger.close()
        # The thread that closes the descriptor blocks; other clients are answered meanwhile.
        assert other.put(7).status == Status.OK
        with VaultClient(vault.path) as third:
            assert third.ask(Message(Kind.DROP, number=1)).status == Status.UNKNOWN
        assert vault.look(lambda: closes_pending(vault)) >= 1
    until(lambda: not closes_pending(vault), "all of the stranger is closed")


def test_all_connections_of_a_user_have_one_budget_and_pieces_count(place: Path, store: MemoryStore) -> None:
    with (
        RunningVault(place, store, LIMITS, VaultServerLimits(rate=0.001, burst=40.0)) as running,
        VaultClient(place) as one,
        VaultClient(place) as two,
    ):

        def left() -> int:
            return running.look(lambda: round(running.door._budgets.left(os.getuid())))

        assert left() == 38
        for number in range(16):
            assert (one, two)[number % 2].put(number).status == Status.OK
        assert left() == 22
        assert one.ask(Message(Kind.KEEP, name="x")).status == Status.OK
        assert left() == 19
        _, fds = two.claim("x")
        os.close(fds[0])
        assert left() == 18


def test_programs_that_cannot_be_looked_at_close_the_door_for_nobody(
    vault: RunningVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, left = threading.Event(), [1, 2, 3]

    def slow(sock: socket.socket, accepted: float) -> VaultPeer:
        peer = identify(sock, accepted)
        if left and left.pop():
            assert go_on.wait(vaulting.DEADLINE_S)
        return peer

    monkeypatch.setattr(vaultserver, "identify", slow)
    monkeypatch.setattr(vaultserver, "IDENTIFY_DEADLINE_S", 0.2)
    stuck = [VaultClient(vault.path, greet=False) for _ in range(3)]
    until(lambda: not left, "all three are looked at")
    monkeypatch.setattr(vaultserver, "IDENTIFY_DEADLINE_S", vaulting.DEADLINE_S)
    with VaultClient(vault.path) as other:
        assert other.put(1).status == Status.OK
    assert all(client.is_closed() for client in stuck) and counted(vault, "closed_not_seen") == 3
    go_on.set()
    for client in stuck:
        client.close()


def test_fuzz(vault: RunningVault) -> None:
    """Valid messages, altered ones and noise, in any order and with any descriptors, do no harm.

    The socket stays open, holds no descriptor that is not memory, and leaks nothing (the fixture checks).
    """
    choose = random.Random(7)
    with VaultClient(vault.path) as steady:
        assert steady.put(1000).status == Status.OK
        for _ in range(300):
            with VaultClient(vault.path, greet=choose.random() < 0.8) as client:
                for _ in range(choose.randrange(1, 6)):
                    try:
                        client.send(*anything(choose))
                    except OSError:
                        break
        assert steady.put(1001).status == Status.OK
    sizes = vault.look(lambda: {h.size for h in vault.vault.ledger.holdings()})
    assert sizes <= {4096}


def anything(choose: random.Random) -> tuple[bytes, list[int]]:
    name = choose.choice(("", "a", "b", "12"))
    kind = choose.choice(list(Kind))
    data = pack(Message(kind, number=choose.randrange(4), size=1 << choose.randrange(64), name=name))
    if choose.random() < 0.3:
        at = choose.randrange(len(data))
        data = data[:at] + choose.randbytes(choose.randrange(8)) + data[at + choose.randrange(8) :]
    fds = [choose.choice(descriptors()) for _ in range(choose.choice((0, 0, 1, 1, 1, 2, 5)))]
    return data, fds


_MADE: list[int] = []


def descriptors() -> list[int]:
    return _MADE


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    left, right = socket.socketpair()
    _MADE[:] = [memory(), memory(), os.open("/dev/null", os.O_RDWR), left.detach(), right.detach()]
    yield
    for fd in _MADE:
        os.close(fd)
