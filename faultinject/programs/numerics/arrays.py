"""Inputs and references of the products as files, and the error of a large result. Needs numpy."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from faultinject.programs.numerics.products import CASES, LARGEST_INPUT, TYPES, Case

Array = Any


def prepare(folder: Path, seed: int) -> None:
    """Write the inputs of each case in each type, and the exact results as fp32. Raises OSError."""
    random = np.random.default_rng(seed)
    for case in CASES:
        shape_a, shape_b = (case.batch, case.rows, case.inner), (case.batch, case.inner, case.columns)
        a, b = (_random(random, shape) for shape in (shape_a, shape_b))
        np.matmul(a, b).tofile(_path(folder, case, "reference"))
        stored = np.ascontiguousarray(b.swapaxes(1, 2)) if case.transposed else b
        for kind in TYPES:
            encoded(a, kind).tofile(_path(folder, case, f"a-{kind}"))
            encoded(stored, kind).tofile(_path(folder, case, f"b-{kind}"))


def _random(random: Any, shape: tuple[int, ...]) -> Array:
    return random.integers(-LARGEST_INPUT, LARGEST_INPUT + 1, shape, np.int8).astype(np.float32)


def _path(folder: Path, case: Case, what: str) -> Path:
    return folder / f"{case.name.replace(' ', '-')}-{what}"


def inputs(folder: Path, case: Case, kind: str) -> tuple[bytes, bytes]:
    """Return the bytes of A and B. Raises OSError."""
    return _path(folder, case, f"a-{kind}").read_bytes(), _path(folder, case, f"b-{kind}").read_bytes()


def encoded(values: Array, kind: str) -> Array:
    """Return fp32 values that the type has exactly, in that type: 16-bit words."""
    if kind == "fp16":
        return values.astype(np.float16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def decoded(data: bytes, kind: str) -> Array:
    """Return the values of a result as fp32."""
    if kind == "fp16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def error_of(data: bytes, kind: str, folder: Path, case: Case) -> float | None:
    """Return the error of a result as products.worst_error() does. Raises OSError."""
    exact, scale = _reference(folder, case)
    off = decoded(data, kind)
    np.subtract(off, exact, out=off)
    np.abs(off, out=off)
    np.divide(off, scale, out=off)
    # An element that is not finite shows in the maximum.
    worst = float(off.max())
    return worst if math.isfinite(worst) else None


@lru_cache(maxsize=1)
def _reference(folder: Path, case: Case) -> tuple[Array, Array]:
    """Return the exact values, and the absolute value of each plus the RMS of all. Raises OSError."""
    exact = np.fromfile(_path(folder, case, "reference"), np.float32)
    rms = np.sqrt(np.mean(np.square(exact, dtype=np.float64))).astype(np.float32)
    return exact, np.abs(exact) + rms
