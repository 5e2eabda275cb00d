"""Receiving from a peer: data, descriptors, and the process that sent them.

The kernel installs every descriptor of a message before the receiver can count them: up to 253 at once. And a
descriptor for which there is no space is closed inside recvmsg(2), which can wait. So each message is first
looked at with MSG_PEEK. A message with too many descriptors is never received: it ends its connection, and a
thread closes what lies in it (mpsd.peers.closing).
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpsd.peers.credentials import UCRED, Credentials
from mpsd.peers.quotas import Account

_SENDER = socket.CMSG_SPACE(UCRED.size)
_BUDGETS = 2048
_SEVERAL_S = 1.0
# Linux 6.16 (asm-generic/socket.h), which Python does not name.
SO_PASSRIGHTS = 83


class Refused(Exception):
    """Ends a connection. The text is the counted reason."""


@dataclass(frozen=True, slots=True)
class Received:
    """`sender`: the process that sent the data; its uid is the real one. `fds`: the caller closes them."""

    data: bytes
    fds: list[int]
    sender: Credentials | None


def receive(sock: socket.socket, size: int, descriptors: int = 0) -> Received:
    """Return one message, or the next bytes of a stream that one process sent; no data: the end.

    `descriptors`: how many may come along. Raises Refused, BlockingIOError, OSError.
    """
    # CMSG_LEN, not CMSG_SPACE: the padding of the latter has room for one more descriptor.
    space = _SENDER + (socket.CMSG_LEN(4 * descriptors) if descriptors else 0)
    looked, fds, _ = _receive(sock, size, space, socket.MSG_PEEK)
    for fd in fds:
        os.close(fd)  # A duplicate: the message still holds the descriptor, so this close cannot wait.
    if not looked:
        return Received(b"", [], None)
    data, fds, sender = _receive(sock, len(looked), space, 0)
    return Received(data, fds, sender)


def holds_nothing(sock: socket.socket) -> bool:
    """Return whether no descriptor can lie unread in a connection that was shut down."""
    try:
        if sock.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) == 0:
            return True
    except OSError:
        pass  # An older kernel.
    try:
        # The kernel adds the sender to an empty message, and not to the end of a connection.
        data, ancillary, _, _ = sock.recvmsg(1, _SENDER, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    return not data and (sock.type == socket.SOCK_STREAM or not ancillary)


def _receive(
    sock: socket.socket, size: int, space: int, flags: int
) -> tuple[bytes, list[int], Credentials | None]:
    data, ancillary, found, _ = sock.recvmsg(size, space, flags | socket.MSG_CMSG_CLOEXEC)
    fds, sender = _unpack(ancillary)
    if found & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise Refused("descriptors")
    return data, fds, sender


def _unpack(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[list[int], Credentials | None]:
    fds: list[int] = []
    sender = None
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += struct.unpack(f"{len(payload) // 4}i", payload[: len(payload) // 4 * 4])
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid, uid, gid = UCRED.unpack(payload)
            sender = Credentials(uid, gid, pid)
    return fds, sender


@dataclass(slots=True)
class _Budget:
    """Messages that a user or an account may still send. `latest`: the account of a user that asked last;
    `changed`: when that was another one than before."""

    remaining: float
    filled: float
    latest: Account | None = None
    changed: float = -math.inf


class Budgets:
    """One budget per user over all connections: `rate` messages per second, `burst` at once.

    While several accounts of a user send, each has half of that. Thus one container leaves the other
    containers of its user as much.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._of: dict[int | Account, _Budget] = {}

    def allows(self, account: Account) -> bool:
        """Return whether to read a message of this account now."""
        owner = self._budget(account.owner)
        if owner.latest != account:
            if owner.latest is not None:
                owner.changed = owner.filled
            owner.latest = account
        several = owner.filled - owner.changed < _SEVERAL_S
        return owner.remaining >= 1 and (not several or self._budget(account).remaining >= 1)

    def charge(self, account: Account, messages: float = 1.0) -> None:
        """Take messages from a user's budget. One expensive message may overdraw it."""
        self._budget(account.owner).remaining -= messages
        own = self._budget(account)
        own.remaining = max(0.0, own.remaining - messages)

    def left(self, owner: int) -> float:
        return self._budget(owner).remaining

    def _budget(self, key: int | Account) -> _Budget:
        """Return the present budget. It outlives connections, so a reconnect gains nothing."""
        now = self._clock()
        budget = self._of.get(key)
        if budget is None:
            if len(self._of) >= _BUDGETS:
                for known in [k for k, b in self._of.items() if self._fill(k, b, now)]:
                    del self._of[known]
            budget = self._of[key] = _Budget(math.inf, now)
        self._fill(key, budget, now)
        return budget

    def _fill(self, key: int | Account, budget: _Budget, now: float) -> bool:
        """Add what the time since has brought; return whether the budget is full."""
        part = 0.5 if isinstance(key, Account) else 1.0
        gained = (now - budget.filled) * self._rate * part
        budget.remaining = min(self._burst * part, budget.remaining + gained)
        budget.filled = now
        return budget.remaining >= self._burst * part
