"""A convolutional network, forwards and backwards."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from faultinject.programs.basics.pytorch import (
    DEVICE,
    as_bytes,
    prepare,
    wait,
)

BATCH, SIDE = 32, 64
UNIT, PER_STEP, UNTIMED = "images", BATCH, ""


class Convolution:
    def __init__(self, seed: int) -> None:
        prepare(seed)
        layers: list[nn.Module] = []
        for before, after in ((3, 64), (64, 128), (128, 128), (128, 256)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.features, self.head = nn.Sequential(*layers), nn.Linear(256, 10)
        self.model = nn.ModuleList([self.features, self.head]).to(DEVICE).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.output = torch.zeros(BATCH, 10, device=DEVICE)

    def step(self) -> None:
        images = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE)
        self.output = self.head(self.features(images).mean((2, 3)))
        self.optimizer.zero_grad(set_to_none=True)
        self.output.square().mean().backward()  # type: ignore[no-untyped-call, unused-ignore]
        self.optimizer.step()
        wait()

    def results(self) -> Iterator[bytes]:
        yield as_bytes(self.output)
        for value in self.model.state_dict().values():
            yield as_bytes(value)

    def close(self) -> None:
        wait()


def start(seed: int, backend: str) -> Convolution:
    return Convolution(seed)
