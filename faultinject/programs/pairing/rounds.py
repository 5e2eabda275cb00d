"""Rounds within one process: a block of steps past the proxy, one through it, and one past it again.

Two processes of a CPU-bound program differ by several percent for as long as they live. Neighbouring blocks
of one process do not. The speed of a shared processor changes within a tenth of a second. So where a step
consists of beats (programs/workloads), a block is one beat, after another one on the same way that does not
count, and a step has many rounds. bypass.py leads calls past the proxy.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BLOCKS = ("past", "through", "again")
"""The blocks of a round within a process. Each is the first in one of len(BLOCKS) rounds (block_order())."""
MIN_BEATS = 20
"""With fewer beats in a step, its blocks are of steps."""
THROUGH = "through"
BLOCK_S = 0.1
"""The length of a block: a third of one between processes, so that a round takes as long."""
WARM_SHARE = 10
BEATS_EACH = 2
"""Beats of a block; the last one counts, because caches are cold after an exchange."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of each block: `warm` steps, then `steps` that count.

    `rounds`: this many in one step, with blocks of beats; 0: blocks of steps.
    """

    warm: int
    steps: int
    rounds: int = 0

    @property
    def steps_per_round(self) -> int:
        """Return the steps of all blocks of a round, or the one step that has many rounds."""
        return 1 if self.rounds else len(BLOCKS) * (self.warm + self.steps)

    def order_data(self, number: int) -> dict[str, Any]:
        """Return the order for that round, or for the step with many rounds."""
        if self.rounds:
            return {"first": number * self.rounds, "rounds": self.rounds}
        return {"blocks": block_order(number), "warm": self.warm, "steps": self.steps}


def shape(step_s: float, beats_per_step: float, most: int, *, exchanges: bool) -> Shape:
    """Return the shape for these seconds and beats of a step.

    `exchanges`: calls can be led another way between two beats (Work.between).
    """
    if exchanges and beats_per_step >= MIN_BEATS:
        return Shape(0, 1, int(beats_per_step) // (len(BLOCKS) * BEATS_EACH))
    steps = max(1, min(most, round(BLOCK_S / max(step_s, 1e-6))))
    return Shape(max(1, steps // WARM_SHARE), steps)


def block_order(number: int) -> tuple[str, ...]:
    """Return the blocks of a round in their order. Each is the first in one of len(BLOCKS) rounds."""
    turn = number % len(BLOCKS)
    return BLOCKS[turn:] + BLOCKS[:turn]


def beat_blocks(first: int, rounds: int) -> list[str]:
    """Return the block of each beat of a step with this many rounds, from that number on."""
    blocks = (name for number in range(first, first + rounds) for name in block_order(number))
    return [name for name in blocks for _ in range(BEATS_EACH)]


def counted_times(names: Sequence[str], values: Sequence[float]) -> dict[str, list[float]]:
    """Return the times [s] of beats that count, by block: one for each whole round.

    `names`: the blocks, in the order of beat_blocks().
    """
    beats = len(BLOCKS) * BEATS_EACH
    whole = min(len(names), len(values)) // beats * beats
    found: dict[str, list[float]] = {name: [] for name in BLOCKS}
    for at in range(BEATS_EACH - 1, whole, BEATS_EACH):
        found[names[at]].append(values[at])
    return found


def round_times(message: Mapping[str, Any]) -> tuple[Mapping[str, list[float]], Mapping[str, list[float]]]:
    """Return times and processor times of each block from a worker's message; of steps one number, their
    median."""
    if "blocks" not in message:
        return message["times"], message["cpu"]
    blocks = {name: message["blocks"][name] for name in BLOCKS}
    times = {name: [statistics.median(block["times"])] for name, block in blocks.items()}
    return times, {name: [block["cpu"]] for name, block in blocks.items()}
