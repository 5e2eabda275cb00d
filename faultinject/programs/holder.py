"""A client that holds GPU memory and changes its allocations all the time, until told to stop, or killed.

Every allocation has a pattern of its own. One after another is read back and compared, and some are freed and
made again, so that a kill comes in any call of the driver.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass

from faultinject.programs.basics.messages import (
    Inbox,
    clock,
    identity,
    no_core_dumps,
    say,
)
from faultinject.programs.devices.base import BACKENDS, DeviceError
from faultinject.programs.devices.driver import Driver

ALLOCATIONS = 12
SMALL, LARGE = 64 << 10, 8 << 20
REPLACE_ONE_IN = 4
"""One allocation in this many is freed after its check."""


@dataclass(frozen=True, slots=True)
class Allocation:
    address: int
    content: bytes


class Holder:
    """`checks`: allocations that were compared; `wrong`: those with other data."""

    def __init__(self, seed: int, count: int, *, still: bool) -> None:
        self.driver, self.random, self.still = Driver(), random.Random(seed), still
        self.checks = self.wrong = 0
        self.allocations = [self._allocate() for _ in range(count)]

    def _allocate(self) -> Allocation:
        size = self.random.randrange(4, LARGE if self.random.random() < 0.25 else SMALL)
        content = self.random.randbytes(min(size, 4096))
        content = (content * -(-size // len(content)))[:size]
        address = self.driver.alloc(size)
        self.driver.write(address, content)
        return Allocation(address, content)

    def check(self, number: int) -> None:
        allocation = self.allocations[number]
        self.checks += 1
        if self.driver.read(allocation.address, len(allocation.content)) != allocation.content:
            self.wrong += 1

    def step(self) -> None:
        number = self.random.randrange(len(self.allocations))
        self.check(number)
        if not self.still and self.random.randrange(REPLACE_ONE_IN) == 0:
            self.driver.free(self.allocations[number].address)
            self.allocations[number] = self._allocate()

    def held_bytes(self) -> int:
        return sum(len(p.content) for p in self.allocations)

    def tally(self) -> dict[str, int]:
        # The names are those of a survivor: a step is a check.
        return {"steps": self.checks, "wrong": self.wrong, "held": self.held_bytes()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pieces", type=int, default=ALLOCATIONS)
    parser.add_argument("--still", action="store_true", help="give nothing back before the end")
    args = parser.parse_args(argv)
    no_core_dumps()
    inbox = Inbox()
    holder = None
    try:
        say("started", **identity())
        holder = Holder(args.seed, args.pieces, still=args.still)
        say("ready", **identity(), context_at=clock(), held=holder.held_bytes())
        while (order := inbox.wait(timeout=0)) is None or order["do"] != "stop":
            holder.step()
        for number in range(len(holder.allocations)):
            holder.check(number)
        say("done", **holder.tally())
        for allocation in holder.allocations:
            holder.driver.free(allocation.address)
        holder.driver.close()
        return 0
    except DeviceError as error:
        say("error", code=error.code, text=str(error), **(holder.tally() if holder else {}))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
