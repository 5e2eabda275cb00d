"""The ledger's layout, as clients/libcuda/src/ledger.h has it. Offsets and sizes in bytes; no I/O."""

from __future__ import annotations

import struct
from enum import IntEnum

MAGIC = 0x726764656C64706D
VERSION = 2
ZONES = 8192
NOTES = 65536
LAUNCHES = 64
NAMES = 4096
NAME_ROOM = 112

HEAD = struct.Struct("=QIIQQQQQQQQQQQQQQQ13Q")
HEAD_FIELDS = (
    "magic",
    "version",
    "pid",
    "size",
    "launched",
    "settled",
    "names_used",
    "notes_lost",
    "managed_bytes",
    "sparse_bytes",
    "managed_zones",
    "sparse_zones",
    "uncovered",
    "quarantine_bytes",
    "quarantine_count",
    "null_page",
    "far_bytes",
    "far_zones",
    "reserved",
)
"""In the order of the header. None of the layouts here has padding, nor has the header."""

ZONE = struct.Struct("=IHHQQQ")
ZONE_FIELDS = ("sequence", "kind", "role", "start", "end", "born_ns")
NOTE = struct.Struct("=IIQQQQQ")
NOTE_FIELDS = ("sequence", "device", "address", "size", "order", "born_ns", "freed_ns")
LAUNCH = struct.Struct("=QQ")
LAUNCH_FIELDS = ("function", "stream")
NAME = struct.Struct(f"=IIQ{NAME_ROOM}s")
NAME_FIELDS = ("sequence", "reserved", "function", "name")

COUNTER = struct.Struct("=Q")
SEQUENCE = struct.Struct("=I")
HEAD_VERSION = struct.Struct("=II")
HEAD_VERSION_AT = 8


def counter_at(field: str) -> int:
    """Return the offset of a 64-bit field of the header."""
    index = HEAD_FIELDS.index(field)
    return 0 if index == 0 else 8 * (index - 1)


ZONES_AT = HEAD.size
NOTES_AT = ZONES_AT + ZONES * ZONE.size
LAUNCHES_AT = NOTES_AT + NOTES * NOTE.size
NAMES_AT = LAUNCHES_AT + LAUNCHES * LAUNCH.size
SIZE = NAMES_AT + NAMES * NAME.size


class Kind(IntEnum):
    NONE = 0
    MANAGED = 1
    SPARSE = 2


class Role(IntEnum):
    GUARD = 0
    QUARANTINE = 1
    NULL_PAGE = 2
    FAR = 3
