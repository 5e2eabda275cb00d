"""PyTorch, set up so that a program computes the same bits each time."""

from __future__ import annotations

import os

# Read when cuBLAS makes its first handle: without it some of its kernels are not reproducible.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor

DEVICE = "cuda:0"


def prepare(seed: int) -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


def as_bytes(tensor: Tensor) -> bytes:
    """Return the bits of a tensor on any device."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data


def wait() -> None:
    torch.cuda.synchronize()
