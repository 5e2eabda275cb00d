"""A cuda-bindings program that maps its memory itself: one address range, which grows and shrinks.

Buffers cross the mappings of 2 MiB each. In every step more is mapped behind them, filled by a kernel, copied
into one of them, and unmapped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from cuda.bindings import driver

from faultinject.programs.devices.nvidia import checked
from faultinject.programs.workloads.bindings.allocations import (
    PER_STEP,
    PIECES,
    STANDIN_IMAGE,
    THREADS,
    UNIT,
    UNTIMED,
    Pieces,
)
from faultinject.programs.workloads.bindings.primary import image_for

__all__ = ["PER_STEP", "UNIT", "UNTIMED", "start"]

MAPPING, MOST = 2 << 20, 256
ALIGNMENT = 512


class Segment:
    """Reserved addresses, of which the first are mapped."""

    def __init__(self, device: int) -> None:
        self._property = driver.CUmemAllocationProp()
        self._property.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = driver.CUmemAccessDesc()
        for of in (self._property, self._access):
            of.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            of.location.id = device
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.base = int(checked(driver.cuMemAddressReserve(MOST * MAPPING, 0, 0, 0)))
        self._handles: list[Any] = []

    @property
    def end(self) -> int:
        return self.base + len(self._handles) * MAPPING

    def grow(self) -> None:
        """Grow by one mapping."""
        handle = checked(driver.cuMemCreate(MAPPING, self._property, 0))
        checked(driver.cuMemMap(self.end, MAPPING, 0, handle, 0))
        checked(driver.cuMemSetAccess(self.end, MAPPING, [self._access], 1))
        self._handles.append(handle)

    def shrink(self, end: int) -> None:
        """Shrink to that length, at the end of a mapping."""
        checked(driver.cuMemUnmap(end, self.end - end))
        while self.end > end:
            checked(driver.cuMemRelease(self._handles.pop()))

    def close(self) -> None:
        self.shrink(self.base)
        checked(driver.cuMemAddressFree(self.base, MOST * MAPPING))


class Segments(Pieces):
    def __init__(self, seed: int, image: bytes) -> None:
        self.segment: Segment | None = None
        self.used = 0
        super().__init__(seed, image)

    def _new(self, words: int) -> int:
        if self.segment is None:
            self.segment = Segment(int(self.device))
        at = self.segment.base + self.used
        self.used += -(-words * 4 // ALIGNMENT) * ALIGNMENT
        while self.segment.end < self.segment.base + self.used:
            self.segment.grow()
        checked(driver.cuMemsetD32(at, 0, words))
        return at

    def step(self) -> None:
        super().step()
        assert self.segment is not None
        end, stream, number = self.segment.end, self.streams[0], self.random.randrange(PIECES)
        for _ in range(self.random.randrange(1, 4)):
            self.segment.grow()
        words = (self.segment.end - end) // 4
        arguments = (
            (end, words, self.random.getrandbits(32)),
            (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32),
        )
        grid = min(1024, words // THREADS)
        checked(driver.cuLaunchKernel(self.fill, grid, 1, 1, THREADS, 1, 1, 0, stream, arguments, 0))
        size = min(self.words[number], words) * 4
        into = self.at[number]
        checked(driver.cuMemcpyDtoDAsync(into, self.segment.end - size, size, stream))
        checked(driver.cuCtxSynchronize())
        self.segment.shrink(end)

    def results(self) -> Iterator[bytes]:
        for at, words in zip(self.at, self.words, strict=True):
            data = bytearray(words * 4)
            checked(driver.cuMemcpyDtoH(data, at, len(data)))
            yield bytes(data)

    def close(self) -> None:
        assert self.segment is not None
        self.segment.close()
        checked(driver.cuDevicePrimaryCtxRelease(self.device))


def start(seed: int, backend: str) -> Segments:
    return Segments(seed, image_for(backend, STANDIN_IMAGE))
