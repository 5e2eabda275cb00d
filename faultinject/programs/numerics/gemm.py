"""A client that multiplies matrices under its own thread percentage and says how wrong each result is.

On a GPU cuBLAS computes. On the simulated GPU this program computes by itself, and spoils its results at the
percentages of --wrong: that tests the campaign and says nothing about any GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from faultinject.programs.basics.messages import identity, no_core_dumps, say
from faultinject.programs.devices.base import BACKENDS, DeviceError, open_device
from faultinject.programs.numerics.products import (
    LARGEST_INPUT,
    Case,
    Product,
    all_products,
    worst_error,
)
from mpsd.base.percentages import VARIABLE

SM_COUNT = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT."""
SIMULATED_SMS, SIMULATED_SIDE = 132, 6
ROUNDS = 2
"""Each product is computed so often, and the worst result counts: a wrong one may not come each time."""
UNWRITTEN = 0xFF
"""A result is filled with it before the product: not a number in both types."""


def on_gpu(folder: Path, library: str) -> Iterator[Product]:
    """Say what the client sees, then yield each product. Raises CublasError, DeviceError, OSError."""
    import ctypes

    from faultinject.programs.devices.driver import Driver
    from faultinject.programs.numerics import arrays
    from faultinject.programs.numerics.cublas import Cublas

    driver = Driver()
    sms = ctypes.c_int()
    driver.call("cuDeviceGetAttribute", ctypes.byref(sms), SM_COUNT, 0)
    cublas = Cublas(driver, library)
    say("begun", **identity(), sms=sms.value, cublas=cublas.version)
    for kind, case, path in all_products():
        a, b, c = (driver.alloc(2 * size) for size in case.sizes)
        size = 2 * case.sizes[2]
        for address, data in zip((a, b), arrays.inputs(folder, case, kind), strict=True):
            driver.write(address, data)
        errors = []
        for _ in range(ROUNDS):
            driver.set(c, UNWRITTEN, size)
            driver.synchronize()
            cublas.multiply(path, case, kind, a, b, c)
            driver.synchronize()
            errors.append(arrays.error_of(driver.read(c, size), kind, folder, case))
        for address in (a, b, c):
            driver.free(address)
        known = [error for error in errors if error is not None]
        nan = len(known) < len(errors)
        yield Product(kind, case.name, path, None if nan else max(known), nan)


def simulated(wrong: frozenset[int]) -> Iterator[Product]:
    """As on_gpu(), with small matrices that this program multiplies. Raises DeviceError."""
    device = open_device("simulated")
    percentage = float(os.environ.get(VARIABLE, "100"))
    sms = max(2, int(SIMULATED_SMS * percentage / 100) // 2 * 2)
    say("begun", **identity(), sms=sms, cublas="simulated")
    for kind, case, path in all_products():
        exact = _multiplied(case)
        found = [_rounded(each, kind) for each in exact]
        if percentage in wrong and kind == "bf16":
            found[0] += 1 + abs(found[0])
        elif percentage in wrong and case.rows == case.columns == case.inner:
            found[-1] = float("nan")
        error = worst_error(found, exact)
        yield Product(kind, case.name, path, error, error is None)
    device.close()


def _multiplied(case: Case) -> list[float]:
    """Return the product of two small matrices, of the case's proportions where they are small."""
    inner, seed = min(case.inner, SIMULATED_SIDE), random.Random(case.name)
    draw = [seed.randint(-LARGEST_INPUT, LARGEST_INPUT) for _ in range(2 * SIMULATED_SIDE * inner)]
    rows = [draw[at : at + inner] for at in range(0, len(draw), inner)]
    left, right = rows[:SIMULATED_SIDE], rows[SIMULATED_SIDE:]
    return [float(sum(x * y for x, y in zip(a, b, strict=True))) for a in left for b in right]


def _rounded(value: float, kind: str) -> float:
    """Return the value as the 16-bit type keeps it; bf16 by truncation."""
    if kind == "fp16":
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    return float(struct.unpack("<f", b"\0\0" + struct.pack("<f", value)[2:])[0])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--inputs", type=Path, default=Path(), help="folder of inputs and references")
    parser.add_argument("--cublas", default="", help="the libcublas to load; default: PyTorch's")
    parser.add_argument("--wrong", default="", help="simulated GPU: percentages with wrong results")
    args = parser.parse_args(argv)
    no_core_dumps()
    wrong = frozenset(int(word) for word in args.wrong.split(",") if word)
    try:
        products = simulated(wrong) if args.backend == "simulated" else on_gpu(args.inputs, args.cublas)
        for each in products:
            say("product", type=each.type, case=each.case, path=each.path, error=each.error, nan=each.nan)
    except (DeviceError, OSError, RuntimeError) as error:
        say("failed", text=str(error))
        return 1
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
