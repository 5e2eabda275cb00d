"""Floods of a local user against mpsd's sockets. Each runs for a time and returns how much it did."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping

from mpsd.wire import messages, zmtp
from mpsd.wire.session import ClientSession

HELD = 600
"""Connections that a flood holds open at a time: more than a door takes from one user."""
PAUSE_S = 0.002
"""Rest after a refusal: the attacker's own processor time is no part of the attack."""
REQUESTS = 512


def _connect(path: str, kind: int) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        return None
    return sock


def _hold(path: str, kind: int, end: float, first: bytes = b"") -> int:
    """Open connections and keep them; the oldest go when there are HELD."""
    held: list[socket.socket] = []
    made = 0
    try:
        while time.monotonic() < end:
            sock = _connect(path, kind)
            if sock is None:
                time.sleep(PAUSE_S)
                continue
            made += 1
            with contextlib.suppress(OSError):
                sock.send(first, socket.MSG_NOSIGNAL)
            held.append(sock)
            if len(held) >= HELD:
                held.pop(0).close()
    finally:
        for sock in held:
            sock.close()
    return made


def connections(path: str, end: float) -> int:
    """Open connections to the control socket without a word."""
    return _hold(path, socket.SOCK_STREAM, end)


def garbage(path: str, end: float) -> int:
    """Send random bytes to the control socket, on a new connection each time."""
    sent = 0
    while time.monotonic() < end:
        sock = _connect(path, socket.SOCK_STREAM)
        if sock is None:
            time.sleep(PAUSE_S)
            continue
        with sock, contextlib.suppress(OSError):
            sock.send(os.urandom(4096), socket.MSG_NOSIGNAL)
            sent += 1
    return sent


def messages_of(path: str, end: float) -> int:
    """Open connections to a socket of messages, each with a message that is none."""
    return _hold(path, socket.SOCK_SEQPACKET, end, b"x" * 64)


def unread(path: str, end: float) -> int:
    """Ask for the state on and on, and read no answer."""
    peers: list[_Asker] = []
    asked = 0
    try:
        while time.monotonic() < end:
            if len(peers) < 16 and (sock := _connect(path, socket.SOCK_STREAM)) is not None:
                peers.append(_Asker(sock))
            before = asked
            asked += sum(peer.ask() for peer in peers)
            if asked == before:
                time.sleep(PAUSE_S)
    finally:
        for peer in peers:
            peer.close()
    return asked


class _Asker:
    """A connection that sends requests and, after the handshake, reads nothing."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._zmtp = zmtp.Connection(zmtp.DEALER, messages.MAX_ANSWER_BYTES)
        self._session = ClientSession()
        self._unsent = b""

    def ask(self) -> int:
        """Send one request if the socket takes it. Returns how many were sent."""
        try:
            if self._zmtp.phase is not zmtp.Phase.OPEN:
                self._zmtp.receive(self._socket.recv(1 << 16))
            asked = 0
            if self._zmtp.phase is zmtp.Phase.OPEN and not self._unsent:
                with contextlib.suppress(messages.ProtocolError):
                    _, frame = self._session.request("status", {}, time.monotonic(), 60.0)
                    self._zmtp.send(frame)
                    asked = 1
            self._unsent += self._zmtp.to_send()
            self._unsent = self._unsent[self._socket.send(self._unsent, socket.MSG_NOSIGNAL) :]
            return asked
        except (OSError, messages.ProtocolError):
            return 0

    def close(self) -> None:
        self._socket.close()


FLOODS: Mapping[str, Callable[[str, float], int]] = {
    "connections": connections,
    "garbage": garbage,
    "messages": messages_of,
    "unread": unread,
}
