"""Let UCX's memory hooks (libucm, of the folder in argv[1]) watch an allocation; print what they saw."""

import ctypes
import sys
from pathlib import Path

# ucm/api/ucm.h: UCM_EVENT_MEM_TYPE_ALLOC, UCM_EVENT_MEM_TYPE_FREE.
ALLOCATED, FREED = 1 << 20, 1 << 21

cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
codes = [
    cuda.cuInit(0),
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
    cuda.cuCtxSetCurrent(context),
]
folder = Path(sys.argv[1])
ctypes.CDLL(str(folder / "libucs.so.0"), mode=ctypes.RTLD_GLOBAL)
ucm = ctypes.CDLL(str(folder / "libucm.so.0"), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(folder / "ucx" / "libucm_cuda.so.0"), mode=ctypes.RTLD_GLOBAL)
events: list[int] = []


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def seen(kind: int, event: object, argument: object) -> None:
    events.append(kind)


status = ucm.ucm_set_event_handler(ALLOCATED | FREED, 1000, seen, None)
memory = ctypes.c_uint64()
codes += [
    cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)),
    cuda.cuMemFree_v2(memory),
]
print(codes, status, ["allocated" if kind == ALLOCATED else "freed" for kind in events])
