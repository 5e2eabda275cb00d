"""When a dead client's kernels have ended: its semaphores, read through /proc/PID/mem.

The lease keeps the dead process's memory map, and with it the driver's mappings and, behind them, its
channels. A descriptor of /proc/PID/mem that was opened while the process lived reads on. One of
/proc/PID/maps does so until the process is reaped, and after an exec: so the last look is at the dead, if
it comes in time. Afterwards mappings cannot be told from libcuda's reservation around them, which reads as
zeros.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence

from mpsd.errors import UnsupportedError
from mpsd.gpu.nvidia.semaphores import LOW_END, Area, Signs, areas
from mpsd.linux import procfs
from mpsd.model import ProcessInstance

PIECE = 2 << 20
BLOCK = 16 << 10
OVERLAP = 64
"""Longer than any pattern, so that none is cut in two."""
CALM = 2
"""Consecutive looks that must find nothing: a mark and the report of its launch are two writes."""
DROPPED_S = 3.0
"""Launches still queued this long after the death have been dropped: the driver gives them 2.0 s."""
SOON_S = 0.1
"""From the first mapping of a context to its first launch passes more than this."""

_AT_RANDOM = 25
_PAIR = struct.Struct("@LL")
_ZERO = bytes(BLOCK + OVERLAP)


def record_of(found: Sequence[Area] | None, *, settled: bool = True) -> bytes:
    """Areas as they are noted, None for too many. The sum tells a whole record from a torn one.

    `settled`: two looks agreed on them; one alone may have met a context that was just being made.
    """
    rows = None if found is None else [[a.start, a.end] for a in found]
    body = json.dumps(rows if settled else {"once": rows}).encode()
    return b"%s\n%08x" % (body, zlib.crc32(body))


def areas_noted(record: bytes) -> list[Area] | None:
    """None where that is not known: too many, no look was completed, or the writer was killed meanwhile."""
    body, _, check = record.partition(b"\n")
    # An earlier mpsd noted no sum.
    if check and check != b"%08x" % zlib.crc32(body):
        return None
    try:
        rows = json.loads(body)
        rows = rows.get("once") if isinstance(rows, dict) else rows
        return [Area(int(start), int(end)) for start, end in rows] if isinstance(rows, list) else None
    except (ValueError, TypeError):
        return None


def noted_once(record: bytes) -> bool:
    """Whether one look alone saw these areas."""
    return record.startswith(b'{"once"')


def outside(found: Sequence[Area], left: Sequence[Area]) -> list[Area]:
    """Those that lie in none of `left`."""
    return [a for a in found if not any(one.start <= a.start and a.end <= one.end for one in left)]


def written(data: bytes) -> Iterator[bytes]:
    """The blocks of a piece of memory that hold anything: most of a command buffer was never used."""
    for at in range(0, len(data), BLOCK):
        block = data[at : at + BLOCK + OVERLAP]
        if block != _ZERO[: len(block)]:
            yield block


class ProcessWork:
    """The work of one life of a client. `mem` and `areas` outlive the daemon in the descriptor store.

    `refresh` may run in a thread while others are called. `maps`: negative where the living was not met.
    `_blind`: it has more mappings than are read, or it is not known which. `_settled`: two looks agreed.
    """

    def __init__(self, mem: int, notes: int, maps: int = -1) -> None:
        self._mem = mem
        self._notes = notes
        self._maps = maps
        self._areas: list[Area] = []
        self._outside: list[Area] = []
        self._applied = self._outside
        self._blind = True
        self._unreadable = False
        self._settled = False
        self._looked: float | None = None
        self._found: procfs.MapLines | None = None
        self._noted = b""
        self._turn = threading.Lock()
        self._signs: Signs | None = None
        self._understood = False
        self._calm = 0
        self._died = 0.0
        self._wrote_commands = False

    @property
    def fds(self) -> Mapping[str, int]:
        return {"areas": self._notes, "mem": self._mem}

    @property
    def located(self) -> bool:
        with self._turn:
            return bool(self._areas) or (self._blind and self._looked is not None)

    def refresh(self) -> None:
        self._look()

    def _look(self, *, dead: bool = False) -> bool:
        """Whether the look was completed."""
        began = time.monotonic()
        try:
            found = procfs.map_lines_of(self._maps, LOW_END)
        except OSError:
            return False
        if found is None:
            return False
        if found == self._found and self._settled and self._applied is self._outside:
            # As a rule, and looked at every second: nothing is taken apart again.
            with self._turn:
                self._looked = began
            return True
        rows = [procfs.parse_map(line) for line in found.lines]
        all_there = areas((r.start, r.end, r.permissions, r.path) for r in rows)
        with self._turn:
            self._applied = self._outside
            there = outside(all_there, self._applied)
            if self._notes >= 0:
                self._take(there, truncated=found.truncated, began=began, dead=dead)
            self._found = found
        return True

    def _take(self, there: list[Area], *, truncated: bool, began: float, dead: bool) -> None:
        first = self._looked is None
        self._looked = began
        # A client that ends takes its areas away: what they were is not forgotten.
        there = there or outside(self._areas, self._applied)
        self._settled = there == self._areas and (self._settled or not first)
        self._areas, self._blind = there, truncated
        if not dead:
            self._unreadable = not self._can_be_read(there)
        self._note()

    def _note(self) -> None:
        unknown = self._blind or self._unreadable
        record = record_of(None if unknown else self._areas, settled=self._settled)
        if record != self._noted:
            # In this order: killed in between, it leaves a record that is not whole, never an empty one.
            os.pwrite(self._notes, record, 0)
            os.ftruncate(self._notes, len(record))
            self._noted = record

    def _can_be_read(self, there: Sequence[Area]) -> bool:
        """Whether the driver lets the memory of the living be read. Of the dead nobody could tell that from
        a client that has taken its areas away."""
        try:
            return not there or any(_memory(self._mem, area.start, 1) for area in there)
        except UnsupportedError:
            return True  # It has just ended: that is seen when its work is looked for.

    def leave_out(self, spans: Sequence[tuple[int, int]]) -> None:
        """Waits for no look that is under way, which may hang: the next one comes to it."""
        self._outside = [Area(start, end) for start, end in spans]
        if not self._turn.acquire(blocking=False):
            return
        try:
            self._apply()
            if self._notes >= 0 and self._looked is not None:
                self._note()
        finally:
            self._turn.release()

    def _apply(self) -> None:
        """Leave out what is to be. What is to be no longer the next look at the living finds."""
        self._areas = outside(self._areas, self._outside)
        if self._signs is not None:
            self._signs.keep(self._areas)

    def recall(self) -> None:
        """After adoption: the areas that an earlier daemon noted."""
        record = os.pread(self._notes, 1 << 20, 0)
        noted = areas_noted(record)
        self._blind = noted is None
        self._areas = noted or []
        self._settled = not noted_once(record)

    def pending(self) -> str | None:
        if self._signs is None:
            exact = self._look(dead=True)
            with self._turn:
                if not (exact or self._seen_to_the_end()):
                    self._blind = True
        with self._turn:
            return None if self._blind or self._unreadable or self._mem < 0 else self._left()

    def _seen_to_the_end(self) -> bool:
        """Whether the last look can have missed no context, nor a part of it."""
        if self._looked is not None and time.monotonic() - self._looked < SOON_S:
            return True
        return self._settled and bool(self._areas)

    def _left(self) -> str | None:
        self._apply()
        if self._signs is None:
            self._signs = self._scan()
            self._understood = self._signs.understood
            self._died = time.monotonic()
        if not self._understood:
            # A client that never launched anything has no commands at all; any others are not ours to read.
            return None if self._wrote_commands else ""
        running = self._signs.running(self._word)
        queued = [] if time.monotonic() - self._died > DROPPED_S else self._signs.queued(self._word)
        late = [*running, *queued]
        self._calm = 0 if late else self._calm + 1
        if late:
            return ", ".join(late[:4])
        return "" if self._calm >= CALM else "looking once more"

    def _scan(self) -> Signs:
        """Read every area once: the process is dead, so nobody writes commands any more."""
        signs = Signs()
        for area in self._areas:
            for at in range(area.start, area.end, PIECE):
                for block in written(_memory(self._mem, at, min(PIECE + OVERLAP, area.end - at))):
                    self._wrote_commands = True
                    signs.scan(block)
        signs.keep(self._areas)
        return signs

    def _word(self, address: int) -> int | None:
        data = _memory(self._mem, address, 4)
        return int.from_bytes(data, "little") if len(data) == 4 else None

    def close(self) -> None:
        with self._turn:
            for fd in (self._mem, self._notes, self._maps):
                if fd >= 0:
                    os.close(fd)
            self._mem = self._notes = self._maps = -1


class NvidiaWork:
    """WorkInspector of the real driver."""

    def open(self, process: ProcessInstance, pidfd: int) -> ProcessWork:
        mem = maps = -1
        try:
            mem = os.open(f"/proc/{process.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            maps = os.open(f"/proc/{process.pid}/maps", os.O_RDONLY | os.O_CLOEXEC)
            notes = os.memfd_create("mpsd-areas", os.MFD_CLOEXEC)
        except OSError as error:
            _close(mem, maps)
            raise UnsupportedError(
                f"may not read the memory of process {process.pid}: {error.strerror}",
                remedy="run mpsd with CAP_SYS_PTRACE",
            ) from error
        if not self.is_present(process, {"mem": mem}):
            _close(mem, maps, notes)
            raise UnsupportedError(f"process {process.pid} replaced its program while it was looked at")
        view = ProcessWork(mem, notes, maps)
        view.refresh()
        return view

    def adopt(self, process: ProcessInstance, fds: Mapping[str, int]) -> ProcessWork:
        if not {"mem", "areas"} <= fds.keys():
            raise UnsupportedError(f"the work of process {process.pid} was not looked at while it lived")
        view = ProcessWork(fds["mem"], fds["areas"], self._maps(process, fds["mem"]))
        view.recall()
        return view

    def _maps(self, process: ProcessInstance, mem: int) -> int:
        """The mappings that a kept `mem` shows the contents of; negative when they have gone."""
        try:
            maps = os.open(f"/proc/{process.pid}/maps", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1
        if _same_program(process, mem):
            return maps
        os.close(maps)
        return -1

    def is_present(self, process: ProcessInstance, fds: Mapping[str, int]) -> bool:
        return "mem" not in fds or _same_program(process, fds["mem"]) is not False


def _memory(mem: int, at: int, size: int) -> bytes:
    """What lies at an address, through /proc/PID/mem; nothing where nothing is mapped.

    Raises UnsupportedError where there is no memory map any more, which its lease should have kept: that
    reads as the end of the file.
    """
    try:
        data = os.pread(mem, size, at)
    except OSError:
        return b""
    if not data:
        raise UnsupportedError("its memory has gone before its work was seen to end")
    return data


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _same_program(process: ProcessInstance, mem: int) -> bool | None:
    """Whether `mem` is the memory that the process has now; None when that cannot be told.

    The kernel gives every program that is executed 16 random bytes, and says where (getauxval(3)).
    """
    try:
        with open(f"/proc/{process.pid}/auxv", "rb") as file:
            pairs = file.read()
        now = os.open(f"/proc/{process.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            usable = len(pairs) // _PAIR.size * _PAIR.size
            address = dict(_PAIR.iter_unpack(pairs[:usable])).get(_AT_RANDOM)
            there = b"" if address is None else os.pread(now, 16, address)
        finally:
            os.close(now)
        if len(there) < 16 or address is None or procfs.start_ticks(process.pid) != process.start_ticks:
            return None
    except OSError:
        return None
    try:
        return os.pread(mem, 16, address) == there
    except OSError:
        return False
