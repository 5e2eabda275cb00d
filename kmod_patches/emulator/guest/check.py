"""A check: a name, a time limit, and a function that returns its observation or raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

DEADLINE_S = 120.0


class CheckError(Exception):
    """The observation differs from the requirement."""


@dataclass(frozen=True, slots=True)
class Check:
    """`deadline_s` allows for a machine that is emulated instruction by instruction on a busy host."""

    name: str
    run: Callable[[], str]
    deadline_s: float = DEADLINE_S


def expect(what: str, seen: object, wanted: object) -> None:
    """Raise CheckError if the two differ."""
    if seen != wanted:
        raise CheckError(f"{what}: {seen!r}, expected {wanted!r}")
