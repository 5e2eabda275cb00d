"""The GPU of the worker programs: one small interface with a real and a simulated version."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, Protocol

from mpsd.base.errors import UsageError

Access = Literal["store", "load", "atomic"]
BACKENDS = ("nvidia", "simulated", "standin")
NO_DEVICE, NOT_SUPPORTED = 100, 801


class DeviceError(Exception):
    """An error of a driver call: the CUDA error code, sticky as in CUDA."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(f"CUDA error {code}" + (f": {text}" if text else ""))
        self.code = code


class Device(Protocol):
    """One context on one GPU. Every method raises DeviceError; launches are asynchronous."""

    on_mps: bool | None
    """Return whether the context is that of an MPS client; None where the device cannot tell."""

    def alloc(self, size: int) -> int:
        """Allocate `size` bytes of device memory."""
        ...

    def write(self, address: int, data: bytes) -> None: ...

    def read(self, address: int, size: int) -> bytes:
        """Wait for all launches, then copy."""
        ...

    def increment(self, address: int, words: int) -> None:
        """Add one to each of `words` 32-bit words."""
        ...

    def busy(self, seconds: float, *, fill: bool = False) -> None:
        """Run a kernel for about this long, on every SM if `fill`."""
        ...

    def endless(self, *, fill: bool = False) -> None:
        """Run a kernel that does not end."""
        ...

    def commit(self, kind: str, fire: Callable[[], None], stray: int = 0) -> None:
        """Commit a fault of this kind (registry.kinds.GPU_KINDS); `stray` is the address for the guard kinds.

        `fire` is called right before the fault, when all is set up.
        """
        ...

    def preload_kernel(self, kind: str) -> None:
        """Put the kernel of such a fault into a graph that is never launched, so that it is known.

        DeviceError(801) as free.
        """
        ...

    def free(self, address: int) -> None:
        """Free an allocation. Raises DeviceError(801) where the device cannot."""
        ...

    def access_range(
        self, access: Access, address: int, span: int, seconds: float, *, fill: bool = False
    ) -> None:
        """Access one word of each page in `span` bytes from `address` on, repeatedly for this long.

        By one thread, or by as many as fill every SM, each from another page on. DeviceError(801) as free.
        """
        ...

    def free_bytes(self) -> int | None:
        """Return the free bytes of the GPU's memory; None where the device cannot tell."""
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


def open_device(backend: str) -> Device:
    """Open the GPU of this backend. Each implementation is imported only when it is chosen.

    `standin`: the stand-in driver through libcuda.so.1, with or without the proxy. Raises DeviceError (as the
    driver refused; NO_DEVICE without a driver) or UsageError for an unknown backend.
    """
    if backend not in BACKENDS:
        raise UsageError(f"there is no backend {backend!r}", remedy=f"use one of {', '.join(BACKENDS)}")
    try:
        return _opened(backend)
    except (ImportError, OSError, RuntimeError) as error:
        # RuntimeError: cuda-bindings without a libcuda.
        raise DeviceError(NO_DEVICE, f"{backend} cannot be opened here: {error}") from error


def _opened(backend: str) -> Device:
    match backend:
        case "simulated":
            from faultinject.programs.devices.simulated import open_simulated

            return open_simulated(os.environ)
        case "standin":
            from faultinject.programs.devices.standin import StandinDevice

            return StandinDevice()
        case _:
            from faultinject.programs.devices.nvidia import open_nvidia

            return open_nvidia(os.environ)
