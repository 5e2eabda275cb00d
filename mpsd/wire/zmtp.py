"""ZMTP 3.x over a stream: greeting, NULL handshake, frames. Bytes in, bytes and frames out.

Written from the specification (rfc.zeromq.org, 23/ZMTP and 37/ZMTP), tested against libzmq. One end is
a DEALER (the client library, which so needs no libzmq), the other a ROUTER; the NULL mechanism is the
same for both. A message of mpsd is exactly one frame: a frame with the "more" flag is refused, because
a message of endlessly many frames has no size limit that a receiver could hold (libzmq's ROUTER
collects all of it).
"""

from __future__ import annotations

import struct
from enum import StrEnum

from .messages import ProtocolError

DEALER = "DEALER"
ROUTER = "ROUTER"
_PEER = {DEALER: ROUTER, ROUTER: DEALER}

_GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = slice(12, 32)
_NULL = b"NULL".ljust(20, b"\0")

_MORE, _LONG, _COMMAND = 1, 2, 4
_MAX_SHORT = 255
# READY holds two properties, PING and ERROR less: a command of more than this is not one of ours.
_MAX_COMMAND = 1024
_MAX_PING_CONTEXT = 16


class Phase(StrEnum):
    GREETING = "greeting"
    HANDSHAKE = "handshake"
    OPEN = "open"
    BROKEN = "broken"


class Connection:
    """One end of one connection.

    Feed what the stream delivers to receive(), send what to_send() gives. After a ProtocolError the
    connection is BROKEN and must be closed.
    """

    def __init__(self, socket_type: str, max_frame_bytes: int) -> None:
        self.phase = Phase.GREETING
        self._type = socket_type
        self._largest = max_frame_bytes
        self._buffer = bytearray()
        # Version 3.1, mechanism NULL, not "as server", 31 bytes of filler.
        self._outgoing = bytearray(_SIGNATURE + b"\x03\x01" + _NULL + bytes(32))

    def to_send(self) -> bytes:
        """Bytes to put on the stream, in order, each of them once."""
        out = bytes(self._outgoing)
        self._outgoing.clear()
        return out

    def send(self, payload: bytes) -> None:
        """Queue one frame. Raises ProtocolError before the handshake is done."""
        if self.phase is not Phase.OPEN:
            raise ProtocolError(f"cannot send: the connection is in phase {self.phase}")
        self._put(0, payload)

    def receive(self, data: bytes) -> list[bytes]:
        """The frames that are complete with these bytes. Raises ProtocolError."""
        if self.phase is Phase.BROKEN:
            raise ProtocolError("the connection is broken")
        self._buffer += data
        frames: list[bytes] = []
        try:
            if self.phase is Phase.GREETING:
                self._greet()
            if self.phase is not Phase.GREETING:
                self._take_frames(frames)
        except ProtocolError:
            self.phase = Phase.BROKEN
            self._buffer.clear()
            raise
        return frames

    def _greet(self) -> None:
        # What is wrong already is refused before the whole greeting is here: a peer that speaks
        # something else might never send as much.
        head = bytes(self._buffer[:11])
        if head[:1] not in (b"", b"\xff") or (len(head) >= 10 and not head[9] & 1):
            raise ProtocolError("the peer does not speak ZMTP", remedy="is this the socket of mpsd?")
        if len(head) == 11 and head[10] < 3:
            raise ProtocolError(f"the peer speaks ZMTP {head[10]}; 3 is needed")
        if len(self._buffer) < _GREETING_BYTES:
            return
        if self._buffer[_MECHANISM] != _NULL:
            raise ProtocolError("the peer wants a security mechanism; mpsd uses the kernel's credentials")
        del self._buffer[:_GREETING_BYTES]
        self._command(b"READY", _property(b"Socket-Type", self._type.encode()) + _property(b"Identity", b""))
        self.phase = Phase.HANDSHAKE

    def _take_frames(self, frames: list[bytes]) -> None:
        used = 0
        while (header := self._header(used)) is not None:
            flags, start, size = header
            if len(self._buffer) < start + size:
                break
            body = bytes(self._buffer[start : start + size])
            used = start + size
            if flags & _COMMAND:
                self._obey(body)
            else:
                frames.append(body)
        del self._buffer[:used]

    def _header(self, at: int) -> tuple[int, int, int] | None:
        """Flags, where the body starts and its size; None while the header is incomplete."""
        if at >= len(self._buffer):
            return None
        flags = self._buffer[at]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ProtocolError(f"a frame with flags {flags:#x}")
        if flags & _MORE:
            raise ProtocolError("a message of several frames; mpsd's messages have one")
        if not flags & _COMMAND and self.phase is not Phase.OPEN:
            raise ProtocolError("a message before the handshake was done")
        length = struct.Struct(">Q" if flags & _LONG else ">B")
        start = at + 1 + length.size
        if len(self._buffer) < start:
            return None
        (size,) = length.unpack_from(self._buffer, at + 1)
        largest = _MAX_COMMAND if flags & _COMMAND else self._largest
        if size > largest:
            raise ProtocolError(f"a frame of {size} bytes; the limit is {largest}")
        return flags, start, size

    def _obey(self, body: bytes) -> None:
        name, content = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        match name, self.phase:
            case b"READY", Phase.HANDSHAKE:
                self._check_ready(_properties(content))
                self.phase = Phase.OPEN
            case b"ERROR", _:
                reason = content[1:].decode("ascii", "replace") or "no reason given"
                raise ProtocolError(f"the peer refused the connection: {reason!a}")
            case b"PING", Phase.OPEN:
                # Two bytes of time to live, then a context that the answer repeats.
                self._command(b"PONG", content[2 : 2 + _MAX_PING_CONTEXT])
            case b"PONG", Phase.OPEN:
                pass
            case _:
                raise ProtocolError(f"unexpected command {name[:20]!a} in phase {self.phase}")

    def _check_ready(self, properties: dict[bytes, bytes]) -> None:
        peer = properties.get(b"socket-type", b"")
        if peer != _PEER[self._type].encode():
            raise ProtocolError(
                f"the peer is a {peer[:20]!a} socket; a {self._type} talks to a {_PEER[self._type]}"
            )

    def _command(self, name: bytes, content: bytes) -> None:
        self._put(_COMMAND, bytes([len(name)]) + name + content)

    def _put(self, flags: int, body: bytes) -> None:
        if len(body) > _MAX_SHORT:
            self._outgoing += struct.pack(">BQ", flags | _LONG, len(body))
        else:
            self._outgoing += struct.pack(">BB", flags, len(body))
        self._outgoing += body


def _property(name: bytes, value: bytes) -> bytes:
    return struct.pack(">B", len(name)) + name + struct.pack(">I", len(value)) + value


def _properties(content: bytes) -> dict[bytes, bytes]:
    """The metadata of READY, names in lower case (they compare without case). Raises ProtocolError."""
    found: dict[bytes, bytes] = {}
    while content:
        name_end = 1 + content[0]
        value_start = name_end + 4
        if len(content) < value_start:
            raise ProtocolError("metadata that ends in the middle")
        (size,) = struct.unpack_from(">I", content, name_end)
        if len(content) < value_start + size:
            raise ProtocolError("metadata that ends in the middle")
        found[content[1:name_end].lower()] = content[value_start : value_start + size]
        content = content[value_start + size :]
    return found
