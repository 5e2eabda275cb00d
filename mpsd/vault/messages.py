"""Messages on RUN/vault.sock, as clients/libcuda/src/vaultwire.h lays them out. Bytes in, values out."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from mpsd.base.text import gpu_uuid

MAGIC = 0x746C7661
VERSION = 1
ANSWER = 128
NAME_ROOM = 64
TOKEN_ROOM = 32
NO_TOKEN = bytes(TOKEN_ROOM)
READS_FAR = 1
"""`index` of an answer to LEDGER: rows of far zones are understood."""

LAYOUT = struct.Struct(f"=IHHIIQQQII16s{TOKEN_ROOM}s{NAME_ROOM}s")
FIELDS = (
    "magic",
    "version",
    "kind",
    "sequence",
    "status",
    "number",
    "size",
    "address",
    "index",
    "count",
    "gpu",
    "token",
    "name",
)
"""In the order of the header. LAYOUT has no padding, nor has the header."""


class Kind(IntEnum):
    HELLO = 1
    PUT = 2
    DROP = 3
    KEEP = 4
    CLAIM = 5
    RELEASE = 6
    LEDGER = 7
    SHARE = 8
    OPEN = 9
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


class WireError(Exception):
    """Bytes that are no message of this protocol; the text is one or two words, for a counter."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `gpu` is a UUID as NVML prints it (GPU-...), `name` text."""

    kind: Kind
    sequence: int = 0
    number: int = 0
    size: int = 0
    address: int = 0
    index: int = 0
    count: int = 0
    gpu: str = ""
    token: bytes = NO_TOKEN
    name: str = ""
    status: Status = Status.OK


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
        uuid_bytes(message.gpu),
        message.token,
        message.name.encode(),
    )


def unpack(data: bytes, *, answer: bool = False) -> Message:
    """Parse a message. Raises WireError."""
    if len(data) != LAYOUT.size:
        raise WireError("size")
    magic, version, kind, sequence, status, number, size, address, index, count, gpu, token, name = (
        LAYOUT.unpack(data)
    )
    if magic != MAGIC:
        raise WireError("magic")
    if version != VERSION:
        raise WireError("version")
    text, _, rest = name.partition(b"\0")
    if len(text) == NAME_ROOM or rest.strip(b"\0"):
        raise WireError("name")
    try:
        return Message(
            Kind(kind - (ANSWER if answer else 0)),
            sequence,
            number,
            size,
            address,
            index,
            count,
            gpu_uuid(gpu),
            token,
            text.decode("ascii"),
            Status(status),
        )
    except ValueError as error:
        raise WireError("name" if isinstance(error, UnicodeDecodeError) else "kind") from error


def uuid_bytes(text: str) -> bytes:
    """Return the bytes of a UUID; zeros for other texts, as a simulated GPU may have."""
    try:
        raw = bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))
    except ValueError:
        return bytes(16)
    return raw if len(raw) == 16 else bytes(16)
