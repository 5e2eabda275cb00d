"""A program under mpsd-standby: whether it waits, and when its turn comes.

mpsd-standby gives each process a descriptor and a word about itself (MPSD_TURN, "FD ROLE"). The process says
`ready` there when all is done that can be done before its turn; one that waits is answered `go`, and says
`took` when its memory is its own. The end of the other side is the end of mpsd-standby.
"""

from __future__ import annotations

import os
import socket
import threading

from mpsd_client._protocol import errors

VARIABLE = "MPSD_TURN"
READY, GO, TOOK = b"ready\n", b"go\n", b"took\n"


class Turn:
    """`waits`: the process waits for its turn. `is_first`: nobody had a turn before."""

    def __init__(self, descriptor: int, role: str) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._socket.set_inheritable(False)
        self.waits = role == "standby"
        self.is_first = role == "first"

    def say(self, word: bytes) -> None:
        """Nobody may listen any more: who works goes on."""
        try:
            self._socket.sendall(word)
        except OSError:
            if self.waits:
                raise _left() from None

    def wait(self) -> None:
        """Until its turn. Raises NotRunningError when mpsd-standby ends before."""
        said = b""
        while not said.endswith(b"\n"):
            try:
                part = self._socket.recv(16)
            except OSError:
                part = b""
            if not part:
                raise _left()
            said += part
        if said != GO:
            raise errors.ProtocolError(f"mpsd-standby said {said!r}", remedy="use one version of both")
        self.waits = False


def _left() -> errors.NotRunningError:
    return errors.NotRunningError("mpsd-standby has ended: nobody will say when it is this one's turn")


_lock = threading.Lock()
_turn: list[Turn | None] = []


def turn() -> Turn | None:
    """None: not under mpsd-standby. Taken out of the environment: children have no turn of their own."""
    with _lock:
        if not _turn:
            number, _, role = os.environ.pop(VARIABLE, "").partition(" ")
            _turn.append(Turn(int(number), role) if number.isdecimal() and role else None)
        return _turn[0]
