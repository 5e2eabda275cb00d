"""generate.py with a model of 1.6 billion weights (6 GB), each of which is read for each token."""

from __future__ import annotations

from faultinject.programs.workloads.generate import (
    BEAT,
    PER_STEP,
    UNIT,
    UNTIMED,
    Generation,
    Size,
    gpt2,
)

__all__ = ["BEAT", "PER_STEP", "UNIT", "UNTIMED", "start"]

# Few tokens a step: validation compares all memory after each kernel.
LARGE = Size(width=4096, layers=8, heads=32, new=4)


def start(seed: int, backend: str) -> Generation:
    return Generation(seed, lambda: gpt2(LARGE), LARGE.new)
