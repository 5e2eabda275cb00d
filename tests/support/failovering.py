"""A program of the simulated GPU that can fail over: the proxy's part, in a few lines of Python.

Its name `dev` is its context; after a move, the standby context. It needs the standard library alone. Every
wait has a deadline.
"""

from __future__ import annotations

import os
import socket

from mpsd.base.model import ExceptionOwner
from mpsd.failover.messages import (
    BUDGETS,
    GIVES,
    LAYOUT,
    MODES,
    SWITCHES,
    TAKES_FENCED,
    Kind,
    Message,
    pack,
    unpack,
)
from mpsd.gpu.simulated.client import SimulatedDevice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEADLINE_S = 60.0


class Speaker:
    """One connection to failover.sock."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(path)

    def say(self, kind: Kind, **fields: Any) -> None:
        self.socket.send(pack(Message(kind, **fields)))

    def hear(self) -> Message:
        """Raises EOFError if the connection is closed."""
        try:
            data = self.socket.recv(LAYOUT.size)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        return unpack(data)

    def close(self) -> None:
        self.socket.close()


class FailoverProgram:
    def __init__(self, known: dict[str, Any], path: str) -> None:
        self._known = known
        self._path = path
        self.values: tuple[int, ...] = ()
        self._speaker: Speaker | None = None
        self.standby: SimulatedDevice | None = None
        self.generation = 0
        self.budgets = False
        self.switches = True

    @property
    def speaker(self) -> Speaker:
        assert self._speaker is not None
        return self._speaker

    def hello(self, mode: str = "keep", generation: int = 0) -> list[object]:
        """Say HELLO on a new connection, also to a daemon that was started again.

        The daemon may send any message.
        """
        if self._speaker is not None:
            self._speaker.close()
        self._speaker = Speaker(self._path)
        wanted = next(m for m in MODES if m.value == mode)
        more = BUDGETS * self.budgets | SWITCHES * self.switches
        knows = (TAKES_FENCED | GIVES | more,)
        self.speaker.say(Kind.HELLO, mode=wanted, generation=generation, values=knows)
        return self.hear()

    def hear(self) -> list[object]:
        """Return [kind, generation, mode or path, text] of the next message; `values` are its values."""
        try:
            message = self.speaker.hear()
        except EOFError:
            return ["gone", 0, "", ""]
        name, generation, self.values = message.kind.name, message.generation, message.values
        return [name, generation, message.path or message.mode.value, message.text]

    def prepare(self, ready: bool = True) -> list[object]:
        """Wait for a standby domain, make a context there, and report it.

        Release standby contexts of ended domains.
        """
        heard = self.hear()
        while heard[0] in ("STAND_DOWN", "FENCED", "LIMIT"):
            if heard[0] == "STAND_DOWN":
                self.drop()
            heard = self.hear()
        assert heard[0] == "STANDBY", heard
        generation, path = heard[1], heard[2]
        if self.standby is None or generation != self.generation:
            self.drop()
            self.standby = SimulatedDevice.open({**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(path)})
        assert isinstance(generation, int)
        self.generation = generation
        if ready:
            self.ready()
        return heard

    def ready(self) -> None:
        self.speaker.say(Kind.READY, generation=self.generation, values=(1_000_000, 4096))

    def move(self, whose: int = 0) -> list[object]:
        """Wait for MOVE; from then on `dev` is the standby context.

        `whose`: its finding on the exception's owner.
        """
        heard = self.hear()
        assert heard[0] == "MOVE", heard
        self._known["old"], self._known["dev"] = self._known["dev"], self.standby
        self.standby = None
        if whose:
            self.speaker.say(Kind.LOOKED, generation=heard[1], values=(whose,))
        # A program that reports its own code does nothing before mpsd's answer.
        times = (1_000_000, 2_000_000, 3_000_000, *((0, 0, 1) if whose == ExceptionOwner.OWN else (64, 5)))
        self.speaker.say(Kind.MOVED, generation=heard[1], values=times)
        return heard

    def rescue(self) -> int:
        """Move to the standby context without a daemon; return its generation."""
        self._known["old"], self._known["dev"] = self._known["dev"], self.standby
        self.standby = None
        return self.generation

    def waits(self, generation: int) -> None:
        """Report that this program has moved and waits for its turn."""
        self.speaker.say(Kind.MOVED, generation=generation, values=(1_000_000, 2_000_000, 3_000_000, 0, 0, 1))

    def limit(self) -> int:
        """Wait for LIMIT; return how many bytes the snapshot buffers may take."""
        heard = self.hear()
        while heard[0] != "LIMIT":
            assert heard[0] in ("STANDBY", "STAND_DOWN"), heard
            heard = self.hear()
        return self.values[0]

    def stay(self, why: str) -> list[object]:
        heard = self.hear()
        assert heard[0] == "MOVE", heard
        self.speaker.say(Kind.STAYED, generation=heard[1], text=why)
        return heard

    def say(self, kind: str, **fields: Any) -> None:
        self.speaker.say(Kind[kind], **fields)

    def drop(self) -> None:
        if self.standby is not None:
            self.standby.close()
            self.standby = None
