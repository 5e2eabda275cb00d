"""Requests, and their slots in a batch. No GPU, no I/O."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SLOTS, WAVE = 8, 64
PROMPT, LONGEST, WORDS = 32, 96, 2048
"""The longest prompt, the most words of a request, the size of the vocabulary."""
FEWEST, MOST = 8, LONGEST - PROMPT
"""Tokens of an answer."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for this many tokens after this prompt. Numbers are in the order of arrival."""

    number: int
    prompt: tuple[int, ...]
    tokens: int

    def data(self) -> dict[str, Any]:
        return {"number": self.number, "prompt": list(self.prompt), "tokens": self.tokens}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Request:
        return cls(int(data["number"]), tuple(map(int, data["prompt"])), int(data["tokens"]))


def request(seed: int, number: int) -> Request:
    """Return a request, a function of seed and number alone."""
    rng = random.Random(seed * 1_000_003 + number)
    prompt = tuple(rng.randrange(1, WORDS) for _ in range(rng.randint(4, PROMPT)))
    return Request(number, prompt, rng.randint(FEWEST, MOST))


def wave(seed: int, number: int, size: int = WAVE) -> list[Request]:
    """Return the requests of a wave, at the fault of this number."""
    return [request(seed, each) for each in range(number * size, (number + 1) * size)]


@dataclass(slots=True)
class Batch:
    """The slots.

    Before a step `admit` gives free slots to the requests that wait longest. After it `advance` frees the
    slots of finished requests.
    """

    slots: int
    waiting: deque[Request] = field(default_factory=deque)
    active: dict[int, Request] = field(default_factory=dict)
    _remaining: dict[int, int] = field(default_factory=dict)

    def add(self, requests: Sequence[Request]) -> None:
        self.waiting.extend(requests)

    def admit(self) -> dict[int, Request]:
        """Return the slots that were given now."""
        free = [slot for slot in range(self.slots) if slot not in self.active]
        given = {slot: self.waiting.popleft() for slot in free[: len(self.waiting)]}
        self.active.update(given)
        self._remaining.update({slot: request.tokens for slot, request in given.items()})
        return given

    def advance(self) -> dict[int, Request]:
        """Count one token for each active slot; return the request of each."""
        served = {slot: self.active[slot] for slot in sorted(self.active)}
        for slot in served:
            self._remaining[slot] -= 1
            if not self._remaining[slot]:
                del self.active[slot], self._remaining[slot]
        return served

    @property
    def idle(self) -> bool:
        return not self.active and not self.waiting
