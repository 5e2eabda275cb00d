"""The training of transformer.py in the driver's stream-ordered memory pool (cudaMallocAsync)."""

from __future__ import annotations

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"

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
    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        raise RuntimeError("PyTorch does not use cudaMallocAsync here")
    return transformer.start(seed, backend)
