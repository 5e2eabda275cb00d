"""Verdicts: valid, unknown and invalid. A merge returns the worst."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class Verdict(StrEnum):
    VALID = "valid"
    UNKNOWN = "unknown"
    INVALID = "invalid"


_RANK = {Verdict.VALID: 0, Verdict.UNKNOWN: 1, Verdict.INVALID: 2}


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of them, and unknown of none."""
    return max(verdicts, key=_RANK.__getitem__, default=Verdict.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of one law on one run."""

    law: str
    verdict: Verdict
    text: str


def valid(text: str = "") -> tuple[Verdict, str]:
    return Verdict.VALID, text


def invalid(text: str) -> tuple[Verdict, str]:
    return Verdict.INVALID, text


def unknown(text: str) -> tuple[Verdict, str]:
    return Verdict.UNKNOWN, text


def findings(laws: Iterable[Callable[[T], tuple[Verdict, str]]], seen: T) -> list[Finding]:
    """Return what each law says about an observation, with the name of the law."""
    return [Finding(law.__name__.strip("_").replace("_", " "), *law(seen)) for law in laws]
