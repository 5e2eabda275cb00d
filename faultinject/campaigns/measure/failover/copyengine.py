"""Work of a copy engine alone: its stream has no kernel, and each step is mostly a large copy."""

from __future__ import annotations

import ctypes
import threading
import time

from faultinject.programs.devices.instance import GRANULE, Driver, now

STEPS, STEP = 1 << 16, 16
FROM_HOST_BYTES, WITHIN_BYTES = 2 << 20, 64 << 20
LOOK_S = 0.00002
MARK = 7


class Engine:
    """Copies a large block, then the number of the step to `target`, repeatedly."""

    def __init__(self, driver: Driver, target: int, *, from_host: bool) -> None:
        self._driver, self._target = driver, target
        self._size = FROM_HOST_BYTES if from_host else WITHIN_BYTES
        self._call = "cuMemcpyHtoDAsync_v2" if from_host else "cuMemcpyDtoDAsync_v2"
        numbers = b"".join(number.to_bytes(8, "little") + bytes(STEP - 8) for number in range(1, STEPS + 1))
        self.stream = driver.stream()
        self._scratch = driver.alloc(self._size)
        if from_host:
            self._from = driver.made("cuMemHostAlloc", self._size, 0)
            self._numbers = driver.made("cuMemHostAlloc", len(numbers), 0)
            ctypes.memmove(self._numbers, numbers, len(numbers))
        else:
            self._from, self._numbers = driver.alloc(self._size), driver.alloc(len(numbers))
            driver("cuMemcpyHtoD_v2", self._numbers, numbers, len(numbers))
        self._step = 0

    def submit(self) -> int:
        """Submit one step; return the first code that is not 0."""
        number = self._numbers + STEP * (self._step % STEPS)
        self._step += 1
        code = self._driver.code(self._call, self._scratch, self._from, self._size, self.stream)
        return code or self._driver.code(self._call, self._target, number, 8, self.stream)


class ToHost:
    """Copies a whole granule into pinned host memory, repeatedly, and detects when a copy arrives.

    Three words of the source, the last one among them, are MARK. The host overwrites them with 0 again and
    again: a word that is not 0 any more shows that a copy came after that (`before`), and by now (`seen`).
    """

    WORDS = (GRANULE // 256, GRANULE // 2, GRANULE - 8)

    def __init__(self, driver: Driver, source: int) -> None:
        self._driver, self._source = driver, source
        self._to = driver.made("cuMemHostAlloc", GRANULE, 0)
        self._seen = [ctypes.c_uint64.from_address(self._to + at) for at in self.WORDS]
        for at in self.WORDS:
            driver.write_u32(source + at, MARK)
        self.stream = driver.stream()
        self.copies, self.before, self.seen = 0, 0.0, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def submit(self) -> int:
        """Submit one copy; return its code."""
        return self._driver.code("cuMemcpyDtoHAsync_v2", self._to, self._source, GRANULE, self.stream)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2)

    def _watch(self) -> None:
        cleared = [0.0] * len(self._seen)
        while not self._stop.is_set():
            for i, word in enumerate(self._seen):
                if cleared[i] and not word.value:
                    continue
                if cleared[i]:
                    self.copies += 1
                    self.before, self.seen = max(self.before, cleared[i]), now()
                cleared[i] = now()
                word.value = 0
            time.sleep(LOOK_S)
