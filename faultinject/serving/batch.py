"""Requests, and which of them have the slots of a batch. No GPU, no I/O."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SLOTS, WAVE = 8, 64
PROMPT, LONGEST, WORDS = 32, 96, 2048
"""The longest prompt, the most words of a request in all, the size of the vocabulary."""
FEWEST, MOST = 8, LONGEST - PROMPT
"""Tokens of an answer."""


@dataclass(frozen=True, slots=True)
class Request:
    """So many tokens after this prompt. Numbers are in the order of arrival."""

    number: int
    prompt: tuple[int, ...]
    tokens: int

    def data(self) -> dict[str, Any]:
        return {"number": self.number, "prompt": list(self.prompt), "tokens": self.tokens}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Request:
        return cls(int(data["number"]), tuple(map(int, data["prompt"])), int(data["tokens"]))


def request(seed: int, number: int) -> Request:
    """A function of both alone."""
    draw = random.Random(seed * 1_000_003 + number)
    prompt = tuple(draw.randrange(1, WORDS) for _ in range(draw.randint(4, PROMPT)))
    return Request(number, prompt, draw.randint(FEWEST, MOST))


def wave(seed: int, number: int, size: int = WAVE) -> list[Request]:
    """What is asked for at once, at the fault of this number."""
    return [request(seed, each) for each in range(number * size, (number + 1) * size)]


@dataclass(slots=True)
class Batch:
    """Who has which slot. Before a step `admit` gives free slots to those who wait longest; after it
    `advance` takes back the slots of those who have had all their tokens."""

    slots: int
    waiting: deque[Request] = field(default_factory=deque)
    active: dict[int, Request] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)

    def add(self, requests: Sequence[Request]) -> None:
        self.waiting.extend(requests)

    def admit(self) -> dict[int, Request]:
        """The slots that have been given away now."""
        free = [slot for slot in range(self.slots) if slot not in self.active]
        given = {slot: self.waiting.popleft() for slot in free[: len(self.waiting)]}
        self.active.update(given)
        self._left.update({slot: request.tokens for slot, request in given.items()})
        return given

    def advance(self) -> dict[int, Request]:
        """Each active slot has had one token; who had it, by slot."""
        had = {slot: self.active[slot] for slot in sorted(self.active)}
        for slot in had:
            self._left[slot] -= 1
            if not self._left[slot]:
                del self.active[slot], self._left[slot]
        return had

    @property
    def idle(self) -> bool:
        return not self.active and not self.waiting
