"""The daemon's end of failover.sock, played by tests."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.simnode import until

MAGIC, VERSION = 0x726F6C66, 1
HELLO, READY, UNREADY, OPAQUE, OWN_ERROR, MOVED, STAYED, DONE, UNSURE = range(1, 10)
SHORT, GAVE, LOOKED, LEFT, HOLDS, COST, LEAVES, EXPOSED = range(10, 18)
WELCOME, STANDBY, STAND_DOWN, MOVE, TURN, FENCED, GIVE, ROOM, LIMIT, GUARD = range(65, 75)
SWITCH_KNOWN = 2
_LAYOUT = struct.Struct("=IHHIIQ6Q112s128s")
KEEP, EXACT = 1, 2
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Said:
    kind: int
    generation: int
    values: tuple[int, ...]
    text: str


class Line:
    """A connection from one program."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.mode = KEEP
        self.unsure: list[str] = []
        self.held: list[tuple[int, int]] = []
        """Values of HOLDS that no test asked for."""
        sock.settimeout(DEADLINE_S)

    def say(
        self,
        kind: int,
        generation: int = 0,
        path: str = "",
        text: str = "",
        *,
        planned: bool = False,
        again: int = 0,
        unlogged: bool = False,
        may_go_on: bool = False,
        hurries: bool = False,
        lazy: bool = False,
        short: bool = False,
        switch: bool = False,
        look: int = 0,
        left: bool = False,
        budget: int | None = None,
        exposed: bool = False,
        value: int = 0,
        number: int = 0,
    ) -> None:
        """Send a message.

        `planned`, `again`, `unlogged`, `may_go_on`, `hurries`: MOVE; `lazy`, `short`, `switch`, `look`,
        `left`, `budget`, `exposed`: WELCOME; `value`: GIVE, ROOM or LIMIT; `number`: ROOM or LIMIT.
        """
        second = (again or number) + int(short) + SWITCH_KNOWN * int(switch)
        values = (int(planned or lazy or value), second, int(look or unlogged), int(left or may_go_on))
        values += (int(budget is not None) + 2 * exposed + int(hurries), budget or 0)
        words = (path.encode(), text.encode())
        self._sock.send(_LAYOUT.pack(MAGIC, VERSION, kind, self.mode, 0, generation, *values, *words))

    def move(self, generation: int, *, planned: bool = False, again: int = 0) -> Said:
        """Send MOVE. Return the program's answer, MOVED or STAYED; an OWN_ERROR before it is skipped."""
        self.say(MOVE, generation, planned=planned, again=again)
        said = self.hear(MOVED, STAYED, OWN_ERROR)
        while said.kind == OWN_ERROR:
            said = self.hear(MOVED, STAYED, OWN_ERROR)
        return said

    def hear(self, *kinds: int) -> Said:
        """Return the next message, which must be of these kinds.

        UNSURE and HOLDS are kept aside unless requested; COST is dropped.
        """
        said = self._next()
        while said.kind in (UNSURE, HOLDS, COST) and said.kind not in kinds:
            if said.kind == UNSURE:
                self.unsure.append(said.text)
            elif said.kind == HOLDS:
                self.held.append(said.values[:2])
            said = self._next()
        assert said.kind in kinds, said
        return said

    def why_unsure(self) -> str:
        """Return why something cannot be replayed. The message may come before or after the end of a move."""
        return self.unsure.pop(0) if self.unsure else self.hear(UNSURE).text

    def _next(self) -> Said:
        magic, version, kind, _, _, generation, *rest = _LAYOUT.unpack(self._sock.recv(4096))
        assert (magic, version) == (MAGIC, VERSION)
        return Said(kind, generation, tuple(rest[:6]), rest[7].rstrip(b"\0").decode())

    def is_silent(self, seconds: float = 0.0) -> bool:
        """Return whether no message is left to read, or comes within that time, which may be too short."""
        return not select.select([self._sock], [], [], seconds)[0]

    def is_read(self) -> bool:
        """Return whether the program has read all messages."""
        return fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4)) == bytes(4)

    def close(self) -> None:
        self._sock.close()


class Post:
    """A socket that programs find by MPSD_FAILOVER_SOCKET."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(DEADLINE_S)
        self._lines: list[Line] = []

    def accept(self) -> Line:
        line = Line(self._listener.accept()[0])
        self._lines.append(line)
        return line

    def greet(
        self,
        mode: int = KEEP,
        *,
        lazy: bool = False,
        short: bool = False,
        switch: bool = False,
        look: int = 0,
        left: bool = False,
        budget: int | None = None,
        exposed: bool = False,
    ) -> Line:
        """Accept the next program, which has said HELLO, and grant it that mode.

        `short`, `look`, `left`: the program may send SHORT, LOOKED (2: also with NO_SIGN), and LEFT.
        `switch`: LEAVES after GUARD. `budget`: it hears of budgets, with so many thousandths of time; 0 for
        no time budget. `exposed`: it may send EXPOSED.
        """
        line = self.accept()
        line.mode = mode
        line.hear(HELLO)
        line.say(
            WELCOME,
            lazy=lazy,
            short=short,
            switch=switch,
            look=look,
            left=left,
            budget=budget,
            exposed=exposed,
        )
        # Until it has read the answer, the program is in the mode that it requested.
        until(line.is_read)
        return line

    def close(self) -> None:
        for line in self._lines:
            line.close()
        self._listener.close()


@contextlib.contextmanager
def open_post(folder: Path) -> Iterator[Post]:
    post = Post(folder / "failover.sock")
    try:
        yield post
    finally:
        post.close()
