"""The way to the descriptor store: in order, retried, and never blocking the loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import StoreError
from mpsd.fdstore import keeperstore, queue
from mpsd.fdstore.keeperstore import KeeperStore
from mpsd.fdstore.queue import LeaseStore
from tests.support.conditioning import texts
from tests.support.descriptors import open_descriptors

DEADLINE_S = 10.0


class Store:
    """A scripted store: `failing` names the calls it refuses, `gate` holds it up."""

    kind = "fake"

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failing: set[str] = set()
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)

    def _do(self, what: str) -> None:
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)
        if what in self.failing:
            raise StoreError(f"no {what}")
        self.done.append(what)

    def put(self, name: str, fds: Sequence[int]) -> None:
        for fd in fds:
            os.fstat(fd)
        self._do(f"put {name}")

    def remove(self, name: str) -> None:
        self._do(f"remove {name}")

    def fetch_all(self) -> dict[str, list[int]]:
        return {"old": []}

    def fileno(self) -> int:
        return self.reader

    def revive(self) -> None:
        self._do("revive")
        # The new connection exists before the old one closes, as with a real keeper.
        before, (self.reader, self.writer) = self.reader, os.pipe2(os.O_CLOEXEC)
        os.close(before)

    def die(self) -> None:
        os.close(self.writer)

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "FIRST_PAUSE_S", 0.001)


def with_store(play: Callable[[Store, LeaseStore], Awaitable[None]]) -> None:
    before = open_descriptors()

    async def run() -> None:
        store = Store()
        front = LeaseStore(store)
        async with asyncio.timeout(DEADLINE_S):
            await play(store, front)
            store.gate.set()
            await front.close(DEADLINE_S, end=False)

    asyncio.run(run())
    assert set(open_descriptors()) <= set(before)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_what_fails_is_said_and_tried_again_until_it_succeeds() -> None:
    async def play(store: Store, front: LeaseStore) -> None:
        store.failing = {"put a"}
        held = front.put("a", [0])
        await until(lambda: bool(front.conditions()))
        assert front.conditions() == [Condition(Code.LEASES_NOT_STORED, detail="no put a", count=1)]
        # Other leases do not wait for it.
        await front.put("b", [0])
        store.failing = set()
        await held
        assert store.done == ["put b", "put a"]
        assert not front.conditions()

    with_store(play)


def test_a_name_is_removed_before_it_is_put_again() -> None:
    async def play(store: Store, front: LeaseStore) -> None:
        await front.put("a", [0])
        store.failing = {"remove a"}
        front.drop("a")
        held = front.put("a", [0])
        await until(lambda: bool(front.conditions()))
        assert front.conditions() == [Condition(Code.LEASES_LEFT_STORED, detail="no remove a", count=1)]
        assert not held.done()
        store.failing = set()
        await held
        assert store.done == ["put a", "remove a", "put a"]

    with_store(play)


def test_what_is_dropped_while_it_is_put_is_removed_after_it() -> None:
    async def play(store: Store, front: LeaseStore) -> None:
        store.gate.clear()
        held = front.put("a", [0])
        await until(store.entered.is_set)
        waiting = front.put("b", [0])
        front.drop("a")
        front.drop("b")
        assert held.cancelled() and waiting.cancelled()
        again = front.put("a", [0])
        store.gate.set()
        await again
        assert store.done == ["put a", "remove a", "put a"]

    with_store(play)


def test_what_an_earlier_daemon_stored_can_be_dropped() -> None:
    async def play(store: Store, front: LeaseStore) -> None:
        assert front.fetch_all() == {"old": []}
        front.drop("old")
        front.drop("unknown")
        await until(lambda: store.done == ["remove old"])

    with_store(play)


def test_a_store_that_dies_is_revived_however_often_that_fails_and_watched_again() -> None:
    async def play(store: Store, front: LeaseStore) -> None:
        for life in (1, 2):
            store.failing = {"revive"}
            store.die()
            await until(lambda: front.conditions() == [Condition(Code.STORE_LOST, detail="no revive")])
            store.failing = set()
            await until(lambda: store.done == ["revive"] * life)  # noqa: B023
            await until(lambda: not front.conditions())

    with_store(play)


def test_one_that_never_answers_holds_up_the_end_no_longer_than_the_deadline() -> None:
    async def run() -> None:
        store = Store()
        front = LeaseStore(store)
        store.gate.clear()
        held = front.put("a", [0])
        await until(store.entered.is_set)
        await front.close(0.01, end=False)
        # The store may still use its descriptors: they stay open until the process ends.
        os.fstat(store.reader)
        assert not held.done()
        store.gate.set()
        store.close()

    asyncio.run(run())


def test_a_stopped_keeper_is_not_waited_for_and_gets_everything_in_the_end(tmp_path: Path) -> None:
    async def run() -> None:
        front = LeaseStore(KeeperStore.open(tmp_path, linger_s=0, check_s=0.02))
        (keeper,) = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _is_keeper(p, tmp_path)]
        os.kill(keeper, signal.SIGSTOP)
        held = front.put("a", [0])
        await asyncio.sleep(0)
        assert not held.done()
        os.kill(keeper, signal.SIGCONT)
        async with asyncio.timeout(DEADLINE_S):
            await held
            front.drop("a")
            await front.close(DEADLINE_S, end=True)

    asyncio.run(run())


def test_mpsd_starts_without_a_keeper_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeperstore, "ANSWER_TIMEOUT_S", 0.05)

    async def run() -> None:
        KeeperStore.open(tmp_path, linger_s=60, check_s=0.02).close()
        (keeper,) = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _is_keeper(p, tmp_path)]
        os.kill(keeper, signal.SIGSTOP)
        front = LeaseStore(KeeperStore.open(tmp_path, linger_s=0, check_s=0.02))
        assert front.fetch_all() == {}
        (text,) = texts(front.conditions())
        assert text.startswith("leases end with mpsd: the keeper does not hold descriptors: ")
        held = front.put("a", [0])
        os.kill(keeper, signal.SIGCONT)
        monkeypatch.setattr(keeperstore, "ANSWER_TIMEOUT_S", DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            await held
            while front.conditions():
                await asyncio.sleep(0.01)
            front.drop("a")
            await front.close(DEADLINE_S, end=True)

    asyncio.run(run())


def _is_keeper(proc: Path, directory: Path) -> bool:
    try:
        arguments = (proc / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return os.fsencode(directory) in arguments and b"-S" in arguments


def test_one_users_leases_take_no_more_than_a_share() -> None:
    async def run() -> None:
        store = Store()
        front = LeaseStore(store, share=4)
        async with asyncio.timeout(DEADLINE_S):
            assert front.fetch_all() == {"old": []}
            await front.put("a", [0, 0], 7)
            await front.put("b", [0, 0], 7)
            over, later = front.put("c", [0], 7), front.put("d", [0], 7)
            # Leases of other users, and of no user, are not delayed.
            await front.put("e", [0, 0, 0, 0], 8)
            await front.put("f", [0, 0, 0, 0, 0])
            assert front.conditions() == [Condition(Code.LEASES_OVER_SHARE, detail="4", count=2)]
            assert not over.done()
            front.drop("c")
            front.drop("a")
            await later
            assert not front.conditions()
            assert "put c" not in store.done and "remove c" not in store.done
            # A put that fails uses no share.
            store.failing = {"put g"}
            failed = front.put("g", [0], 7)
            await until(lambda: bool(front.conditions()))
            await front.put("h", [0], 7)
            store.failing = set()
            front.drop("b")
            await failed
            await front.put("i", [0], 7)
            waits = front.put("j", [0] * 4, 7)
            # A lease that waits for its share does not delay the end.
            await front.close(DEADLINE_S, end=False)
            assert waits.cancelled()

    before = open_descriptors()
    asyncio.run(run())
    assert set(open_descriptors()) <= set(before)


def test_what_an_earlier_daemon_stored_counts_once_its_owner_is_known() -> None:
    class Full(Store):
        def fetch_all(self) -> dict[str, list[int]]:
            return {"old": [1, 2], "gone": [3]}

    async def run() -> None:
        front = LeaseStore(Full(), share=2)
        async with asyncio.timeout(DEADLINE_S):
            front.fetch_all()
            for name in ("old", "unknown", "old"):
                front.belongs(name, 7)
            held = front.put("a", [0], 7)
            await until(lambda: bool(front.conditions()))
            front.drop("old")
            await held
            await front.close(DEADLINE_S, end=False)

    asyncio.run(run())


def test_without_a_descriptor_to_watch_the_store_by_leases_are_stored_and_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = queue.fcntl.fcntl
    full = True

    def dup(fd: int, *rest: int) -> int:
        if full and fd == watched:
            raise OSError(24, "Too many open files")
        return real(fd, *rest)

    async def play(store: Store, front: LeaseStore) -> None:
        nonlocal full, watched
        watched = store.reader
        front._watched = -1
        front._watch()
        await front.put("a", [0])
        assert front.conditions() == [Condition(Code.STORE_NOT_WATCHED, detail="Too many open files")]
        full = False
        await until(lambda: not front.conditions())
        store.die()
        await until(lambda: "revive" in store.done)

    watched = -1
    monkeypatch.setattr(queue.fcntl, "fcntl", dup)
    with_store(play)


def test_the_end_of_a_name_is_told_when_the_store_has_let_go() -> None:
    """This holds for a lease that is stored, one that is being stored, and one that never was."""

    async def play(store: Store, front: LeaseStore) -> None:
        loop = asyncio.get_running_loop()
        await front.put("a", [0])
        store.gate.clear()
        store.entered.clear()
        front.put("b", [0])
        await asyncio.to_thread(store.entered.wait, DEADLINE_S)
        gone = {name: loop.create_future() for name in "abc"}
        for name, future in gone.items():
            front.drop(name, future)
        await gone["c"]
        assert not gone["a"].done() and not gone["b"].done()
        store.gate.set()
        await gone["a"]
        await gone["b"]
        assert store.done == ["put a", "put b", "remove a", "remove b"]

    with_store(play)
