"""Closes that block: closes of one user delay that user alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from mpsd.peers.closing import OF_ONE, THREADS, Closers

DEADLINE_S = 20.0


@pytest.fixture
def closers() -> Iterator[Closers]:
    made = Closers()
    yield made
    made.end()


def test_each_user_waits_for_his_own_closes(closers: Closers, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, closed = threading.Event(), []

    def close(fd: int) -> None:
        if fd < 0:
            assert go_on.wait(DEADLINE_S)
        closed.append(fd)

    monkeypatch.setattr(os, "close", close)
    for uid in range(THREADS - 1):
        closers.close(uid, [-1] * OF_ONE)
        closers.close(uid, [-2])
    done, rest = threading.Event(), threading.Event()
    closers.close(77, [1000], done.set)
    assert done.wait(DEADLINE_S) and closed == [1000]
    assert closers.pending(0) == OF_ONE + 1 and closers.pending(77) == 0
    closers.close(0, [1001], rest.set)
    go_on.set()
    assert rest.wait(DEADLINE_S)
    assert closed.index(1001) > closed.index(-2)


def test_what_cannot_be_closed_ends_no_thread(closers: Closers) -> None:
    done = threading.Event()
    for _ in range(THREADS + 1):
        closers.close(1, [10_000_000])
    reader, writer = os.pipe()
    closers.close(1, [reader, writer], done.set)
    assert done.wait(DEADLINE_S)


def test_the_threads_end_when_all_is_closed() -> None:
    closers, before = Closers(), threading.active_count()
    done = threading.Event()
    closers.close(1, os.pipe(), done.set)
    closers.end()
    assert done.wait(DEADLINE_S)
    assert closers.pending(1) == 0 and before >= THREADS
