"""generate.py with a model of 2.5 billion weights (10 GB), each of which is read for each token."""

from __future__ import annotations

from faultinject.proxy.work.generate import BEAT, PER_STEP, UNIT, UNTIMED, Generation, Size

__all__ = ["BEAT", "PER_STEP", "UNIT", "UNTIMED", "start"]

# Few tokens a step: validation looks at all memory after each of the kernels of one.
LARGE = Size(width=2560, layers=32, heads=20, new=8)


def start(seed: int, backend: str) -> Generation:
    return Generation(seed, LARGE)
