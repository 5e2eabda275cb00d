#!/usr/bin/env python3
"""A service that survives a fault of its domain: a second, prepared process of it takes over.

    mpsd-standby python warm_service.py            # --cold: without a second process, restart instead

It counts in GPU memory and prints each number; a real service would hold its model and requests there. All
slow work comes before wait_for_turn(): loading libraries, creating the context, attaching the memory, a
first run of every kernel. Kill it, or let a neighbour's kernel fault: the next number comes from the other
process. Needs mpsd with a vault. Without mpsd-standby it counts too, and ends with its domain.

A number is written to the place of the last but one, so a kill at any instant leaves a whole number.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
import time
import zlib

import mpsd_client

RECORD = struct.Struct("<QI")
PLACES = (0, 512)


class Count:
    """The number in the buffer, and which of the two places holds it."""

    def __init__(self, buffer: mpsd_client.Buffer) -> None:
        self.buffer = buffer
        self.number, self.place = 0, 0

    def load(self) -> None:
        """Read the number that the previous process left; 0 if there is no whole one."""
        for place, at in enumerate(PLACES):
            number, check = RECORD.unpack(self.buffer.read(RECORD.size, at))
            if check == _check(number) and number > self.number:
                self.number, self.place = number, place

    def next(self) -> int:
        number, place = self.number + 1, 1 - self.place
        self.buffer.write(RECORD.pack(number, _check(number)), PLACES[place])
        self.number, self.place = number, place
        return number


def _check(number: int) -> int:
    return zlib.crc32(number.to_bytes(8, "little"))


def main() -> int:
    parser = argparse.ArgumentParser(description="A counter in GPU memory that continues in another process.")
    parser.add_argument("--name", default="warm-service", help="name of the buffer (default: %(default)s)")
    parser.add_argument("--to", type=int, default=1000, help="last number (default: %(default)s)")
    parser.add_argument("--ms", type=float, default=10.0, help="pause between numbers (default: %(default)s)")
    given = parser.parse_args()
    try:
        with mpsd_client.session() as session:
            buffer = session.attach(given.name, 1 << 20)
            count = Count(buffer)
            if session.wait_for_turn():
                print(f"process {os.getpid()} takes over", flush=True)
            count.load()
            while count.number < given.to:
                print(f"{count.next()} {os.getpid()}", flush=True)
                time.sleep(given.ms / 1e3)
            buffer.forget()
    except mpsd_client.MpsdError as error:
        print(f"warm_service: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
