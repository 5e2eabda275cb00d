"""The end of a process's GPU work, read from its own completion semaphores. No I/O.

libcuda maps its command buffers and semaphores into the client, at the same low addresses on CPU and GPU.
Every launch leaves two signs in the command buffer:
  - a report: the address of a 16-byte semaphore and the number that the front end writes there when it has
    taken the launch. The numbers of one semaphore only grow (modulo 2^32);
  - a mark: four bytes that the launch sets to 5 (BUSY) and the kernel's completion sets to another number.
Work is pending while a semaphore is behind one of its numbers, or while a marked value is still 5.
Measured on an H200 with driver 580 (faultinject/evidence/mechanisms.md). Method numbers are those of the
public class headers of compute and copy engines (offset and length of inline data, report semaphore).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

BUSY = 5
Read = Callable[[int], int | None]
"""Read the 32-bit word at an address; None if nothing is mapped."""

LOW_END = 1 << 36
"""Ordinary mappings are above this address, libcuda's shared areas below."""

_WORD = struct.Struct("<I")
_ANY_CHANNEL = rb"[\x00\x20\x40\x60\x80\xa0\xc0\xe0]"
_TARGET = rb"(?P<address>.{8})(?P<number>.{4})"
# OFFSET_OUT (2 words: high, low), LINE_LENGTH_IN 4 and LINE_COUNT 1, LAUNCH_DMA, inline data BUSY.
_MARK = re.compile(
    re.escape(struct.pack("<I", 0x20022062))
    + rb"(?P<address>.{8})"
    + re.escape(struct.pack("<IIIIIII", 0x20022060, 4, 1, 0x2001206C, 0x41, 0x6001206D, BUSY)),
    re.DOTALL,
)
# SET_REPORT_SEMAPHORE: high, low, number, operation.
_REPORT = re.compile(re.escape(struct.pack("<I", 0x200426C0)) + _TARGET, re.DOTALL)
# Copy engine, SET_SEMAPHORE: high, low, number.
_COPY = re.compile(rb"\x90" + _ANY_CHANNEL + rb"[\x03\x04]\x20" + _TARGET, re.DOTALL)
# Host engine, SEM_ADDR_LO: low, high, number (low and high word), operation.
_HOST = re.compile(rb"\x17" + _ANY_CHANNEL + rb"\x05\x20" + _TARGET, re.DOTALL)


@dataclass(slots=True)
class Signs:
    """Signs in one process's command buffers: addresses to read, and values to expect."""

    marks: set[int] = field(default_factory=set)
    numbers: dict[int, set[int]] = field(default_factory=dict)

    def scan(self, commands: bytes) -> None:
        """Add the signs of a part of a command buffer. Old commands are harmless: their numbers are
        reached."""
        for found in _MARK.finditer(commands):
            self._mark(_high_low(found["address"]))
        for found in _REPORT.finditer(commands):
            self._number(_high_low(found["address"]), found["number"])
        for found in _COPY.finditer(commands):
            self._number(_high_low(found["address"]), found["number"])
        for found in _HOST.finditer(commands):
            self._number(_low_high(found["address"]), found["number"])

    def _mark(self, address: int) -> None:
        if 0 < address < LOW_END and address % 4 == 0:
            self.marks.add(address)

    def _number(self, address: int, number: bytes) -> None:
        if 0 < address < LOW_END and address % 16 == 0:
            self.numbers.setdefault(address, set()).add(_WORD.unpack(number)[0])

    def keep(self, found: Sequence[Area]) -> None:
        """Drop addresses outside the areas: they come from data that only looks like a command.

        Every real sign lies in an area (24 marks and 28 semaphores of one program on an H200)."""
        self.marks = {address for address in self.marks if _lies_in(address, found)}
        self.numbers = {a: numbers for a, numbers in self.numbers.items() if _lies_in(a, found)}

    @property
    def understood(self) -> bool:
        """Whether this driver leaves the known signs: every client that ever launched has some."""
        return bool(self.numbers)

    def queued(self, read: Read) -> list[str]:
        """Return semaphores that are behind a number: launches that the front end has not taken."""
        late = []
        for address, numbers in self.numbers.items():
            value = read(address)
            if value is not None and any(behind(value, number) for number in numbers):
                late.append(f"semaphore {address:#x} at {value}")
        return late

    def running(self, read: Read) -> list[str]:
        """Return marks of kernels that have begun and not ended."""
        return [f"kernel {address:#x}" for address in sorted(self.marks) if read(address) == BUSY]


def behind(value: int, number: int) -> bool:
    """Return whether a semaphore has yet to reach a number (serial arithmetic, as numbers wrap)."""
    return 0 < (number - value) & 0xFFFFFFFF < 1 << 31


def _lies_in(address: int, found: Sequence[Area]) -> bool:
    return any(area.start <= address < area.end for area in found)


def _high_low(raw: bytes) -> int:
    return (int.from_bytes(raw[:4], "little") & 0x1FFFF) << 32 | int.from_bytes(raw[4:], "little")


def _low_high(raw: bytes) -> int:
    return _high_low(raw[4:] + raw[:4])


@dataclass(frozen=True, slots=True, order=True)
class Area:
    """Bytes [start, end) that the client's driver shares with the GPU."""

    start: int
    end: int


def areas(rows: Iterable[tuple[int, int, str, str]]) -> list[Area]:
    """Return the areas to read, in order, from (start, end, permissions, path) of the low mappings.

    Only system memory that the control device maps, never a device's registers.
    """
    return [
        Area(start, end)
        for start, end, permissions, path in rows
        if end <= LOW_END and "s" in permissions and "r" in permissions and path == "/dev/nvidiactl"
    ]
