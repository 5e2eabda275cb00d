"""Work of a copy engine alone: in its stream is no kernel, and each step is mostly a large copy."""

from __future__ import annotations

import ctypes

from faultinject.measure.failover_driver import Driver

STEPS, STEP = 1 << 16, 16
FROM_HOST_BYTES, WITHIN_BYTES = 2 << 20, 64 << 20


class Engine:
    """Copies a large piece, and then the number of the step to `target`, over and over."""

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
        """One step; the first code that is not 0."""
        number = self._numbers + STEP * (self._step % STEPS)
        self._step += 1
        code = self._driver.code(self._call, self._scratch, self._from, self._size, self.stream)
        return code or self._driver.code(self._call, self._target, number, 8, self.stream)
