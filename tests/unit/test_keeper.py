"""The keeper: it holds descriptors past its owner's death, serves only its own user, and ends."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mpsd.base.errors import StoreError
from mpsd.fdstore import keeper
from mpsd.fdstore.keeperstore import KeeperStore
from mpsd.fdstore.notify import Channel
from tests.support.descriptors import inheritable, open_descriptors
from tests.support.manager import DEADLINE_S


def keeper_pids(directory: Path) -> list[int]:
    """Return the living keepers of this directory (a zombie has no command line)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if keeper.__file__.encode() in arguments and os.fsencode(directory) in arguments:
                found.append(int(entry.name))
    return found


def wait_until_ended(pid: int) -> None:
    """Wait by pidfd_open(2), which is readable once the process has ended; it need not be a child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ended = poll.poll(DEADLINE_S * 1000)
    os.close(fd)
    assert ended, f"keeper {pid} is still there after {DEADLINE_S} s"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for pid in keeper_pids(tmp_path):
        os.kill(pid, signal.SIGKILL)
        wait_until_ended(pid)


def the_keeper(directory: Path) -> int:
    (pid,) = keeper_pids(directory)
    return pid


def pipe_with(text: bytes) -> int:
    """Return the reading end of a pipe that holds the text and then ends."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.write(writing, text)
    os.close(writing)
    return reading


def contents(fds: list[int]) -> list[bytes]:
    texts = [os.read(fd, 100) for fd in fds]
    for fd in fds:
        os.close(fd)
    return texts


def test_a_set_comes_back_in_order_after_the_store_was_left(directory: Path) -> None:
    before = open_descriptors()
    may_inherit = inheritable()
    store = KeeperStore.open(directory)
    fds = [pipe_with(text) for text in (b"va", b"mm")]
    store.put("lease d1/7@9/0", fds)
    for fd in fds:
        os.close(fd)
    store.close()
    assert open_descriptors() == before

    again = KeeperStore.open(directory)
    sets = again.fetch_all()
    assert inheritable() == may_inherit
    assert list(sets) == ["lease d1/7@9/0"]
    assert contents(sets["lease d1/7@9/0"]) == [b"va", b"mm"]
    pid = the_keeper(directory)
    again.end()
    wait_until_ended(pid)
    assert open_descriptors() == before


OWNER = """
import os, signal, sys
from mpsd.fdstore.keeperstore import KeeperStore
store = KeeperStore.open(sys.argv[1])
reading, writing = os.pipe()
os.write(writing, b"alive")
store.put("lease", [reading])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_descriptors_outlive_kill_9_of_their_owner(directory: Path) -> None:
    done = subprocess.run([sys.executable, "-c", OWNER, str(directory)], timeout=DEADLINE_S, check=False)
    assert done.returncode == -signal.SIGKILL
    store = KeeperStore.open(directory)
    assert contents(store.fetch_all()["lease"]) == [b"alive"]
    store.end()


def test_remove_closes_the_last_copy(directory: Path) -> None:
    store = KeeperStore.open(directory)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    store.put("lease", [writing])
    os.close(writing)
    store.remove("lease")
    poll = select.poll()
    poll.register(reading, select.POLLHUP)
    assert poll.poll(DEADLINE_S * 1000), "the writing end is still open somewhere"
    os.close(reading)
    assert store.fetch_all() == {}
    store.end()


def test_more_than_one_message_of_descriptors(directory: Path) -> None:
    store = KeeperStore.open(directory)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    wanted = {f"set {number}": 1 + number % 3 for number in range(keeper.BATCH)}
    for name, count in wanted.items():
        store.put(name, [null] * count)
    os.close(null)
    sets = store.fetch_all()
    assert {name: len(fds) for name, fds in sets.items()} == wanted
    for fds in sets.values():
        contents(fds)
    store.end()


def test_a_full_keeper_refuses_clearly_and_keeps_the_rest(directory: Path) -> None:
    store = KeeperStore.open(directory, limit=3)
    fds = [pipe_with(text) for text in (b"1", b"2")]
    store.put("first", fds)
    with pytest.raises(StoreError, match=r"refused second: full: 3 of 3 descriptors are held"):
        store.put("second", fds)
    store.put("third", fds[:1])
    assert sorted(store.fetch_all()) == ["first", "third"]
    store.end()


@pytest.mark.parametrize("name", ["", "a:b", "a#0/1", "a\nb", "é", "x" * 300])
def test_names_that_the_protocol_cannot_carry(directory: Path, name: str) -> None:
    store = KeeperStore("unused", 1, linger_s=1, check_s=1)
    with pytest.raises(StoreError, match="cannot store"):
        store.put(name, [0])
    store.close()


def test_a_name_is_stored_once_and_needs_open_descriptors(directory: Path) -> None:
    store = KeeperStore.open(directory)
    store.put("lease", [0])
    with pytest.raises(StoreError, match="stored already"):
        store.put("lease", [0])
    with pytest.raises(StoreError, match="Bad file descriptor"):
        store.put("other", [9999])
    store.end()


def test_one_keeper_for_all_who_come(directory: Path) -> None:
    stores = [KeeperStore.open(directory) for _ in range(3)]
    arguments = [sys.executable, "-I", "-S", keeper.__file__, str(directory), "10", "1", "1"]
    assert subprocess.run(arguments, timeout=DEADLINE_S, check=False).returncode == 0
    pid = the_keeper(directory)
    for store in stores:
        store.close()
    assert the_keeper(directory) == pid


def test_a_dead_keeper_is_noticed_and_replaced_with_nothing_lost(directory: Path) -> None:
    store = KeeperStore.open(directory)
    fds = [pipe_with(text) for text in (b"1", b"2")]
    store.put("lease", fds)
    first = the_keeper(directory)
    os.kill(first, signal.SIGKILL)
    poll = select.poll()
    poll.register(store.fileno(), select.POLLIN)
    assert poll.poll(DEADLINE_S * 1000)
    store.revive()
    assert the_keeper(directory) != first
    store.close()
    again = KeeperStore.open(directory)
    assert contents(again.fetch_all()["lease"]) == [b"1", b"2"]
    again.end()


def test_put_replaces_a_dead_keeper_by_itself(directory: Path) -> None:
    store = KeeperStore.open(directory)
    store.put("first", [0])
    first = the_keeper(directory)
    os.kill(first, signal.SIGKILL)
    wait_until_ended(first)
    store.remove("never stored")
    store.put("second", [0])
    assert sorted(store.fetch_all()) == ["first", "second"]
    store.end()


def test_a_half_stored_set_is_dropped(directory: Path) -> None:
    store = KeeperStore.open(directory)
    channel = Channel(str(directory / keeper.SOCKET))
    channel.send("FDSTORE=1\nFDNAME=lease#0/2", [0])
    channel.send("FDSTORE=1\nFDNAME=whole#0/1", [0])
    assert channel.barrier(DEADLINE_S) == keeper.OK
    assert list(store.fetch_all()) == ["whole"]
    assert list(store.fetch_all()) == ["whole"]
    channel.close()
    store.end()


def test_an_empty_keeper_leaves_when_nobody_comes(directory: Path) -> None:
    store = KeeperStore.open(directory, linger_s=0, check_s=0.02)
    pid = the_keeper(directory)
    store.put("lease", [0])
    store.remove("lease")
    store.close()
    wait_until_ended(pid)
    assert not (directory / keeper.SOCKET).exists()


def test_a_keeper_leaves_with_its_directory(directory: Path) -> None:
    inner = directory / "run"
    inner.mkdir()
    store = KeeperStore.open(inner, check_s=0.02)
    store.put("lease", [0])
    pid = the_keeper(inner)
    (inner / keeper.SOCKET).unlink()
    (inner / keeper.LOCK).unlink()
    inner.rmdir()
    store.close()
    wait_until_ended(pid)


def test_a_lost_socket_is_made_again(directory: Path) -> None:
    store = KeeperStore.open(directory, linger_s=60, check_s=0.02)
    store.put("lease", [0])
    (directory / keeper.SOCKET).unlink()
    store.close()
    deadline = time.monotonic() + DEADLINE_S
    while not (directory / keeper.SOCKET).exists():
        assert time.monotonic() < deadline
        os.sched_yield()
    again = KeeperStore.open(directory)
    assert list(again.fetch_all()) == ["lease"]
    again.end()


def test_where_none_may_be_started_its_absence_is_an_error(directory: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        KeeperStore.open(directory, start=False)
    with pytest.raises(StoreError, match="the keeper did not start"):
        KeeperStore.open(directory / "absent")


def test_the_socket_is_for_its_user_alone(directory: Path) -> None:
    KeeperStore.open(directory).close()
    assert (directory / keeper.SOCKET).stat().st_mode & 0o777 == 0o600
    assert (directory / keeper.LOCK).stat().st_mode & 0o777 == 0o600


STRANGER = """
import os, sys
from mpsd.fdstore.notify import Channel
os.setgid(65534)
os.setuid(65534)
channel = Channel(sys.argv[1])
channel.send("EXIT=1")
channel.send("FDSTORE=1\\nFDNAME=theirs#0/1", [0])
print(channel.barrier(10))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_denied_even_where_the_mode_lets_him_in(directory: Path) -> None:
    store = KeeperStore.open(directory)
    os.chmod(directory / keeper.SOCKET, 0o777)
    # A link outside the 0700 directories that pytest creates: the same socket, reachable by all users.
    reachable = Path("/tmp") / f"mpsd-keeper-test-{os.getpid()}"
    os.link(directory / keeper.SOCKET, reachable)
    try:
        done = subprocess.run(
            [sys.executable, "-c", STRANGER, str(reachable)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    finally:
        reachable.unlink()
    assert done.stdout == "denied: uid 65534 is not that of the keeper\n", done.stderr
    assert store.fetch_all() == {}
    store.end()


def test_nonsense_and_half_a_handover_do_no_harm(directory: Path) -> None:
    store = KeeperStore.open(directory)
    store.put("lease", [0])
    channel = Channel(str(directory / keeper.SOCKET))
    for text in ("", "=", "\n\n", "FDSTORE", "BARRIER=1", "FETCH=1", "HELLO", "\xff\x00", "x" * 6000):
        channel.send(text)
    channel.send("FETCH=1", [0])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.send("FETCH=1", [theirs.fileno()])
    theirs.close()
    ours.close()
    channel.barrier(DEADLINE_S)
    channel.close()
    assert list(store.fetch_all()) == ["lease"]
    store.end()


def test_it_is_small_detached_and_holds_nothing_of_its_starter(directory: Path) -> None:
    secret = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(secret, True)
    store = KeeperStore.open(directory)
    pid = the_keeper(directory)
    os.close(secret)
    assert os.getsid(pid) != os.getsid(0)
    proc = Path(f"/proc/{pid}")
    targets = sorted(os.readlink(fd) for fd in (proc / "fd").iterdir())
    assert sum(target == os.devnull for target in targets) == 3
    assert len(targets) == 6  # the standard descriptors, its socket, its lock, and the other end of ours
    assert (proc / "comm").read_text() == "mpsd-keeper\n"
    assert (proc / "environ").read_bytes().count(b"\0") <= 1
    resident_kb = int((proc / "status").read_text().split("VmRSS:")[1].split()[0])
    assert resident_kb < 16 * 1024
    assert "libcuda" not in (proc / "maps").read_text()
    store.end()


def test_a_keeper_with_few_descriptors_refuses_what_does_not_fit_and_still_answers(directory: Path) -> None:
    arguments = [str(directory), "4096", "60", "10"]
    limited = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (48, 48))
    command = [sys.executable, "-I", "-S", keeper.__file__, *arguments]
    subprocess.run(command, preexec_fn=limited, check=True, timeout=DEADLINE_S)
    store = KeeperStore.open(directory, start=False)
    with open(os.devnull, "rb") as held:
        with pytest.raises(StoreError, match="full: 16 of 16 descriptors are held"):
            for number in range(48):
                store.put(f"lease.{number}", [held.fileno()])
        store.remove("lease.0")
        store.put("lease.new", [held.fileno()])
    store.end()
