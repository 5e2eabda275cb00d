"""Peer access to memory in the window between two devices of the stand-in driver; its kernels check
access."""

from __future__ import annotations

import pytest

from tests.libcuda.test_memory import ask
from tests.support.libcudas import Libraries

DEVICES = """
start()
image = b"standin module\\nkernel copy copy 0\\n"
contexts = [ctypes.c_void_p() for _ in range(2)]
for device, context in enumerate(contexts):
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
def use(device):
    must(cuda.cuCtxSetCurrent(contexts[device]))
def on(device, size):
    use(device)
    address = alloc(size)
    assert address > 0
    must(cuda.cuMemsetD8_v2(ctypes.c_uint64(address), 5 + device, ctypes.c_size_t(size)))
    return address
def kernels():
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    use(1)
    must(cuda.cuModuleLoadData(ctypes.byref(module), image))
    must(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"copy"))
    return function
def reach(source, target, function):
    "What a kernel of device 1 makes of it: what cuCtxSynchronize says, and the byte that it copied."
    words = ctypes.c_uint64(64)
    given = [ctypes.c_uint64(target), ctypes.c_uint64(source), words]
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(one) for one in given))
    use(1)
    must(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, pointers, None))
    code = cuda.cuCtxSynchronize()
    byte = ctypes.c_ubyte()
    if code == 0:
        must(cuda.cuMemcpyDtoH_v2(ctypes.byref(byte), ctypes.c_uint64(target), ctypes.c_size_t(1)))
    return [code, byte.value]
def enable():
    use(1)
    return cuda.cuCtxEnablePeerAccess(contexts[0], 0)
def disable():
    use(1)
    return cuda.cuCtxDisablePeerAccess(contexts[0])
function = kernels()
target = on(1, 4096)
sources = [on(0, 4096), on(0, 5 * MIB)]
"""

ENDS = {
    "never enabled": ("out = []", [700, 0]),
    "disabled": ("out = [enable(), disable(), disable()]", [700, 0]),
    "of another context": (
        """
enable()
must(cuda.cuDevicePrimaryCtxReset_v2(1))
must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(contexts[1]), 1))
function, target = kernels(), on(1, 4096)
out = []
""",
        [700, 0],
    ),
    "enabled": (
        "out = [enable(), enable()]; sources.append(on(0, 3 * MIB)); sources.append(on(0, 1000))",
        [0, 5],
    ),
}


@pytest.mark.parametrize("what", ENDS)
@pytest.mark.parametrize("which", [0, -1])
def test_a_peer_reaches_what_it_was_let_to(libraries: Libraries, what: str, which: int) -> None:
    """A peer reaches memory allocated before and after access was enabled; a context created again has no
    access."""
    how, expected = ENDS[what]
    script = f"{DEVICES}{how}\nprint(json.dumps([out, reach(sources[{which}], target, function)]))"
    without = ask(libraries, script, "0", MPSD_STANDIN_DEVICES="2")
    assert isinstance(without, list) and without[1] == expected
    assert ask(libraries, script, "1", MPSD_STANDIN_DEVICES="2") == without


def test_each_device_has_its_window_and_its_end(libraries: Libraries) -> None:
    script = f"""{DEVICES}
def ordinal(address):
    answer = ctypes.c_int(-1)
    must(cuda.cuPointerGetAttribute(ctypes.byref(answer), 9, ctypes.c_uint64(address)))
    return answer.value
ordinals = [ordinal(address) for address in (*sources, target)]
counts = [held()[0]]
must(cuda.cuDevicePrimaryCtxReset_v2(0))
counts.append(held()[0])
use(1)
must(cuda.cuCtxSynchronize())
must(free(target))
print(json.dumps([ordinals, counts, held()[:3]]))
"""
    answer = ask(libraries, script, "1", MPSD_STANDIN_DEVICES="2")
    assert answer == [[0, 0, 1], [3, 1], [0, 0, 0]]
