"""Training of layered products with AdamW (optax): one jitted step, with donated arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from faultinject.programs.basics import xla

POOL = 0.10
BATCH, WIDTH, LAYERS, KEPT_LOSSES = 2048, 1024, 8, 4096
UNIT, PER_STEP, UNTIMED = "rows", BATCH, ""


class Training:
    def __init__(self, seed: int) -> None:
        first, self.key = jax.random.split(jax.random.key(seed))
        keys = jax.random.split(first, LAYERS)
        self.optimizer = optax.adamw(1e-4)
        parameters = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
        self.carried = (parameters, self.optimizer.init(parameters), jnp.zeros(KEPT_LOSSES))
        self.steps = 0
        self._update = jax.jit(self._updated, donate_argnums=0)

    def _loss(self, parameters: list[Any], rows: Any) -> Any:
        found = rows
        for weights in parameters:
            found = found + jnp.tanh(found @ weights)
        return jnp.mean((found - jnp.sin(rows)) ** 2)

    def _updated(self, carried: Any, step: Any) -> Any:
        parameters, state, losses = carried
        rows = jax.random.normal(jax.random.fold_in(self.key, step), (BATCH, WIDTH))
        loss, gradients = jax.value_and_grad(self._loss)(parameters, rows)
        updates, state = self.optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, losses.at[step % KEPT_LOSSES].set(loss)

    def step(self) -> None:
        self.carried = self._update(self.carried, self.steps)
        self.steps += 1
        jax.block_until_ready(self.carried)

    def results(self) -> Iterator[bytes]:
        yield from xla.as_bytes(self.carried)

    def close(self) -> None:
        jax.block_until_ready(self.carried)


def start(seed: int, backend: str) -> Training:
    xla.prepare(POOL)
    return Training(seed)
