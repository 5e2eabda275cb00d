"""A client under mpsd-standby: it counts by kernels in memory of the vault, and another process continues.

Every word of the first page must be the count; the last complete count is beside it. A death may come in the
middle of a kernel: then some words are one ahead, and the next process corrects them first.
"""

from __future__ import annotations

import argparse
import sys
import time

import mpsd_client
from faultinject.programs.basics.messages import identity, no_core_dumps, say
from faultinject.programs.devices.base import (
    BACKENDS,
    Device,
    DeviceError,
    open_device,
)

WORDS = 1024
DONE_AT = 4 * WORDS
SIZE = 2 << 20


class Count:
    def __init__(self, device: Device, at: int) -> None:
        self.device, self.at = device, at
        self.number = 0

    def load(self) -> int:
        """Load the state; return how many words are neither done nor one ahead."""
        self.number = int.from_bytes(self.device.read(self.at + DONE_AT, 4), "little")
        wrong = sum(word not in (self.number, self.number + 1) for word in self._words())
        self.device.write(self.at, self.number.to_bytes(4, "little") * WORDS)
        return wrong

    def _words(self) -> list[int]:
        page = self.device.read(self.at, 4 * WORDS)
        return [int.from_bytes(page[i : i + 4], "little") for i in range(0, len(page), 4)]

    def next(self) -> int:
        """Run one kernel; return how many words are wrong."""
        self.device.increment(self.at, WORDS)
        wrong = sum(word != self.number + 1 for word in self._words())
        self.number += 1
        self.device.write(self.at + DONE_AT, self.number.to_bytes(4, "little"))
        return wrong


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--pause-ms", type=float, default=1.0)
    args = parser.parse_args(argv)
    no_core_dumps()
    try:
        device = open_device(args.backend)
        # A first run of the kernel, for what is loaded lazily.
        warm = device.alloc(4 * WORDS)
        device.increment(warm, WORDS)
        device.synchronize()
        with mpsd_client.session() as session:
            buffer = session.attach("turns", SIZE)
            say("waits", **identity())
            took_over = session.wait_for_turn()
            count = Count(device, buffer.pointer)
            say("turn", took_over=took_over, wrong=count.load(), **identity())
            while True:
                wrong = count.next()
                say("step", number=count.number, wrong=wrong, **identity())
                time.sleep(args.pause_ms / 1e3)
    except (DeviceError, mpsd_client.MpsdError) as error:
        say("error", text=str(error), **identity())
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
