"""Whether a user gets to a control socket, as the kernel decides it for that user's rights."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.base.errors import DeadlineError
from mpsd.mps import reachability
from mpsd.mps.reachability import Blocked, Identity, Obstacle, Reachability, check_apart
from mpsd.os import acl

USER, GROUP = 65534, 65533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's rights")


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.fixture
def control(base: Path) -> Iterator[socket.socket]:
    """A control socket as the stock daemon has it, which nobody accepts from."""
    where = base / "d" / "d1"
    where.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(where / "control"))
        (where / "control").chmod(0o666)
        listener.listen(1)
        listener.setblocking(False)
        yield listener


def path_of(control: socket.socket) -> Path:
    return Path(control.getsockname())


def check(path: Path, uid: int | None = USER, groups: tuple[int, ...] = ()) -> Blocked | None:
    async def run() -> Blocked | None:
        reach = Reachability(lambda asked: Identity(asked, 65534, groups))
        try:
            (found,) = await reach.check([(uid, str(path))])
            assert not reach.problem
            return found
        finally:
            reach.close()

    return asyncio.run(run())


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_an_open_socket_is_reached_and_its_daemon_is_not_disturbed(base: Path, kind: int) -> None:
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(str(base / "control"))
        (base / "control").chmod(0o666)
        listener.listen(1)
        listener.setblocking(False)
        for _ in range(3):
            assert check(base / "control") is None
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_missing_or_unserved_socket_is_named(control: socket.socket) -> None:
    path = path_of(control)
    control.close()
    assert check(path) == Blocked(Obstacle.UNSERVED, str(path))
    path.unlink()
    assert check(path) == Blocked(Obstacle.MISSING, str(path))
    path.parent.rmdir()
    assert check(path) == Blocked(Obstacle.MISSING, str(path.parent))


@as_root
@pytest.mark.parametrize("up", [0, 1, 2])
def test_the_part_of_the_path_that_is_closed_is_named(control: socket.socket, up: int) -> None:
    path = path_of(control)
    closed = [path, path.parent, path.parent.parent][up]
    closed.chmod(0o600 if up == 0 else 0o700)
    assert check(path) == Blocked(Obstacle.CLOSED, str(closed))
    assert check(path, uid=0) is None
    assert check_apart(USER, str(path)) == Blocked(Obstacle.CLOSED, str(closed))


@as_root
def test_links_are_followed_and_what_they_lead_to_is_named(control: socket.socket, base: Path) -> None:
    slot = base / "slot"
    slot.symlink_to(path_of(control).parent)
    assert check(slot / "control") is None
    path_of(control).parent.chmod(0o700)
    assert check(slot / "control") == Blocked(Obstacle.CLOSED, str(path_of(control).parent))
    slot.unlink()
    assert check(slot / "control") == Blocked(Obstacle.MISSING, str(slot))
    slot.symlink_to(slot)
    assert check(slot / "control") == Blocked(Obstacle.MISSING, str(slot / "control"))


@as_root
def test_groups_and_access_lists_count(control: socket.socket) -> None:
    directory = path_of(control).parent
    os.chown(directory, 0, GROUP)
    directory.chmod(0o750)
    assert check(path_of(control)) == Blocked(Obstacle.CLOSED, str(directory))
    assert check(path_of(control), groups=(GROUP,)) is None
    # The user of the shared domain has no rights of its own.
    assert check(path_of(control), uid=None, groups=(GROUP,)) is not None
    os.chown(directory, 0, 0)
    acl.only_for(str(directory), USER)
    assert check(path_of(control)) is None
    assert check(path_of(control), uid=GROUP) == Blocked(Obstacle.CLOSED, str(directory))


@as_root
def test_only_the_thread_of_the_check_has_the_rights_of_the_user(control: socket.socket) -> None:
    # Another test of this process may have changed its ids, which clears the flag (prctl(2), 3 and 4).
    reachability._libc.prctl(4, 1, 0, 0, 0)

    async def run() -> None:
        reach = Reachability(Identity)
        path_of(control).parent.chmod(0o700)
        for _ in range(2):
            both = await reach.check([(USER, str(path_of(control))), (0, str(path_of(control)))])
            assert both == [Blocked(Obstacle.CLOSED, str(path_of(control).parent)), None]
        threads = {t.name: t.native_id for t in threading.enumerate()}
        (checking,) = [number for name, number in threads.items() if name.startswith("mpsd-reach")]
        for number in threads.values():
            status = Path(f"/proc/self/task/{number}/status").read_text()
            # Real, effective and saved ids never change: a process of that user cannot signal mpsd.
            ids = [line.split()[1:4] for line in status.splitlines() if line.startswith(("Uid:", "Gid:"))]
            assert ids == [["0"] * 3] * 2
        assert checking is not None
        reach.close()

    asyncio.run(run())
    assert reachability._libc.prctl(3, 0, 0, 0, 0) == 1


def test_a_user_database_that_does_not_answer_costs_only_the_groups(
    control: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "GROUPS_DEADLINE_S", 0.01)
    hangs = threading.Event()

    def look_up(uid: int) -> Identity:
        hangs.wait(20)
        raise DeadlineError("no answer")

    async def run() -> None:
        reach = Reachability(look_up)
        assert await reach.check([(USER, str(path_of(control)))]) == [None]
        # For a while the database is not asked again.
        monkeypatch.setattr(reach, "_look_up", None)
        assert await reach.check([(USER, str(path_of(control)))]) == [None]
        reach.close()

    try:
        asyncio.run(run())
    finally:
        hangs.set()


@as_root
def test_without_the_right_to_take_ids_the_check_goes_on_and_says_so(
    control: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "_CALLS", None)

    async def run() -> None:
        reach = Reachability(Identity)
        assert await reach.check([(USER, str(path_of(control)))]) == [None]
        assert reach.problem.startswith("the system calls of")
        reach.close()

    asyncio.run(run())


def test_a_user_that_the_database_does_not_know_has_no_group() -> None:
    assert reachability.identity_of(3_999_999) == Identity(3_999_999, 65534)
    assert reachability.identity_of(0).gid == 0
