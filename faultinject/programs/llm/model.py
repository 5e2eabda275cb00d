"""The models of the server, and their interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from faultinject.programs.devices.base import NO_DEVICE, DeviceError
from faultinject.programs.llm.batch import Batch

SEED = 1
"""Seed of the weights."""


class Model(Protocol):
    """Slots with a cache each. Every method raises DeviceError."""

    name: str

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        """Give the slot to this prompt of at least two words."""
        ...

    def step(self, slots: Sequence[int]) -> list[int]:
        """Return the next token of each of these slots, in order; it is on the host on return."""
        ...

    def close(self) -> None: ...


def open_model(backend: str, slots: int) -> Model:
    """Open a model; each is imported only where it is chosen. Raises DeviceError, ImportError."""
    match backend:
        case "nvidia":
            from faultinject.programs.llm.transformer import Transformer

            return Transformer(SEED, slots)
        case "standin":
            from faultinject.programs.llm.toy import Toy

            return Toy(slots)
        case _:
            raise DeviceError(NO_DEVICE, f"there is no model for {backend}")


def step(model: Model, batch: Batch) -> list[tuple[int, int, int]]:
    """Compute one token for every request with a slot: its number, slot and token. Raises DeviceError."""
    for slot, request in batch.admit().items():
        model.begin(slot, request.prompt)
    slots = sorted(batch.active)
    tokens = model.step(slots)
    served = batch.advance()
    return [(served[slot].number, slot, token) for slot, token in zip(slots, tokens, strict=True)]
