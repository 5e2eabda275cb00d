"""What every cuda-bindings program begins with: the primary context, and the image of its kernels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from faultinject.programs.device_nvidia import CUBIN, checked


def use_primary_context() -> Any:
    """The first device, whose primary context is this thread's from now on. To be released by the device."""
    checked(driver.cuInit(0))
    device = checked(driver.cuDeviceGet(0))
    checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))
    return device


def image_for(backend: str, standin: bytes) -> bytes:
    """The harness's kernels, or the text that the stand-in driver takes for them."""
    return standin if backend == "simulated" else Path(os.environ[CUBIN]).read_bytes()
