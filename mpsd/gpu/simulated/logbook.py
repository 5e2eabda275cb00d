"""Log lines of the control and server stand-ins, in the stock shape.

`[YYYY-MM-DD hh:mm:ss.mmm TAG PID] TEXT`. In the foreground (-f) the stock daemon and its servers log to
the daemon's standard output and to nothing else; with -d to control.log and server.log.
"""

from __future__ import annotations

import os
import time


class Logbook:
    """Appends to a descriptor it does not own. A full disk or a dead reader loses the line, nothing else."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()

    def write(self, tag: str, text: str, pid: int | None = None) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        head = f"[{stamp}.{int(now * 1000) % 1000:03d} {tag:>5} {pid or self._pid:5d}]"
        try:
            os.write(self._fd, "".join(f"{head} {line}\n" for line in text.split("\n")).encode())
        except OSError:
            return


def open_log(directory: str, name: str) -> int:
    """Open a log for appending. Raises OSError."""
    path = os.path.join(directory, name)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
