"""A program that takes memory in pieces of many sizes until there is none, gives it back, takes one more.

It calls the driver by ctypes, so that the same program runs with the proxy and without.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import asdict, dataclass, field

from faultinject.programs.device import BACKENDS, DeviceError
from faultinject.programs.driver import Driver
from faultinject.programs.talk import Inbox, clock, identity, no_core_dumps, say

LARGEST, LEAST_LARGE = 1 << 30, 2 << 20
SMALL = (256 << 10, 64 << 10, 4 << 10)
"""Sizes that are tried at the end, one after another."""

SHARE = 64
"""No piece is larger than this part of the GPU's memory."""

UNIT = 512
BACK_S, GIVEN_S, POLL_S = 5.0, 3.0, 0.01
BACK_SHARE = 0.995


@dataclass(slots=True)
class Taken:
    """`codes` are the errors that ended each size of piece, `had` bytes as they were asked for."""

    had: int = 0
    pieces: list[int] = field(default_factory=list)
    codes: set[int] = field(default_factory=set)

    def take(self, driver: Driver, size: int) -> bool:
        """One more piece; False where there was none."""
        try:
            self.pieces.append(driver.alloc(size))
        except DeviceError as error:
            self.codes.add(error.code)
            return False
        self.had += size
        return True


def ladder(total: int) -> list[int]:
    """Powers of two from the largest piece down, for this many bytes of memory."""
    size, sizes = LARGEST, []
    while size >= LEAST_LARGE:
        sizes += [size] if size <= total // SHARE else []
        size //= 2
    return sizes


def exhaust(driver: Driver, seed: int, leave: int = 0) -> Taken:
    """Pieces of all sizes in turn, a little less than a power of two; no longer those that did not fit.

    `leave`: bytes. Before fewer are left it waits for others to give some, until they do not any more.
    """
    taken, numbers = Taken(), random.Random(seed)
    sizes = ladder(driver.room()[1])
    while sizes:
        chosen = numbers.randrange(len(sizes))
        less = numbers.randrange(sizes[chosen] // 16 // UNIT) * UNIT
        if leave and not has_room(driver, sizes[chosen] + leave):
            sizes, leave = (sizes[chosen + 1 :], leave) if sizes[chosen] > leave else (sizes, 0)
            continue
        if not taken.take(driver, sizes[chosen] - less):
            # Nor does what is larger: the next to be tried is the next smaller one.
            sizes = sizes[chosen + 1 :]
    for size in SMALL:
        while taken.take(driver, size):
            pass
    return taken


def has_room(driver: Driver, wanted: int) -> bool:
    """Whether so many bytes are free, or become so in time."""
    end = clock() + GIVEN_S
    while (is_short := driver.room()[0] < wanted) and clock() < end:
        time.sleep(POLL_S)
    return not is_short


def room_again(driver: Driver, before: int) -> int:
    """Free bytes, once all but a trifle is back, or at the deadline: a daemon lets go a little later."""
    end = clock() + BACK_S
    while (room := driver.room()[0]) < before * BACK_SHARE and clock() < end:
        time.sleep(POLL_S)
    return room


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--leave", type=int, default=0, help="bytes; grow slowly where fewer are left")
    args = parser.parse_args(argv)
    no_core_dumps()
    inbox = Inbox()
    try:
        driver = Driver()
        # One that stays: with the vault the program is known by it, and gets its guard zones.
        driver.alloc(LEAST_LARGE)
        say("ready", **identity())
        inbox.expect("go")
        began, (before, total) = clock(), driver.room()
        taken = exhaust(driver, args.seed, args.leave)
        left, took = driver.room()[0], clock() - began
        facts = {k: v for k, v in asdict(taken).items() if k == "had"}
        facts |= {"pieces": len(taken.pieces), "codes": sorted(taken.codes), "total": total}
        say("full", **identity(), **facts, free_before=before, free_after=left, seconds=round(took, 3))
        inbox.expect("free")
        began = clock()
        for address in taken.pieces:
            driver.free(address)
        took, back = clock() - began, room_again(driver, before)
        again = Taken()
        again.take(driver, ladder(total)[0])
        say("done", free_again=back, again=sorted(again.codes), seconds=round(took, 3))
        driver.close()
        return 0
    except DeviceError as error:
        say("error", code=error.code, text=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
