"""transformers' generate, greedy, with a small model of random weights; nothing is downloaded.

Its tokens would hide a wrong bit, so the compared results are all logits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from faultinject.programs.basics.pytorch import (
    DEVICE,
    as_bytes,
    prepare,
    wait,
)

BATCH, PROMPT, WORDS = 4, 16, 2048
UNIT, PER_STEP, UNTIMED = "tokens", BATCH, ""
BEAT = "from one token to the next"


class Pace(LogitsProcessor):  # type: ignore[misc]
    """A processor that changes no logits and records the time of each token but the first of a step.

    With come_between() a token ends when its work has (`settle`), and the time between two tokens does not
    count.
    """

    def __init__(self, beats: list[float]) -> None:
        self._beats = beats
        self.last: float | None = None
        self.between: tuple[Callable[[], None], Callable[[], None]] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        settle, act = self.between or (None, None)
        if settle:
            settle()
        now = time.perf_counter()
        if self.last is not None:
            self._beats.append(now - self.last)
        if act:
            act()
            now = time.perf_counter()
        self.last = now
        return scores


@dataclass(frozen=True, slots=True)
class Size:
    """`new`: tokens of one step."""

    width: int
    layers: int
    heads: int
    new: int


SMALL = Size(width=256, layers=4, heads=4, new=32)


def gpt2(size: Size) -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=PROMPT + size.new,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


class Generation:
    """`build` makes the model. `new`: tokens of one step."""

    def __init__(self, seed: int, build: Callable[[], PreTrainedModel], new: int) -> None:
        prepare(seed)
        self.beats: list[float] = []
        self._pace = Pace(self.beats)
        self._new = new
        # Not on the host first: billions of random numbers take minutes there.
        with torch.device(DEVICE):
            self.model = build().eval()
        self.prompt = torch.randint(1, WORDS, (BATCH, PROMPT), device=DEVICE)
        self.sequences: list[torch.Tensor] = []
        self.logits_sum = torch.zeros(BATCH, self.model.config.vocab_size, device=DEVICE)
        self.steps = 0
        wait()

    def come_between(self, settle: Callable[[], None], act: Callable[[], None]) -> None:
        self._pace.between = settle, act

    def leave(self) -> None:
        self._pace.between = None

    def step(self) -> None:
        self._pace.last = None
        with torch.no_grad():
            found = self.model.generate(
                self.prompt,
                attention_mask=torch.ones_like(self.prompt),
                max_new_tokens=self._new,
                min_new_tokens=self._new,
                do_sample=False,
                logits_processor=LogitsProcessorList([self._pace]),
                output_logits=True,
                return_dict_in_generate=True,
            )
        # The next prompt is the last answer without one word, because answers come to repeat themselves.
        self.steps += 1
        self.prompt = found.sequences[:, -PROMPT:].contiguous()
        self.prompt[:, 0] = 1 + self.steps % (WORDS - 1)
        self.sequences = [*self.sequences[-64:], found.sequences]
        self.logits_sum = self.logits_sum * 0.99 + torch.stack(found.logits).sum(0)
        wait()

    def results(self) -> Iterator[bytes]:
        for words in (*self.sequences, self.logits_sum):
            yield as_bytes(words)

    def close(self) -> None:
        wait()


def start(seed: int, backend: str) -> Generation:
    return Generation(seed, lambda: gpt2(SMALL), SMALL.new)
