"""The socket of the vault: the memory that mpsd holds for each owner, and through which client exits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpsd.base.errors import NotFoundError
from mpsd.core.vault import Limits
from mpsd.os import procfs
from mpsd.peers import vaultpeer as vault_peer
from mpsd.vault.messages import Kind, Message, Status, pack
from tests.support import vaulting
from tests.support.long import only_long
from tests.support.site import OTHER_UID, ROOT, as_user, until
from tests.support.vaultfixtures import LIMITS, alone, counted, held, place, store, vault
from tests.support.vaulting import MemoryStore, RunningVault, VaultClient, memory

__all__ = ["place", "store", "vault"]  # pytest finds fixtures by these names.

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")


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
        # A duplicate was taken: the segment stays until it is released.
        assert held(vault) == [1, 2, 3]
        assert client.ask(Message(Kind.RELEASE, name="model")).status == Status.OK
        assert held(vault) == []
        assert client.ask(Message(Kind.RELEASE, name="model")).status == Status.DENIED


def test_a_piece_alone_is_taken_over_and_survives_its_next_process_too(
    vault: RunningVault, store: MemoryStore
) -> None:
    keep = "client.keep_alone('weights', 7, b'bytes'); print('kept', flush=True); signal.pause()"
    first = program(vault.path, then=keep)
    assert first.stdout is not None and first.stdout.readline() == "kept\n"
    end(first)
    until(lambda: held(vault) == [7], "what was not kept has gone")
    take = "answer, fds = client.take('weights', 9); print(answer.status, os.pread(fds[0], 5, 0), flush=True)"
    second = program(vault.path, then=f"import os; {take}; signal.pause()")
    assert second.stdout is not None and second.stdout.readline() == "0 b'bytes'\n"
    with VaultClient(vault.path) as client:
        assert client.take("weights", 1)[0].status == Status.IN_USE
        assert client.take("nothing", 1)[0].status == Status.DENIED
        assert client.put(3).status == Status.OK
        assert client.ask(Message(Kind.KEEP, name="weights")).status == Status.NAME
        assert client.keep_alone("weights", 4).status == Status.NAME
        end(second)
        # The take may arrive before the loop has seen the client's exit.
        answer, fds = client.take("weights", 5)
        assert (answer.status, answer.size, os.pread(fds[0], 5, 0)) == (Status.OK, 4096, b"bytes")
        os.close(fds[0])
        assert client.ask(Message(Kind.LEAVE, number=3)).status == Status.UNKNOWN
        assert client.ask(Message(Kind.LEAVE, number=5)).status == Status.OK
        assert vault.look(lambda: vault.vault.ledger.next_expiry()) is not None
        assert client.ask(Message(Kind.RELEASE, name="weights")).status == Status.OK
        assert held(vault) == [3]


def test_a_piece_alone_is_answered_for_when_it_outlives_the_daemon(place: Path, store: MemoryStore) -> None:
    with RunningVault(place, store, LIMITS), VaultClient(place) as client:
        answer = client.keep_alone("weights", 7, b"bytes")
        assert (answer.status, answer.count) == (Status.OK, 1)
        assert set(store.held) == {"vault.notes", "vault.1"}
        assert client.keep_alone("moments", 8).count == 1
    with RunningVault(place, store, LIMITS), VaultClient(place) as client:
        # Two names of one process, both still its own: this process lives and holds them.
        answer, fds = client.take("weights", 7)
        assert (answer.status, os.pread(fds[0], 5, 0)) == (Status.OK, b"bytes")
        os.close(fds[0])
        assert client.ask(Message(Kind.RELEASE, name="weights")).status == Status.OK
        assert client.ask(Message(Kind.RELEASE, name="moments")).status == Status.OK


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


def test_a_program_that_replaced_another_begins_anew(vault: RunningVault) -> None:
    """Under the numbers of the replaced program the new one finds nothing, however soon it comes."""
    again = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.vaulting import *
client = VaultClient({str(vault.path)!r})
print(client.put(2, 4096, b"new").status, flush=True)
signal.pause()
"""
    process = program(
        vault.path, then=f"import os; os.execv(sys.executable, [sys.executable, '-c', {again!r}])"
    )
    assert process.stdout is not None and process.stdout.readline() == "0\n"
    assert held(vault) == [2]
    end(process)
    until(lambda: held(vault) == [], "it has ended")


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
    # The child holds the socket, but does not count as a holder of memory.
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
    """The store outlives the daemon. Between two daemons two clients exit, one of which keeps its memory."""
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
        # This process lives and still holds segment 50.
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


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=[only_long, pytest.mark.timeout(300)])])
def test_many_deaths_leave_nothing(place: Path, store: MemoryStore, count: int) -> None:
    with RunningVault(place, store, LIMITS) as running:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ROOT / "tests/support/vaulting.py"), str(place), str(count)]
        subprocess.run(command, check=True, env=environment, timeout=280)
        # Of the kept segments, two per client, the quota lets 8 clients' stay: 16 descriptors.
        left = 2 * min(count // 10, 8)
        until(lambda: len(held(running)) == left, "what is kept")
        until(lambda: len(store.held) == left + 1, "and as much in the store")
        assert counted(running, "taken") == 2 * count


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


def test_who_has_the_pid_of_a_peer_that_has_ended_is_not_taken_for_it(place: Path) -> None:
    """Without the kernel's answer mpsd compares ages: the process is younger than the connection."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(place))
    listener.listen()
    began = procfs.start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    with listener, VaultClient(place, greet=False):
        accepted, _ = listener.accept()
        with accepted:
            vault_peer.pin(accepted, os.getpid(), 9999, accepted=began).close()
            with pytest.raises(NotFoundError):
                vault_peer.pin(accepted, os.getpid(), 9999, accepted=began - 1)


SECRET = b"a secret of thirty-two bytes....."[:32]


def test_what_is_shared_another_process_of_the_owner_opens(vault: RunningVault) -> None:
    """The segment can be opened until its exporter exits, also where the exporter keeps it under a name."""
    share = f"assert client.ask(Message(Kind.SHARE, number=2, token={SECRET!r})).status == 0"
    then = f"{share}; print('shared', flush=True); signal.pause()"
    process = program(vault.path, name="model", then=then)
    assert process.stdout is not None and process.stdout.readline() == "shared\n"
    with VaultClient(vault.path) as client:
        for _ in range(2):
            answer, (fd,) = client.open(SECRET)
            assert (answer.status, answer.size, answer.number, answer.token) == (0, 4096, 0, bytes(32))
            assert os.pread(fd, 6, 0) == b"second"
            os.close(fd)
        assert client.open(b"x" * 32)[0].status == Status.DENIED
        assert client.open(bytes(32))[0].status == Status.DENIED
        end(process)
        ledger = vault.vault.ledger
        until(lambda: vault.look(lambda: all(h.died for h in ledger.holdings())), "its exporter has ended")
        assert client.open(SECRET)[0].status == Status.DENIED
        answer, (fd,) = client.claim("model", 1)
        assert answer.status == Status.OK
        os.close(fd)
    assert counted(vault, "shares") == 1


def test_a_share_ends_with_its_piece(vault: RunningVault) -> None:
    with VaultClient(vault.path) as client:
        client.put(1)
        client.put(2)
        assert client.ask(Message(Kind.SHARE, number=3, token=SECRET)).status == Status.UNKNOWN
        assert client.ask(Message(Kind.SHARE, number=1, token=SECRET)).status == Status.OK
        # The same secret for two segments would make one of them unreachable.
        assert client.ask(Message(Kind.SHARE, number=2, token=SECRET)).status == Status.TWICE
        answer, fds = client.open(SECRET)
        assert answer.status == Status.OK
        os.close(fds[0])
        assert client.ask(Message(Kind.DROP, number=1)).status == Status.OK
        assert client.open(SECRET)[0].status == Status.DENIED
        client.send(pack(Message(Kind.SHARE, number=2)))
        assert client.is_closed()
    assert counted(vault, "closed_token") == 1


@root_only
def test_another_owner_opens_nothing(vault: RunningVault) -> None:
    """The answer is the same as for an unknown secret, however the process learnt the secret."""
    owner = b"t" * 32
    share = f"assert client.ask(Message(Kind.SHARE, number=2, token={SECRET!r})).status == 0"
    then = f"{share}; print('shared', flush=True); signal.pause()"
    process = program(vault.path, token=owner, then=then)
    assert process.stdout is not None and process.stdout.readline() == "shared\n"
    for uid, token in ((OTHER_UID, owner), (os.geteuid(), bytes(32))):
        with as_user(uid):
            stranger = VaultClient(vault.path, token=token)
        with stranger:
            assert stranger.open(SECRET) == stranger.open(b"x" * 32)
            assert stranger.open(SECRET)[0].status == Status.DENIED
        alone_but(vault, process.pid)
    with VaultClient(vault.path, token=owner) as friend:
        answer, fds = friend.open(SECRET)
        assert answer.status == Status.OK
        os.close(fds[0])
    end(process)


def alone_but(vault: RunningVault, pid: int) -> None:
    """Wait until `pid` is the only client: this process may belong to another owner next."""
    until(
        lambda: vault.look(lambda: vault.vault.owner_of(os.getpid()) is None and vault.vault.owner_of(pid)),
        "this process is no client any more",
    )


def test_the_next_daemon_opens_what_was_shared(place: Path, store: MemoryStore) -> None:
    with RunningVault(place, store, LIMITS), VaultClient(place) as client:
        client.put(1, 4096, b"first")
        assert client.ask(Message(Kind.SHARE, number=1, token=SECRET)).status == Status.OK
        until(lambda: len(store.held) == 2, "all is stored")
    with RunningVault(place, store, LIMITS), VaultClient(place) as client:
        answer, (fd,) = client.open(SECRET)
        assert answer.status == Status.OK and os.pread(fd, 5, 0) == b"first"
        os.close(fd)
