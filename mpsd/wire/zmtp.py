"""ZMTP 3.x over a stream: greeting, NULL handshake, frames. Bytes in, bytes and frames out.

Written from the specification (rfc.zeromq.org, 23/ZMTP and 37/ZMTP), tested against libzmq. One end is
a DEALER (the client library, which therefore needs no libzmq), the other a ROUTER. Both use the NULL
mechanism. A message of mpsd has exactly one frame. A frame with the "more" flag is refused: a receiver
would have to buffer any number of frames (libzmq's ROUTER does).
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
# READY has two properties, PING and ERROR fewer, so no command of mpsd exceeds this.
_MAX_COMMAND = 1024
_MAX_PING_CONTEXT = 16


class Phase(StrEnum):
    GREETING = "greeting"
    HANDSHAKE = "handshake"
    OPEN = "open"
    BROKEN = "broken"


class Connection:
    """One end of one connection.

    The caller passes received bytes to receive() and sends the bytes of to_send(). After a ProtocolError
    the connection is BROKEN and must be closed.
    """

    def __init__(self, socket_type: str, max_frame_bytes: int) -> None:
        self.phase = Phase.GREETING
        self._type = socket_type
        self._largest = max_frame_bytes
        self._buffer = bytearray()
        # Version 3.1, mechanism NULL, not "as server", 31 bytes of filler.
        self._outgoing = bytearray(_SIGNATURE + b"\x03\x01" + _NULL + bytes(32))

    def to_send(self) -> bytes:
        """Return and clear the bytes to send, in order."""
        out = bytes(self._outgoing)
        self._outgoing.clear()
        return out

    def send(self, payload: bytes) -> None:
        """Queue one frame. Raise ProtocolError before the handshake is done."""
        if self.phase is not Phase.OPEN:
            raise ProtocolError(f"cannot send: the connection is in phase {self.phase}")
        self._put(0, payload)

    def receive(self, data: bytes) -> list[bytes]:
        """Return the frames that these bytes complete. Raise ProtocolError."""
        self.feed(data)
        frames = []
        while (frame := self.next_frame()) is not None:
            frames.append(frame)
        return frames

    def feed(self, data: bytes) -> None:
        """Add received bytes, for next_frame()."""
        if self.phase is not Phase.BROKEN:
            self._buffer += data

    def next_frame(self) -> bytes | None:
        """Return the next complete frame; None while there is none. Raise ProtocolError.

        A caller that handles frames one by one can leave the rest for later.
        """
        if self.phase is Phase.BROKEN:
            raise ProtocolError("the connection is broken")
        try:
            if self.phase is Phase.GREETING:
                self._greet()
            return None if self.phase is Phase.GREETING else self._take_frame()
        except ProtocolError:
            self.phase = Phase.BROKEN
            self._buffer.clear()
            raise

    def _greet(self) -> None:
        # Refuse a wrong greeting before it is complete: a peer with another protocol may send fewer bytes.
        head = bytes(self._buffer[:11])
        if head[:1] not in (b"", b"\xff") or (len(head) >= 10 and not head[9] & 1):
            raise ProtocolError(
                "the peer does not speak ZMTP", remedy="check that this is the socket of mpsd"
            )
        if len(head) == 11 and head[10] < 3:
            raise ProtocolError(f"the peer speaks ZMTP {head[10]}; mpsd needs version 3")
        if len(self._buffer) < _GREETING_BYTES:
            return
        if self._buffer[_MECHANISM] != _NULL:
            raise ProtocolError("the peer asks for a security mechanism; mpsd uses the kernel's credentials")
        del self._buffer[:_GREETING_BYTES]
        self._command(b"READY", _property(b"Socket-Type", self._type.encode()) + _property(b"Identity", b""))
        self.phase = Phase.HANDSHAKE

    def _take_frame(self) -> bytes | None:
        while (header := self._header()) is not None:
            flags, start, size = header
            if len(self._buffer) < start + size:
                break
            body = bytes(self._buffer[start : start + size])
            del self._buffer[: start + size]
            if not flags & _COMMAND:
                return body
            self._handle_command(body)
        return None

    def _header(self) -> tuple[int, int, int] | None:
        """Return flags, start and size of the body; None while the header is incomplete."""
        if not self._buffer:
            return None
        flags = self._buffer[0]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ProtocolError(f"the peer sent a frame with invalid flags {flags:#x}")
        if flags & _MORE:
            raise ProtocolError("the peer sent a message of several frames; mpsd's messages have one")
        if not flags & _COMMAND and self.phase is not Phase.OPEN:
            raise ProtocolError("the peer sent a message before the handshake was done")
        length = struct.Struct(">Q" if flags & _LONG else ">B")
        start = 1 + length.size
        if len(self._buffer) < start:
            return None
        (size,) = length.unpack_from(self._buffer, 1)
        largest = _MAX_COMMAND if flags & _COMMAND else self._largest
        if size > largest:
            raise ProtocolError(f"a frame of {size} bytes exceeds the limit of {largest}")
        return flags, start, size

    def _handle_command(self, body: bytes) -> None:
        name, content = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        match name, self.phase:
            case b"READY", Phase.HANDSHAKE:
                self._check_ready(_properties(content))
                self.phase = Phase.OPEN
            case b"ERROR", _:
                reason = content[1:].decode("ascii", "replace") or "no reason given"
                raise ProtocolError(f"the peer refused the connection: {reason!a}")
            case b"PING", Phase.OPEN:
                # Content: two bytes of time to live, then a context that the answer repeats.
                self._command(b"PONG", content[2 : 2 + _MAX_PING_CONTEXT])
            case b"PONG", Phase.OPEN:
                pass
            case _:
                raise ProtocolError(
                    f"the peer sent an unexpected command {name[:20]!a} in phase {self.phase}"
                )

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
    """Return the metadata of READY, with its case-insensitive names in lower case. Raise ProtocolError."""
    found: dict[bytes, bytes] = {}
    while content:
        name_end = 1 + content[0]
        value_start = name_end + 4
        if len(content) < value_start:
            raise ProtocolError("the peer sent incomplete metadata")
        (size,) = struct.unpack_from(">I", content, name_end)
        if len(content) < value_start + size:
            raise ProtocolError("the peer sent incomplete metadata")
        found[content[1:name_end].lower()] = content[value_start : value_start + size]
        content = content[value_start + size :]
    return found
