"""The CUDA driver calls of the measuring clients. Only child processes import this."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

from faultinject.programs.devices.kernels import KERNELS

VMM_BYTES = 2 << 20


class CudaError(Exception):
    """A driver call failed; `code` is the CUresult."""

    def __init__(self, code: int, name: str, call: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class Cuda:
    """The primary context of device 0 and the harness kernels. Stamps are CLOCK_MONOTONIC."""

    def __init__(self, cubin: str) -> None:
        from cuda.bindings import driver

        self.driver: Any = driver
        self.stamps = {"import_end": time.monotonic()}
        self("cuInit", 0)
        self.stamps["cuinit_end"] = time.monotonic()
        self.device = self("cuDeviceGet", 0)
        self.context = self("cuDevicePrimaryCtxRetain", self.device)
        self("cuCtxSetCurrent", self.context)
        self.stamps["context_end"] = time.monotonic()
        module = self("cuModuleLoadData", Path(cubin).read_bytes())
        self._functions = {name: self("cuModuleGetFunction", module, name.encode()) for name in KERNELS}

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call the driver; its results without the code. Raises CudaError."""
        result = getattr(self.driver, name)(*arguments)
        if int(result[0]):
            raise CudaError(int(result[0]), result[0].name, name)
        return result[1] if len(result) == 2 else result[1:]

    def code_of(self, name: str, *arguments: Any) -> str:
        """Call the driver; the name of its result code."""
        return str(getattr(self.driver, name)(*arguments)[0].name)

    def launch(self, kernel: str, *values: int, grid: int = 1, block: int = 1, stream: Any = 0) -> None:
        """Launch asynchronously. Raises CudaError."""
        parameters = (tuple(int(value) for value in values), KERNELS[kernel])
        function = self._functions[kernel]
        self("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, parameters, 0)

    def sync(self) -> None:
        self("cuCtxSynchronize")

    def alloc(self, size: int) -> int:
        """Zeroed device memory."""
        address = int(self("cuMemAlloc", size))
        self("cuMemsetD8", address, 0, size)
        return address

    def read(self, address: int, size: int) -> bytes:
        out = bytearray(size)
        self("cuMemcpyDtoH", out, address, size)
        return bytes(out)

    def read_u64(self, address: int) -> int:
        return int.from_bytes(self.read(address, 8), "little")

    def write(self, address: int, data: bytes) -> None:
        self("cuMemcpyHtoD", address, data, len(data))

    def create_shareable(self) -> tuple[Any, int]:
        """2 MiB of VMM memory: its handle and an exported descriptor."""
        d = self.driver
        properties = d.CUmemAllocationProp()
        properties.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = 0
        kind = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties.requestedHandleTypes = kind
        handle = self("cuMemCreate", VMM_BYTES, properties, 0)
        return handle, int(self("cuMemExportToShareableHandle", handle, kind, 0))

    def import_shareable(self, fd: int) -> Any:
        kind = self.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = self("cuMemImportFromShareableHandle", fd, kind)
        os.close(fd)
        return handle

    def map(self, handle: Any, *, writable: bool = True) -> int:
        """Map 2 MiB of VMM memory somewhere; the address."""
        d = self.driver
        address = int(self("cuMemAddressReserve", VMM_BYTES, 0, 0, 0))
        self("cuMemMap", address, VMM_BYTES, 0, handle, 0)
        access = d.CUmemAccessDesc()
        access.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = 0
        flags = d.CUmemAccess_flags
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        self("cuMemSetAccess", address, VMM_BYTES, [access], 1)
        return address

    def stream(self) -> Any:
        return self("cuStreamCreate", 1)


def pointer_to(buffer: Any) -> int:
    """Address of a writable buffer (mmap, bytearray, ctypes array)."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
