"""A program of two GPUs by ctypes: access of the second GPU to memory of the first.

It tries before and after peer access is enabled, and after it is disabled. As a file it prints one JSON
object.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

MIB = 1 << 20
FILLED = 5
STANDIN = b"standin module\nkernel copy copy 0\n"
cuda = ctypes.CDLL("libcuda.so.1")


def must(code: int) -> None:
    assert code == 0, code


class Peers:
    """A primary context on each GPU, and a kernel of the second that reads one word."""

    def __init__(self) -> None:
        must(cuda.cuInit(0))
        self.contexts = [ctypes.c_void_p() for _ in range(2)]
        for device, context in enumerate(self.contexts):
            must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        cubin = os.environ.get("MPSD_FAULTINJECT_CUBIN")
        self.name, image = (b"load", Path(cubin).read_bytes()) if cubin else (b"copy", STANDIN)
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self.use(1)
        must(cuda.cuModuleLoadData(ctypes.byref(module), image))
        must(cuda.cuModuleGetFunction(ctypes.byref(self.function), module, self.name))
        self.target = self.alloc(1, 4096)

    def use(self, device: int) -> None:
        must(cuda.cuCtxSetCurrent(self.contexts[device]))

    def alloc(self, device: int, size: int) -> int:
        """Allocate memory filled with FILLED on the first GPU, with zeros on the second."""
        self.use(device)
        address = ctypes.c_uint64()
        must(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
        must(cuda.cuMemsetD8_v2(address, 0 if device else FILLED, ctypes.c_size_t(size)))
        must(cuda.cuCtxSynchronize())
        return address.value

    def read(self) -> int:
        byte = ctypes.c_ubyte()
        must(cuda.cuMemcpyDtoH_v2(ctypes.byref(byte), ctypes.c_uint64(self.target), ctypes.c_size_t(1)))
        must(cuda.cuMemsetD8_v2(ctypes.c_uint64(self.target), 0, ctypes.c_size_t(4)))
        return byte.value

    def launch(self, source: int) -> int:
        """Run a kernel of the second GPU that reads a word of `source`. Return cuCtxSynchronize's code."""
        at, to, words = ctypes.c_uint64(source), ctypes.c_uint64(self.target), ctypes.c_uint64(1)
        given = [at, to] if self.name == b"load" else [to, at, words]
        pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(one) for one in given))
        self.use(1)
        must(cuda.cuLaunchKernel(self.function, 1, 1, 1, 1, 1, 1, 0, None, pointers, None))
        return int(cuda.cuCtxSynchronize())

    def reach(self, source: int) -> list[int]:
        """Return the code of such a kernel, and the byte that it read."""
        code = self.launch(source)
        return [code, -1 if code else self.read()]

    def copied(self, source: int) -> list[int]:
        """Return code and byte of a cuMemcpyPeer."""
        self.use(1)
        there, here = ctypes.c_uint64(source), ctypes.c_uint64(self.target)
        code = int(cuda.cuMemcpyPeer(here, self.contexts[1], there, self.contexts[0], ctypes.c_size_t(4)))
        return [code, -1 if code else self.read()]

    def enable(self) -> int:
        self.use(1)
        return int(cuda.cuCtxEnablePeerAccess(self.contexts[0], 0))

    def disable(self) -> int:
        self.use(1)
        return int(cuda.cuCtxDisablePeerAccess(self.contexts[0]))


def windowed() -> int:
    """Return the number of allocations in the proxy's window; 0 without a proxy."""
    from faultinject.programs.basics.statistics import read_stats

    stats = read_stats(os.getpid())
    return int(stats["vault_allocations"]) if stats else 0


def main() -> None:
    can = ctypes.c_int()
    must(cuda.cuInit(0))
    must(cuda.cuDeviceCanAccessPeer(ctypes.byref(can), 1, 0))
    answer: dict[str, Any] = {"can": can.value, "windowed": 0}
    if can.value:
        peers = Peers()
        early = peers.alloc(0, 4096)
        answer["never"] = peers.copied(early)
        must(peers.enable())
        answer |= {"before": peers.reach(early), "twice": peers.enable()}
        late, large = peers.alloc(0, 4096), peers.alloc(0, 5 * MIB)
        answer |= {"after": peers.reach(late), "large": peers.reach(large + 4 * MIB)}
        answer |= {"copied": peers.copied(late), "windowed": windowed()}
        answer |= {"disabled": peers.disable(), "again": peers.disable()}
        # Last, since the context does not survive it.
        answer["unreachable"] = peers.launch(early)
    print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
