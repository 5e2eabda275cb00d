"""A program under mpsd-standby: whether it waits, and when its turn comes.

mpsd-standby gives each process a descriptor and a word about itself (MPSD_TURN, "FD ROLE"). The process says
`ready` there when all is done that can be done before its turn; one that waits is answered `go`, and says
`took` when its memory is its own. One that has its turn says `hears` before, and is told `let-go` when its
domain is lost: it says `left` when nothing of the vault's is mapped in it any more, or `keeps` where that
fails. `left` it may say by itself, at its end. The end of the other side is the end of mpsd-standby.
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
READY, GO, TOOK = b"ready\n", b"go\n", b"took\n"
HEARS, LET_GO, LEFT, KEEPS = b"hears\n", b"let-go\n", b"left\n", b"keeps\n"
LOOK_S, STEP_S = 0.002, 0.02


def until_next_look(waited_s: float) -> float:
    """For the end of a process that is just being killed. Most are gone in milliseconds; but one fault ends
    many programs, and the daemon that all of them ask has their leases to close."""
    return min(max(LOOK_S, waited_s / 5), STEP_S)


class Turn:
    """`waits`: the process waits for its turn. `is_first`: nobody had a turn before."""

    def __init__(self, descriptor: int, role: str) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._socket.set_inheritable(False)
        self.waits = role == "standby"
        self.is_first = role == "first"
        self._listens = False
        self._said = b""

    def say(self, word: bytes) -> None:
        """Nobody may listen any more: who works goes on."""
        try:
            self._socket.sendall(word)
        except OSError:
            if self.waits:
                raise _left() from None

    def wait(self) -> None:
        """Until its turn. Raises NotRunningError when mpsd-standby ends before."""
        said = self._hear()
        if said != GO:
            raise errors.ProtocolError(f"mpsd-standby said {said!r}", remedy="use one version of both")
        self.waits = False

    def listen(self, let_go: Callable[[], bool]) -> bool:
        """From now on, in a thread of its own: let go when mpsd-standby says so, and say whether it was done.
        Whether that begins by this call."""
        if self._listens:
            return False
        try:
            threading.Thread(target=self._obey, args=(let_go,), name="mpsd-turn", daemon=True).start()
        except RuntimeError:
            # No thread is to be had: its end will be waited for.
            return False
        self._listens = True
        self.say(HEARS)
        return True

    def say_left(self) -> None:
        self.say(LEFT)

    def _obey(self, let_go: Callable[[], bool]) -> None:
        with contextlib.suppress(errors.NotRunningError):
            while self._hear() != LET_GO:
                pass
            self.say(LEFT if let_go() else KEEPS)

    def _hear(self) -> bytes:
        while b"\n" not in self._said:
            try:
                part = self._socket.recv(16)
            except OSError:
                part = b""
            if not part:
                raise _left()
            self._said += part
        word, end, self._said = self._said.partition(b"\n")
        return word + end


def _left() -> errors.NotRunningError:
    return errors.NotRunningError("mpsd-standby has ended: nobody will say when it is this one's turn")


_lock = threading.Lock()
_turn: list[Turn | None] = []


def is_followed() -> bool:
    """Whether this process, or what has started it, is under mpsd-standby."""
    return MARK in os.environ


def turn() -> Turn | None:
    """None: not under mpsd-standby. Taken out of the environment: children have no turn of their own."""
    with _lock:
        if not _turn:
            number, _, role = os.environ.pop(VARIABLE, "").partition(" ")
            _turn.append(Turn(int(number), role) if number.isdecimal() and role else None)
        return _turn[0]
