"""Call driver functions so that they fail, and print what each answered and wrote.

argv: the state of the driver, and a file with the functions: the name, and for each parameter "in" (zeros),
"out", or "" for the value 0. The driver is uninitialised, has no current context, or has lost its context.
"""

import ctypes
import json
import sys

ROOM = 4096
BEFORE = b"\xa5" * ROOM
IMAGE = b"standin module\nkernel trap trap 0\n"

cuda = ctypes.CDLL("libcuda.so.1")


def lose_context() -> None:
    context, module, trap = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    assert not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) and not cuda.cuCtxSetCurrent(context)
    assert not cuda.cuModuleLoadData(ctypes.byref(module), IMAGE)
    assert not cuda.cuModuleGetFunction(ctypes.byref(trap), module, b"trap")
    assert not cuda.cuLaunchKernel(trap, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    assert cuda.cuCtxSynchronize()


def call(name: str, kinds: list[str]) -> object:
    """Return the result, and for each output how many of its first bytes were written: up to the last one."""
    filled = {"out": BEFORE, "in": bytes(ROOM)}
    buffers = [ctypes.create_string_buffer(filled[kind], ROOM) if kind in filled else None for kind in kinds]
    arguments = [ctypes.c_uint64(ctypes.addressof(one) if one is not None else 0) for one in buffers]
    code = getattr(cuda, name)(*arguments)
    outputs = (one.raw for one, kind in zip(buffers, kinds, strict=True) if one is not None and kind == "out")
    return [code, [len(raw.rstrip(BEFORE[:1])) for raw in outputs]]


state, path = sys.argv[1:]
# The flag 7 is refused, but a proxy has put its wrappers in place by then.
assert cuda.cuInit(7 if state == "uninitialised" else 0) == (1 if state == "uninitialised" else 0)
if state == "lost":
    lose_context()
with open(path) as file:
    functions = json.load(file)
for name, kinds in functions:
    if hasattr(cuda, name):
        print(json.dumps([name, call(name, kinds)]), flush=True)
