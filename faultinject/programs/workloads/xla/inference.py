"""Inference: a jitted function reads its weights, and passes its state on from step to step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from faultinject.programs.basics import xla

POOL = 0.10
BATCH, WIDTH, LAYERS = 64, 2048, 16
UNIT, PER_STEP, UNTIMED = "rows", BATCH, ""


def _next(weights: list[Any], state: Any) -> Any:
    found = state
    for layer in weights:
        found = found + jax.nn.gelu(found @ layer)
        found = found / jnp.sqrt(jnp.mean(found**2, axis=-1, keepdims=True) + 1e-6)
    return found


class Inference:
    def __init__(self, seed: int) -> None:
        first, second = jax.random.split(jax.random.key(seed))
        keys = jax.random.split(first, LAYERS)
        self.weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
        self.state = jax.random.normal(second, (BATCH, WIDTH))
        self._next = jax.jit(_next)

    def step(self) -> None:
        self.state = self._next(self.weights, self.state)
        jax.block_until_ready(self.state)

    def results(self) -> Iterator[bytes]:
        yield from xla.as_bytes((self.state, self.weights))

    def close(self) -> None:
        jax.block_until_ready(self.state)


def start(seed: int, backend: str) -> Inference:
    xla.prepare(POOL)
    return Inference(seed)
