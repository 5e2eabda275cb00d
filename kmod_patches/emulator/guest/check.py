"""A check: a name, how long it may take, and a function that says what it saw or raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

DEADLINE_S = 120.0


class CheckError(Exception):
    """What was seen is not what has to be."""


@dataclass(frozen=True, slots=True)
class Check:
    """`deadline_s` is for a machine that is emulated instruction by instruction on a busy host."""

    name: str
    run: Callable[[], str]
    deadline_s: float = DEADLINE_S


def expect(what: str, seen: object, wanted: object) -> None:
    """Raises CheckError where the two differ."""
    if seen != wanted:
        raise CheckError(f"{what}: {seen!r}, not {wanted!r}")
