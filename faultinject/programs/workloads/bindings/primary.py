"""The start of every cuda-bindings program: the primary context, and the image of its kernels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from faultinject.programs.devices.nvidia import CUBIN, checked


def use_primary_context() -> Any:
    """Return the first device, with its primary context current in this thread. The caller releases it."""
    checked(driver.cuInit(0))
    device = checked(driver.cuDeviceGet(0))
    checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))
    return device


def image_for(backend: str, standin: bytes) -> bytes:
    """Return the harness's kernels, or the text that the stand-in driver takes for them."""
    return standin if backend == "simulated" else Path(os.environ[CUBIN]).read_bytes()
