"""transformers' generate, greedy, with a small model of random weights; nothing is downloaded.

What it says would hide a wrong bit, so all logits are gathered in what is compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor, LogitsProcessorList

from faultinject.proxy.work.tensors import DEVICE, as_bytes, prepare, wait

BATCH, PROMPT, WORDS = 4, 16, 2048
UNIT, PER_STEP, UNTIMED = "tokens", BATCH, ""
BEAT = "from one token to the next"


class Pace(LogitsProcessor):  # type: ignore[misc]
    """Changes no logits; notes how long each token takes, but for the first of a step.

    Where somebody comes `between` two of them, a token is over when its work is (`settle`), and that time is
    nobody's.
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


class Generation:
    def __init__(self, seed: int, size: Size = SMALL) -> None:
        prepare(seed)
        self.beats: list[float] = []
        self._pace = Pace(self.beats)
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
        self._new = size.new
        # Not on the host first: there billions of random numbers take minutes.
        with torch.device(DEVICE):
            self.model = GPT2LMHeadModel(config).eval()
        self.prompt = torch.randint(1, WORDS, (BATCH, PROMPT), device=DEVICE)
        self.said: list[torch.Tensor] = []
        self.seen = torch.zeros(BATCH, WORDS, device=DEVICE)
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
        # The next prompt is what was said last, but for one word: what is said comes to repeat itself.
        self.steps += 1
        self.prompt = found.sequences[:, -PROMPT:].contiguous()
        self.prompt[:, 0] = 1 + self.steps % (WORDS - 1)
        self.said = [*self.said[-64:], found.sequences]
        self.seen = self.seen * 0.99 + torch.stack(found.logits).sum(0)
        wait()

    def results(self) -> Iterator[bytes]:
        for words in (*self.said, self.seen):
            yield as_bytes(words)

    def close(self) -> None:
        wait()


def start(seed: int, backend: str) -> Generation:
    return Generation(seed)
