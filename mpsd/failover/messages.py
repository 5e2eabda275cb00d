"""Messages on RUN/failover.sock, as clients/libcuda/src/failoverwire.h defines them: packing and
unpacking."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from mpsd.base.model import FailoverMode

MAGIC = 0x726F6C66
VERSION = 1
PATH_ROOM = 112
TEXT_ROOM = 128
VALUES = 6

LAYOUT = struct.Struct(f"=IHHIIQ{VALUES * 8}s{PATH_ROOM}s{TEXT_ROOM}s")
FIELDS = ("magic", "version", "kind", "mode", "reserved", "generation", "values", "path", "text")
"""In the order of the C header. LAYOUT has no padding, and the C structure has none either."""
_NUMBERS = struct.Struct(f"={VALUES}Q")
TAKES_FENCED, GIVES, BUDGETS, SWITCHES = 1, 2, 4, 8
"""Flags in a HELLO's first value: messages that the program understands. BUDGETS: the values 4 and 5 of
WELCOME, and LIMIT. SWITCHES: GUARD. A program without its flag ends its connection at such a message."""
SHORT_KNOWN, SWITCH_KNOWN = 1, 2
"""Flags in a WELCOME's second value: messages that the daemon understands. SWITCH_KNOWN: the LEAVES of a
program that was told GUARD. An earlier daemon ends the connection at it."""
LOOKED_ALL = 2
"""In a WELCOME's third value: the daemon knows every finding of LOOKED. 1, of earlier releases: all but
NO_SIGN."""
MODES = (FailoverMode.OFF, FailoverMode.KEEP, FailoverMode.EXACT)
"""Modes by their number in a message."""
HEARS_BUDGETS, HEARS_EXPOSED = 1, 2
"""Flags in a WELCOME's value 4: messages that the daemon understands."""


class Kind(IntEnum):
    HELLO = 1
    READY = 2
    UNREADY = 3
    OPAQUE = 4
    OWN_ERROR = 5
    MOVED = 6
    STAYED = 7
    DONE = 8
    UNSURE = 9
    SHORT = 10
    GAVE = 11
    LOOKED = 12
    LEFT = 13
    HOLDS = 14
    COST = 15
    LEAVES = 16
    EXPOSED = 17
    WELCOME = 65
    STANDBY = 66
    STAND_DOWN = 67
    MOVE = 68
    TURN = 69
    FENCED = 70
    GIVE = 71
    ROOM = 72
    LIMIT = 73
    GUARD = 74


FROM_PROGRAM = frozenset(k for k in Kind if k < Kind.WELCOME)


class WireError(Exception):
    """Not a message of this protocol. The text is a short reason, for counting."""


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    mode: FailoverMode = FailoverMode.OFF
    generation: int = 0
    values: tuple[int, ...] = (0,) * VALUES
    path: str = ""
    text: str = ""


def pack(message: Message) -> bytes:
    """Return the bytes of a message. A text that is too long is cut. Raises ValueError for a path that is
    too long."""
    path = message.path.encode()
    if len(path) >= PATH_ROOM:
        raise ValueError(f"{message.path!r} is too long for a message")
    values = (*message.values, *(0,) * VALUES)[:VALUES]
    return LAYOUT.pack(
        MAGIC,
        VERSION,
        message.kind,
        MODES.index(message.mode),
        0,
        message.generation,
        _NUMBERS.pack(*values),
        path,
        fitting(message.text).encode(),
    )


def fitting(text: str) -> str:
    """Return the part of a text that fits one message, with its final zero."""
    return text.encode()[: TEXT_ROOM - 1].decode(errors="ignore")


def unpack(data: bytes) -> Message:
    """Return the message in these bytes. Raises WireError."""
    if len(data) != LAYOUT.size:
        raise WireError("size")
    magic, version, kind, mode, reserved, generation, values, path, text = LAYOUT.unpack(data)
    if magic != MAGIC:
        raise WireError("magic")
    if version != VERSION:
        raise WireError("version")
    if reserved:
        raise WireError("reserved")
    if mode >= len(MODES):
        raise WireError("mode")
    try:
        known = Kind(kind)
    except ValueError as error:
        raise WireError("kind") from error
    return Message(known, MODES[mode], generation, _NUMBERS.unpack(values), _text(path), _text(text))


def _text(field: bytes) -> str:
    text, end, rest = field.partition(b"\0")
    if not end or rest.strip(b"\0"):
        raise WireError("text")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise WireError("text") from error
