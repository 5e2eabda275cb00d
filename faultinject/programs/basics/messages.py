"""JSON lines between a worker program and the rig, dated with the clock that both share.

A program that loses its rig (end of its standard input) ends at once, so that none is orphaned.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

clock = time.monotonic
UNDERWAY_S = 0.1
"""After this long a launched kernel runs, on any machine that the harness knows."""

LOST_RIG = 3
"""Exit status of a program after the end of its rig."""


def say(what: str, **data: Any) -> None:
    """Send one message to the rig, in one write."""
    line = json.dumps({"what": what, "t": clock(), **data}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())


class Inbox:
    """Orders from the rig, read by a thread: {"do": ...} a line."""

    def __init__(self) -> None:
        self._orders: queue.Queue[Mapping[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._orders.put(json.loads(line))
        os._exit(LOST_RIG)

    def wait(self, timeout: float | None = None) -> Mapping[str, Any] | None:
        """Return the next order; None when none came in time."""
        try:
            return self._orders.get(timeout=timeout) if timeout != 0 else self._orders.get_nowait()
        except queue.Empty:
            return None

    def expect(self, name: str) -> Mapping[str, Any]:
        """Wait for this order; a `stop` ends the program."""
        while True:
            order = self.wait()
            if order is not None and order["do"] == name:
                return order
            if order is not None and order["do"] == "stop":
                sys.exit(0)


def start_ticks() -> int:
    """Return field 22 of /proc/self/stat, which identifies this process together with its pid."""
    with open("/proc/self/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])


def identity() -> dict[str, int]:
    return {"pid": os.getpid(), "start_ticks": start_ticks()}


def no_core_dumps() -> None:
    """Disable core dumps: a program that is to crash must not fill a disk."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
