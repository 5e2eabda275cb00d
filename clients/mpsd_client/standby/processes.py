"""Processes of mpsd-standby: start, watch and end a process with all its descendants.

A descendant is recognised by its environment (MPSD_TURN_MARK), its session or its parents. mpsd-standby is a
subreaper (PR_SET_CHILD_SUBREAPER, prctl(2)), so orphans become its children and none escapes. Signals go
through a pidfd, after a comparison of the start time.
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
"""Fields of /proc/PID/stat after the name: ppid, session, starttime (proc(5))."""
_ORPHAN_POLLS = 100
"""Polls of orphans without an environment: during exec the environment is empty, and it may stay empty."""


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process. If that fails, only their mark identifies them."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class ProcessTree:
    """One process of the program and the socket to it. Raises OSError if it cannot be started.

    Its fileno() (a pidfd) becomes readable when the process has ended; then call finish() for its status.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], role: str) -> None:
        self._mark = uuid.uuid4().hex
        self.connection, child_end = socket.socketpair()
        try:
            child_environ = {
                **environ,
                turns.MARK: self._mark,
                turns.VARIABLE: f"{child_end.fileno()} {role}",
            }
            self._child = subprocess.Popen(
                list(command), env=child_environ, pass_fds=(child_end.fileno(),), start_new_session=True
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            child_end.close()
        self.connection.setblocking(False)
        self.pid = self._child.pid
        # The process is not reaped before finish(), so its pid is not reused.
        self._pidfd = os.pidfd_open(self.pid)
        self._since = _row(self.pid)[1][_START]
        self.known: set[tuple[int, int]] = {(self.pid, self._since)}
        """All processes that ever belonged to it, as (pid, start ticks)."""
        self._received = b""
        self.lost_at = self.ended_at = 0.0
        """Monotonic times: its domain's fault or its own earlier end, and its end."""

    def fileno(self) -> int:
        return self._pidfd

    def messages(self) -> list[bytes] | None:
        """Return the messages received since the last call, or None at the end of the connection."""
        try:
            part = self.connection.recv(256)
        except BlockingIOError:
            return []
        except OSError:
            part = b""
        if not part:
            return None
        *lines, self._received = (self._received + part).split(b"\n")
        return [line + b"\n" for line in lines]

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # The process has ended, which the loop learns from the pidfd.
            self.connection.send(message)

    def living(self) -> dict[int, int]:
        """Return the living processes, pid to start ticks. Zombies do not count."""
        rows = dict(_processes())
        found = {pid for pid, row in rows.items() if pid == self.pid or row[_SESSION] == self.pid}
        found |= {pid for pid, start in self.known if pid in rows and rows[pid][_START] == start}
        later = (pid for pid, row in rows.items() if row[_START] >= self._since and pid not in found)
        found |= {pid for pid in later if _has_mark(pid, self._mark)}
        more = found
        while more:
            more = {pid for pid, row in rows.items() if row[_PARENT] in more} - found
            found |= more
        living = {pid: rows[pid][_START] for pid in found if pid in rows}
        self.known |= set(living.items())
        return living

    def is_living(self) -> bool:
        return bool(self.living())

    def signal(self, number: signal.Signals) -> int:
        """Send a signal to all processes and return their number."""
        living = self.living()
        for pid, start in living.items():
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                try:
                    if _stat(pid)[_START] == start:
                        signal.pidfd_send_signal(pidfd, number)
                finally:
                    os.close(pidfd)
        return len(living)

    def kill_group(self) -> None:
        """Kill the process group at once, so that it does nothing more.

        kill() ends the remaining descendants, which needs a scan of all processes."""
        # The pid is not reused before it is reaped.
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self, patience_s: float = 5.0) -> bool:
        """Kill all descendants, including those being started, until none is left. False on a timeout."""
        end, polls_left = time.monotonic() + patience_s, _ORPHAN_POLLS
        while (signalled := self.signal(signal.SIGKILL)) or (polls_left > 0 and self._has_unclear_orphan()):
            polls_left -= not signalled
            self._reap()
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def _has_unclear_orphan(self) -> bool:
        """Return whether an orphan without an environment exists, which may belong to this process."""
        mine, since = os.getpid(), self._since
        orphans = (pid for pid, row in _processes() if row[_PARENT] == mine and row[_START] >= since)
        return any(_environ(pid) == b"" for pid in orphans)

    def _reap(self) -> None:
        """Reap orphans that this process has adopted."""
        # Another thread may add to `known` meanwhile.
        for pid, start in tuple(self.known):
            with contextlib.suppress(OSError):
                state, row = _row(pid)
                mine = state in b"ZX" and row[_START] == start and row[_PARENT] == os.getpid()
                if pid != self.pid and mine:
                    os.waitpid(pid, os.WNOHANG)

    def finish(self) -> int:
        """Return the exit status of the ended process, as waitstatus_to_exitcode does."""
        status = self._child.wait()
        self._reap()
        return status

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self.connection.close()


def _processes() -> Iterator[tuple[int, Sequence[int]]]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            row = _stat_of(int(name))
            if row is not None:
                yield int(name), row


def _row(pid: int) -> tuple[bytes, list[int]]:
    """Return the state letter and the numeric fields after the name. Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    return words[0], [int(word) if word.lstrip(b"-").isdigit() else 0 for word in words]


def _stat(pid: int) -> list[int]:
    """Return the numeric fields. Raises OSError for a missing process or a zombie."""
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
    """Return the environment, or None if the process is missing or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return None
