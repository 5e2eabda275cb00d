"""A client program as a test holds it: told what to do, heard, pinned."""

from __future__ import annotations

import signal
from typing import Self

from faultinject.history import Entry
from faultinject.worker import Worker
from mpsd.linux.pinned import Pinned
from mpsd.model import ProcessInstance
from tests.support.waiting import DEADLINE_S


class Program:
    """One of faultinject.programs. Every wait fails at a deadline."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._pinned: Pinned | None = None

    @property
    def pid(self) -> int:
        return self.worker.pid

    @property
    def pinned(self) -> Pinned:
        if self._pinned is None:
            self._pinned = Pinned.open(self.pid)
        return self._pinned

    @property
    def instance(self) -> ProcessInstance:
        return self.pinned.instance

    def ready(self) -> Self:
        """Wait until it has its context and has run a kernel."""
        said = self.must("ready", "error", "outcome")
        assert said.what == "ready", said
        assert (said.data["pid"], said.data["start_ticks"]) == (self.pid, self.instance.start_ticks)
        return self

    def must(self, *whats: str) -> Entry:
        return self.worker.must(*whats, timeout=DEADLINE_S)

    def go(self) -> None:
        self.worker.tell("go")

    def failure(self) -> int:
        """The CUDA error that it met; 0 when it did its deed and met none."""
        return int(self.must("outcome", "error").data["code"])

    def gone(self) -> int:
        """Wait for its end; the exit status, negative for a signal."""
        return int(self.must("gone").data["status"])

    def kill(self) -> None:
        self.worker.signal(signal.SIGKILL)
        assert self.gone() == -signal.SIGKILL

    def unharmed(self) -> None:
        """End it in order: every result that it computed must have been right, and none missing."""
        self.worker.tell("stop")
        said = self.must("done", "error", "wrong")
        assert said.what == "done", said
        assert said.data["wrong"] == 0
        assert said.data["steps"] > 0
        assert self.gone() == 0

    def close(self) -> None:
        self.worker.end()
        if self._pinned is not None:
            self._pinned.close()
