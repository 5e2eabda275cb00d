"""One driver instance, called through ctypes, so that several can be in one process.

Timestamps are CLOCK_MONOTONIC seconds. Each thread makes an instance's context current for itself.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from pathlib import Path
from typing import Any

from faultinject.programs.devices import driverfile
from faultinject.programs.devices.driverfile import Helper
from faultinject.programs.devices.kernels import KERNELS

NOT_READY = 600
GRANULE = 2 << 20
SHAREABLE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
# Pinned memory of device 0: type, handle type, location, no Windows data, no flags.
_PROPERTIES = struct.pack("<iiiiQQ", 1, SHAREABLE, 1, 0, 0, 0)
_ACCESS = struct.pack("<iii", 1, 0, 3)
now = time.monotonic


class DriverError(Exception):
    """A failed call into one driver instance; `code` is the CUresult."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code


def _argument(value: Any) -> Any:
    # Every integer parameter of the driver fits a 64-bit register or stack slot.
    return ctypes.c_uint64(value & 0xFFFF_FFFF_FFFF_FFFF) if isinstance(value, int) else value


class Launch:
    """A launch that can be repeated; a call returns the driver's code."""

    def __init__(self, driver: Driver, kernel: str, values: tuple[int, ...], stream: int, grid: int) -> None:
        kinds = KERNELS[kernel]
        self._values = [kind(value) for kind, value in zip(kinds, values, strict=True)]
        self._pointers = (ctypes.c_void_p * max(1, len(values)))(
            *[ctypes.addressof(value) for value in self._values]
        )
        sizes = (grid, 1, 1, 1 if grid == 1 else 256, 1, 1, 0, stream)
        self._arguments = [_argument(n) for n in (driver.functions[kernel], *sizes)]
        self._launch = driver.library.cuLaunchKernel

    def __call__(self) -> int:
        return int(self._launch(*self._arguments, self._pointers, None))


class Driver:
    """A loaded driver instance and, after start(), its primary context of device 0."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.context = 0
        self.functions: dict[str, int] = {}
        self.module = 0

    def code(self, name: str, *arguments: Any) -> int:
        """Call the driver; return its result code."""
        return int(getattr(self.library, name)(*[_argument(value) for value in arguments]))

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call the driver. Raises DriverError."""
        code = self.code(name, *arguments)
        if code:
            raise DriverError(code, name)

    def made(self, name: str, *arguments: Any) -> int:
        """Call a function that writes its result to the first parameter; return that result.

        Raises DriverError.
        """
        out = ctypes.c_uint64()
        self(name, ctypes.byref(out), *arguments)
        return out.value

    def start(self, cubin: Path) -> dict[str, float]:
        """Run cuInit, make the primary context, load the kernels; return milliseconds of each.

        Raises DriverError.
        """
        stamps = [now()]
        self("cuInit", 0)
        stamps.append(now())
        self.context = self.made("cuDevicePrimaryCtxRetain", 0)
        self.current()
        stamps.append(now())
        self.module = self.made("cuModuleLoadData", cubin.read_bytes())
        for name in KERNELS:
            self.functions[name] = self.made("cuModuleGetFunction", self.module, name.encode())
        stamps.append(now())
        names = ("cuInit ms", "context ms", "module ms")
        return {n: ms(stamps[i], stamps[i + 1]) for i, n in enumerate(names)}

    def current(self) -> None:
        self("cuCtxSetCurrent", self.context)

    def prepare(self, kernel: str, *values: int, stream: int = 0, grid: int = 1) -> Launch:
        return Launch(self, kernel, values, stream, grid)

    def launch(self, kernel: str, *values: int, stream: int = 0, grid: int = 1) -> None:
        """Launch asynchronously. Raises DriverError."""
        code = self.prepare(kernel, *values, stream=stream, grid=grid)()
        if code:
            raise DriverError(code, f"launch of {kernel}")

    def sync(self) -> None:
        self("cuCtxSynchronize")

    def stream(self) -> int:
        return self.made("cuStreamCreate", 1)

    def alloc(self, size: int) -> int:
        """Allocate zeroed device memory."""
        address = self.made("cuMemAlloc_v2", size)
        self("cuMemsetD8_v2", address, 0, size)
        self.sync()
        return address

    def read(self, address: int, size: int) -> bytes:
        out = ctypes.create_string_buffer(size)
        self("cuMemcpyDtoH_v2", out, address, size)
        return out.raw

    def read_u64(self, address: int) -> int:
        return int.from_bytes(self.read(address, 8), "little")

    def write_u32(self, address: int, value: int) -> None:
        self("cuMemcpyHtoD_v2", address, struct.pack("<I", value), 4)

    def create(self, size: int = GRANULE) -> int:
        """Create shareable memory; return its handle."""
        return self.made("cuMemCreate", size, _PROPERTIES, 0)

    def export(self, handle: int) -> int:
        out = ctypes.c_int(-1)
        self("cuMemExportToShareableHandle", ctypes.byref(out), handle, SHAREABLE, 0)
        return out.value

    def adopt(self, fd: int) -> int:
        """Import exported memory; return its handle. The descriptor stays the caller's."""
        return self.made("cuMemImportFromShareableHandle", fd, SHAREABLE)

    def reserve(self, size: int, at: int = 0) -> int:
        """Reserve addresses, at `at` if the driver follows the hint."""
        return self.made("cuMemAddressReserve", size, 0, at, 0)

    def map(self, address: int, handle: int, size: int = GRANULE) -> None:
        self("cuMemMap", address, size, 0, handle, 0)
        self("cuMemSetAccess", address, size, _ACCESS, 1)

    def unmap(self, address: int, handle: int, size: int = GRANULE) -> None:
        self("cuMemUnmap", address, size)
        self("cuMemRelease", handle)


def ms(begin: float, end: float) -> float:
    """Return milliseconds between two timestamps."""
    return round((end - begin) * 1e3, 3)


def original_driver() -> Driver:
    """Return the process's ordinary driver."""
    return Driver(ctypes.CDLL("libcuda.so.1"))


class DriverInstances:
    """Loads driver instances that do not interfere with the first one.

    `folder` is made by prepare(): plain-N.so and renamed-N.so for N from 1 on, and helper.so.
    """

    PLAIN, RENAMED = 2, 10

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.helper = Helper(folder / "helper.so")
        self.notes: dict[str, Any] = {}

    @classmethod
    def prepare(cls, folder: Path) -> dict[str, Any]:
        """Make the files of `folder`; return what was found in the original. Raises OSError, ValueError."""
        source = driverfile.real_library()
        driverfile.build_helper(source, folder / "helper.so")
        for number in range(1, cls.PLAIN + 1):
            driverfile.copy_plain(source, folder / f"plain-{number}.so")
        began = now()
        for number in range(1, cls.RENAMED + 1):
            driverfile.copy_renamed(source, folder / f"renamed-{number}.so")
        each = ms(began, now()) / cls.RENAMED
        size = source.stat().st_size >> 20
        return driverfile.describe(source) | {"MiB": size, "copy and rename ms": round(each, 1)}

    def load(self, number: int, pipe: Path, how: str = "symbols") -> Driver:
        """Load instance `number`, not yet started; `how` is symbols, slots or nothing. Raises OSError."""
        path = self._folder / f"{'renamed' if how == 'symbols' else 'plain'}-{number}.so"
        began = now()
        library = self.helper.within(pipe, number, lambda: ctypes.CDLL(str(path), mode=os.RTLD_NOW))
        self.notes = {"dlopen ms": ms(began, now())}
        if how == "slots":
            self.notes |= driverfile.overwrite_slots(library, path, self.helper)
        return Driver(library)

    def start(self, number: int, pipe: Path, cubin: Path, how: str = "symbols") -> Driver:
        """Load instance `number` and make a context in the domain of `pipe`. Raises OSError, DriverError."""
        driver = self.load(number, pipe, how)

        def begin() -> dict[str, float]:
            return driver.start(cubin)

        self.notes |= self.helper.within(pipe, number, begin)
        return driver


class Shared:
    """Memory of `pages` granules that two driver instances have mapped; `fd` keeps it."""

    def __init__(self, one: Driver, other: Driver, pages: int = 1) -> None:
        size = pages * GRANULE
        one.current()
        handle = one.create(size)
        self.fd = one.export(handle)
        self.one = one.reserve(size)
        one.map(self.one, handle, size)
        one("cuMemsetD8_v2", self.one, 0, size)
        one.sync()
        self.handle, self.size = handle, size
        other.current()
        self.other_handle = other.adopt(self.fd)
        self.other = other.reserve(size)
        other.map(self.other, self.other_handle, size)
