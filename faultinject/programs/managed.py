"""A client that faults on managed memory on request: the GPU serves such faults.

Each order `pages:N` moves N pages to the CPU and lets a kernel access them: real GPU faults, none fatal.
NVIDIA only; at most MEMORY bytes of managed memory.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys

from cuda.bindings import driver

from faultinject.programs.basics.messages import (
    Inbox,
    identity,
    no_core_dumps,
    say,
)
from faultinject.programs.devices.base import BACKENDS, DeviceError
from faultinject.programs.devices.nvidia import checked, open_nvidia

MEMORY = 256 << 20
PAGE = 64 << 10
"""The smallest unit in which the driver moves managed memory."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.parse_args(argv)
    no_core_dumps()
    inbox = Inbox()
    try:
        device = open_nvidia(os.environ)
        flags = int(driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
        memory = int(checked(driver.cuMemAllocManaged(MEMORY, flags)))
        say("ready", **identity(), on_mps=device.on_mps)
        at = 0
        while (order := inbox.wait()) is not None and order["do"] != "stop":
            pages_left = int(str(order["do"]).partition(":")[2])
            while pages_left > 0:
                pages = min(pages_left, MEMORY // PAGE - at)
                ctypes.memset(memory + at * PAGE, 0, pages * PAGE)
                device.increment(memory + at * PAGE, pages * PAGE // 4)
                device.synchronize()
                pages_left -= pages
                at = (at + pages) % (MEMORY // PAGE)
        device.close()
        say("done")
        return 0
    except DeviceError as error:
        say("error", code=error.code, text=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
