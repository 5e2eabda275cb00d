"""Training of a small transformer with AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from faultinject.programs.basics.pytorch import (
    DEVICE,
    as_bytes,
    prepare,
    wait,
)

BATCH, LENGTH, WIDTH, HEADS, LAYERS, WORDS = 16, 512, 1024, 16, 4, 4096
UNIT, PER_STEP, UNTIMED = "tokens", BATCH * LENGTH, ""
KEPT_LOSSES = 4096


class Training:
    def __init__(
        self, seed: int, layers: int = LAYERS, *, compiled: bool = False, mixed: bool = False
    ) -> None:
        """`compiled`: the body goes through torch.compile. `mixed`: its products are in bfloat16."""
        prepare(seed)
        self._mixed = mixed
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(WORDS, WIDTH).to(DEVICE)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(DEVICE)
        self.head = nn.Linear(WIDTH, WORDS).to(DEVICE)
        self.model = nn.ModuleList([self.embedding, self.body, self.head])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.losses = torch.zeros(KEPT_LOSSES, device=DEVICE)
        self.steps = 0
        self.model.train()
        # The model's parameters stay those of the plain modules.
        self._compute = torch.compile(self.body) if compiled else self.body

    def _precision(self) -> AbstractContextManager[None]:
        return torch.autocast("cuda", dtype=torch.bfloat16) if self._mixed else nullcontext()

    def step(self) -> None:
        words = torch.randint(WORDS, (BATCH, LENGTH + 1), device=DEVICE)
        with sdpa_kernel(SDPBackend.MATH):
            with self._precision():
                output = self.head(self._compute(self.embedding(words[:, :-1])))
            loss = nn.functional.cross_entropy(output.reshape(-1, WORDS), words[:, 1:].reshape(-1))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        self.optimizer.step()
        self.losses[self.steps % KEPT_LOSSES] = loss.detach()
        self.steps += 1
        wait()

    def results(self) -> Iterator[bytes]:
        yield as_bytes(self.losses)
        for parameter in self.model.parameters():
            yield as_bytes(parameter)

    def close(self) -> None:
        wait()


def start(seed: int, backend: str) -> Training:
    return Training(seed)
