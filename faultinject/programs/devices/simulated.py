"""The simulated GPU for the worker programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from faultinject.programs.devices.base import NOT_SUPPORTED, Access, DeviceError
from mpsd.gpu.simulated.client import GpuFailure, SimulatedDevice

UNMAPPED = 0x7E0000000000
LOW_CODE = 0x10
WORDS = 1024


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except GpuFailure as failure:
        raise DeviceError(failure.code, str(failure)) from failure


class SimulatedProgramDevice:
    """A Device on mpsd.gpu.simulated."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.on_mps: bool | None = device.on_mps

    def alloc(self, size: int) -> int:
        with _translated():
            return self._device.alloc(size // 4)

    def write(self, address: int, data: bytes) -> None:
        with _translated():
            self._device.write(address, data)

    def read(self, address: int, size: int) -> bytes:
        with _translated():
            return self._device.read(address, size)

    def increment(self, address: int, words: int) -> None:
        with _translated():
            self._device.launch("increment", address=address, words=words)

    def busy(self, seconds: float, *, fill: bool = False) -> None:
        with _translated():
            self._device.launch("spin", duration_s=seconds, fill_gpu=fill)

    def endless(self, *, fill: bool = False) -> None:
        with _translated():
            self._device.launch("forever", fill_gpu=fill)

    def commit(self, kind: str, fire: Callable[[], None], stray: int = 0) -> None:
        with _translated():
            address = stray or self._target(kind)
            fire()
            self._device.launch(kind, address=address)

    def preload_kernel(self, kind: str) -> None:
        raise DeviceError(NOT_SUPPORTED, "the simulated GPU has no graphs")

    def free(self, address: int) -> None:
        raise DeviceError(NOT_SUPPORTED, "memory of the simulated GPU ends with its client")

    def access_range(
        self, access: Access, address: int, span: int, seconds: float, *, fill: bool = False
    ) -> None:
        raise DeviceError(NOT_SUPPORTED, "guard zones are the libcuda proxy's: use the stand-in driver")

    def _target(self, kind: str) -> int:
        """Return the address for this kind, set up as the kind needs it."""
        match kind:
            case "store" | "load" | "atomic" | "wild_call":
                return UNMAPPED
            case "wild_call_low":
                return LOW_CODE
            case "read_only":
                return self._device.map_read_only(WORDS)
            case "use_after_unmap" | "pbdma":
                address = self._device.alloc(WORDS)
                self._device.unmap(address)
                return address
            case _:
                return 0

    def free_bytes(self) -> int | None:
        return None

    def synchronize(self) -> None:
        with _translated():
            self._device.synchronize()

    def close(self) -> None:
        with _translated():
            self._device.close()


def open_simulated(environ: Mapping[str, str]) -> SimulatedProgramDevice:
    """Join the simulated node of the environment. Raises DeviceError."""
    with _translated():
        return SimulatedProgramDevice(SimulatedDevice.open(environ))
