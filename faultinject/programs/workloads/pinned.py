"""Pinned host memory: asynchronous copies in both directions, with work between them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from faultinject.programs.basics.pytorch import (
    DEVICE,
    as_bytes,
    prepare,
    wait,
)

WORDS, PIECES = 1 << 22, 4
UNIT, PER_STEP, UNTIMED = "bytes", 2 * 4 * WORDS * PIECES, ""


class Pinned:
    def __init__(self, seed: int) -> None:
        prepare(seed)
        self.sources = [torch.randn(WORDS).pin_memory() for _ in range(PIECES)]
        self.targets = [torch.empty(WORDS, pin_memory=True) for _ in range(PIECES)]
        self.beside = torch.cuda.Stream()
        self.steps = 0

    def step(self) -> None:
        self.beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.beside):
            for source, target in zip(self.sources, self.targets, strict=True):
                there = source.to(DEVICE, non_blocking=True)
                target.copy_(there * 1.0001 + self.steps, non_blocking=True)
        self.beside.synchronize()
        self.sources, self.targets = self.targets, self.sources
        self.steps += 1

    def results(self) -> Iterator[bytes]:
        for source in self.sources:
            yield as_bytes(source)

    def close(self) -> None:
        wait()


def start(seed: int, backend: str) -> Pinned:
    return Pinned(seed)
