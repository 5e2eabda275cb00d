"""CUDA graphs: a captured piece of work, replayed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from faultinject.programs.basics.pytorch import (
    DEVICE,
    as_bytes,
    prepare,
    wait,
)

SIDE, REPLAYS = 1024, 20
UNIT, PER_STEP, UNTIMED = "replays", REPLAYS, ""


class Graphs:
    def __init__(self, seed: int) -> None:
        prepare(seed)
        self.weights = [torch.randn(SIDE, SIDE, device=DEVICE) / SIDE**0.5 for _ in range(8)]
        self.state = torch.randn(SIDE, SIDE, device=DEVICE)
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            # Objects that PyTorch makes lazily must exist before the capture.
            self._advance()
        torch.cuda.current_stream().wait_stream(beside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._advance()
        wait()

    def _advance(self) -> None:
        state = self.state
        for weight in self.weights:
            state = torch.tanh(state @ weight + 0.1)
        self.state.copy_(state)

    def step(self) -> None:
        for _ in range(REPLAYS):
            self.graph.replay()
        wait()

    def results(self) -> Iterator[bytes]:
        yield as_bytes(self.state)

    def close(self) -> None:
        self.graph.reset()


def start(seed: int, backend: str) -> Graphs:
    return Graphs(seed)
