"""torch.multiprocessing: a tensor on the GPU shared with a spawned child, both write to it in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch import multiprocessing as mp

from faultinject.programs.basics.processes import end_with_parent
from faultinject.programs.basics.pytorch import (
    DEVICE,
    as_bytes,
    prepare,
    wait,
)

WORDS = 1 << 20
PATIENCE_S = 60.0
UNIT, PER_STEP = "hand-overs", 1
UNTIMED = "a step is mostly two processes waking each other"


def child(parent: int, orders: Any, answers: Any) -> None:
    """Do the requested work on the shared tensor, in the other process."""
    end_with_parent(parent)
    shared: Tensor = orders.get(timeout=PATIENCE_S)
    answers.put("here")
    while (order := orders.get()) is not None:
        shared.mul_(0.75).add_(order)
        torch.cuda.synchronize()
        answers.put("done")
    del shared


class Sharing:
    def __init__(self, seed: int) -> None:
        prepare(seed)
        context = mp.get_context("spawn")
        self.orders, self.answers = context.Queue(), context.Queue()
        self.shared = torch.randn(WORDS, device=DEVICE)
        wait()
        arguments = (os.getpid(), self.orders, self.answers)
        self.child = context.Process(target=child, args=arguments, daemon=True)
        self.child.start()
        self.orders.put(self.shared)
        self.answers.get(timeout=PATIENCE_S)
        self.steps = 0

    def step(self) -> None:
        self.shared.add_(1.0)
        wait()
        self.orders.put(float(self.steps))
        self.answers.get(timeout=PATIENCE_S)
        self.steps += 1

    def results(self) -> Iterator[bytes]:
        yield as_bytes(self.shared)

    def close(self) -> None:
        self.orders.put(None)
        self.child.join(PATIENCE_S)


def start(seed: int, backend: str) -> Sharing:
    return Sharing(seed)
