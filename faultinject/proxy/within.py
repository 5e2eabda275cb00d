"""Rounds within one process: a block of steps past the proxy, one through it, and one past it again.

Two processes of one program whose steps are the CPU's differ by several percent, each for as long as it
lives. Between neighbouring blocks of one process there is none of that. How fast a processor that others use
too is changes within a tenth of a second, so where a step consists of beats (faultinject/proxy/work) a block
is one of these, after another that goes the same way and is not counted, and a step has many rounds.
How calls are led past the proxy, and which of them, is in faultinject/proxy/past.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faultinject.proxy.judge import BEATS_LEAST, BLOCKS

THROUGH = "through"
BLOCK_S = 0.1
"""Of a block: a third of one between processes, so that a round takes as long as one of those."""
WARM_SHARE = 10
BEATS_EACH = 2
"""Of a block of beats: the last one counts. What comes first after an exchange finds caches cold."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of each block of a program: `warm` steps, then `steps` that count. `rounds`: so many are in one step,
    of beats, and no block takes a step; 0: it is of steps."""

    warm: int
    steps: int
    rounds: int = 0

    @property
    def of_round(self) -> int:
        """Steps of all its blocks; or the step that its rounds are in."""
        return 1 if self.rounds else len(BLOCKS) * (self.warm + self.steps)

    def told(self, number: int) -> dict[str, Any]:
        """The order for that round, or for the step that such rounds are in."""
        if self.rounds:
            return {"first": number * self.rounds, "rounds": self.rounds}
        return {"blocks": order(number), "warm": self.warm, "steps": self.steps}


def shape(step_s: float, beats_per_step: float, most: int, *, exchanges: bool) -> Shape:
    """By the seconds and the beats of a step: what comes first after an exchange is not counted.

    `exchanges`: between two beats calls may be led another way (Work.between).
    """
    if exchanges and beats_per_step >= BEATS_LEAST:
        return Shape(0, 1, int(beats_per_step) // (len(BLOCKS) * BEATS_EACH))
    steps = max(1, min(most, round(BLOCK_S / max(step_s, 1e-6))))
    return Shape(max(1, steps // WARM_SHARE), steps)


def order(number: int) -> tuple[str, ...]:
    """The blocks of a round, one after another. Each is the first in one of so many rounds."""
    turn = number % len(BLOCKS)
    return BLOCKS[turn:] + BLOCKS[:turn]


def turns(first: int, rounds: int) -> list[str]:
    """Whose block each beat of a step belongs to: of so many rounds, from that number on."""
    blocks = (name for number in range(first, first + rounds) for name in order(number))
    return [name for name in blocks for _ in range(BEATS_EACH)]


def counted(names: Sequence[str], values: Sequence[float]) -> dict[str, list[float]]:
    """Of what each beat took (seconds), with turns() of them, what counts: a number for each whole round, by
    block."""
    beats = len(BLOCKS) * BEATS_EACH
    whole = min(len(names), len(values)) // beats * beats
    found: dict[str, list[float]] = {name: [] for name in BLOCKS}
    for at in range(BEATS_EACH - 1, whole, BEATS_EACH):
        found[names[at]].append(values[at])
    return found


def of_round(said: Mapping[str, Any]) -> tuple[Mapping[str, list[float]], Mapping[str, list[float]]]:
    """What each block took, and what processors worked for it, from a worker's word of a round: of steps one
    number each, the steps' median."""
    if "blocks" not in said:
        return said["times"], said["cpu"]
    blocks = {name: said["blocks"][name] for name in BLOCKS}
    times = {name: [statistics.median(block["times"])] for name, block in blocks.items()}
    return times, {name: [block["cpu"]] for name, block in blocks.items()}
