"""Messages on RUN/vault.sock, encoded by programs: the counterpart of clients/libcuda/src/vaultwire.h.

mpsd/vault/messages.py is the daemon's encoder; a test compares both byte by byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

MAGIC = 0x746C7661
VERSION = 1
ANSWER = 128
NAME_ROOM = 64
TOKEN_ROOM = 32
LAYOUT = struct.Struct(f"=IHHIIQQQII16s{TOKEN_ROOM}s{NAME_ROOM}s")


class Kind(IntEnum):
    HELLO = 1
    CLAIM = 5
    RELEASE = 6
    PUT_NAMED = 10
    TAKE = 11
    LEAVE = 12


class Status(IntEnum):
    OK = 0
    QUOTA = 1
    UNKNOWN = 2
    DENIED = 3
    TWICE = 4
    NAME = 5
    IN_USE = 16


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `size`: bytes; `gpu`: 16 bytes as of cuDeviceGetUuid; `token`: TOKEN_ROOM bytes."""

    kind: Kind
    sequence: int = 0
    number: int = 0
    size: int = 0
    address: int = 0
    index: int = 0
    count: int = 0
    gpu: bytes = bytes(16)
    token: bytes = bytes(TOKEN_ROOM)
    name: str = ""
    status: Status = Status.OK


def valid_name(name: str) -> bool:
    """Check a name by the daemon's rule: 1 to 63 printable ASCII characters, no blanks, not a number."""
    return 0 < len(name) < NAME_ROOM and all("!" <= c <= "~" for c in name) and not name.isdecimal()


def pack(message: Message, *, answer: bool = False) -> bytes:
    return LAYOUT.pack(
        MAGIC,
        VERSION,
        message.kind + (ANSWER if answer else 0),
        message.sequence,
        message.status,
        message.number,
        message.size,
        message.address,
        message.index,
        message.count,
        message.gpu,
        message.token,
        message.name.encode("ascii"),
    )


def unpack_answer(data: bytes) -> Message:
    """Decode an answer. Raises ValueError for an invalid one."""
    if len(data) != LAYOUT.size:
        raise ValueError(f"{len(data)} bytes are no message of the vault")
    magic, version, kind, sequence, status, number, size, address, index, count, gpu, token, name = (
        LAYOUT.unpack(data)
    )
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"magic {magic:#x} version {version}")
    text = name.rstrip(b"\0").decode("ascii")
    numbers = (sequence, number, size, address, index, count)
    return Message(Kind(kind - ANSWER), *numbers, gpu, token, text, Status(status))
