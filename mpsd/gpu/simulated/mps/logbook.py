"""Log lines of the control and server stand-ins, in the stock format.

`[YYYY-MM-DD hh:mm:ss.mmm TAG PID] TEXT`. In the foreground (-f) the stock daemon and its servers log only to
the daemon's standard output; with -d they log to control.log and server.log.

A line that any process writes into the FIFO `log` of the pipe directory silences the log for good, as in
stock: the line itself never appears, and neither does a later line of the daemon or of a server.
"""

from __future__ import annotations

import os
import time


class Logbook:
    """Append lines to a descriptor that it does not own. A failed write loses only the line."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self.silent = False

    def write(self, tag: str, text: str, pid: int | None = None) -> None:
        if self.silent:
            return
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
