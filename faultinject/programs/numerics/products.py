"""The products that the campaign `numerics` computes, and the error of a result.

All inputs are whole numbers from -2 to 2. A sum of at most 4096 products of them is exact in fp32 in any
order, so the reference is exact and a right result differs from it by the rounding of its own type alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LARGEST_INPUT = 2
TYPES = ("bf16", "fp16")
PATHS = ("gemm", "lt")
"""cublasGemmEx, and cublasLtMatmul with the first algorithm of the heuristic: what PyTorch calls."""
BOUND = 0.02
"""The largest relative error of a right result. Rounding to bf16 adds at most 0.004."""


@dataclass(frozen=True, slots=True)
class Case:
    """A product of row-major matrices: C[rows, columns] = A[rows, inner] B[inner, columns], `batch` times.

    `transposed`: B lies in memory as [columns, inner], as the weights of PyTorch's Linear do.
    """

    name: str
    rows: int
    columns: int
    inner: int
    batch: int = 1
    transposed: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the number of elements of A, B and C."""
        sides = (self.rows * self.inner, self.inner * self.columns, self.rows * self.columns)
        return sides[0] * self.batch, sides[1] * self.batch, sides[2] * self.batch


CASES = (
    Case("512x1024x1024", 512, 1024, 1024),
    Case("512x1024x1024 linear", 512, 1024, 1024, transposed=True),
    Case("4096x4096x4096", 4096, 4096, 4096),
    Case("32768x256x512", 32768, 256, 512),
    Case("64x64x64", 64, 64, 64),
    Case("16 times 256x256x256", 256, 256, 256, batch=16),
)


@dataclass(frozen=True, slots=True)
class Product:
    """One result. `error`: the worst relative error; None with `nan`: an element is not finite."""

    type: str
    case: str
    path: str
    error: float | None
    nan: bool

    @property
    def is_wrong(self) -> bool:
        return self.nan or self.error is None or self.error > BOUND


def worst_error(result: Sequence[float], reference: Sequence[float]) -> float | None:
    """Return the largest error of an element, relative to its reference plus the references' RMS.

    None if an element is not finite.
    """
    if not all(map(math.isfinite, result)):
        return None
    rms = math.sqrt(sum(each * each for each in reference) / len(reference))
    pairs = zip(result, reference, strict=True)
    return max(abs(found - exact) / (abs(exact) + rms) for found, exact in pairs)


def all_products() -> Iterator[tuple[str, Case, str]]:
    """Yield type, case and path of each product, the small cases first."""
    for case in sorted(CASES, key=lambda each: each.sizes):
        for kind in TYPES:
            for path in PATHS:
                yield kind, case, path
