"""Statistics of the proxy in a process: the shared structure of src/stats.h, read from outside."""

from __future__ import annotations

import enum
import os
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MAGIC = int.from_bytes(b"mpsdcuda", "little")
VERSION = 1
_NAME = "/memfd:mpsd-libcuda"
_HEAD = struct.Struct("<Q10I20Q256s512s")
_UNKNOWN = struct.Struct("<Q88s")
_UNKNOWN_MAX = 64
_TAIL = struct.Struct("<5Q128sQ5Q")
"""Trailing fields of validation, `relayed` and snapshots: zeros in a proxy build that lacks them."""
_BYTES = _HEAD.size + _UNKNOWN_MAX * _UNKNOWN.size + _TAIL.size


class State(enum.IntEnum):
    LOADING = 0
    ACTIVE = 1
    ASIDE = 2
    NO_DRIVER = 3


class Window(enum.IntEnum):
    """Where the address windows are. ELSEWHERE: not at the requested address."""

    NOT_YET = 0
    AS_WANTED = 1
    ELSEWHERE = 2
    NONE = 3


@dataclass(frozen=True)
class Validation:
    """Findings of MPSD_FAILOVER=validate so far.

    `operations`: checked; `unsure`: not checked, because they cannot be rolled back. `strays`: pages written
    outside the parameters; `variables`: writes of module variables; `first`: the first of either. `unread`:
    code images with unknown variables, or with use of the device heap.
    """

    operations: int
    unsure: int
    strays: int
    variables: int
    unread: int
    first: str


@dataclass(frozen=True)
class Snapshots:
    """Measured cost of mode exact so far.

    `periods`: periods of work that were measured; `saved`: bytes copied to snapshot buffers in them;
    `added_ns`, `rest_ns`: the time that copying added, and the rest of the periods. `left`: 1 if the program
    left fail-over for the time budget, 2 for the memory budget, 3 if mpsd told it to, else 0.
    """

    periods: int
    saved: int
    added_ns: int
    rest_ns: int
    left: int


@dataclass(frozen=True)
class Stats:
    """One reading of the statistics. `driver_version` is 0 until the program has called cuInit.

    `vault_*`: allocations in exportable memory, their bytes, the bytes mapped for them, and calls of
    cuMemAlloc that the driver answered instead; segments (slabs and large allocations) that the daemon has
    taken, refused, or not received so far.

    `ipc_*`: exported handles of such memory, open handles of other processes, and calls that the vault could
    not answer. `passed_*`: allocations outside the vault so far: stream-ordered memory, managed memory, host
    memory (also registered), and the program's own cuMemCreate. `window_base`: address of the first window, 0
    without one. `host_guard`: bytes of host memory under guard now. `relayed`: launches that the proxy's
    launch thread has made so far.
    """

    pid: int
    state: State
    reason: str
    real_path: str
    driver_version: int
    names: int
    hidden: int
    added: int
    lacking: int
    asked: int
    mapped: int
    unmapped: int
    export_tables: int
    vault_allocations: int
    vault_bytes: int
    vault_mapped: int
    vault_passed: int
    vault_taken: int
    vault_refused: int
    vault_lost: int
    ipc_shared: int
    ipc_opened: int
    ipc_failed: int
    passed_pool: int
    passed_managed: int
    passed_host: int
    passed_exportable: int
    window: Window
    window_base: int
    host_guard: int
    unknown: Mapping[str, int]
    validation: Validation
    relayed: int
    snapshots: Snapshots


_COUNTED = [field.name for field in fields(Stats)][4:-7]
"""Counters in the order of stats.h, between the path and the window."""


def read_stats(pid: int) -> Stats | None:
    """Return the statistics of a process, or None without a proxy of this version or without the process.

    Raises PermissionError if the caller may not read the process's memory.
    """
    try:
        with open(f"/proc/{pid}/maps") as maps:
            starts = [int(line.split("-", 1)[0], 16) for line in maps if _NAME in line]
        if not starts:
            return None
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            data = os.pread(memory.fileno(), _BYTES, starts[0])
    except (FileNotFoundError, ProcessLookupError):
        return None
    return decode(data)


def decode(data: bytes) -> Stats | None:
    """Decode the structure, or return None for another version."""
    if len(data) < _BYTES:
        return None
    magic, version, _, pid, state, *numbers, window, guard, reason, path = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        return None
    # Skip the reserved field.
    counts: dict[str, Any] = dict(zip(_COUNTED, [*numbers[:5], *numbers[6:]], strict=True))
    unknown: Counter[str] = Counter()
    for number in range(_UNKNOWN_MAX):
        count, name = _UNKNOWN.unpack_from(data, _HEAD.size + number * _UNKNOWN.size)
        if count:
            unknown[_text(name)] += count
    tail = _TAIL.unpack_from(data, _BYTES - _TAIL.size)
    operations, unsure, strays, variables, unread, first, relayed, *snapshots = tail
    return Stats(
        pid=pid,
        state=State(state),
        reason=_text(reason),
        real_path=_text(path),
        window=Window(window & 3),
        window_base=window & ~3,
        host_guard=guard,
        unknown=unknown,
        validation=Validation(operations, unsure, strays, variables, unread, _text(first)),
        relayed=relayed,
        snapshots=Snapshots(*snapshots),
        **counts,
    )


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode(errors="replace")
