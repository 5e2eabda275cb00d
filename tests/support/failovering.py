"""A program of the simulated GPU that can fail over: what the proxy does in C, in a few lines of Python.

It has `dev`, its context, among its names, and after a move that is the second one. The standard library
alone. Every wait has a deadline.
"""

from __future__ import annotations

import os
import socket

from mpsd.failover.wire import GIVES, LAYOUT, MODES, TAKES_FENCED, Kind, Message, pack, unpack
from mpsd.gpu.simulated.client import SimulatedDevice
from mpsd.model import Whose

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEADLINE_S = 20.0


class Speaker:
    """One connection to failover.sock."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(path)

    def say(self, kind: Kind, **fields: Any) -> None:
        self.socket.send(pack(Message(kind, **fields)))

    def hear(self) -> Message:
        """Raises EOFError when the connection has been closed."""
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

    @property
    def speaker(self) -> Speaker:
        assert self._speaker is not None
        return self._speaker

    def hello(self, mode: str = "keep", generation: int = 0) -> list[object]:
        """On a connection of its own, again to a daemon that was started anew. It may be told everything."""
        if self._speaker is not None:
            self._speaker.close()
        self._speaker = Speaker(self._path)
        wanted = next(m for m in MODES if m.value == mode)
        knows = (TAKES_FENCED | GIVES,)
        self.speaker.say(Kind.HELLO, mode=wanted, generation=generation, values=knows)
        return self.hear()

    def hear(self) -> list[object]:
        """[kind, generation, mode or path, text]; `values` are those of that."""
        try:
            message = self.speaker.hear()
        except EOFError:
            return ["gone", 0, "", ""]
        name, generation, self.values = message.kind.name, message.generation, message.values
        return [name, generation, message.path or message.mode.value, message.text]

    def prepare(self, ready: bool = True) -> list[object]:
        """Wait for a standby, make a context there, and say so. Standbys that have ended are let go of."""
        heard = self.hear()
        while heard[0] in ("STAND_DOWN", "FENCED"):
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
        """Wait to be told; from then on `dev` is the second context. `whose`: what it has found of who made
        the fault."""
        heard = self.hear()
        assert heard[0] == "MOVE", heard
        self._known["old"], self._known["dev"] = self._known["dev"], self.standby
        self.standby = None
        if whose:
            self.speaker.say(Kind.LOOKED, generation=heard[1], values=(whose,))
        # Who says that it was its own code does nothing before it is told.
        times = (1_000_000, 2_000_000, 3_000_000, *((0, 0, 1) if whose == Whose.OWN else (64, 5)))
        self.speaker.say(Kind.MOVED, generation=heard[1], values=times)
        return heard

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
