"""A well-behaved client: computes, checks every result, and measures how long each step took.

Every step adds one to each word of a buffer on the GPU and reads all of them back. Word i must hold base + i
+ step: a lost step, a repeated step, a stale or foreign value all show. A second buffer stays unchanged and
is compared now and then, so that a neighbour's out-of-bounds write shows.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from dataclasses import dataclass, field

from faultinject.programs.basics.messages import (
    Inbox,
    clock,
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

MASK = 0xFFFFFFFF
BUCKET_S = 0.05
STILL_EVERY = 16
"""Steps between two checks of the constant buffer."""


@dataclass(slots=True)
class Tally:
    """The survivor's figures at its end.

    `longest`: (start, end) of the longest step that began in each BUCKET_S of time, so that a stall can be
    told from what came before it.
    """

    steps: int = 0
    wrong: int = 0
    longest: dict[int, tuple[float, float]] = field(default_factory=dict)

    def timed(self, start: float, end: float) -> None:
        bucket = int(start / BUCKET_S)
        before = self.longest.get(bucket, (0.0, 0.0))
        if end - start > before[1] - before[0]:
            self.longest[bucket] = (start, end)

    def report(self) -> dict[str, object]:
        return {
            "steps": self.steps,
            "wrong": self.wrong,
            "longest": [(round(a, 6), round(b, 6)) for a, b in self.longest.values()],
        }


def pattern(base: int, words: int) -> array[int]:
    return array("I", [(base + i) & MASK for i in range(words)])


def next_content(expected: array[int]) -> array[int]:
    return array("I", [(x + 1) & MASK for x in expected])


class Computation:
    """The buffers, what they must hold, and one step of the work.

    `lasts_s`: how long the GPU works before the check, where kernels themselves take no time.
    """

    def __init__(self, device: Device, seed: int, words: int, *, check: bool, lasts_s: float = 0.0) -> None:
        self.device, self.words, self.check, self.lasts_s = device, words, check, lasts_s
        self.expected = pattern(seed, words)
        self.still = pattern(seed ^ 0x5A5A5A5A, words).tobytes()
        self.moving_at = device.alloc(words * 4)
        self.still_at = device.alloc(words * 4)
        device.write(self.moving_at, self.expected.tobytes())
        device.write(self.still_at, self.still)
        self.tally = Tally()

    def step(self) -> None:
        """Do one step; count every mismatch, report the first at once. Raises DeviceError."""
        start = clock()
        self.device.increment(self.moving_at, self.words)
        if self.lasts_s:
            time.sleep(self.lasts_s)
        seen = self.device.read(self.moving_at, self.words * 4) if self.check else b""
        if not self.check:
            self.device.synchronize()
        self.tally.timed(start, clock())
        self.tally.steps += 1
        self.expected = next_content(self.expected)
        if self.check and seen != self.expected.tobytes():
            self._report_mismatch("moving", seen, self.expected.tobytes())
        if self.check and self.tally.steps % STILL_EVERY == 0:
            still = self.device.read(self.still_at, self.words * 4)
            if still != self.still:
                self._report_mismatch("still", still, self.still)

    def _report_mismatch(self, buffer: str, seen: bytes, expected: bytes) -> None:
        self.tally.wrong += 1
        if self.tally.wrong == 1:
            at = next((i for i in range(0, len(expected), 4) if seen[i : i + 4] != expected[i : i + 4]), 0)
            got, want = seen[at : at + 4].hex(), expected[at : at + 4].hex()
            say("wrong", step=self.tally.steps, buffer=buffer, word=at // 4, seen=got, expected=want)


def work(computation: Computation, inbox: Inbox, pause_s: float) -> None:
    """Step until told to stop. Raises DeviceError."""
    while True:
        order = inbox.wait(0)
        if order is not None and order["do"] == "stop":
            return
        computation.step()
        if pause_s:
            time.sleep(pause_s)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", type=int, default=256)
    parser.add_argument("--pause-ms", type=float, default=2.0)
    parser.add_argument("--no-check", action="store_true", help="do not compare memory contents")
    args = parser.parse_args(argv)
    no_core_dumps()
    inbox = Inbox()
    computation = None
    try:
        device = open_device(args.backend)
        context_at = clock()
        computation = Computation(device, args.seed, args.words, check=not args.no_check)
        computation.step()
        say("ready", **identity(), context_at=context_at, on_mps=device.on_mps)
        work(computation, inbox, args.pause_ms / 1e3)
        say("done", **computation.tally.report())
        device.close()
        return 0
    except DeviceError as error:
        tally = computation.tally.report() if computation else {}
        say("error", code=error.code, text=str(error), **tally)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
