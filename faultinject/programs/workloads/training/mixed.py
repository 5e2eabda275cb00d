"""The training of transformer.py with twelve layers, in mixed precision."""

from __future__ import annotations

from faultinject.programs.workloads.training.transformer import (
    PER_STEP,
    UNIT,
    UNTIMED,
    Training,
)

__all__ = ["PER_STEP", "UNIT", "UNTIMED", "start"]

LAYERS = 12


def start(seed: int, backend: str) -> Training:
    return Training(seed, LAYERS, mixed=True)
