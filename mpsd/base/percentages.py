"""Thread percentages at which cuBLAS computes wrong results: the verdict on one percentage.

On some GPUs cuBLAS computes wrong bf16 and fp16 products, without an error, at some values of
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE. The campaign `mpsd-faultinject numerics` measures every whole percentage;
its table is data beside the driver's (mpsd/gpu/drivers).

The result depends on the number of SMs that the client sees. One percent of a GPU is fewer SMs than MPS's
granularity, so a decimal has the SMs of one of its two whole neighbours, and which one is not known. A
decimal is therefore right only if both neighbours are right.

This file stands alone: an installed mpsd-client carries a copy (clients/hatch_build.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
WHOLE = range(1, 101)
"""The percentages that the campaign measures."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The findings of a campaign. `cublas`: the version that was measured, by commas if several.

    `bound`: the largest relative error of a right result. `missing`: whole percentages without a result.
    """

    cublas: str
    bound: float
    wrong: frozenset[int]
    missing: frozenset[int] = frozenset()

    def is_right(self, whole: int) -> bool:
        return whole in WHOLE and whole not in self.wrong and whole not in self.missing

    def view(self) -> dict[str, Any]:
        """Return the table as JSON, for `from_view`."""
        return {
            "cublas": self.cublas,
            "bound": self.bound,
            "wrong": sorted(self.wrong),
            "missing": sorted(self.missing),
        }


def from_view(view: Mapping[str, Any]) -> Measured:
    """Return the table of a TOML or JSON object. Raise ValueError, KeyError or TypeError."""
    wrong, missing = (frozenset(map(int, view[name])) for name in ("wrong", "missing"))
    bound = float(view["bound"])
    if not wrong | missing <= set(WHOLE) or wrong & missing or not 0 < bound < 1:
        raise ValueError("percentages are whole numbers from 1 to 100, each in one list; a bound is below 1")
    return Measured(str(view["cublas"]), bound, wrong, missing)


def together(tables: Iterable[Measured]) -> Measured | None:
    """Return one table for a client of several GPUs: wrong where it is wrong on one. None without a table."""
    found = list(tables)
    if not found:
        return None
    wrong = frozenset().union(*(each.wrong for each in found))
    missing = frozenset().union(*(each.missing for each in found)) - wrong
    cublas = ", ".join(dict.fromkeys(each.cublas for each in found))
    return Measured(cublas, max(each.bound for each in found), wrong, missing)


class Finding(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a percentage. `below`, `above`: the nearest right whole percentages of a wrong one."""

    finding: Finding
    percentage: float
    below: int | None = None
    above: int | None = None

    @property
    def text(self) -> str:
        """Return the verdict in words, for a wrong percentage with the nearest right ones."""
        here = f"{self.percentage:g} %"
        if self.finding is not Finding.WRONG:
            return f"{here} is {self.finding}"
        near = [f"{whole} %" for whole in (self.below, self.above) if whole is not None]
        return f"{here} is wrong, the nearest right percentages: {' and '.join(near) or 'none'}"


def verdict(percentage: float, table: Measured | None) -> Verdict:
    """Return the verdict on a thread percentage from above 0 to 100. `table`: None if nothing is measured."""
    if table is None:
        return Verdict(Finding.NOT_MEASURED, percentage)
    neighbours = {math.floor(percentage), math.ceil(percentage)}
    if neighbours & table.wrong:
        below = (whole for whole in reversed(WHOLE) if whole < percentage and table.is_right(whole))
        above = (whole for whole in WHOLE if whole > percentage and table.is_right(whole))
        return Verdict(Finding.WRONG, percentage, next(below, None), next(above, None))
    known = all(map(table.is_right, neighbours))
    return Verdict(Finding.RIGHT if known else Finding.NOT_MEASURED, percentage)


def read(text: str) -> float | None:
    """Return the percentage of a setting or of the variable's value; None if it sets no limit."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        return None
    return value if 0 < value <= 100 else None


def effective(*limits: float | None) -> float | None:
    """Return the percentage of a client with these limits: its own can only lower its domain's."""
    return min((limit for limit in limits if limit is not None), default=None)
