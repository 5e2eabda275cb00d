"""A process that is being ended is told of before its pidfd tells, and one that goes on is not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mpsd import procs
from mpsd.endwatch import LOOKS, EndWatch
from mpsd.linux import procfs
from mpsd.model import ProcessInstance

DEADLINE_S = 20.0
EXITING = 0x4

# For each line that it is given one thread ends, the oldest first, and it says that it has.
PROGRAM = """
import sys, threading
ends = [threading.Event() for _ in range(int(sys.argv[1]))]
threads = [threading.Thread(target=end.wait, daemon=True) for end in ends]
for thread in threads:
    thread.start()
print("ready", flush=True)
for end, thread in zip(ends, threads):
    sys.stdin.readline()
    end.set()
    thread.join()
    print("ended", flush=True)
sys.stdin.readline()
"""


class Threads:
    """A process with so many threads besides its first."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-c", PROGRAM, str(count)]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.child.stdout is not None and self.child.stdin is not None
        self._heard, self._told = self.child.stdout, self.child.stdin
        assert self._heard.readline() == "ready\n"
        self.instance = procs.facts(self.child.pid).instance

    def end_one(self) -> None:
        before = len(procfs.threads(self.child.pid, 100))
        print(file=self._told, flush=True)
        assert self._heard.readline() == "ended\n"
        # join() returns while the thread is leaving.
        while len(procfs.threads(self.child.pid, 100)) == before:
            os.sched_yield()

    def kill(self) -> None:
        self.child.kill()

    def close(self) -> None:
        with self.child:
            self.child.kill()


@pytest.fixture
def started() -> Iterator[Callable[[int], Threads]]:
    made: list[Threads] = []

    def start(count: int) -> Threads:
        made.append(Threads(count))
        return made[-1]

    yield start
    for each in made:
        each.close()


def run(work: Callable[[], Any]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
    assert set(os.listdir("/proc/self/fd")) == before


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_one_that_is_killed_is_told_of_once(started: Callable[[int], Threads]) -> None:
    process, told = started(3), list[int]()

    async def work() -> None:
        watch = EndWatch(process.instance, lambda: told.append(1))
        watch.begin()
        assert not told and len(watch._watched) == 3
        process.kill()
        await until(lambda: told)
        watch.begin()
        assert told == [1] and not watch._watched
        watch.close()

    run(work)


def test_a_thread_that_ends_alone_is_no_sign(started: Callable[[int], Threads]) -> None:
    """And who begins again watches others."""
    process, told = started(3), list[int]()

    async def work() -> None:
        watch = EndWatch(process.instance, lambda: told.append(1))
        watch.begin()
        process.end_one()
        await until(lambda: not watch._watched)
        await until(lambda: watch._timer is None)
        assert not told
        watch.begin()
        watch.begin()
        assert len(watch._watched) == 2
        process.kill()
        await until(lambda: told)
        watch.close()

    run(work)


def test_who_has_one_thread_has_nothing_to_be_watched(started: Callable[[int], Threads]) -> None:
    alone = started(0)

    async def work() -> None:
        watch = EndWatch(alone.instance, lambda: None)
        watch.begin()
        assert not watch._watched
        watch.close()

    run(work)


def test_another_life_of_the_pid_is_not_watched(started: Callable[[int], Threads]) -> None:
    process = started(2)

    async def work() -> None:
        watch = EndWatch(ProcessInstance(process.instance.pid, 1), lambda: None)
        watch.begin()
        assert not watch._watched

    run(work)


def test_where_the_kernel_has_no_descriptors_of_threads_nothing_is_told(
    started: Callable[[int], Threads], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started(2)

    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(22, os.strerror(22))

    monkeypatch.setattr(os, "pidfd_open", refuse)

    async def work() -> None:
        watch = EndWatch(process.instance, lambda: None)
        watch.begin()
        assert not watch._watched
        watch.close()

    run(work)


@pytest.mark.parametrize("yes_after", [1, LOOKS, None])
def test_a_signal_that_not_all_threads_have_taken_yet_is_looked_for_again(
    started: Callable[[int], Threads], monkeypatch: pytest.MonkeyPatch, yes_after: int | None
) -> None:
    process, told, looks = started(1), list[int](), list[int]()

    def is_ending(instance: ProcessInstance, threads: int) -> bool:
        looks.append(threads)
        return len(looks) == yes_after

    monkeypatch.setattr(procs, "is_ending", is_ending)

    async def work() -> None:
        watch = EndWatch(process.instance, lambda: told.append(1))
        watch.begin()
        process.end_one()
        await until(lambda: looks and watch._timer is None)
        watch.close()

    run(work)
    assert len(looks) == (yes_after or LOOKS) and len(told) == (yes_after is not None)


def test_nothing_is_told_once_it_is_closed(
    started: Callable[[int], Threads], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, told = started(1), list[int]()
    monkeypatch.setattr(procs, "is_ending", lambda *_: False)

    async def work() -> None:
        watch = EndWatch(process.instance, lambda: told.append(1))
        watch.begin()
        process.end_one()
        await until(lambda: watch._timer is not None)
        timer = watch._timer
        watch.close()
        assert timer is not None and timer.cancelled() and not told

    run(work)


KILLED = {"SigPnd": f"{1 << (signal.SIGKILL - 1):016x}"}
OTHER = {"SigPnd": f"{1 << (signal.SIGTERM - 1):016x}"}
GOES_ON = ("S", 0, OTHER)


@pytest.mark.parametrize(
    ("threads", "ending"),
    [
        ([("S", EXITING, {}), ("D", EXITING, {})], True),
        ([("Z", 0, {}), ("D", 0, KILLED)], True),
        ([("Z", 0, {}), None], True),
        ([("Z", 0, {}), GOES_ON], False),
        ([GOES_ON, ("D", EXITING, {})], False),
    ],
)
def test_a_process_is_ending_when_each_of_its_threads_is(
    monkeypatch: pytest.MonkeyPatch, threads: list[tuple[str, int, dict[str, str]] | None], ending: bool
) -> None:
    """Its first thread may be in the driver for long, or have ended by itself."""

    def of(tid: int) -> tuple[str, int, dict[str, str]]:
        found = threads[tid - 100]
        if found is None:
            raise ProcessLookupError
        return found

    monkeypatch.setattr(procfs, "start_ticks", lambda pid: 7)
    monkeypatch.setattr(procfs, "threads", lambda pid, limit: [100, 101][:limit])
    monkeypatch.setattr(procfs, "stat", lambda tid: SimpleNamespace(state=of(tid)[0], flags=of(tid)[1]))
    monkeypatch.setattr(procfs, "status_fields", lambda tid: of(tid)[2])
    process = ProcessInstance(100, 7)
    assert procs.is_ending(process, 8) is ending
    assert procs.is_ending(process) is (threads[0] != GOES_ON)
    assert procs.is_ending(ProcessInstance(100, 8), 8)
