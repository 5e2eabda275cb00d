"""The two descriptor stores behind one interface, and the choice between them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.base.errors import StoreError
from mpsd.fdstore.fdset import close_all, whole_sets
from mpsd.fdstore.keeperstore import KeeperStore
from mpsd.fdstore.notify import Channel, Notifier
from mpsd.fdstore.store import SystemdStore, open_store
from mpsd.os.samefile import same_file
from tests.support.descriptors import open_descriptors
from tests.support.manager import DEADLINE_S, Manager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with Manager(tmp_path) as running:
        yield running


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run directory. If the test started a keeper, it is ended afterwards."""
    directory = tmp_path / "run"
    directory.mkdir()
    yield directory
    with contextlib.suppress(StoreError):  # There is no keeper, or it is just ending.
        KeeperStore.open(directory, start=False).end()


@pytest.fixture
def files() -> Iterator[list[int]]:
    """Three open files."""
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    yield opened
    for fd in opened:
        os.close(fd)


def test_systemd_store_holds_names_and_forgets_them(manager: Manager, files: list[int]) -> None:
    store = SystemdStore(Channel(manager.address), {}, 64)
    store.put("lease", files[:2])
    assert manager.names() == ["file.1#file", "file.2#file", "lease#set"]
    store.remove("lease")
    store.remove("unknown")
    store.put("other", files[2:])
    assert manager.names() == ["file.3#file", "other#set"]
    store.close()
    store._channel.close()


def test_systemd_store_knows_its_limit_because_the_manager_is_silent(
    manager: Manager, files: list[int]
) -> None:
    store = SystemdStore(Channel(manager.address), {}, 3)
    store.put("lease", files[:2])
    for _ in range(2):
        with pytest.raises(StoreError, match="descriptor store is full"):
            store.put("more", files[2:])
    store.remove("lease")
    store.put("more", files[2:])
    store.close()
    store._channel.close()


def test_systemd_store_reports_a_manager_that_does_not_answer(
    manager: Manager, files: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpsd.fdstore.store.ANSWER_TIMEOUT_S", 0.05)
    manager.answering = False
    store = SystemdStore(Channel(manager.address), {}, 3)
    with pytest.raises(StoreError, match="the service manager does not hold descriptors"):
        store.put("lease", files[:1])
    manager.answering = True
    monkeypatch.undo()
    store.put("lease", files[:1])
    assert manager.names() == ["file.2#file", "lease#set"]
    store.close()
    store._channel.close()


def taken_over(manager: Manager, limit: int = 64) -> SystemdStore:
    """Return the store of the next daemon, over what the manager kept."""
    passed: dict[str, list[int]] = {}
    for name, fd in manager.stored:
        passed.setdefault(name, []).append(os.dup(fd))
    return SystemdStore(Channel(manager.address), passed, limit)


def test_sets_that_share_an_open_file_come_back_whole_and_part_one_by_one(
    manager: Manager, files: list[int]
) -> None:
    before = open_descriptors()
    memory, one, two = files
    again = os.dup(memory)
    store = SystemdStore(Channel(manager.address), {}, 64)
    store.put("space 0", [memory, one])
    store.put("space 1", [again, two])
    store.put("twice", [one, one])
    os.close(again)
    assert len([n for n in manager.names() if n.endswith("#file")]) == 3
    store.close()
    store._channel.close()
    later = taken_over(manager)
    found = later.fetch_all()
    assert sorted(found) == ["space 0", "space 1", "twice"]
    for name, wanted in {"space 0": [memory, one], "space 1": [memory, two], "twice": [one, one]}.items():
        assert all(same_file(a, b) for a, b in zip(found[name], wanted, strict=True))
        for fd in found[name]:
            os.close(fd)
    later.remove("space 0")
    later.remove("twice")
    later._channel.barrier(DEADLINE_S)
    assert sorted(manager.names()) == ["file.1#file", "file.3#file", "space 1#set"]
    later.remove("space 1")
    later._channel.barrier(DEADLINE_S)
    assert not manager.names()
    later.close()
    later._channel.close()
    assert open_descriptors() == before


def test_sets_of_the_first_form_come_back_and_their_labels_can_be_removed(
    manager: Manager, files: list[int]
) -> None:
    before = open_descriptors()
    channel = Channel(manager.address)
    # The memory map that a second address space shares was kept for the first space only.
    labels = ["lease.d1.7.8.0#0/2", "lease.d1.7.8.0#1/2", "lease.d1.7.8.1#1/2"]
    for label, fd in zip(labels, files, strict=True):
        channel.send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={label}", [fd])
    channel.barrier(DEADLINE_S)
    channel.close()
    later = taken_over(manager)
    later._channel.barrier(DEADLINE_S)
    assert sorted(manager.names()) == labels[:2]
    found = later.fetch_all()
    assert list(found) == ["lease.d1.7.8.0"]
    for kept, wanted in zip(found["lease.d1.7.8.0"], files[:2], strict=True):
        assert same_file(kept, wanted)
        os.close(kept)
    later.remove("lease.d1.7.8.0")
    later._channel.barrier(DEADLINE_S)
    assert not manager.names()
    later.close()
    later._channel.close()
    assert open_descriptors() == before


def test_what_a_death_within_put_or_remove_left_is_cleared(manager: Manager, files: list[int]) -> None:
    channel = Channel(manager.address)
    store = SystemdStore(channel, {}, 64)
    store.put("whole", files[:1])
    store.put("half", files[1:2])
    store.close()
    # The file of one set is missing, another file has no set; the socket does not belong to the store.
    channel.send("FDSTOREREMOVE=1\nFDNAME=file.2#file")
    for label, fd in (("file.7#file", files[2]), ("socket", files[1])):
        channel.send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={label}", [fd])
    channel.barrier(DEADLINE_S)
    passed = {name: [os.dup(fd)] for name, fd in manager.stored}
    later = SystemdStore(channel, passed, 64)
    channel.barrier(DEADLINE_S)
    found = later.fetch_all()
    assert list(found) == ["whole"]
    assert sorted(manager.names()) == ["file.1#file", "socket", "whole#set"]
    for fd in (*found["whole"], *passed["socket"]):
        os.close(fd)
    later.close()
    channel.close()


SERVICE = """
import json, os, signal, sys
from mpsd.fdstore.store import open_store
from mpsd.fdstore.notify import Notifier
notifier = Notifier.from_environ(os.environ)
store = open_store("auto", sys.argv[1], 64, os.environ, notifier)
found = {name: [os.read(fd, 100).decode() for fd in fds] for name, fds in store.fetch_all().items()}
if not found:
    for name in ("lease 1", "lease 2"):
        fds = []
        for role in ("va", "mm"):
            reading, writing = os.pipe()
            os.write(writing, f"{name} {role}".encode())
            fds.append(reading)
        store.put(name, fds)
    store.remove("lease 2")
notifier.ready(json.dumps([store.kind, found, sorted(k for k in os.environ if "FDS" in k)]))
signal.pause()
"""


@pytest.mark.parametrize(("tells", "kind"), [(True, "systemd"), (False, "keeper")])
def test_descriptors_survive_kill_9_under_a_manager(
    tmp_path: Path, run_dir: Path, tells: bool, kind: str
) -> None:
    with Manager(tmp_path, tells=tells) as manager:
        command = [sys.executable, "-c", SERVICE, str(run_dir)]
        process = manager.start(command, os.environ)
        assert json.loads(manager.wait_for("READY")["STATUS"]) == [kind, {}, []]
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        manager.start(command, os.environ)
        answer = json.loads(manager.wait_for("READY")["STATUS"])
        assert answer == [kind, {"lease 1": ["lease 1 va", "lease 1 mm"]}, []]


def test_what_a_keeper_holds_moves_to_the_manager(manager: Manager, run_dir: Path, files: list[int]) -> None:
    old = KeeperStore.open(run_dir)
    old.put("lease", files[:2])
    old.close()
    before = open_descriptors()
    notifier = Notifier(Channel(manager.address))
    store = open_store("auto", run_dir, 64, {"FDSTORE": "64"}, notifier)
    assert store.kind == "systemd"
    assert manager.names() == ["file.1#file", "file.2#file", "lease#set"]
    (fds,) = store.fetch_all().values()
    for fd in fds:
        os.close(fd)
    store.close()
    notifier.close()
    assert set(before) <= set(open_descriptors())
    assert not [fd for fd in set(open_descriptors()) - set(before) if fd not in dict(manager.stored).values()]


def open_both(manager: Manager, run_dir: Path, out: Path, limit: int) -> None:
    """Open a store as a service of a manager with six descriptors.

    Write the kind, names and descriptors of what it finds to `out`.
    """
    code = f"""
import json, os
from mpsd.fdstore.store import open_store
from mpsd.fdstore.notify import Notifier
os.environ["FDSTORE"] = "6"
store = open_store("auto", {str(run_dir)!r}, {limit}, os.environ, Notifier.from_environ(os.environ))
opened = len(os.listdir("/proc/self/fd"))
found = store.fetch_all()
opened = len(os.listdir("/proc/self/fd")) - opened
open({str(out)!r}, "w").write(json.dumps([store.kind, sorted(found), opened]))
"""
    process = manager.start([sys.executable, "-W", "ignore::ResourceWarning", "-c", code], os.environ)
    assert process.wait(DEADLINE_S) == 0


def test_what_a_keeper_holds_and_the_manager_has_no_room_for_stays(
    manager: Manager, run_dir: Path, files: list[int]
) -> None:
    """The manager's descriptors move to the keeper: all of them are found, in one place."""
    old = KeeperStore.open(run_dir)
    for number, fd in enumerate(files):
        old.put(f"lease {number}", [fd])
    old.close()
    before = SystemdStore(Channel(manager.address), {}, 64)
    before.put("known", files[:1])
    before.put("lease 1", files[1:2])
    before.close()
    before._channel.close()
    out = run_dir / "out"
    open_both(manager, run_dir, out, limit=6)
    assert json.loads(out.read_text()) == ["keeper", ["known", "lease 0", "lease 1", "lease 2"], 4]
    assert manager.names() == []


def test_what_fits_nowhere_whole_stays_where_it_is_and_is_said(
    manager: Manager, run_dir: Path, files: list[int]
) -> None:
    old = KeeperStore.open(run_dir, limit=4)
    for number, fd in enumerate(files):
        old.put(f"lease {number}", [fd])
    old.close()
    before = SystemdStore(Channel(manager.address), {}, 64)
    for number in range(2):
        before.put(f"known {number}", files[number : number + 1])
    before.close()
    before._channel.close()
    held, out = manager.names(), run_dir / "out"
    open_both(manager, run_dir, out, limit=4)
    assert json.loads(out.read_text()) == ["systemd", ["known 0", "known 1"], 2]
    assert manager.names() == held
    again = KeeperStore.open(run_dir, limit=4, start=False)
    found = again.fetch_all()
    assert sorted(found) == ["lease 0", "lease 1", "lease 2"]
    close_all(found)
    again.close()


def test_what_the_manager_holds_moves_to_a_keeper(manager: Manager, run_dir: Path, files: list[int]) -> None:
    store = SystemdStore(Channel(manager.address), {}, 64)
    store.put("lease", files[:2])
    store.close()
    store._channel.close()
    out = run_dir / "out"
    code = f"""
import os
from mpsd.fdstore.store import open_store
from mpsd.fdstore.notify import Notifier
store = open_store("keeper", {str(run_dir)!r}, 64, os.environ, Notifier.from_environ(os.environ))
open({str(out)!r}, "w").write(store.kind + " " + " ".join(store.fetch_all()))
"""
    process = manager.start([sys.executable, "-W", "ignore::ResourceWarning", "-c", code], os.environ)
    assert process.wait(DEADLINE_S) == 0
    assert out.read_text() == "keeper lease"
    assert manager.names() == []


def test_systemd_wished_for_where_there_is_none(run_dir: Path) -> None:
    with pytest.raises(StoreError, match="there is no service manager"):
        open_store("systemd", run_dir, 64, {}, Notifier(None))


def test_without_a_manager_it_is_a_keeper(run_dir: Path) -> None:
    store = open_store("auto", run_dir, 64, {}, Notifier(None))
    assert store.kind == "keeper"
    store.close()


def test_incomplete_sets_are_closed_and_foreign_descriptors_left_alone() -> None:
    def null() -> int:
        return os.open(os.devnull, os.O_RDONLY)

    before = open_descriptors()
    foreign = null()
    held = {
        "b#1/2": [null()],
        "b#0/2": [null(), null()],
        "half#0/2": [null()],
        "odd#3/1": [null()],
        "listen": [foreign],
    }
    whole, incomplete = whole_sets(held)
    assert sorted(incomplete) == ["half#0/2", "odd#3/1"]
    assert whole == {"b": [held["b#0/2"][0], held["b#1/2"][0]]}
    assert set(open_descriptors()) == {*before, *whole["b"], foreign}
    for fd in (*whole["b"], foreign):
        os.close(fd)
