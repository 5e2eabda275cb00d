"""The turn protocol of mpsd-standby, from the program's side.

mpsd-standby passes each process a descriptor and its role (MPSD_TURN, "FD ROLE"). Messages of the process:
  `ready`    it has prepared everything that it can prepare before its turn
  `took`     after `go`: it owns its named buffers
  `hears`    it can release its buffers on request
  `left`     none of its vault memory is mapped any more; also sent unasked at its end
  `keeps`    it could not release its buffers
Messages of mpsd-standby: `go` (the turn of a waiting process begins) and `let-go` (the domain of the working
process faulted: release the buffers). End of file means that mpsd-standby has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from mpsd_client._protocol import errors

VARIABLE = "MPSD_TURN"
MARK = "MPSD_TURN_MARK"
READY, GO, TOOK_OVER = b"ready\n", b"go\n", b"took\n"
CAN_RELEASE, RELEASE, RELEASED, CANNOT_RELEASE = b"hears\n", b"let-go\n", b"left\n", b"keeps\n"
FIRST_POLL_S, LONGEST_POLL_S = 0.002, 0.02


def poll_pause(waited_s: float) -> float:
    """Return the pause [s] before the next poll for the end of a process that has been killed.

    Most processes end within milliseconds. The pause grows because one fault can end many programs, and the
    daemon that all of them poll has their leases to close."""
    return min(max(FIRST_POLL_S, waited_s / 5), LONGEST_POLL_S)


class Turn:
    """One process's connection to mpsd-standby.

    `waits`: the process waits for its turn. `is_first`: no process had a turn before it."""

    def __init__(self, descriptor: int, role: str) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._socket.set_inheritable(False)
        self.waits = role == "standby"
        self.is_first = role == "first"
        self._is_listening = False
        self._received = b""

    def say(self, message: bytes) -> None:
        """Send a message. A closed connection is an error only for a waiting process."""
        try:
            self._socket.sendall(message)
        except OSError:
            if self.waits:
                raise _standby_ended() from None

    def wait(self) -> None:
        """Block until the turn of this process. Raises NotRunningError if mpsd-standby ends first."""
        message = self._receive()
        if message != GO:
            raise errors.ProtocolError(
                f"mpsd-standby sent {message!r} instead of the turn", remedy="use one version of both"
            )
        self.waits = False

    def listen(self, release: Callable[[], bool]) -> bool:
        """Start a thread that calls `release` when mpsd-standby asks for it, and reports the result.

        Return whether this call started the thread."""
        if self._is_listening:
            return False
        try:
            threading.Thread(
                target=self._serve_requests, args=(release,), name="mpsd-turn", daemon=True
            ).start()
        except RuntimeError:
            # Without a thread, mpsd-standby waits for the end of this process instead.
            return False
        self._is_listening = True
        self.say(CAN_RELEASE)
        return True

    def report_released(self) -> None:
        self.say(RELEASED)

    def _serve_requests(self, release: Callable[[], bool]) -> None:
        with contextlib.suppress(errors.NotRunningError):
            while self._receive() != RELEASE:
                pass
            self.say(RELEASED if release() else CANNOT_RELEASE)

    def _receive(self) -> bytes:
        while b"\n" not in self._received:
            try:
                part = self._socket.recv(16)
            except OSError:
                part = b""
            if not part:
                raise _standby_ended()
            self._received += part
        text, end, self._received = self._received.partition(b"\n")
        return text + end


def _standby_ended() -> errors.NotRunningError:
    return errors.NotRunningError(
        "mpsd-standby has ended: the turn of this process will not come", remedy="start the program again"
    )


_lock = threading.Lock()
_turn: list[Turn | None] = []


def is_followed() -> bool:
    """Return whether this process or one of its ancestors runs under mpsd-standby."""
    return MARK in os.environ


def turn() -> Turn | None:
    """Return the turn of this process, or None if it does not run under mpsd-standby.

    Removes the variable from the environment, because child processes have no turn."""
    with _lock:
        if not _turn:
            number, _, role = os.environ.pop(VARIABLE, "").partition(" ")
            _turn.append(Turn(int(number), role) if number.isdecimal() and role else None)
        return _turn[0]
