"""JAX, set up so that a program computes the same bits each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy

FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
"""Without them the results differ from run to run."""


def prepare(fraction: float, *, at_once: bool = True) -> None:
    """Let XLA take this fraction of the memory for its pool, or let its pool grow up to that.

    Call it before the first array is made.
    """
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(fraction)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(at_once).lower()


def as_bytes(tree: Any) -> Iterator[bytes]:
    """Yield the bits of all arrays in a tree of them."""
    for leaf in jax.tree_util.tree_leaves(tree):
        yield numpy.asarray(leaf).tobytes()
