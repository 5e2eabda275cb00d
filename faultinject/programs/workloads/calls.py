"""A program that calls the driver by ctypes: memory is allocated, set, copied, read and freed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from faultinject.programs.devices.driver import Driver

PIECES, LARGEST = 16, 4 << 20
UNIT, PER_STEP = "pieces", PIECES
UNTIMED = "its steps are mostly allocations, which no training step is"


class Calls:
    def __init__(self, seed: int) -> None:
        self.driver = Driver()
        self.random = random.Random(seed)
        self.sizes = [self.random.randrange(4, LARGEST >> self.random.randrange(12)) for _ in range(PIECES)]
        self.at = [self._new(size) for size in self.sizes]

    def _new(self, size: int) -> int:
        at = self.driver.alloc(size)
        self.driver.set(at, 0, size)
        return at

    def step(self) -> None:
        for number, (at, size) in enumerate(zip(self.at, self.sizes, strict=True)):
            offset = self.random.randrange(size)
            self.driver.set(at + offset, self.random.getrandbits(8), size - offset)
            into = (number + 1) % PIECES
            self.driver.copy(self.at[into], at, min(size, self.sizes[into]))
        for number in self.random.sample(range(PIECES), 3):
            self.driver.free(self.at[number])
            self.at[number] = self._new(self.sizes[number])
        self.driver.synchronize()

    def results(self) -> Iterator[bytes]:
        for at, size in zip(self.at, self.sizes, strict=True):
            yield self.driver.read(at, size)

    def close(self) -> None:
        for at in self.at:
            self.driver.free(at)
        self.driver.close()


def start(seed: int, backend: str) -> Calls:
    return Calls(seed)
