"""The door of the vault: what is held of whom, through which ends, and what a hostile peer gets."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.core.vault import Limits, Quota
from mpsd.vault import peer as vault_peer
from mpsd.vault.door import DoorLimits
from mpsd.vault.wire import LAYOUT, Kind, Message, Status, pack
from tests.support import vaulting
from tests.support.descriptors import open_descriptors
from tests.support.site import OTHER_UID, ROOT, as_user, until
from tests.support.vaulting import MemoryStore, RunningVault, VaultClient, memory

LIMITS = Limits(Quota(1 << 30, 64), Quota(1 << 30, 128), Quota(1 << 20, 16), 256, 3600.0)
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where:
        os.chmod(where, 0o755)
        yield Path(where) / "vault.sock"


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """Nothing is open afterwards that was not before, when the store has been emptied."""
    gc.collect()
    before = open_descriptors()
    kept = MemoryStore()
    yield kept
    kept.empty()
    until(lambda: not (open_descriptors().keys() - before.keys()), "no descriptor is left open")


@pytest.fixture
def vault(place: Path, store: MemoryStore) -> Iterator[RunningVault]:
    with RunningVault(place, store, LIMITS) as running:
        yield running


def held(vault: RunningVault) -> list[int]:
    return vault.look(lambda: sorted(h.number for h in vault.vault.ledger.holdings()))


def alone(vault: RunningVault) -> None:
    """Until this process is no client any more: it may be another owner's next."""
    until(lambda: vault.look(lambda: not vault.door._visits), "all connections have ended")


def counted(vault: RunningVault, name: str) -> int:
    return vault.look(lambda: vault.vault.counters[name])


PROGRAM = """
import sys, signal
sys.path.insert(0, {root!r})
from tests.support.vaulting import *
client = VaultClient({path!r}, token={token!r})
client.put(1, 8192, b"first")
client.put(2, 4096, b"second")
if {name!r}:
    assert client.ask(Message(Kind.KEEP, name={name!r})).status == 0
client.put(3, 4096, b"third")
print("there", flush=True)
exec({then!r})
"""


def program(
    place: Path, name: str = "", then: str = "signal.pause()", token: bytes = bytes(32)
) -> subprocess.Popen[str]:
    text = PROGRAM.format(root=str(ROOT), path=str(place), name=name, then=then, token=token)
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


def end(process: subprocess.Popen[str], how: int = signal.SIGKILL) -> None:
    process.send_signal(how)
    process.communicate(timeout=vaulting.DEADLINE_S)


def test_what_is_not_kept_goes_with_its_process(vault: RunningVault, store: MemoryStore) -> None:
    process = program(vault.path)
    assert held(vault) == [1, 2, 3]
    until(lambda: set(store.held) == {"vault.notes", "vault.1", "vault.2", "vault.3"}, "all is stored")
    end(process)
    until(lambda: not store.held and vault.look(vault.vault.ledger.is_empty), "nothing is held")


def test_what_is_kept_is_claimed_by_its_owner_with_every_byte(vault: RunningVault) -> None:
    end(program(vault.path, name="model"))
    with VaultClient(vault.path) as client:
        for index, expected in enumerate((b"first", b"second", b"third")):
            answer, (fd,) = client.claim("model", index)
            assert (answer.status, answer.count, answer.number) == (Status.OK, 3, index + 1)
            assert os.pread(fd, answer.size + 1, 0) == expected.ljust(answer.size, b"\0")
            os.close(fd)
        assert client.claim("model", 3)[0].status == Status.UNKNOWN
        assert client.claim("other")[0].status == Status.DENIED
        # Taken by duplicates: it stays until it is released.
        assert held(vault) == [1, 2, 3]
        assert client.ask(Message(Kind.RELEASE, name="model")).status == Status.OK
        assert held(vault) == []
        assert client.ask(Message(Kind.RELEASE, name="model")).status == Status.DENIED


@root_only
def test_another_owner_is_denied(vault: RunningVault) -> None:
    end(program(vault.path, name="model"))
    secret = b"s" * 32
    end(program(vault.path, name="hidden", token=secret))
    with as_user(OTHER_UID):
        stranger = VaultClient(vault.path)
    with stranger:
        assert stranger.claim("model")[0].status == Status.DENIED
        assert stranger.ask(Message(Kind.RELEASE, name="model")).status == Status.DENIED
    alone(vault)
    with VaultClient(vault.path, token=b"x" * 32) as other_token:
        assert other_token.claim("model")[0].status == Status.DENIED
        assert other_token.claim("hidden")[0].status == Status.DENIED
    alone(vault)
    with as_user(OTHER_UID):
        thief = VaultClient(vault.path, token=secret)
    with thief:
        assert thief.claim("hidden")[0].status == Status.DENIED
    alone(vault)
    with VaultClient(vault.path, token=secret) as owner:
        answer, fds = owner.claim("hidden")
        assert answer.status == Status.OK
        os.close(fds[0])
    assert len(held(vault)) == 6


def test_the_end_of_a_connection_is_not_the_end_of_a_client(vault: RunningVault) -> None:
    process = program(vault.path, then="client.close(); print('closed', flush=True); signal.pause()")
    assert process.stdout is not None and process.stdout.readline() == "closed\n"
    alone(vault)
    assert held(vault) == [1, 2, 3]
    end(process)
    until(lambda: held(vault) == [], "the process has ended")


def test_a_process_that_replaces_its_program_is_no_client_any_more(vault: RunningVault) -> None:
    process = program(vault.path, then="import os; os.execvp('sleep', ['sleep', '1000'])")
    until(lambda: held(vault) == [], "what the old program brought has gone")
    assert process.poll() is None
    end(process)


def test_a_forked_child_is_no_client(vault: RunningVault) -> None:
    then = """
import os, threading
heard, said = os.pipe()
if not os.fork():
    os.close(said)
    client.send(pack(Message(Kind.DROP, number=1)))
    os.read(heard, 1)   # until the parent has ended
    os._exit(0)
signal.pause()"""
    process = program(vault.path, then=then)
    until(lambda: counted(vault, "closed_sender") == 1, "the child's message is refused")
    assert held(vault) == [1, 2, 3]
    end(process)
    # The child holds the socket, and is no reason to hold anything.
    until(lambda: held(vault) == [], "the parent has ended")


def test_a_program_s_drop_ends_when_nothing_is_held(vault: RunningVault, store: MemoryStore) -> None:
    with VaultClient(vault.path) as client:
        client.put(7)
        client.put(8)
        until(lambda: "vault.2" in store.held, "all is stored")
        assert client.put(7).status == Status.TWICE
        assert client.ask(Message(Kind.DROP, number=7, sequence=9)).status == Status.OK
        assert "vault.1" not in store.held and "vault.2" in store.held
        assert client.ask(Message(Kind.DROP, number=7)).status == Status.UNKNOWN
        assert held(vault) == [8]


def test_over_quota_is_said_and_is_no_error(vault: RunningVault) -> None:
    with VaultClient(vault.path) as client:
        said = [client.put(number).status for number in range(1, 66)]
        assert said == [Status.OK] * 64 + [Status.QUOTA]
        assert counted(vault, "refused_client_quota") == 1
        assert client.ask(Message(Kind.DROP, number=1)).status == Status.OK
        assert client.put(99).status == Status.OK


def test_the_next_daemon_finds_all_of_it(place: Path, store: MemoryStore) -> None:
    """The store outlives the daemon; between the two one client dies, and one that has kept its own."""
    with RunningVault(place, store, LIMITS) as first:
        living, dying, keeping = program(place), program(place), program(place, name="model")
        until(lambda: len(store.held) == 10, "all is stored")
        with VaultClient(place) as client:
            client.ask(Message(Kind.KEEP, name="mine"))
        assert len(held(first)) == 9
    end(dying)
    end(keeping)
    with RunningVault(place, store, LIMITS) as second:
        assert sorted(held(second)) == [1, 1, 2, 2, 3, 3]
        with VaultClient(place) as client:
            _, fds = client.claim("model", 1)
            assert os.pread(fds[0], 6, 0) == b"second"
            os.close(fds[0])
            client.put(50)
        end(living)
        # This process lives and holds 50 still.
        until(lambda: sorted(held(second)) == [1, 2, 3, 50], "the other client's have gone")
        until(lambda: len(store.held) == 5, "and from the store")


def test_descriptors_that_nobody_noted_are_freed(place: Path, store: MemoryStore) -> None:
    fd = memory()
    store.put("vault.7", [fd])
    store.put("vault.x", [fd])
    os.close(fd)
    with RunningVault(place, store, LIMITS) as running:
        assert held(running) == []
        until(lambda: not store.held, "the store is empty")


def test_what_is_kept_grows_old(place: Path, store: MemoryStore) -> None:
    limits = Limits(LIMITS.client, LIMITS.user, LIMITS.kept, 256, 0.05)
    with RunningVault(place, store, limits) as running:
        process = program(place, name="model")
        assert held(running) == [1, 2, 3]
        end(process)
        until(lambda: not store.held and held(running) == [], "it was freed by its age")


@pytest.mark.parametrize(
    "count", [100, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_many_deaths_leave_nothing(place: Path, store: MemoryStore, count: int) -> None:
    if count > 100 and os.environ.get("MPSD_TEST_LONG") != "1":
        pytest.skip("minutes; MPSD_TEST_LONG=1 runs it")
    with RunningVault(place, store, LIMITS) as running:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ROOT / "tests/support/vaulting.py"), str(place), str(count)]
        subprocess.run(command, check=True, env=environment, timeout=280)
        # Of the kept ones, two each, the quota lets 8 stay: 16 descriptors.
        left = 2 * min(count // 10, 8)
        until(lambda: len(held(running)) == left, "what is kept")
        until(lambda: len(store.held) == left + 1, "and as much in the store")
        assert counted(running, "taken") == 2 * count


# -- hostile peers ---------------------------------------------------------------------------------------


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


def test_a_process_cannot_change_its_owner(vault: RunningVault) -> None:
    with VaultClient(vault.path) as client:
        client.put(1)
        with VaultClient(vault.path, greet=False) as second:
            second.send(pack(Message(Kind.HELLO, token=b"t" * 32)))
            assert second.is_closed()
        assert counted(vault, "closed_another_owner") == 1
        assert client.ask(Message(Kind.DROP, number=1)).status == Status.OK


def test_those_who_say_nothing_or_do_not_listen_are_closed(place: Path, store: MemoryStore) -> None:
    limits = DoorLimits(connections=3, hello_s=0.05)
    with RunningVault(place, store, LIMITS, limits) as running:
        with VaultClient(place, greet=False) as silent:
            assert silent.is_closed() and counted(running, "closed_silent") == 1
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
        assert counted(running, "slowed") >= 0
        clients = [VaultClient(place) for _ in range(3)]
        with VaultClient(place, greet=False) as fourth:
            assert fourth.is_closed()
        assert counted(running, "closed_connections") == 1
        for client in clients:
            client.close()


def test_a_flood_is_slowed_and_others_are_served(place: Path, store: MemoryStore) -> None:
    slow = DoorLimits(rate=100.0, burst=10.0)
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


def test_fuzz(vault: RunningVault) -> None:
    """Valid messages, bent ones and noise, with any descriptors, in any order: the door stays open, holds
    nothing that is no memory, and leaks nothing (the fixture looks)."""
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


def test_a_peer_is_pinned_where_the_kernel_has_no_option_for_it(place: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(place))
    listener.listen()
    with listener, VaultClient(place, greet=False):
        accepted, _ = listener.accept()
        with accepted:
            pins = [
                vault_peer.pin(accepted, os.getpid(), option) for option in (vault_peer.SO_PEERPIDFD, 9999)
            ]
            assert pins[0].instance == pins[1].instance and all(pin.alive() for pin in pins)
            for pin in pins:
                pin.close()
