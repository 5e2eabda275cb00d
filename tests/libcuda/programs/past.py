"""Launch kernels through the proxy, past it, and through it again; print the counts of the proxy's ledger.

One line of JSON: `launched` in each of the three passes; the proxy's own `functions` before them; those
left in the pass `past` the proxy; whether the words were `restored`; the words `read` from memory that all
passes have written; or `error`. With the argument `functions` it prints these alone. With `foreign` it
reads stubs as of another machine. With `driver-first` it opens the driver by its path before the proxy.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import platform
import struct
import sys
from unittest import mock

from faultinject.programs.devices.driver import Driver
from faultinject.programs.pairing import bypass
from mpsd.base.errors import UnsupportedError
from tests.support.zoning import ledger_of

IMAGE = b"standin module\nkernel fill fill 0\n"
WORDS = 1024


class Filling:
    """A kernel that fills memory in the legacy stream."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.at = self.driver.alloc(WORDS * 4)
        module, self.fill = ctypes.c_void_p(), ctypes.c_void_p()
        self.driver.call("cuModuleLoadData", ctypes.byref(module), IMAGE)
        self.driver.call("cuModuleGetFunction", ctypes.byref(self.fill), module, b"fill")

    def launch(self, first: int, words: int, value: int) -> None:
        kept = (ctypes.c_uint64(self.at + 4 * first), ctypes.c_uint64(words), ctypes.c_uint32(value))
        given = (ctypes.c_void_p * 3)(*(ctypes.addressof(one) for one in kept))
        self.driver.call("cuLaunchKernel", self.fill, 1, 1, 1, 32, 1, 1, 0, None, given, None)

    def read(self) -> list[int]:
        self.driver.synchronize()
        words = struct.unpack(f"<{WORDS}I", self.driver.read(self.at, WORDS * 4))
        return sorted(set(words))


def launched() -> int:
    """Return the number of launches that the proxy has seen."""
    with contextlib.closing(ledger_of(os.getpid())) as ledger:
        return ledger.launched


def turns() -> dict[str, object]:
    work = Filling()
    way = bypass.find_bypass()
    before, functions, counts = way.words(), way.differing(), [launched()]
    for turn, launches in enumerate((1, 2, 3)):
        way.switch(past=turn == 1)
        for number in range(launches):
            work.launch(256 * turn + 64 * number, 64, 10 * turn + number + 1)
        counts.append(launched())
        if turn == 1:
            beside = way.differing()
    return {
        "launched": [after - earlier for earlier, after in itertools.pairwise(counts)],
        "functions": functions,
        "past": beside,
        "restored": way.words() == before and not way.is_past,
        "read": work.read(),
    }


def main() -> None:
    try:
        if sys.argv[1:] == ["functions"]:
            Filling()
            print(json.dumps({"functions": bypass.find_bypass().differing()}))
            return
        if sys.argv[1:] == ["foreign"]:
            other = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
            with mock.patch("platform.machine", return_value=other):
                Filling()
                bypass.find_bypass()
        if sys.argv[1:] == ["driver-first"]:
            ctypes.CDLL(os.environ["MPSD_REAL_LIBCUDA"])
            ctypes.CDLL(f"{os.environ['LD_LIBRARY_PATH']}/libcuda.so.1")
        print(json.dumps(turns()))
    except UnsupportedError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
