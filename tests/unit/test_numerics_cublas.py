"""The calls of cuBLAS that the campaign `numerics` makes, against a library that follows its documentation.

cuBLAS is column-major, and the products of the campaign are row-major, as PyTorch's are.
"""

from __future__ import annotations

import ctypes
from ctypes import sizeof
from typing import Any

import pytest

from faultinject.programs.numerics import cublas
from faultinject.programs.numerics.cublas import Cublas, CublasError
from faultinject.programs.numerics.products import PATHS, Case

A, B, C = 0x1000, 0x2000, 0x3000
CASES = (
    Case("plain", 2, 3, 4),
    Case("linear", 2, 3, 4, transposed=True),
    Case("batch", 2, 3, 4, batch=3),
    Case("linear batch", 3, 2, 5, batch=2, transposed=True),
)


def number(value: Any) -> int:
    """Return a value that is passed as an int or as a ctypes object."""
    return int(getattr(value, "value", value) or 0)


class Library:
    """cuBLAS and cuBLASLt over lists of numbers, by address. Each call returns a status."""

    def __init__(self) -> None:
        self.memory: dict[int, list[float]] = {}
        self.made: dict[int, dict[Any, Any]] = {}
        self.knows = 1

    def cublasGetProperty(self, which: int, value: Any) -> int:
        value._obj.value = (13, 0, 2)[which]
        return 0

    def cublasCreate_v2(self, handle: Any) -> int:
        return 0

    cublasLtCreate = cublasCreate_v2

    def cublasGemmEx(self, *given: Any) -> int:
        _, ta, tb, m, n, k, one, a, at, lda, b, bt, ldb, zero, c, ct, ldc, compute, algorithm = given
        assert (one._obj.value, zero._obj.value, compute, algorithm) == (1.0, 0.0, 68, -1)
        assert at == bt == ct == cublas.DATA_TYPES["bf16"]
        self._multiply((ta, tb), (m, n, k), (a, lda, 0), (b, ldb, 0), (c, ldc, 0), 1)
        return 0

    def cublasGemmStridedBatchedEx(self, *given: Any) -> int:
        (_, ta, tb, m, n, k, one, a, at, lda, sa, b, bt, ldb, sb, zero, c, ct, ldc, sc, batch, compute, _) = (
            given
        )
        assert (one._obj.value, zero._obj.value, compute) == (1.0, 0.0, 68)
        assert at == bt == ct == cublas.DATA_TYPES["bf16"]
        self._multiply((ta, tb), (m, n, k), (a, lda, sa), (b, ldb, sb), (c, ldc, sc), batch)
        return 0

    def _make(self, out: Any, **facts: Any) -> int:
        out._obj.value = 0x100 + len(self.made)
        self.made[out._obj.value] = facts
        return 0

    def cublasLtMatmulDescCreate(self, out: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._make(out)

    def cublasLtMatmulPreferenceCreate(self, out: Any) -> int:
        return self._make(out)

    def cublasLtMatrixLayoutCreate(self, out: Any, data: int, rows: Any, columns: Any, leading: Any) -> int:
        assert data == cublas.DATA_TYPES["bf16"]
        assert (sizeof(rows), sizeof(columns), sizeof(leading)) == (8, 8, 8)
        return self._make(out, rows=number(rows), columns=number(columns), leading=number(leading))

    def _set(self, of: Any, attribute: int, value: Any, size: Any) -> int:
        assert sizeof(value._obj) == number(size)
        self.made[of.value][attribute] = number(value._obj)
        return 0

    cublasLtMatmulDescSetAttribute = cublasLtMatrixLayoutSetAttribute = _set
    cublasLtMatmulPreferenceSetAttribute = _set

    def cublasLtMatmulAlgoGetHeuristic(self, *given: Any) -> int:
        assert given[6].value in self.made and given[7] == 1
        given[9]._obj.value = self.knows
        return 0

    def cublasLtMatmul(self, *given: Any) -> int:
        _, description, one, a, first, b, second, zero, c, third, d, result, _, _, size, _ = given
        assert (one._obj.value, zero._obj.value) == (1.0, 0.0)
        assert c.value == d.value and third.value == result.value
        assert number(size) == cublas.WORKSPACE_BYTES
        operation = self.made[description.value].get(3, 0)
        of = [self.made[layout.value] for layout in (first, second, result)]
        m, n = of[2]["rows"], of[2]["columns"]
        k = of[1]["rows"]
        assert (of[0]["rows"], of[0]["columns"]) == ((k, m) if operation else (m, k))
        assert of[1]["columns"] == n
        operands = [(p, o["leading"], o.get(6, 0)) for p, o in zip((a, b, d), of, strict=True)]
        self._multiply((operation, 0), (m, n, k), *operands, of[2].get(5, 1))
        return 0

    def _multiply(
        self, transposed: tuple[int, int], sides: tuple[int, int, int], a: Any, b: Any, c: Any, batch: int
    ) -> None:
        """Compute C = op(A) op(B) of column-major matrices: (address, leading dimension, stride)."""
        m, n, k = sides
        for each in range(batch):
            for i in range(m):
                for j in range(n):
                    pairs = (
                        (self._at(a, each, i, x, transposed[0]), self._at(b, each, x, j, transposed[1]))
                        for x in range(k)
                    )
                    target = self.memory[number(c[0])]
                    target[each * number(c[2]) + i + j * c[1]] = sum(x * y for x, y in pairs)

    def _at(self, of: Any, each: int, row: int, column: int, transposed: int) -> float:
        if transposed:
            row, column = column, row
        return self.memory[number(of[0])][each * number(of[2]) + row + column * of[1]]


class Memory:
    def alloc(self, size: int) -> int:
        return 0x9000


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(cublas, "load", lambda named: (made, made))
    return made


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_row_major_product_is_computed(library: Library, case: Case, path: str) -> None:
    sizes = case.sizes
    a, b = [float(x % 5 - 2) for x in range(sizes[0])], [float(x % 7 - 3) for x in range(sizes[1])]
    library.memory = {A: a, B: b, C: [float("nan")] * sizes[2]}
    made = Cublas(Memory(), "")  # type: ignore[arg-type]
    made.multiply(path, case, "bf16", A, B, C)
    r, c, k = case.rows, case.columns, case.inner
    expected = []
    for each in range(case.batch):
        for i in range(r):
            for j in range(c):
                of_b = [each * k * c + (j * k + x if case.transposed else x * c + j) for x in range(k)]
                expected.append(sum(a[each * r * k + i * k + x] * b[of_b[x]] for x in range(k)))
    assert library.memory[C] == expected
    assert made.version == "13.0.2"


def test_a_heuristic_without_an_algorithm_is_an_error(library: Library) -> None:
    library.knows = 0
    library.memory = {A: [0.0] * 8, B: [0.0] * 12, C: [0.0] * 6}
    with pytest.raises(CublasError, match="knows no algorithm"):
        Cublas(Memory(), "").multiply("lt", CASES[0], "bf16", A, B, C)  # type: ignore[arg-type]


def test_the_result_of_the_heuristic_has_the_size_of_the_header() -> None:
    assert ctypes.sizeof(cublas._Heuristic) == 96


def test_a_library_that_cannot_be_loaded_is_an_error() -> None:
    with pytest.raises(CublasError, match="cannot load cuBLAS"):
        cublas.load("/nowhere/libcublas.so.13")
