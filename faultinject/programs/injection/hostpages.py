"""Host memory of this program. A kernel gets its address by mistake."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from faultinject.programs.devices.base import DeviceError
from mpsd.zones import layout
from mpsd.zones.ledger import Ledger

SIZE = 8 << 20
DEADLINE_S = 30.0
POLL_S = 0.05


class HostPages:
    """Pages that the driver does not know, all zeroes."""

    def __init__(self) -> None:
        self._pages = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages[:] = bytes(SIZE)
        self._view = ctypes.c_char.from_buffer(self._pages)
        self.middle = ctypes.addressof(self._view) + SIZE // 2

    def await_guard(self) -> None:
        """Wait until the proxy has covered the middle. Raises DeviceError at the deadline."""
        until = time.monotonic() + DEADLINE_S
        while not any(start <= self.middle < end for start, end in _sparse_zones()):
            if time.monotonic() > until:
                raise DeviceError(0, "the program's host memory is not under guard")
            time.sleep(POLL_S)

    def prove_whole(self) -> None:
        """Raise DeviceError if anything was written there."""
        if self._pages[:] != bytes(SIZE):
            raise DeviceError(0, "host memory was written by the GPU")


def _sparse_zones() -> Iterator[tuple[int, int]]:
    """Yield what this process's sparse zones cover, by its own ledger."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(path).startswith("/memfd:mpsd-ledger"):
                continue
            ledger = Ledger(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            rows = layout.ZONE.iter_unpack(ledger.zone_bytes())
            yield from ((start, end) for _, kind, _, start, end, _ in rows if kind == layout.Kind.SPARSE)
            ledger.close()
