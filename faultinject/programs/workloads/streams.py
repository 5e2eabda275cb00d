"""Work in several streams that read each other's results and wait for one another by events."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from faultinject.programs.basics.pytorch import (
    DEVICE,
    as_bytes,
    prepare,
    wait,
)

SIDE, STREAMS, ROUNDS = 768, 4, 6
UNIT, PER_STEP, UNTIMED = "products", STREAMS * ROUNDS, ""


class Streams:
    def __init__(self, seed: int) -> None:
        prepare(seed)
        self.streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        self.weight = torch.randn(SIDE, SIDE, device=DEVICE) / SIDE**0.5
        self.states = [torch.randn(SIDE, SIDE, device=DEVICE) for _ in self.streams]
        wait()

    def step(self) -> None:
        for _ in range(ROUNDS):
            events = []
            for number, stream in enumerate(self.streams):
                with torch.cuda.stream(stream):
                    self.states[number] = torch.tanh(self.states[number] @ self.weight)
                    events.append(stream.record_event())
            before = list(self.states)
            for number, stream in enumerate(self.streams):
                stream.wait_event(events[number - 1])
                with torch.cuda.stream(stream):
                    self.states[number] = before[number] * 0.5 + before[number - 1] * 0.5
            # `before` is kept until all have read it: freed memory goes to its own stream's next work.
            for stream in self.streams:
                torch.cuda.current_stream().wait_stream(stream)
            for stream in self.streams:
                stream.wait_stream(torch.cuda.current_stream())
        wait()

    def results(self) -> Iterator[bytes]:
        for state in self.states:
            yield as_bytes(state)

    def close(self) -> None:
        wait()


def start(seed: int, backend: str) -> Streams:
    return Streams(seed)
