"""The training of transformer.py in PyTorch's expandable segments, which the program maps itself."""

from __future__ import annotations

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch

from faultinject.programs.workloads.training import transformer
from faultinject.programs.workloads.training.transformer import (
    PER_STEP,
    UNIT,
    UNTIMED,
    Training,
)

__all__ = ["PER_STEP", "UNIT", "UNTIMED", "start"]


def start(seed: int, backend: str) -> Training:
    """Raise RuntimeError where PyTorch has allocated its memory in another way."""
    training = transformer.start(seed, backend)
    if not all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()):
        raise RuntimeError("PyTorch does not use expandable segments here")
    return training
