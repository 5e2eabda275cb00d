"""A cuda-bindings program that reads much memory and never writes it, as models do with weights."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver

from faultinject.programs.devices.nvidia import checked
from faultinject.programs.workloads.bindings.counting import (
    STANDIN_IMAGE,
    THREADS,
    WORDS,
    Counting,
)
from faultinject.programs.workloads.bindings.primary import image_for

# A copy replaces the kernel there; its result depends on the weights, too.
WITH_WEIGH = STANDIN_IMAGE + b"kernel weigh copy 0\n"
LAYERS, ROUNDS = 8, 8
LAYER_BYTES = 1 << 30
UNIT, PER_STEP, UNTIMED = "rounds", ROUNDS, ""


class Weights(Counting):
    """Each round uses a part of each layer, and copies the result."""

    def __init__(self, seed: int, image: bytes, words: int, layer_bytes: int) -> None:
        super().__init__(seed, image, words, events=0)
        self.weigh = checked(driver.cuModuleGetFunction(self.module, b"weigh"))
        self.stream = self._stream()
        self.parts = layer_bytes // self.bytes
        self.layers = [int(checked(driver.cuMemAlloc(layer_bytes))) for _ in range(LAYERS)]
        for layer in self.layers:
            checked(driver.cuMemsetD32(layer, self.random.getrandbits(32), layer_bytes // 4))
        checked(driver.cuCtxSynchronize())

    def _weigh(self, layer: int) -> None:
        part = layer + self.random.randrange(self.parts) * self.bytes
        arguments: Any = ((self.first, part, self.words), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64))
        shape = (self._blocks(self.words), 1, 1, THREADS, 1, 1)
        checked(driver.cuLaunchKernel(self.weigh, *shape, 0, self.stream, arguments, 0))

    def step(self) -> None:
        for _ in range(ROUNDS):
            for layer in self.layers:
                self._weigh(layer)
            checked(driver.cuStreamSynchronize(self.stream))

    def close(self) -> None:
        for layer in self.layers:
            checked(driver.cuMemFree(layer))
        super().close()


def start(seed: int, backend: str) -> Weights:
    small = backend == "simulated"
    words, layer_bytes = (WORDS >> 6, LAYER_BYTES >> 8) if small else (WORDS, LAYER_BYTES)
    return Weights(seed, image_for(backend, WITH_WEIGH), words, layer_bytes)
