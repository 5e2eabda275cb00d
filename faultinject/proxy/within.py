"""Rounds within one process: a block of steps past the proxy, one through it, and one past it again.

Two processes of one program whose steps are the CPU's differ by several percent, each for as long as it
lives. Between neighbouring blocks of one process there is none of that.
How calls are led past the proxy, and which of them, is in faultinject/proxy/past.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faultinject.proxy.judge import BEATS_LEAST, BLOCKS, pace

THROUGH = "through"
BLOCK_S = 0.1
"""Of a block: a third of one between processes, so that a round takes as long as one of those."""
WARM_SHARE = 10
WARM_BEATS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Of each block of a program: `warm` steps, then `steps` that count, without their first `beats`."""

    warm: int
    steps: int
    beats: int

    @property
    def of_round(self) -> int:
        """Steps of all its blocks."""
        return len(BLOCKS) * (self.warm + self.steps)


def shape(step_s: float, beats_per_step: float, most: int) -> Shape:
    """By the seconds and the beats of a step: what comes first after an exchange is not counted.

    Where one step has beats enough some of these are left out, in place of a whole step.
    """
    steps = max(1, min(most, round(BLOCK_S / max(step_s, 1e-6))))
    if beats_per_step >= BEATS_LEAST + WARM_BEATS:
        return Shape(0, steps, WARM_BEATS)
    return Shape(max(1, steps // WARM_SHARE), steps, 0)


def order(number: int) -> tuple[str, ...]:
    """The blocks of a round, one after another. Each is the first in one of so many rounds."""
    turn = number % len(BLOCKS)
    return BLOCKS[turn:] + BLOCKS[:turn]


def paces(blocks: Mapping[str, Mapping[str, Any]], form: Shape) -> dict[str, float]:
    """What each block of a round counts with, in seconds, from the steps and beats of each."""
    return {name: pace(blocks[name]["times"], blocks[name]["beats"][form.beats :]) for name in BLOCKS}
