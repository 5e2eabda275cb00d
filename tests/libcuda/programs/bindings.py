"""A plain cuda-bindings program, except for its kernel's image."""

import ctypes

from cuda.bindings import driver


def must(answer: tuple) -> object:
    assert answer[0] == driver.CUresult.CUDA_SUCCESS, answer
    return answer[1] if len(answer) == 2 else answer[1:]


must(driver.cuInit(0))
device = must(driver.cuDeviceGet(0))
must(driver.cuCtxSetCurrent(must(driver.cuDevicePrimaryCtxRetain(device))))
module = must(driver.cuModuleLoadData(b"standin module\nkernel fill fill 100\n"))
kernel = must(driver.cuModuleGetFunction(module, b"fill"))
stream = must(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
memory = must(driver.cuMemAlloc(4096))
arguments = ((int(memory), 1024, 7), (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32))
must(driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, arguments, 0))
must(driver.cuStreamSynchronize(stream))
words = bytearray(8)
must(driver.cuMemcpyDtoH(words, int(memory) + 4088, 8))
base, size = must(driver.cuMemGetAddressRange(int(memory) + 100))
print(words.hex(), int(base) == int(memory), size)
print(driver.cuMemFree(int(memory) + 1)[0].name, driver.cuMemFree(memory)[0].name)
