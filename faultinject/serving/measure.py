"""What was heard of requests, against when the fault came and what was to be heard. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from faultinject.serving.batch import Request

AGAIN = 1_000_000
"""Requests that are asked for once more have their number and a multiple of this."""


@dataclass(frozen=True, slots=True)
class Said:
    """A token, when it was on the host, and of which of the server's processes, counted from 0."""

    life: int
    t: float
    number: int
    token: int


@dataclass(slots=True)
class Served:
    """One fault.

    `in_flight`: requests that had had a token, and not their last, when the offender was told to; `waiting`:
    those that had had none. `completed` and `lost` are of all these. `wrong`: tokens that differ from those
    without faults, of all requests. `told`: errors that the server met; `starts`: how often it was started
    anew; `twice`: tokens that were computed twice for that. Times in ms. `median`: between two tokens of one
    request before the fault; `longest`: where the second one came after it. From the order to the offender
    until the server had `ended`, and until the first token of the next one (`again`). `stall`: the longest
    step of a bystander in another domain since the fault. `record`: of the fail-over, as mpsd has it.
    """

    kind: str
    problem: str = ""
    in_flight: int = 0
    waiting: int = 0
    completed: int = 0
    lost: int = 0
    wrong: int = 0
    told: int = 0
    starts: int = 0
    twice: int = 0
    median: float | None = None
    longest: float | None = None
    ended: float | None = None
    again: float | None = None
    stall: float | None = None
    record: Mapping[str, Any] | None = None


def repeated(requests: Sequence[Request], time: int) -> list[Request]:
    """The same ones under other numbers."""
    return [Request(each.number + time * AGAIN, each.prompt, each.tokens) for each in requests]


class Heard:
    """All tokens of one request, in the order in which they were heard."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.of_lives: dict[int, list[Said]] = {}

    def add(self, said: Said) -> None:
        self.of_lives.setdefault(said.life, []).append(said)

    @property
    def tokens(self) -> list[Said]:
        """Each place's first one: what who asked has of it."""
        found = list[Said]()
        for of_life in self.of_lives.values():
            found += of_life[len(found) :]
        return found

    @property
    def complete(self) -> bool:
        return any(len(said) == self.request.tokens for said in self.of_lives.values())

    @property
    def twice(self) -> int:
        return sum(map(len, self.of_lives.values())) - len(self.tokens)

    def wrong(self, expected: Sequence[int]) -> int:
        """Tokens too many are wrong, too."""
        return sum(
            place >= len(expected) or said.token != expected[place]
            for of_life in self.of_lives.values()
            for place, said in enumerate(of_life)
        )

    def gaps(self) -> list[tuple[float, float]]:
        """(when it ended, how long it was in ms) of the time between each two tokens."""
        times = [said.t for said in self.tokens]
        return [(b, (b - a) * 1e3) for a, b in pairwise(times)]


def by_request(asked: Sequence[Request], said: Sequence[Said]) -> list[Heard]:
    heard = {request.number: Heard(request) for request in asked}
    for each in said:
        if each.number in heard:
            heard[each.number].add(each)
    return list(heard.values())


def fill(one: Served, requests: Sequence[Heard], answers: Mapping[int, Sequence[int]], at: float) -> None:
    """What can be said of this fault, which came at that time. `answers`: the right tokens, by number."""
    for heard in requests:
        tokens = heard.tokens
        one.wrong += heard.wrong(answers[heard.request.number % AGAIN])
        one.twice += heard.twice
        if heard.complete and tokens[-1].t <= at:
            continue
        if tokens and tokens[0].t <= at:
            one.in_flight += 1
        else:
            one.waiting += 1
        one.completed += heard.complete
        one.lost += not heard.complete
    gaps = [gap for heard in requests for gap in heard.gaps()]
    before, later = [long for end, long in gaps if end <= at], [long for end, long in gaps if end > at]
    one.median = round(median(before), 3) if before else None
    one.longest = round(max(later), 3) if later else None
    one.again = _again(requests, at)


def _again(requests: Sequence[Heard], at: float) -> float | None:
    """Until the first token of a process that is not the first."""
    said = [each for heard in requests for of_life in heard.of_lives.values() for each in of_life]
    first = min((each.life for each in said), default=0)
    times = [each.t for each in said if each.life > first]
    return round((min(times) - at) * 1e3, 3) if times else None
