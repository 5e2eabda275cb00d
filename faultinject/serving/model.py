"""What the server needs of a model, and which there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from faultinject.programs.device import NO_DEVICE, DeviceError
from faultinject.serving.batch import Batch

SEED = 1
"""Of the weights."""


class Model(Protocol):
    """Slots with a cache each. Every method raises DeviceError."""

    name: str

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        """The slot belongs to this prompt from now on. It has two words at least."""
        ...

    def step(self, slots: Sequence[int]) -> list[int]:
        """The next token of each of these slots, in their order, on the host when it returns."""
        ...

    def close(self) -> None: ...


def open_model(backend: str, slots: int) -> Model:
    """Each is imported only where it is chosen. Raises DeviceError, ImportError for a missing package."""
    match backend:
        case "nvidia":
            from faultinject.serving.transformer import Transformer

            return Transformer(SEED, slots)
        case "standin":
            from faultinject.serving.toy import Toy

            return Toy(slots)
        case _:
            raise DeviceError(NO_DEVICE, f"there is no model for {backend}")


def step(model: Model, batch: Batch) -> list[tuple[int, int, int]]:
    """One token for everybody who has a slot: each request's number, slot and token. Raises DeviceError."""
    for slot, request in batch.admit().items():
        model.begin(slot, request.prompt)
    slots = sorted(batch.active)
    tokens = model.step(slots)
    had = batch.advance()
    return [(had[slot].number, slot, token) for slot, token in zip(slots, tokens, strict=True)]
