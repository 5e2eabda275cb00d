"""A real GPU for the worker programs: the CUDA driver API and the harness's own kernels.

The faults use mechanisms that were measured on hardware (stock driver): a store to a remote address, memory
mapped by hand to be unmapped or read-only, a stream memory operation on a target that is unmapped before its
turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from faultinject.programs.devices import kernels
from faultinject.programs.devices.base import Access, DeviceError
from faultinject.registry.kinds import ENGINE_DELAY_MS

CUBIN = "MPSD_FAULTINJECT_CUBIN"
"""Path of the compiled kernels, so that not every program compiles them."""

UNMAPPED = 0x7E0000000000
"""Canonical, and never mapped."""

NON_CANONICAL = 0xDEAD000000000000
BEYOND_WINDOW = 0x00F00000
LOW_CODE = 0x10
CHUNK = 2 << 20
"""Granularity of memory that is mapped by hand."""

THREADS = 256


def checked(result: tuple[Any, ...]) -> Any:
    """Return the values of a driver call. Raises DeviceError with the driver's code."""
    if int(result[0]):
        raise DeviceError(int(result[0]), str(result[0].name))
    return result[1] if len(result) == 2 else result[1:]


class NvidiaDevice:
    """A Device on a visible GPU, by default the first."""

    def __init__(self, cubin: Path | None, ordinal: int = 0) -> None:
        checked(driver.cuInit(0))
        self._device = checked(driver.cuDeviceGet(ordinal))
        self._context = checked(driver.cuDevicePrimaryCtxRetain(self._device))
        self.use()
        self.on_mps = self._under_mps()
        image = cubin.read_bytes() if cubin else kernels.compile(self._arch())
        self._module = checked(driver.cuModuleLoadData(image))
        self._functions = {n: self._function(n) for n in kernels.KERNELS}
        self._full_grid = self._attribute("MULTIPROCESSOR_COUNT") * self._attribute(
            "MAX_THREADS_PER_MULTIPROCESSOR"
        )
        # Everything a fault needs is set up here: only the launch comes after `fire`.
        self._scratch = self.alloc(1 << 16)
        checked(driver.cuMemsetD8(self._scratch, 0, 1 << 16))
        self._stream = checked(driver.cuStreamCreate(1))

    def use(self) -> None:
        """Make its context current in this thread, for a program with several."""
        checked(driver.cuCtxSetCurrent(self._context))

    def _attribute(self, name: str) -> int:
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(checked(driver.cuDeviceGetAttribute(attribute, self._device)))

    def _under_mps(self) -> bool | None:
        if not hasattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_MPS_ENABLED"):
            return None
        return bool(self._attribute("MPS_ENABLED"))

    def _arch(self) -> str:
        major = self._attribute("COMPUTE_CAPABILITY_MAJOR")
        return f"sm_{major}{self._attribute('COMPUTE_CAPABILITY_MINOR')}"

    def _function(self, name: str) -> Any:
        return checked(driver.cuModuleGetFunction(self._module, name.encode()))

    def _launch(self, name: str, *args: int, grid: int = 1, block: int = 1, stream: Any = 0) -> None:
        values = (tuple(args), kernels.KERNELS[name])
        checked(driver.cuLaunchKernel(self._functions[name], grid, 1, 1, block, 1, 1, 0, stream, values, 0))

    def alloc(self, size: int) -> int:
        return int(checked(driver.cuMemAlloc(size)))

    def write(self, address: int, data: bytes) -> None:
        checked(driver.cuMemcpyHtoD(address, data, len(data)))

    def read(self, address: int, size: int) -> bytes:
        data = bytearray(size)
        checked(driver.cuMemcpyDtoH(data, address, size))
        return bytes(data)

    def increment(self, address: int, words: int) -> None:
        self._launch("increment", address, words, grid=-(-words // THREADS), block=THREADS)

    def _grid(self, fill: bool) -> dict[str, int]:
        return {"grid": self._full_grid // THREADS, "block": THREADS} if fill else {}

    def busy(self, seconds: float, *, fill: bool = False) -> None:
        self._launch("spin", int(seconds * 1e9), **self._grid(fill))

    def endless(self, *, fill: bool = False) -> None:
        self._launch("forever", self._scratch, **self._grid(fill))

    def free(self, address: int) -> None:
        checked(driver.cuMemFree(address))

    def access_range(
        self, access: Access, address: int, span: int, seconds: float, *, fill: bool = False
    ) -> None:
        to = (self._scratch,) if access == "load" else ()
        self._launch(f"wild_{access}", address, span, int(seconds * 1e9), *to, **self._grid(fill))

    def free_bytes(self) -> int | None:
        return int(checked(driver.cuMemGetInfo())[0])

    def synchronize(self) -> None:
        checked(driver.cuCtxSynchronize())

    def close(self) -> None:
        checked(driver.cuDevicePrimaryCtxRelease(self._device))

    def preload_kernel(self, kind: str) -> None:
        kernel, args = self._simple(kind, 0)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCapture(self._stream, mode))
        self._launch(kernel, *args, stream=self._stream)
        checked(driver.cuStreamEndCapture(self._stream))

    def commit(self, kind: str, fire: Callable[[], None], stray: int = 0) -> None:
        match kind:
            case "use_after_unmap" | "pbdma" | "read_only":
                self._on_own_mapping(kind, fire)
            case _:
                kernel, args = self._simple(kind, stray)
                fire()
                self._launch(kernel, *args)

    def _simple(self, kind: str, stray: int) -> tuple[str, tuple[int, ...]]:
        """Kinds that are one launch: kernel and arguments."""
        if stray:
            return "store", (stray,)
        table: dict[str, tuple[str, tuple[int, ...]]] = {
            "store": ("store", (UNMAPPED,)),
            "load": ("load", (UNMAPPED, self._scratch)),
            "atomic": ("atomic", (UNMAPPED,)),
            "null": ("store", (0,)),
            "noncanonical": ("store", (NON_CANONICAL,)),
            "misaligned": ("misaligned", (self._scratch,)),
            "shared_window": ("shared_window", (BEYOND_WINDOW,)),
            "local_window": ("local_window", (BEYOND_WINDOW,)),
            "trap": ("trap", ()),
            "breakpoint": ("breakpoint", ()),
            "stack_overflow": ("stack_overflow", (100_000, self._scratch)),
            "wild_call": ("wild_call", (UNMAPPED,)),
            "wild_call_low": ("wild_call", (LOW_CODE,)),
            "assert": ("assertion", (1,)),
        }
        return table[kind]

    def _on_own_mapping(self, kind: str, fire: Callable[[], None]) -> None:
        address = self._map(writable=kind != "read_only")
        if kind == "use_after_unmap":
            self._launch("store", address)
            self.synchronize()
            checked(driver.cuMemUnmap(address, CHUNK))
        if kind == "pbdma":
            self._launch("spin", round(ENGINE_DELAY_MS * 1e6), stream=self._stream)
            fire()
            checked(driver.cuStreamWriteValue32(self._stream, address, 1, 0))
            checked(driver.cuMemUnmap(address, CHUNK))
            return
        fire()
        self._launch("store", address)

    def _map(self, *, writable: bool) -> int:
        place = driver.CUmemLocation()
        place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = 0
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location = place
        handle = checked(driver.cuMemCreate(CHUNK, wanted, 0))
        address = checked(driver.cuMemAddressReserve(CHUNK, 0, 0, 0))
        checked(driver.cuMemMap(address, CHUNK, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = place
        flags = driver.CUmemAccess_flags
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        checked(driver.cuMemSetAccess(address, CHUNK, [access], 1))
        return int(address)


def open_nvidia(environ: Mapping[str, str], ordinal: int = 0) -> NvidiaDevice:
    """Open a visible GPU, by default the first. Raises DeviceError as the driver refused."""
    named = environ.get(CUBIN)
    return NvidiaDevice(Path(named) if named else None, ordinal)


def prepare_kernels(target: Path) -> None:
    """Compile the kernels once for the first GPU that NVML lists. Raises GpuError, UnsupportedError."""
    import pynvml

    pynvml.nvmlInit()
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
    finally:
        pynvml.nvmlShutdown()
    target.write_bytes(kernels.compile(f"sm_{major}{minor}"))
