"""The workloads of the paired programs. Each module has `start(seed, backend)` and describes its steps.

UNIT and PER_STEP: the counted unit, and how many of them a step does. UNTIMED: why its steps are not judged
by time, "" where they are. Every result is a function of the seed and the number of steps alone.

A workload with long CPU-bound steps is disturbed in each of them. Where a step consists of like pieces, it
has a list `beats` of their durations (seconds), which its reader clears, and BEAT describes them; then
PER_STEP is of a beat. With `come_between(settle, act)` each beat ends with what `settle` waits for. `act` is
called before the first beat of each step and after every one, outside the measured time, until `leave()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

TRAININGS = (
    "transformer",
    "convolution",
    "expandable",
    "malloc_async",
    "collective",
    "compiled",
    "mixed",
)
GENERATIONS = ("generate", "generate_large", "generate_llama")
XLA = ("xla_training", "xla_growing_pool", "xla_large_pool", "xla_inference")
TORCH = (*TRAININGS, *GENERATIONS, "graphs", "streams", "pinned", "sharing", "serving")
BINDINGS = (
    "bindings",
    "bindings_copies",
    "bindings_graphs",
    "bindings_nodes",
    "bindings_segments",
    "bindings_weights",
)
HIDDEN = ("bindings_hidden",)
"""Workloads that write outside their parameters, for validation to find; not for faults."""
NAMES = (*TORCH, *XLA, *BINDINGS, *HIDDEN, "cupy_arrays", "calls")
MAPPED = ("bindings_segments", "expandable")
"""Workloads that map all their memory themselves, which the vault does not hold."""
ON_SIMULATED = (*BINDINGS, *HIDDEN, "calls")
"""Workloads that need nothing that the stand-in driver lacks."""


def module_of(name: str) -> str:
    """Return the module of a workload: trainings, and those named bindings... or xla_..., are in packages."""
    if name in TRAININGS:
        return f"{__name__}.training.{name}"
    if name in XLA:
        return f"{__name__}.xla.{name.removeprefix('xla_')}"
    if name in (*BINDINGS, *HIDDEN):
        return f"{__name__}.bindings.{name.removeprefix('bindings').lstrip('_') or 'allocations'}"
    return f"{__name__}.{name}"


class Work(Protocol):
    def step(self) -> None:
        """Do one step, finished on return."""
        ...

    def results(self) -> Iterator[bytes]:
        """Yield all results so far, as bytes."""
        ...

    def close(self) -> None: ...
