"""The training of transformer.py with a smaller body, which torch.compile turns into kernels of its own."""

from __future__ import annotations

import os

# It compiles in its own process: a pool of compilers outlives a program that a fault ends.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

from faultinject.programs.workloads.training.transformer import (
    PER_STEP,
    UNIT,
    UNTIMED,
    Training,
)

__all__ = ["PER_STEP", "UNIT", "UNTIMED", "start"]

LAYERS = 2


def start(seed: int, backend: str) -> Training:
    return Training(seed, LAYERS, compiled=True)
