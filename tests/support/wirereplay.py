"""Recorded bytes sent again to a daemon's sockets, and its answers as plain values.

Independent of mpsd: the layouts below are those of revision 50d9fcb, so a change of the daemon's own encoder
and decoder cannot hide from a test. The standard library alone: clients of the simulated GPU import this
module.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEADLINE_S = 60.0

VAULT_MAGIC, VAULT = 0x746C7661, struct.Struct("=IHHIIQQQII16s32s64s")
VAULT_FIELDS = (
    *("magic", "version", "kind", "sequence", "status", "number", "size", "address", "index", "count"),
    *("gpu", "token", "name"),
)
FAILOVER_MAGIC, FAILOVER = 0x726F6C66, struct.Struct("=IHHIIQ6Q112s128s")
GENERATION_AT, GENERATION = 16, struct.Struct("=Q")
VAULT_ANSWER, LEDGER = 128, 7
GREETING_BYTES = 64


class Packets:
    """A connection to vault.sock or failover.sock."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(path)

    def send(self, data: str, fds: Sequence[int] = ()) -> None:
        """Send one recorded message, given in hexadecimal."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([bytes.fromhex(data)], rights)

    def receive(self) -> tuple[str, list[int]]:
        """Return one message in hexadecimal, empty at the end of the connection, and its descriptors."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, 4096, 4)
        except ConnectionResetError:
            return "", []
        return data.hex(), fds

    def close(self) -> None:
        self.socket.close()


def vault_fields(data: str) -> dict[str, Any]:
    """Return a message of vault.sock by field. Raises struct.error for another size."""
    return dict(zip(VAULT_FIELDS, VAULT.unpack(bytes.fromhex(data)), strict=True))


def failover_fields(data: str) -> dict[str, Any]:
    """Return a message of failover.sock by field. Raises struct.error for another size."""
    magic, version, kind, mode, reserved, generation, *rest = FAILOVER.unpack(bytes.fromhex(data))
    *values, path, text = rest
    return {
        "magic": magic,
        "version": version,
        "kind": kind,
        "mode": mode,
        "reserved": reserved,
        "generation": generation,
        "values": values,
        "path": path.rstrip(b"\0").decode(),
        "text": text.rstrip(b"\0").decode(),
    }


def with_generation(data: str, generation: int) -> str:
    """Return a recorded message of failover.sock for another standby domain."""
    raw = bytearray.fromhex(data)
    GENERATION.pack_into(raw, GENERATION_AT, generation)
    return raw.hex()


class Frames:
    """The frames of one direction of a ZMTP 3.1 connection, from its bytes."""

    def __init__(self) -> None:
        self._data = b""
        self.greeting = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Return flags and body of every frame that is complete now."""
        self._data += data
        if not self.greeting:
            if len(self._data) < GREETING_BYTES:
                return
            self.greeting, self._data = self._data[:GREETING_BYTES], self._data[GREETING_BYTES:]
        while len(self._data) >= 2:
            flags = self._data[0]
            head, size = (9, self._data[1:9]) if flags & 2 else (2, self._data[1:2])
            end = head + int.from_bytes(size, "big")
            if len(self._data) < head or len(self._data) < end:
                return
            yield flags, self._data[head:end]
            self._data = self._data[end:]


def messages(chunks: Sequence[str]) -> list[dict[str, Any]]:
    """Return the JSON messages in recorded bytes of one direction of a connection to mpsd.sock."""
    frames = Frames()
    found = []
    for chunk in chunks:
        found += [json.loads(body) for flags, body in frames.feed(bytes.fromhex(chunk)) if not flags & 4]
    return found


class Stream:
    """A connection to mpsd.sock."""

    def __init__(self, path: str | Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(path))
        self.frames = Frames()
        self.commands: list[bytes] = []
        self._messages: list[dict[str, Any]] = []

    def send(self, data: str) -> None:
        self.socket.sendall(bytes.fromhex(data))

    def command(self) -> bytes:
        """Return the next ZMTP command of the handshake."""
        while not self.commands:
            self._pull()
        return self.commands.pop(0)

    def greeting(self) -> bytes:
        while not self.frames.greeting:
            self._pull()
        return self.frames.greeting

    def message(self) -> dict[str, Any]:
        while not self._messages:
            self._pull()
        return self._messages.pop(0)

    def _pull(self) -> None:
        data = self.socket.recv(1 << 18)
        assert data, "the daemon closed the connection"
        for flags, body in self.frames.feed(data):
            if flags & 4:
                self.commands.append(body)
            else:
                self._messages.append(json.loads(body))

    def close(self) -> None:
        self.socket.close()


def memory(size: int, name: str = "mpsd-standin-vmm") -> int:
    """Return a sealed memory file, as the stand-in driver exports GPU memory."""
    import fcntl
    import os

    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def replay_vault(path: str, rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Send every recorded message of vault.sock again. Return each answer with its number of descriptors.

    A ledger goes with LEDGER, memory of the stated size with every other message that carries a descriptor.
    """
    import os

    from tests.support.guardzones import LedgerWriter

    ledger, packets = LedgerWriter(), Packets(path)
    answers: list[list[Any]] = []
    for row in rows:
        if "sent" not in row:
            continue
        message, fds = vault_fields(row["sent"]), []
        if row.get("descriptors"):
            fds = [os.dup(ledger.fd) if message["kind"] == LEDGER else memory(message["size"])]
        packets.send(row["sent"], fds)
        data, got = packets.receive()
        for fd in (*fds, *got):
            os.close(fd)
        answers.append([data, len(got)])
    packets.close()
    ledger.close()
    return answers
