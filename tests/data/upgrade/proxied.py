"""A CUDA program that obeys: each line of its input is an expression, answered with its value.

The recorder and the upgrade tests run it through mpsd-run and the libcuda proxy, on the stand-in driver.
"""

import ctypes
import sys

cuda = ctypes.CDLL("libcuda.so.1")
context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()


def alloc(size: int) -> int:
    pointer = ctypes.c_uint64()
    code = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
    assert code == 0, code
    return pointer.value


def free(address: int) -> int:
    return int(cuda.cuMemFree_v2(ctypes.c_uint64(address)))


def write(address: int, value: int) -> int:
    """Store one word at a device address with a kernel; the error code of the launch."""
    values = ctypes.c_uint64(address), ctypes.c_uint32(value)
    arguments = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))
    return int(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, arguments, None))


def sync() -> int:
    return int(cuda.cuCtxSynchronize())


started = [
    cuda.cuInit(0),
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
    cuda.cuCtxSetCurrent(context),
    cuda.cuModuleLoadData(ctypes.byref(module), b"standin module\nkernel store store 0\n"),
    cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"store"),
]
print(started, flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
