"""The LLM server of `mpsd-faultinject serving` without messages: all slots have a request at every step."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from faultinject.programs.basics.pytorch import wait
from faultinject.programs.llm.batch import SLOTS, Batch, wave
from faultinject.programs.llm.model import SEED, Model, step
from faultinject.programs.llm.transformer import Transformer

UNIT, PER_STEP, UNTIMED = "tokens", SLOTS, ""


class Serving:
    """Requests are a function of the seed; a wave of them comes when the last one is finished."""

    def __init__(self, seed: int, model: Model) -> None:
        self.seed, self.model, self.batch = seed, model, Batch(SLOTS)
        self.waves = 0
        self.tokens = array("I")

    def step(self) -> None:
        if len(self.batch.waiting) < SLOTS:
            self.batch.add(wave(self.seed, self.waves))
            self.waves += 1
        for slot_tokens in step(self.model, self.batch):
            self.tokens.extend(slot_tokens)

    def results(self) -> Iterator[bytes]:
        yield self.tokens.tobytes()

    def close(self) -> None:
        wait()


def start(seed: int, backend: str) -> Serving:
    return Serving(seed, Transformer(SEED, SLOTS))
