"""The processes of mpsd-standby: started, watched and ended with all that they have started themselves.

A process is known by the mark that it is started with (MPSD_TURN_MARK, in its environment and those of its
children), its session, and its descent: mpsd-standby adopts what is orphaned (PR_SET_CHILD_SUBREAPER,
prctl(2)), so that nothing of it gets away. Signals go by pidfd, to a process that still is what it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence

from mpsd_client import turns

PR_SET_CHILD_SUBREAPER = 36
_PARENT, _SESSION, _START = 1, 3, 19
"""Fields of /proc/PID/stat behind the name: ppid, session, starttime (proc(5))."""
_LOOKS = 100
"""At orphans without an environment: in the midst of exec nobody has one, and who was given none never."""


def adopt_orphans() -> None:
    """Children's orphans become this process's. Without that right or kernel they are init's, and are known
    by their mark alone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Actor:
    """One process and its line to it. Raises OSError where it cannot be started.

    Its fileno() (a pidfd) is readable once it has ended; then `finish` takes its status.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], role: str) -> None:
        self._mark = uuid.uuid4().hex
        self.line, theirs = socket.socketpair()
        try:
            given = {**environ, turns.MARK: self._mark, turns.VARIABLE: f"{theirs.fileno()} {role}"}
            self._child = subprocess.Popen(
                list(command), env=given, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        except BaseException:
            self.line.close()
            raise
        finally:
            theirs.close()
        self.line.setblocking(False)
        self.pid = self._child.pid
        # It is not reaped before `finish`, so the number is its own.
        self._pidfd = os.pidfd_open(self.pid)
        self._since = _row(self.pid)[1][_START]
        self.known: set[tuple[int, int]] = {(self.pid, self._since)}
        """All that ever was of it, as (pid, start ticks)."""
        self._said = b""
        self.lost_at = self.ended_at = 0.0
        """Monotonic: when its domain was lost, or it ended before that, and when it ended."""

    def fileno(self) -> int:
        return self._pidfd

    def lines(self) -> list[bytes] | None:
        """What it has said since; None at the end of its line."""
        try:
            part = self.line.recv(256)
        except BlockingIOError:
            return []
        except OSError:
            part = b""
        if not part:
            return None
        *lines, self._said = (self._said + part).split(b"\n")
        return [line + b"\n" for line in lines]

    def tell(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # It has just ended: that is heard.
            self.line.send(word)

    def members(self) -> dict[int, int]:
        """Those that are there now, pid to start ticks; a zombie is none."""
        rows = dict(_processes())
        found = {pid for pid, row in rows.items() if pid == self.pid or row[_SESSION] == self.pid}
        found |= {pid for pid, start in self.known if pid in rows and rows[pid][_START] == start}
        later = (pid for pid, row in rows.items() if row[_START] >= self._since and pid not in found)
        found |= {pid for pid in later if _has_mark(pid, self._mark)}
        more = found
        while more:
            more = {pid for pid, row in rows.items() if row[_PARENT] in more} - found
            found |= more
        there = {pid: rows[pid][_START] for pid in found if pid in rows}
        self.known |= set(there.items())
        return there

    def is_there(self) -> bool:
        return bool(self.members())

    def signal(self, number: signal.Signals) -> int:
        """Send it to all of them; how many there are."""
        there = self.members()
        for pid, start in there.items():
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                try:
                    if _stat(pid)[_START] == start:
                        signal.pidfd_send_signal(pidfd, number)
                finally:
                    os.close(pidfd)
        return len(there)

    def strike(self) -> None:
        """SIGKILL to it and those in its group, at once: none of them comes to do anything any more. The rest
        is for `kill`, which takes the time of a look at all processes."""
        # Until it is reaped the number is its own.
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self, patience_s: float = 5.0) -> bool:
        """SIGKILL, until nothing of it is there: what was just being started, too. False: something stays."""
        end, looks = time.monotonic() + patience_s, _LOOKS
        while (there := self.signal(signal.SIGKILL)) or (looks > 0 and self._is_unclear()):
            looks -= not there
            self._reap()
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def _is_unclear(self) -> bool:
        """Whether there is an orphan that does not tell whose it is."""
        mine, since = os.getpid(), self._since
        orphans = (pid for pid, row in _processes() if row[_PARENT] == mine and row[_START] >= since)
        return any(_environ(pid) == b"" for pid in orphans)

    def _reap(self) -> None:
        """Orphans that this process has adopted."""
        # Somebody else may find more meanwhile.
        for pid, start in tuple(self.known):
            with contextlib.suppress(OSError):
                state, row = _row(pid)
                mine = state in b"ZX" and row[_START] == start and row[_PARENT] == os.getpid()
                if pid != self.pid and mine:
                    os.waitpid(pid, os.WNOHANG)

    def finish(self) -> int:
        """Its status, once it has ended: as waitstatus_to_exitcode gives it."""
        status = self._child.wait()
        self._reap()
        return status

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self.line.close()


def _processes() -> Iterator[tuple[int, Sequence[int]]]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            row = _stat_of(int(name))
            if row is not None:
                yield int(name), row


def _row(pid: int) -> tuple[bytes, list[int]]:
    """The state, a letter, and the numbers behind the name, from it on. Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    return words[0], [int(word) if word.lstrip(b"-").isdigit() else 0 for word in words]


def _stat(pid: int) -> list[int]:
    """The numbers. Raises OSError for what is not there, or a zombie."""
    state, row = _row(pid)
    if state in b"ZX":
        raise ProcessLookupError(pid)
    return row


def _stat_of(pid: int) -> list[int] | None:
    try:
        return _stat(pid)
    except OSError:
        return None


def _has_mark(pid: int, mark: str) -> bool:
    return f"{turns.MARK}={mark}".encode() in (_environ(pid) or b"").split(b"\0")


def _environ(pid: int) -> bytes | None:
    """None where there is no such process, or another's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return None
