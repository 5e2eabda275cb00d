"""The stand-in's gate (clients/libcuda/standin/gate.c): the operations allowed in one domain, and its end."""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from tests.support.simnode import Domain

ANY = 2**64 - 1
LAUNCH_FAILED = 719
BEGIN_CAPTURE, END_CAPTURE, CAPTURE_INFO, UNMAP, CURRENT, HOST, INIT = (1 << i for i in range(7))
SYNC, PARAMETERS, KERNEL, NODE, MODULE, LIMIT, WRITE, MANAGER, NO_CUT = (1 << i for i in range(7, 16))
ROOM, NO_ROOM_CUT, COPIED, NO_UNMAP, LAUNCH, NO_LAUNCH, UNLOAD, LAY = (1 << i for i in range(16, 24))


class Gate:
    """A gate; make it before the driver is initialised with this CUDA_MPS_PIPE_DIRECTORY."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        path = folder / "gate"
        path.write_bytes(struct.pack("=QQQQQ", ANY, 0, 0, 0, 0))
        self.folder = folder
        with path.open("r+b") as file:
            self._words = mmap.mmap(file.fileno(), 40)
        self._releases = 0

    def let(self, operations: int) -> None:
        """Allow so many more operations, and then none."""
        self._words[:8] = struct.pack("=Q", operations)

    def left(self) -> int:
        return int(struct.unpack("=Q", self._words[:8])[0])

    def is_done(self) -> bool:
        """Return whether all allowed operations have ended."""
        return self.left() == 0 and self._words[32:] == bytes(8)

    def break_context(self) -> None:
        self._words[8:16] = struct.pack("=Q", LAUNCH_FAILED)

    def keep(self, call: int) -> None:
        """From now on block every thread that makes this call, until `keep(0)`, which releases all."""
        self._releases += call == 0
        self._words[16:24] = struct.pack("=II", call, self._releases)

    def kept(self) -> int:
        """Return the call in which a thread was blocked last."""
        return int(struct.unpack("=Q", self._words[24:32])[0])

    def close(self) -> None:
        self._words.close()


@contextlib.contextmanager
def gate_of(domain: Domain) -> Iterator[Gate]:
    """A gate of the domain; at the end of the context it lets every operation through and blocks no call."""
    made = Gate(Path(domain.environment["CUDA_MPS_PIPE_DIRECTORY"]))
    yield made
    made.let(ANY)
    made.keep(0)
    made.close()
