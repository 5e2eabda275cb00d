"""The training of training.py, with a pool that begins small and grows as the program needs memory."""

from __future__ import annotations

from faultinject.programs.basics import xla
from faultinject.programs.workloads.xla.training import (
    PER_STEP,
    UNIT,
    UNTIMED,
    Training,
)

__all__ = ["PER_STEP", "UNIT", "UNTIMED", "start"]

POOL = 0.75


def start(seed: int, backend: str) -> Training:
    xla.prepare(POOL, at_once=False)
    return Training(seed)
