"""A small Llama of transformers with random weights: greedy, one batch, a cache for each slot.

Every step is a forward pass of one shape: all slots, one word each, over caches of the greatest length with a
mask. So the content of a row is a function of that row alone, as far as matrix products treat all rows in the
same way. That makes a request's tokens comparable between runs with other neighbours in the batch. Mode
`moved` has exactly the schedule of the run without faults. Mode `restarted` has not, and a difference there
could be one of rounding.

It was run on a CPU (transformers 4.46 and 5.23, torch 2.15) and on an H200 (5.17, 2.11).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from faultinject.programs.basics.pytorch import DEVICE, prepare
from faultinject.programs.devices.base import DeviceError
from faultinject.programs.llm.batch import LONGEST, PROMPT, WORDS

LAYERS, HEADS, WIDTH = 6, 8, 512
UNKNOWN_ERROR = 999


@contextmanager
def _translated() -> Iterator[None]:
    try:
        with torch.no_grad():
            yield
    except RuntimeError as error:
        code = getattr(error, "error_code", UNKNOWN_ERROR)
        raise DeviceError(int(code), str(error).splitlines()[0]) from error


def _layers(cache: Any) -> list[tuple[Any, Any]]:
    """Return keys and values of each layer; their place depends on the version of transformers."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


class Transformer:
    """A Model on the first GPU that PyTorch sees."""

    def __init__(self, seed: int, slots: int, device: str = DEVICE) -> None:
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.name = f"a small Llama of random weights, {versions}"
        with _translated():
            prepare(seed)
            config = LlamaConfig(
                vocab_size=WORDS,
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=HEADS,
                max_position_embeddings=2 * LONGEST,
                # Wide enough that the tokens do not soon repeat.
                initializer_range=0.1,
            )
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            self._model = model.float().to(device).eval()
            self._device = device
            shape = (LAYERS, 2, slots, HEADS, LONGEST, WIDTH // HEADS)
            self._caches = torch.zeros(shape, device=device)
            self._lengths = torch.zeros(slots, dtype=torch.long, device=device)
            self._last = torch.zeros(slots, dtype=torch.long, device=device)
            self._places = torch.arange(LONGEST, device=device)
            self._one = torch.ones(slots, 1, dtype=torch.bool, device=device)

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        """Put all but the prompt's last word into the cache; the next step reads that one."""
        before = len(prompt) - 1
        words = [*prompt[:-1], *[0] * (PROMPT - before)]
        with _translated():
            shown = [[int(place < before) for place in range(PROMPT)]]
            made = self._model(
                input_ids=torch.tensor([words], device=self._device),
                attention_mask=torch.tensor(shown, device=self._device),
                past_key_values=DynamicCache(),
                use_cache=True,
            )
            # Rows behind the prompt's words are masked until they are overwritten.
            for layer, (keys, values) in enumerate(_layers(made.past_key_values)):
                self._caches[layer, 0, slot, :, :PROMPT] = keys[0]
                self._caches[layer, 1, slot, :, :PROMPT] = values[0]
            self._lengths[slot] = before
            self._last[slot] = prompt[-1]

    def step(self, slots: Sequence[int]) -> list[int]:
        with _translated():
            rows = torch.tensor(list(slots), device=self._device)
            cache = DynamicCache()
            for layer in range(LAYERS):
                cache.update(self._caches[layer, 0], self._caches[layer, 1], layer)
            used = self._places[None, :] < self._lengths[:, None]
            made = self._model(
                input_ids=self._last[:, None],
                attention_mask=torch.cat([used, self._one], dim=1).long(),
                position_ids=self._lengths[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            # The new word's keys and values came last; their place is behind the row's others.
            at = self._lengths[rows]
            for layer, (keys, values) in enumerate(_layers(made.past_key_values)):
                self._caches[layer, 0][rows, :, at] = keys[rows][:, :, -1]
                self._caches[layer, 1][rows, :, at] = values[rows][:, :, -1]
            self._lengths[rows] = at + 1
            self._last[rows] = made.logits[:, -1].argmax(dim=-1)[rows]
            tokens: list[int] = self._last[rows].tolist()
        return tokens

    def close(self) -> None:
        with _translated():
            torch.cuda.synchronize()
