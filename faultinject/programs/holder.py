"""A client that holds GPU memory and changes what it holds all the time, until it is told to stop, or killed.

Every piece has a pattern of its own. One after another is read back and compared, and some are given back
and taken anew, so that a kill finds it in any of the driver's calls.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass

from faultinject.programs.device import BACKENDS, DeviceError
from faultinject.programs.driver import Driver
from faultinject.programs.talk import Inbox, clock, identity, no_core_dumps, say

PIECES = 12
SMALL, LARGE = 64 << 10, 8 << 20
REPLACED_OF = 4
"""One piece in so many is given back after it was looked at."""


@dataclass(frozen=True, slots=True)
class Piece:
    address: int
    content: bytes


class Holder:
    """`looks` counts the pieces that were compared, `wrong` those that were not as they were left."""

    def __init__(self, seed: int, pieces: int, *, still: bool) -> None:
        self.driver, self.random, self.still = Driver(), random.Random(seed), still
        self.looks = self.wrong = 0
        self.pieces = [self._take() for _ in range(pieces)]

    def _take(self) -> Piece:
        size = self.random.randrange(4, LARGE if self.random.random() < 0.25 else SMALL)
        content = self.random.randbytes(min(size, 4096))
        content = (content * -(-size // len(content)))[:size]
        address = self.driver.alloc(size)
        self.driver.write(address, content)
        return Piece(address, content)

    def look(self, number: int) -> None:
        piece = self.pieces[number]
        self.looks += 1
        if self.driver.read(piece.address, len(piece.content)) != piece.content:
            self.wrong += 1

    def step(self) -> None:
        number = self.random.randrange(len(self.pieces))
        self.look(number)
        if not self.still and self.random.randrange(REPLACED_OF) == 0:
            self.driver.free(self.pieces[number].address)
            self.pieces[number] = self._take()

    def held(self) -> int:
        return sum(len(p.content) for p in self.pieces)

    def tally(self) -> dict[str, int]:
        # The names are those of a survivor: a step is a look.
        return {"steps": self.looks, "wrong": self.wrong, "held": self.held()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pieces", type=int, default=PIECES)
    parser.add_argument("--still", action="store_true", help="give nothing back before the end")
    args = parser.parse_args(argv)
    no_core_dumps()
    inbox = Inbox()
    holder = None
    try:
        say("started", **identity())
        holder = Holder(args.seed, args.pieces, still=args.still)
        say("ready", **identity(), context_at=clock(), held=holder.held())
        while (order := inbox.wait(timeout=0)) is None or order["do"] != "stop":
            holder.step()
        for number in range(len(holder.pieces)):
            holder.look(number)
        say("done", **holder.tally())
        for piece in holder.pieces:
            holder.driver.free(piece.address)
        holder.driver.close()
        return 0
    except DeviceError as error:
        say("error", code=error.code, text=str(error), **(holder.tally() if holder else {}))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
