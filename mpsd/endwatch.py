"""The first sign that a process is being ended: it comes before the pidfd says that it has.

An MPS server that is killed has threads in the driver, which takes its channels apart first: on an H200 its
pidfd said so 11 to 18 ms after the signal (faultinject/reports, -moves-programs-last). A thread that
was in no such call ends at once, and its own descriptor says so (PIDFD_THREAD of pidfd_open(2), Linux 6.9;
where the kernel has none, the pidfd's word is the first). The first thread's does not: since Linux 6.15 it
waits for all others, one of which may take its place by an exec.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from mpsd import procs
from mpsd.linux import procfs
from mpsd.model import ProcessInstance

# include/uapi/linux/pidfd.h
PIDFD_THREAD = os.O_EXCL
WATCHED = 4
# A signal is taken by all threads of a process, but not by all at once.
LOOKED_AT = 8
LOOKS = 5
LOOK_S = 0.001


class EndWatch:
    """Of one life of a process, on the running loop. Close it when that life is over."""

    def __init__(self, process: ProcessInstance, ending: Callable[[], None]) -> None:
        """`ending` is called at most once: when the threads of the process leave, or are to."""
        self._process = process
        self._ending = ending
        self._loop = asyncio.get_running_loop()
        self._watched: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._told = False

    def begin(self) -> None:
        """Watch a few of the threads that it has now; again where those of the last time are gone."""
        if self._watched or self._timer is not None or self._told:
            return
        try:
            if procfs.start_ticks(self._process.pid) != self._process.start_ticks:
                return
            threads = procfs.threads(self._process.pid, WATCHED + 1)
        except OSError:
            return
        for tid in threads:
            if tid != self._process.pid:
                self._watch(tid)

    def _watch(self, tid: int) -> None:
        try:
            descriptor = os.pidfd_open(tid, PIDFD_THREAD)
        except OSError:
            return
        self._watched.append(descriptor)
        self._loop.add_reader(descriptor, self._one_ended)

    def _one_ended(self) -> None:
        self._unwatch()
        self._look(LOOKS)

    def _look(self, left: int) -> None:
        self._timer = None
        if procs.is_ending(self._process, LOOKED_AT):
            self._told = True
            self._ending()
        elif left > 1:
            self._timer = self._loop.call_later(LOOK_S, self._look, left - 1)

    def _unwatch(self) -> None:
        for descriptor in self._watched:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._watched.clear()

    def close(self) -> None:
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._told = True
