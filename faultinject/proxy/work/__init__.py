"""What the paired programs do. Each module has `start(seed, backend)`, and says what a step is worth.

UNIT and PER_STEP: what is counted and how much of it a step does; UNTIMED: why its steps are not judged
by time, "" where they are. Every result is a function of the seed and the number of steps alone.

A work whose steps are long, and the CPU's, is disturbed in each of them. Where they consist of like pieces,
it has a list `beats` of how long each of these took (seconds), which whoever reads it clears, and BEAT says
what they are; then PER_STEP is of a beat. With `come_between(settle, act)` each beat ends with what `settle`
waits for, and `act` is called before the first one of each step and after every one, at no beat's expense;
until `leave()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

TRAININGS = ("transformer", "convolution", "expandable")
TORCH = (*TRAININGS, "graphs", "streams", "pinned", "sharing", "generate", "generate_large", "serving")
BINDINGS = (
    "bindings",
    "bindings_copies",
    "bindings_graphs",
    "bindings_nodes",
    "bindings_segments",
    "bindings_weights",
)
HIDDEN = ("bindings_hidden",)
"""Those that write where no parameter leads, for validation to find: no works for faults."""
NAMES = (*TORCH, *BINDINGS, *HIDDEN, "cupy_arrays", "calls")
MAPPED = ("bindings_segments", "expandable")
"""Those that map all their memory themselves, which the vault does not take."""
ON_SIMULATED = (*BINDINGS, *HIDDEN, "calls")
"""Those that need nothing of a GPU that the stand-in driver lacks."""


class Work(Protocol):
    def step(self) -> None:
        """One step, over when it returns."""
        ...

    def results(self) -> Iterator[bytes]:
        """All results so far, as bytes."""
        ...

    def close(self) -> None: ...
