"""A cuda-bindings program with kernels that write outside their parameters, for validation to find.

One follows a pointer in memory, another one counts in a variable of its module. It is no workload for faults:
its writes are not rolled back, and are not moved.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from cuda.bindings import driver

from faultinject.programs.devices.nvidia import checked
from faultinject.programs.workloads.bindings.primary import image_for, use_primary_context

STANDIN_IMAGE = (
    b".version 8.0\n.visible .global .align 4 .u32 tallied;\n"
    b"standin module\nkernel follow follow 0\nkernel tally count 0\nglobal tallied 4\n\n"
)
UNIT, PER_STEP, UNTIMED = "writes", 2, "a step is a few microseconds"
BYTES = 4 << 20


class Hidden:
    def __init__(self, seed: int, image: bytes) -> None:
        self.device = use_primary_context()
        module = checked(driver.cuModuleLoadData(image))
        self.follow = checked(driver.cuModuleGetFunction(module, b"follow"))
        self.tally = checked(driver.cuModuleGetFunction(module, b"tally"))
        self.value = seed
        self.pointer, self.led_to = (int(checked(driver.cuMemAlloc(BYTES))) for _ in range(2))
        checked(driver.cuMemsetD32(self.led_to, 0, BYTES // 4))
        checked(driver.cuMemcpyHtoD(self.pointer, self.led_to.to_bytes(8, "little"), 8))

    def step(self) -> None:
        self.value += 1
        arguments = ((self.pointer, self.value), (ctypes.c_void_p, ctypes.c_uint32))
        checked(driver.cuLaunchKernel(self.follow, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0))
        checked(driver.cuLaunchKernel(self.tally, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
        checked(driver.cuCtxSynchronize())

    def results(self) -> Iterator[bytes]:
        data = bytearray(4)
        checked(driver.cuMemcpyDtoH(data, self.led_to, len(data)))
        yield bytes(data)

    def close(self) -> None:
        checked(driver.cuDevicePrimaryCtxRelease(self.device))


def start(seed: int, backend: str) -> Hidden:
    return Hidden(seed, image_for(backend, STANDIN_IMAGE))
