"""cuBLAS through ctypes, on the memory of a ctypes driver: two ways to multiply 16-bit matrices.

Values and structures are those of library_types.h, cublas_api.h and cublasLt.h (CUDA 12 and 13).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_int64, c_longlong, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from faultinject.programs.devices.driver import Driver
from faultinject.programs.numerics.products import Case

DATA_TYPES = {"fp16": 2, "bf16": 14}
FP32, COMPUTE_32F, DEFAULT_ALGORITHM = 0, 68, -1
NOT_TRANSPOSED, TRANSPOSED = 0, 1
WORKSPACE_BYTES = 32 << 20
"""As PyTorch gives on Hopper."""
_DESC_TRANSA, _LAYOUT_BATCH_COUNT, _LAYOUT_BATCH_STRIDE, _PREFERENCE_WORKSPACE = 3, 5, 6, 1
_VERSION_PARTS = (0, 1, 2)
_NAMES = ("libcublas.so.13", "libcublas.so.12")
_TOOLKIT = Path("/usr/local/cuda/lib64")


class CublasError(RuntimeError):
    """cuBLAS cannot be loaded, or one of its calls failed."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def candidates() -> Iterator[str]:
    """Yield the places of libcublas: the packages that PyTorch uses, the loader's, the toolkit's."""
    for folder in map(Path, sys.path):
        for name in _NAMES:
            for found in sorted(folder.glob(f"nvidia/*/lib/{name}")):
                yield str(found)
    yield from _NAMES
    yield from (str(_TOOLKIT / name) for name in _NAMES)


def load(named: str = "") -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Return cuBLAS and cuBLASLt. Raises CublasError with the last reason."""
    why = ""
    for path in [named] if named else candidates():
        try:
            # The other library of the same folder first: the loader finds it by its name then.
            lt = ctypes.CDLL(path.replace("libcublas.", "libcublasLt."), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(path), lt
        except OSError as error:
            why = str(error)
    raise CublasError(f"cannot load cuBLAS: {why}")


def version(library: ctypes.CDLL) -> str:
    """Return the version of cuBLAS, as 13.0.2. Raises CublasError."""
    parts = []
    for which in _VERSION_PARTS:
        value = c_int()
        _check("cublasGetProperty", library.cublasGetProperty(which, byref(value)))
        parts.append(str(value.value))
    return ".".join(parts)


def _check(name: str, status: int) -> None:
    if status:
        raise CublasError(f"{name} returned {status}")


class Cublas:
    """Both handles, in the driver's current context. Every method raises CublasError or DeviceError."""

    def __init__(self, driver: Driver, named: str = "") -> None:
        self._library, self._lt_library = load(named)
        self.version = version(self._library)
        self._handle, self._lt_handle = c_void_p(), c_void_p()
        self._call("cublasCreate_v2", byref(self._handle))
        self._lt("cublasLtCreate", byref(self._lt_handle))
        self._workspace = driver.alloc(WORKSPACE_BYTES)

    def _call(self, name: str, *arguments: Any) -> None:
        _check(name, getattr(self._library, name)(*arguments))

    def _lt(self, name: str, *arguments: Any) -> None:
        _check(name, getattr(self._lt_library, name)(*arguments))

    def multiply(self, path: str, case: Case, kind: str, a: int, b: int, c: int) -> None:
        """Compute C from A and B (device addresses) on one of the two paths. Does not wait."""
        (self._gemm if path == "gemm" else self._matmul)(case, DATA_TYPES[kind], a, b, c)

    def _gemm(self, case: Case, data: int, a: int, b: int, c: int) -> None:
        """cuBLAS is column-major: it computes the transpose of C from the transposes of B and A."""
        m, n, k = case.columns, case.rows, case.inner
        operation, leading = _first(case)
        one, zero = c_float(1), c_float(0)
        first, second, result = (c_void_p(address) for address in (b, a, c))
        head = (self._handle, operation, NOT_TRANSPOSED, m, n, k, byref(one))
        if case.batch == 1:
            self._call(
                "cublasGemmEx",
                *(*head, first, data, leading, second, data, k),
                *(byref(zero), result, data, m, COMPUTE_32F, DEFAULT_ALGORITHM),
            )
            return
        strides = [c_longlong(size // case.batch) for size in case.sizes]
        self._call(
            "cublasGemmStridedBatchedEx",
            *(*head, first, data, leading, strides[1], second, data, k, strides[0]),
            *(byref(zero), result, data, m, strides[2], case.batch, COMPUTE_32F, DEFAULT_ALGORITHM),
        )

    def _matmul(self, case: Case, data: int, a: int, b: int, c: int) -> None:
        m, n, k = case.columns, case.rows, case.inner
        operation, leading = _first(case)
        description, preference = c_void_p(), c_void_p()
        self._lt("cublasLtMatmulDescCreate", byref(description), COMPUTE_32F, FP32)
        self._set("MatmulDesc", description, _DESC_TRANSA, ctypes.c_int32(operation))
        shape = (k, m) if case.transposed else (m, k)
        sizes = [size // case.batch for size in case.sizes]
        first = self._layout(data, *shape, leading, case.batch, sizes[1])
        second = self._layout(data, k, n, k, case.batch, sizes[0])
        result = self._layout(data, m, n, m, case.batch, sizes[2])
        self._lt("cublasLtMatmulPreferenceCreate", byref(preference))
        self._set("MatmulPreference", preference, _PREFERENCE_WORKSPACE, c_uint64(WORKSPACE_BYTES))
        found, count = _Heuristic(), c_int()
        self._lt(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self._lt_handle, description, first, second, result, result, preference),
            *(1, byref(found), byref(count)),
        )
        if not count.value:
            raise CublasError(f"cublasLtMatmulAlgoGetHeuristic knows no algorithm for {case.name}")
        one, zero = c_float(1), c_float(0)
        self._lt(
            "cublasLtMatmul",
            *(self._lt_handle, description, byref(one), c_void_p(b), first, c_void_p(a), second),
            *(byref(zero), c_void_p(c), result, c_void_p(c), result),
            *(byref(found), c_void_p(self._workspace), c_size_t(WORKSPACE_BYTES), c_void_p(0)),
        )

    def _layout(self, data: int, rows: int, columns: int, leading: int, batch: int, stride: int) -> c_void_p:
        layout = c_void_p()
        sides = (c_uint64(rows), c_uint64(columns), c_int64(leading))
        self._lt("cublasLtMatrixLayoutCreate", byref(layout), data, *sides)
        if batch > 1:
            self._set("MatrixLayout", layout, _LAYOUT_BATCH_COUNT, ctypes.c_int32(batch))
            self._set("MatrixLayout", layout, _LAYOUT_BATCH_STRIDE, c_int64(stride))
        return layout

    def _set(self, what: str, of: c_void_p, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._lt(f"cublasLt{what}SetAttribute", of, attribute, byref(value), size)


def _first(case: Case) -> tuple[int, int]:
    """Return the operation on B and its leading dimension, in column-major terms."""
    return (TRANSPOSED, case.inner) if case.transposed else (NOT_TRANSPOSED, case.columns)
