#!/usr/bin/env python3
"""A service that goes on when its domain is lost: a second process of it waits, warm, and takes over.

    mpsd-standby python warm_service.py            # --cold: nobody waits, it is started anew

It counts, in GPU memory, and says each number; a real one would hold its model there, and its requests. All
that takes long comes before wait_for_turn(): loading libraries, making the context, attaching the memory, a
first run of every kernel. Kill it, or let a neighbour's kernel fault: the next number comes from the other
process. Needs mpsd with a vault; without mpsd-standby it counts too, and ends with its domain.

A number is written where the last but one was, so a death at any instant leaves a whole one.
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
    """The number in the buffer, and which of the two places has it."""

    def __init__(self, buffer: mpsd_client.Buffer) -> None:
        self.buffer = buffer
        self.number, self.place = 0, 0

    def load(self) -> None:
        """What the process before has left; 0 where nothing is, or nothing whole."""
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
    parser = argparse.ArgumentParser(description="A count in GPU memory that goes on in another process.")
    parser.add_argument("--name", default="warm-service", help="of the buffer (default: %(default)s)")
    parser.add_argument("--to", type=int, default=1000, help="count so far (default: %(default)s)")
    parser.add_argument("--ms", type=float, default=10.0, help="between two numbers (default: %(default)s)")
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
