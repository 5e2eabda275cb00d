"""A test's handle of a client program: commands, messages, a pinned pid."""

from __future__ import annotations

import signal
from typing import Self

from faultinject.registry.history import Entry
from faultinject.rig.worker import Worker
from mpsd.base.model import ProcessInstance
from mpsd.os.pinned import Pinned
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
        """Wait until the program has its context and has run a kernel."""
        said = self.require("ready", "error", "outcome")
        assert said.what == "ready", said
        assert (said.data["pid"], said.data["start_ticks"]) == (self.pid, self.instance.start_ticks)
        return self

    def require(self, *kinds: str) -> Entry:
        return self.worker.require(*kinds, timeout=DEADLINE_S)

    def go(self) -> None:
        self.worker.tell("go")

    def failure(self) -> int:
        """Return the CUDA error that the program met; 0 if its fault caused none."""
        return int(self.require("outcome", "error").data["code"])

    def gone(self) -> int:
        """Wait for the program's end. Return its exit status, negative for a signal."""
        return int(self.require("gone").data["status"])

    def kill(self) -> None:
        self.worker.signal(signal.SIGKILL)
        assert self.gone() == -signal.SIGKILL

    def unharmed(self) -> None:
        """End the program in order: every result that it computed must have been right, and none missing."""
        self.worker.tell("stop")
        said = self.require("done", "error", "wrong")
        assert said.what == "done", said
        assert said.data["wrong"] == 0
        assert said.data["steps"] > 0
        assert self.gone() == 0

    def close(self) -> None:
        self.worker.end()
        if self._pinned is not None:
            self._pinned.close()
