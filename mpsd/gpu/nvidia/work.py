"""The end of an exited client's kernels: its semaphores, read through /proc/PID/mem.

The lease keeps the exited process's memory map, and with it the driver's mappings and its channels. A
descriptor of /proc/PID/mem that was opened while the process lived stays readable. One of /proc/PID/maps
works until the process is reaped, and after an exec. So the last look is at the exited process, if it comes
in time. Afterwards mappings cannot be told from libcuda's reservation around them, which reads as zeros.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence

from mpsd.base.errors import UnsupportedError
from mpsd.base.model import ProcessInstance
from mpsd.gpu.nvidia.semaphores import LOW_END, Area, Signs, areas
from mpsd.os import procfs

READ_BYTES = 2 << 20
BLOCK = 16 << 10
OVERLAP = 64
"""Overlap of blocks, longer than any pattern, so that no pattern is cut in two."""
QUIET_PROBES = 2
"""Consecutive looks that must find nothing: a launch writes its mark and its report separately."""
DROPPED_S = 3.0
"""Launches still queued this long [s] after the exit have been dropped: the driver allows them 2.0 s."""
SOON_S = 0.1
"""The first launch of a context comes later than this [s] after its first mapping."""

_AT_RANDOM = 25
_PAIR = struct.Struct("@LL")
_ZERO = bytes(BLOCK + OVERLAP)


def record_of(found: Sequence[Area] | None, *, settled: bool = True) -> bytes:
    """Return the record of areas, or of None for too many. Its checksum detects a torn record.

    `settled`: two looks agreed; a single look may have met a context that was just being created.
    """
    rows = None if found is None else [[a.start, a.end] for a in found]
    body = json.dumps(rows if settled else {"once": rows}).encode()
    return b"%s\n%08x" % (body, zlib.crc32(body))


def areas_noted(record: bytes) -> list[Area] | None:
    """Return the recorded areas, or None: too many, no complete look, or a torn record."""
    body, _, check = record.partition(b"\n")
    # An earlier mpsd recorded no checksum.
    if check and check != b"%08x" % zlib.crc32(body):
        return None
    try:
        rows = json.loads(body)
        rows = rows.get("once") if isinstance(rows, dict) else rows
        return [Area(int(start), int(end)) for start, end in rows] if isinstance(rows, list) else None
    except (ValueError, TypeError):
        return None


def noted_once(record: bytes) -> bool:
    """Return whether only one look saw these areas."""
    return record.startswith(b'{"once"')


def outside(found: Sequence[Area], excluded: Sequence[Area]) -> list[Area]:
    """Return the areas that lie in none of `excluded`."""
    return [a for a in found if not any(one.start <= a.start and a.end <= one.end for one in excluded)]


def written(data: bytes) -> Iterator[bytes]:
    """Yield the blocks that are not all zero: most of a command buffer is never used."""
    for at in range(0, len(data), BLOCK):
        block = data[at : at + BLOCK + OVERLAP]
        if block != _ZERO[: len(block)]:
            yield block


class ProcessWork:
    """The work of one process of a client. `mem` and `areas` outlive the daemon in the descriptor store.

    `refresh` may run in a thread while other methods are called. `maps`: negative for an exited process.
    `_blind`: the process has more mappings than are read, or their number is unknown. `_settled`: two looks
    agreed.
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
        self._probed: float | None = None
        self._found: procfs.MapLines | None = None
        self._noted = b""
        self._turn = threading.Lock()
        self._signs: Signs | None = None
        self._understood = False
        self._quiet_probes = 0
        self._died = 0.0
        self._wrote_commands = False

    @property
    def fds(self) -> Mapping[str, int]:
        return {"areas": self._notes, "mem": self._mem}

    @property
    def located(self) -> bool:
        with self._turn:
            return bool(self._areas) or (self._blind and self._probed is not None)

    @property
    def settled(self) -> bool:
        # Without the lock: a look in progress may hang.
        return self._settled or self._probed is None

    def refresh(self) -> None:
        self._probe()

    def _probe(self, *, exited: bool = False) -> bool:
        """Read the mappings and return whether that was completed."""
        began = time.monotonic()
        try:
            found = procfs.map_lines_of(self._maps, LOW_END)
        except OSError:
            return False
        if found is None:
            return False
        if found == self._found and self._settled and self._applied is self._outside:
            # The usual case, every second: parse nothing again.
            with self._turn:
                self._probed = began
            return True
        rows = [procfs.parse_map(line) for line in found.lines]
        all_there = areas((r.start, r.end, r.permissions, r.path) for r in rows)
        with self._turn:
            self._applied = self._outside
            there = outside(all_there, self._applied)
            if self._notes >= 0:
                self._take(there, truncated=found.truncated, began=began, exited=exited)
            self._found = found
        return True

    def _take(self, there: list[Area], *, truncated: bool, began: float, exited: bool) -> None:
        first = self._probed is None
        self._probed = began
        # An exiting client removes its areas: keep the last ones.
        there = there or outside(self._areas, self._applied)
        self._settled = there == self._areas and (self._settled or not first)
        self._areas, self._blind = there, truncated
        if not exited:
            self._unreadable = not self._can_be_read(there)
        self._note()

    def _note(self) -> None:
        unknown = self._blind or self._unreadable
        record = record_of(None if unknown else self._areas, settled=self._settled)
        if record != self._noted:
            # In this order: a kill in between leaves a torn record, never an empty one.
            os.pwrite(self._notes, record, 0)
            os.ftruncate(self._notes, len(record))
            self._noted = record

    def _can_be_read(self, there: Sequence[Area]) -> bool:
        """Return whether the driver lets mpsd read the memory of a living client.

        For an exited client a refusal looks like areas that the client has removed."""
        try:
            return not there or any(_memory(self._mem, area.start, 1) for area in there)
        except UnsupportedError:
            return True  # The process has just ended; pending() handles that.

    def leave_out(self, spans: Sequence[tuple[int, int]]) -> None:
        """Exclude pages. Does not wait for a look in progress, which may hang: the next look applies it."""
        self._outside = [Area(start, end) for start, end in spans]
        if not self._turn.acquire(blocking=False):
            return
        try:
            self._apply()
            if self._notes >= 0 and self._probed is not None:
                self._note()
        finally:
            self._turn.release()

    def _apply(self) -> None:
        """Exclude what is to be excluded. Pages that are no longer excluded come back with the next look."""
        self._areas = outside(self._areas, self._outside)
        if self._signs is not None:
            self._signs.keep(self._areas)

    def recall(self) -> None:
        """Restore the areas that an earlier daemon recorded, after adoption."""
        record = os.pread(self._notes, 1 << 20, 0)
        noted = areas_noted(record)
        self._blind = noted is None
        self._areas = noted or []
        self._settled = not noted_once(record)

    def pending(self) -> str | None:
        if self._signs is None:
            exact = self._probe(exited=True)
            with self._turn:
                if not (exact or self._last_probe_suffices()):
                    self._blind = True
        with self._turn:
            return None if self._blind or self._unreadable or self._mem < 0 else self._remaining_work()

    def _last_probe_suffices(self) -> bool:
        """Return whether the last look cannot have missed a context or a part of it."""
        if self._probed is not None and time.monotonic() - self._probed < SOON_S:
            return True
        return self._settled and bool(self._areas)

    def launched(self) -> bool | None:
        if not self._probe():
            return None
        with self._turn:
            if self._blind or self._unreadable or self._mem < 0 or self._outside:
                # With pages left out, it has launched in a context that it has left.
                return None
            signs, wrote = Signs(), False
            for block in self._blocks():
                signs.scan(block)
                wrote = True
            signs.keep(self._areas)
        # Commands without signs are of an unknown format.
        return True if signs.understood or signs.marks else None if wrote else False

    def _remaining_work(self) -> str | None:
        self._apply()
        if self._signs is None:
            self._signs = self._scan()
            self._understood = self._signs.understood
            self._died = time.monotonic()
        if not self._understood:
            # A client that never launched has no commands. Other commands are of an unknown format.
            return None if self._wrote_commands else ""
        running = self._signs.running(self._word)
        queued = [] if time.monotonic() - self._died > DROPPED_S else self._signs.queued(self._word)
        late = [*running, *queued]
        self._quiet_probes = 0 if late else self._quiet_probes + 1
        if late:
            return ", ".join(late[:4])
        return "" if self._quiet_probes >= QUIET_PROBES else "checking once more"

    def _scan(self) -> Signs:
        """Read every area once: the process has ended, so its command buffers no longer change."""
        signs = Signs()
        for block in self._blocks():
            self._wrote_commands = True
            signs.scan(block)
        signs.keep(self._areas)
        return signs

    def _blocks(self) -> Iterator[bytes]:
        for area in self._areas:
            for at in range(area.start, area.end, READ_BYTES):
                yield from written(_memory(self._mem, at, min(READ_BYTES + OVERLAP, area.end - at)))

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
                f"cannot read the memory of process {process.pid}: {error.strerror}",
                remedy="run mpsd with CAP_SYS_PTRACE",
            ) from error
        if not self.is_present(process, {"mem": mem}):
            _close(mem, maps, notes)
            raise UnsupportedError(f"process {process.pid} replaced its program (exec) during inspection")
        view = ProcessWork(mem, notes, maps)
        view.refresh()
        return view

    def adopt(self, process: ProcessInstance, fds: Mapping[str, int]) -> ProcessWork:
        if not {"mem", "areas"} <= fds.keys():
            raise UnsupportedError(f"the work of process {process.pid} was not inspected before its exit")
        view = ProcessWork(fds["mem"], fds["areas"], self._maps(process, fds["mem"]))
        view.recall()
        return view

    def _maps(self, process: ProcessInstance, mem: int) -> int:
        """Open the mappings of the process to which `mem` belongs; negative if they are gone."""
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
    """Read memory at an address through /proc/PID/mem; empty if nothing is mapped.

    Raises UnsupportedError if the memory map has ended, which the lease should have kept: reads then return
    end of file.
    """
    try:
        data = os.pread(mem, size, at)
    except OSError:
        return b""
    if not data:
        raise UnsupportedError("the client's memory map ended before the end of its work was seen")
    return data


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _same_program(process: ProcessInstance, mem: int) -> bool | None:
    """Return whether `mem` is the memory that the process has now; None if that cannot be determined.

    The kernel gives every executed program 16 random bytes and their address (AT_RANDOM, getauxval(3)).
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
