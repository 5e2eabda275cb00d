"""A client that allocates all remaining GPU memory, in ever smaller allocations, until told to stop.

It says how much was left, and at its end whether its allocations still hold their data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from faultinject.programs.basics.messages import (
    Inbox,
    identity,
    no_core_dumps,
    say,
)
from faultinject.programs.devices.base import (
    BACKENDS,
    Device,
    DeviceError,
    open_device,
)

LARGEST, SMALLEST = 1 << 30, 64 << 10
OUT_OF_MEMORY = 2
MARK = 64
"""Bytes at the start of each allocation that are written, and compared at the end."""


def fill(device: Device) -> Iterator[tuple[int, int]]:
    """Return address and size of each allocation. Raises DeviceError for all but the end of memory."""
    size = LARGEST
    while size >= SMALLEST:
        try:
            yield device.alloc(size), size
        except DeviceError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            size //= 2


def mark(number: int) -> bytes:
    return number.to_bytes(4, "little") * (MARK // 4)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    args = parser.parse_args(argv)
    no_core_dumps()
    inbox = Inbox()
    try:
        device = open_device(args.backend)
        allocations = list(fill(device))
        for number, (address, _) in enumerate(allocations):
            device.write(address, mark(number))
        held_bytes = sum(size for _, size in allocations)
        say("full", **identity(), pieces=len(allocations), held=held_bytes, left=device.free_bytes())
        inbox.expect("look")
        wrong = sum(device.read(a, MARK) != mark(n) for n, (a, _) in enumerate(allocations))
        say("done", wrong=wrong)
        device.close()
        return 0
    except DeviceError as error:
        say("error", code=error.code, text=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
