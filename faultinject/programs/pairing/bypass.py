"""Calls past the proxy, from within a process that has it, to measure the cost of the proxy alone.

Every exported function of the proxy is a stub, which jumps through a word of a table
(clients/libcuda/src/proxy.h). In the words of FUNCTIONS the proxy's function is exchanged for the driver's,
and back. So one process, with the same memory and the same handles, makes the same calls with the proxy and
without, in neighbouring blocks. The stub itself, one jump, is in both.

This works because handles are the driver's own until a program fails over, and the driver accepts addresses
of the window. But the proxy does not see these calls: not their work in flight, not their writes (which are
not saved and cannot be rolled back), not their changes of module variables. So no fault may come in such a
run. The exchange waits, both ways, until nothing is in flight.

FUNCTIONS are the functions of carry.toml that submit, wait, query or allocate in a steady state, and
cuStreamIsCapturing. All other calls stay with the proxy:

- calls that create, destroy or set something (memory, modules, kernels, streams, events, graphs, contexts,
  limits, the current context): the proxy must know of these;
- captures and queries of their ids, for the same reason. A program that captures in its steps must not be
  measured in this way: a launch into a capture would go past;
- cuGetProcAddress and cuGetExportTable: the program calls their results afterwards;
- queries of memory (cuPointerGetAttribute, cuMemGetAddressRange): the driver knows mappings where the
  program knows allocations;
- host callbacks and memory operations of streams: they depend on the host;
- copies between contexts, which the proxy tracks;
- queries before the first step that are not repeated.

Their cost is therefore in both kinds of blocks, as are the proxy's own threads and its placement of memory.

In `keep` and `exact` the per-thread stream (CU_STREAM_PER_THREAD, `_ptsz`) is one that the proxy has made,
and past the proxy the driver's. Stream-ordered memory stays with the proxy, so it is not ordered after calls
that went past.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Mapping

from faultinject.programs.basics.statistics import read_stats
from mpsd.base.errors import UnsupportedError
from mpsd_client.driver import LIBRARY_NAME

SUBMITS = (
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuLaunchCooperativeKernel",
    "cuGraphLaunch",
    "cuMemcpy",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyDtoD_v2",
    "cuMemcpyAsync",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpy2D_v2",
    "cuMemcpy2DUnaligned_v2",
    "cuMemcpy2DAsync_v2",
    "cuMemcpy3D_v2",
    "cuMemcpy3DAsync_v2",
    "cuMemsetD8_v2",
    "cuMemsetD16_v2",
    "cuMemsetD32_v2",
    "cuMemsetD8Async",
    "cuMemsetD16Async",
    "cuMemsetD32Async",
    "cuMemsetD2D8_v2",
    "cuMemsetD2D16_v2",
    "cuMemsetD2D32_v2",
    "cuMemsetD2D8Async",
    "cuMemsetD2D16Async",
    "cuMemsetD2D32Async",
    "cuEventRecord",
    "cuEventRecordWithFlags",
    "cuStreamWaitEvent",
)
WAITS = (
    "cuCtxSynchronize",
    "cuCtxSynchronize_v2",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuEventSynchronize",
    "cuEventQuery",
)
ASKS = (
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxGetDevice_v2",
    "cuCtxGetFlags",
    "cuDevicePrimaryCtxGetState",
    "cuStreamIsCapturing",
    "cuStreamGetCtx",
    "cuStreamGetFlags",
    "cuStreamGetId",
    "cuStreamGetPriority",
    "cuFuncGetAttribute",
    "cuKernelGetAttribute",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
)
FUNCTIONS = (*SUBMITS, *WAITS, *ASKS)
VARIANTS = ("", "_ptsz", "_ptds")
"""Of each name, where both libraries export it."""

STUB_BYTES = 16
_X86 = struct.Struct("<7si")
_X86_BEGIN = bytes.fromhex("55 4889e5 5d ff25")
_ARM = struct.Struct("<4I")
_HINT, _ADRP, _LDR, _BR = 0xD503245F, 0x90000010, 0xF9400210, 0xD61F0200
_ADRP_BITS, _LDR_BITS = 0x9F00001F, 0xFFC003FF
PAGE = 1 << 12


def slot_of(code: bytes, at: int, machine: str) -> int:
    """Return the address of the word that a stub jumps through, by the stub's first bytes and address.

    Raises UnsupportedError if the bytes are not a stub of the proxy, and on other machines.
    """
    if machine == "x86_64":
        found = _x86_slot(code, at)
    elif machine == "aarch64":
        found = _arm_slot(code, at)
    else:
        raise UnsupportedError(f"calls can go past the proxy on x86-64 and aarch64, not on {machine}")
    if found is None or found % 8:
        raise UnsupportedError(f"no stub of the proxy's: {code[:STUB_BYTES].hex(' ')}")
    return found


def _x86_slot(code: bytes, at: int) -> int | None:
    """push %rbp; mov %rsp, %rbp; pop %rbp; jmp *offset(%rip). None: it is something else."""
    begin, offset = _X86.unpack_from(code)
    return at + _X86.size + int(offset) if begin == _X86_BEGIN else None


def _arm_slot(code: bytes, at: int) -> int | None:
    """hint #34; adrp x16, page; ldr x16, [x16, #offset]; br x16. None: it is something else."""
    hint, adrp, ldr, br = (int(word) for word in _ARM.unpack_from(code))
    if (hint, adrp & _ADRP_BITS, ldr & _LDR_BITS, br) != (_HINT, _ADRP, _LDR, _BR):
        return None
    pages = (adrp >> 5 & 0x7FFFF) << 2 | adrp >> 29 & 3
    if pages >> 20:
        pages -= 1 << 21
    here = (at + 4) & -PAGE
    return here + pages * PAGE + (ldr >> 10 & 0xFFF) * 8


def writable(maps: str, address: int) -> bool:
    """Return whether a process with these mappings (as in /proc/PID/maps) may write a word there."""
    for line in maps.splitlines():
        place, allowed = line.split()[:2]
        first, end = (int(part, 16) for part in place.split("-"))
        if first <= address and address + 8 <= end:
            return allowed[1] == "w"
    return False


class Bypass:
    """The words of one process. `targets`: the driver's function, by the address of its word."""

    def __init__(self, proxy: ctypes.CDLL, driver: ctypes.CDLL, targets: Mapping[int, int]) -> None:
        self._proxy, self._driver, self._targets = proxy, driver, targets
        self._own: dict[int, int] = {}

    @property
    def is_past(self) -> bool:
        return bool(self._own)

    def words(self) -> dict[int, int]:
        """Return the words' present values, by their addresses."""
        return {slot: _word(slot).value for slot in self._targets}

    def differing(self) -> int:
        """Return how many words hold the proxy's function now, of those that could hold the driver's."""
        return sum(value != self._targets[slot] for slot, value in self.words().items())

    def switch(self, *, past: bool) -> None:
        """Let calls go past the proxy from now on, or through it. Waits until nothing is in flight.

        Raises UnsupportedError if the driver cannot wait, or another library has written the words meanwhile.
        """
        _wait(self._proxy)
        if past == self.is_past:
            return
        if past:
            self._own = self.words()
            for slot, target in self._targets.items():
                _word(slot).value = target
            return
        if self.differing():
            raise UnsupportedError("the proxy's table was changed by other code while calls went past it")
        for slot, own in self._own.items():
            _word(slot).value = own
        self._own = {}

    def settle(self) -> None:
        """Wait until nothing is in flight, past the proxy whichever way calls go.

        A measured time then ends with the work, without the proxy's share of a wait that the program does not
        make. Raises UnsupportedError if the driver cannot wait.
        """
        _wait(self._driver)


def _wait(library: ctypes.CDLL) -> None:
    code = library.cuCtxSynchronize()
    if code:
        raise UnsupportedError(f"calls cannot go past the proxy: cuCtxSynchronize returned {code}")


def _word(at: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(at)


def find_bypass() -> Bypass:
    """Return the words of this process. Its context must exist: the wrappers are installed before that.

    Raises UnsupportedError if there is no proxy, or not this one.
    """
    stats = read_stats(os.getpid())
    if stats is None:
        raise UnsupportedError("there is no proxy in this process for calls to go past")
    if stats["state"] != "active":
        raise UnsupportedError(f"the proxy of this process is {stats['state']}: {stats['reason']}")
    proxy, driver = _load_present(LIBRARY_NAME), _load_present(str(stats["real_path"]))
    with open("/proc/self/maps") as file:
        maps = file.read()
    targets: dict[int, int] = {}
    for name in (f"{function}{variant}" for function in FUNCTIONS for variant in VARIANTS):
        stub, target = _address(proxy, name), _address(driver, name)
        # This driver has no such function, or names it otherwise.
        if stub is None or target is None:
            continue
        slot = slot_of(ctypes.string_at(stub, STUB_BYTES), stub, platform.machine())
        if not writable(maps, slot):
            raise UnsupportedError(
                f"{name} of this process is no stub of the proxy's: its word is not writable"
            )
        targets[slot] = target
    if not targets:
        raise UnsupportedError("the driver of this process has none of the functions that could go past")
    return Bypass(proxy, driver, targets)


def _load_present(name: str) -> ctypes.CDLL:
    """Load only a library that is in the process already: another copy would be another driver instance."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError as error:
        raise UnsupportedError(f"{name} is not in this process: {error}") from error


def _address(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None
