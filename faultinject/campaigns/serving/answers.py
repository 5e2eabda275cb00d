"""The answers to requests, compared with the time of the fault and the right tokens. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from faultinject.programs.llm.batch import Request

REPEAT_OFFSET = 1_000_000
"""A request that is sent again has its number plus a multiple of this."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token, when it was on the host, and of which process of the server, counted from 0."""

    process_number: int
    t: float
    number: int
    token: int


@dataclass(slots=True)
class Served:
    """One fault.

    in_flight: requests between their first and last token at the order to the offender; waiting: those before
    their first. completed, lost: of all these. wrong: tokens that differ from those without faults, of all
    requests. told: errors of the server. starts: how often it was restarted. twice: tokens that were computed
    twice for that.

    Times in ms. median: between two tokens of one request before the fault. longest: such a time that ended
    after the fault. ended, again: from the order to the offender until the server had ended, and until the
    first token of the next one. stall: the longest step of a bystander in another domain since the fault.
    record: of the fail-over, from mpsd.
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


def renumbered(requests: Sequence[Request], time: int) -> list[Request]:
    """Return the same requests with other numbers."""
    return [Request(each.number + time * REPEAT_OFFSET, each.prompt, each.tokens) for each in requests]


class Answer:
    """All tokens of one request, in the order of their arrival."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens_by_process: dict[int, list[Token]] = {}

    def add(self, token: Token) -> None:
        self.tokens_by_process.setdefault(token.process_number, []).append(token)

    @property
    def tokens(self) -> list[Token]:
        """Return the first token of each place, which the sender keeps."""
        found = list[Token]()
        for tokens in self.tokens_by_process.values():
            found += tokens[len(found) :]
        return found

    @property
    def complete(self) -> bool:
        return any(len(tokens) == self.request.tokens for tokens in self.tokens_by_process.values())

    @property
    def twice(self) -> int:
        return sum(map(len, self.tokens_by_process.values())) - len(self.tokens)

    def wrong(self, expected: Sequence[int]) -> int:
        """Surplus tokens are wrong, too."""
        return sum(
            place >= len(expected) or token.token != expected[place]
            for tokens in self.tokens_by_process.values()
            for place, token in enumerate(tokens)
        )

    def gaps(self) -> list[tuple[float, float]]:
        """Return (end, duration in ms) of the time between each two tokens."""
        times = [token.t for token in self.tokens]
        return [(b, (b - a) * 1e3) for a, b in pairwise(times)]


def group_by_request(requests: Sequence[Request], tokens: Sequence[Token]) -> list[Answer]:
    answers = {request.number: Answer(request) for request in requests}
    for token in tokens:
        if token.number in answers:
            answers[token.number].add(token)
    return list(answers.values())


def fill_figures(
    served: Served, requests: Sequence[Answer], answers: Mapping[int, Sequence[int]], at: float
) -> None:
    """Fill in the figures of this fault, at that time. `answers`: the right tokens, by number."""
    for answer in requests:
        tokens = answer.tokens
        served.wrong += answer.wrong(answers[answer.request.number % REPEAT_OFFSET])
        served.twice += answer.twice
        if answer.complete and tokens[-1].t <= at:
            continue
        if tokens and tokens[0].t <= at:
            served.in_flight += 1
        else:
            served.waiting += 1
        served.completed += answer.complete
        served.lost += not answer.complete
    gaps = [gap for answer in requests for gap in answer.gaps()]
    before, later = [long for end, long in gaps if end <= at], [long for end, long in gaps if end > at]
    served.median = round(median(before), 3) if before else None
    served.longest = round(max(later), 3) if later else None
    served.again = _time_to_next_process(requests, at)


def _time_to_next_process(requests: Sequence[Answer], at: float) -> float | None:
    """Return the time until the first token of a process other than the first."""
    all_tokens = [
        token for answer in requests for tokens in answer.tokens_by_process.values() for token in tokens
    ]
    first = min((token.process_number for token in all_tokens), default=0)
    times = [token.t for token in all_tokens if token.process_number > first]
    return round((min(times) - at) * 1e3, 3) if times else None
