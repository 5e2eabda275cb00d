"""What the sockets have in common at which programs talk in messages of one size (SOCK_SEQPACKET)."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpsd.config import check_socket_path
from mpsd.vault.peer import CREDENTIALS

# Room for as many descriptors as a message can carry (SCM_MAX_FD): what does not fit the kernel would close
# inside our recvmsg, on the loop.
ANCILLARY = socket.CMSG_SPACE(253 * 4) + socket.CMSG_SPACE(CREDENTIALS.size)
_BUDGETS = 1024


class Refused(Exception):
    """Ends a connection; the text is what is counted."""


def listen(where: Path) -> tuple[socket.socket, str]:
    """A socket to which any local user may connect, and its path. Raises ConfigError, OSError."""
    path = check_socket_path(where)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o666)
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock, path


def unpack_ancillary(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[list[int], int | None]:
    """Descriptors, and the pid of the sender, which the kernel adds."""
    fds: list[int] = []
    sender = None
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += struct.unpack(f"{len(payload) // 4}i", payload[: len(payload) // 4 * 4])
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            sender = CREDENTIALS.unpack(payload)[0]
    return fds, sender


@dataclass(slots=True)
class Budget:
    """Messages that a user has left; may be overdrawn by what one message touches."""

    left: float
    filled: float


class Budgets:
    """One for each user, over all connections: `rate` messages a second, `burst` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._of: dict[int, Budget] = {}

    def of(self, uid: int) -> Budget:
        """As it is now. It outlives connections: who comes back has no more than who stayed."""
        now = time.monotonic()
        budget = self._of.get(uid)
        if budget is None:
            if len(self._of) >= _BUDGETS:
                full = [u for u, b in self._of.items() if self._fill(b, now) >= self._burst]
                for user in full:
                    del self._of[user]
            budget = self._of[uid] = Budget(self._burst, now)
        self._fill(budget, now)
        return budget

    def _fill(self, budget: Budget, now: float) -> float:
        budget.left = min(self._burst, budget.left + (now - budget.filled) * self._rate)
        budget.filled = now
        return budget.left
