"""A program that allocates all memory in many sizes, frees it, and allocates once more.

It calls the driver by ctypes, so that the same program runs with the proxy and without.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import asdict, dataclass, field

from faultinject.programs.basics.messages import (
    Inbox,
    clock,
    identity,
    no_core_dumps,
    say,
)
from faultinject.programs.devices.base import BACKENDS, DeviceError
from faultinject.programs.devices.driver import Driver

LARGEST, MIN_LARGE = 1 << 30, 2 << 20
SMALL = (256 << 10, 64 << 10, 4 << 10)
"""Sizes that are tried at the end, one after another."""

SHARE = 64
"""No allocation is larger than this share of the GPU's memory."""

UNIT = 512
BACK_S, GIVEN_S, POLL_S = 5.0, 3.0, 0.01
BACK_SHARE = 0.995


@dataclass(slots=True)
class Taken:
    """`codes`: the errors that ended each size; `had`: the requested bytes."""

    had: int = 0
    pieces: list[int] = field(default_factory=list)
    codes: set[int] = field(default_factory=set)

    def take(self, driver: Driver, size: int) -> bool:
        """Allocate once more; return False at the end of memory."""
        try:
            self.pieces.append(driver.alloc(size))
        except DeviceError as error:
            self.codes.add(error.code)
            return False
        self.had += size
        return True


def allocation_sizes(total: int) -> list[int]:
    """Return powers of two from the largest allocation down, for this many bytes of memory."""
    size, sizes = LARGEST, []
    while size >= MIN_LARGE:
        sizes += [size] if size <= total // SHARE else []
        size //= 2
    return sizes


def exhaust(driver: Driver, seed: int, leave: int = 0) -> Taken:
    """Allocate all sizes in turn, a little less than a power of two, without those that do not fit any more.

    `leave` [bytes]: below this it waits for other programs to free memory, until they do not any more.
    """
    taken, numbers = Taken(), random.Random(seed)
    sizes = allocation_sizes(driver.memory_info()[1])
    while sizes:
        chosen = numbers.randrange(len(sizes))
        less = numbers.randrange(sizes[chosen] // 16 // UNIT) * UNIT
        if leave and not await_free_memory(driver, sizes[chosen] + leave):
            sizes, leave = (sizes[chosen + 1 :], leave) if sizes[chosen] > leave else (sizes, 0)
            continue
        if not taken.take(driver, sizes[chosen] - less):
            # A larger one does not fit either: the next size is the next smaller one.
            sizes = sizes[chosen + 1 :]
    for size in SMALL:
        while taken.take(driver, size):
            pass
    return taken


def await_free_memory(driver: Driver, wanted: int) -> bool:
    """Return whether this many bytes are free, or become free in time."""
    end = clock() + GIVEN_S
    while (is_lacking := driver.memory_info()[0] < wanted) and clock() < end:
        time.sleep(POLL_S)
    return not is_lacking


def await_released_memory(driver: Driver, before: int) -> int:
    """Return the free bytes once nearly all is free, or at the deadline: a daemon releases its part later."""
    end = clock() + BACK_S
    while (free_bytes := driver.memory_info()[0]) < before * BACK_SHARE and clock() < end:
        time.sleep(POLL_S)
    return free_bytes


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
        # This one stays: the vault knows the program by it, and it gets guard zones.
        driver.alloc(MIN_LARGE)
        say("ready", **identity())
        inbox.expect("go")
        began, (before, total) = clock(), driver.memory_info()
        taken = exhaust(driver, args.seed, args.leave)
        free_after, took = driver.memory_info()[0], clock() - began
        facts = {k: v for k, v in asdict(taken).items() if k == "had"}
        facts |= {"pieces": len(taken.pieces), "codes": sorted(taken.codes), "total": total}
        say("full", **identity(), **facts, free_before=before, free_after=free_after, seconds=round(took, 3))
        inbox.expect("free")
        began = clock()
        for address in taken.pieces:
            driver.free(address)
        took, free_again = clock() - began, await_released_memory(driver, before)
        again = Taken()
        again.take(driver, allocation_sizes(total)[0])
        say("done", free_again=free_again, again=sorted(again.codes), seconds=round(took, 3))
        driver.close()
        return 0
    except DeviceError as error:
        say("error", code=error.code, text=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
