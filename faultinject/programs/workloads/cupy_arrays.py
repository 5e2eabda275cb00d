"""A CuPy program: a sort, products, a transform, a kernel of its own, with and without CuPy's memory pool."""

from __future__ import annotations

from collections.abc import Iterator

import cupy

WORDS, SIDE = 1 << 20, 512
UNIT, PER_STEP, UNTIMED = "elements", WORDS, ""


class Arrays:
    def __init__(self, seed: int) -> None:
        self.random = cupy.random.RandomState(seed)
        self.numbers = self.random.standard_normal(WORDS, dtype=cupy.float32)
        self.matrix = self.random.standard_normal((SIDE, SIDE), dtype=cupy.float32) / SIDE**0.5
        self.mix = cupy.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = x * 0.5f + y * y", "mix")
        self.spectrum = cupy.fft.rfft(self.numbers)
        # Beside CuPy's pool: an allocation of the driver's.
        raw = cupy.cuda.memory.Memory(WORDS * 4)
        self.direct = cupy.ndarray(WORDS, cupy.float32, cupy.cuda.MemoryPointer(raw, 0))
        cupy.cuda.Device().synchronize()

    def step(self) -> None:
        self.numbers = self.mix(cupy.sort(self.numbers), self.numbers[::-1])
        self.numbers /= cupy.abs(self.numbers).max()
        self.matrix = cupy.tanh(self.matrix @ self.matrix.T)
        self.spectrum = cupy.fft.rfft(self.numbers)
        self.direct[...] = self.numbers
        self.numbers = self.direct + self.matrix.ravel()[0]
        cupy.cuda.Device().synchronize()

    def results(self) -> Iterator[bytes]:
        for array in (self.numbers, self.matrix, self.spectrum):
            yield cupy.asnumpy(array).tobytes()

    def close(self) -> None:
        cupy.get_default_memory_pool().free_all_blocks()


def start(seed: int, backend: str) -> Arrays:
    return Arrays(seed)
