"""Conditions in tests: their texts, those of a status, and the tables of the page.

`python -m tests.support.conditioning` writes the tables of mpsd/docs/conditions.md anew from the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpsd.base.conditions import KINDS, Code, Condition
from mpsd.ctl import conditiontext

PAGE = Path(__file__).resolve().parents[2] / "mpsd" / "docs" / "conditions.md"
TEXTS = ["## Texts", "", "| code | text | effect |", "| --- | --- | --- |"]
REMEDIES = ["## Remedies", "", "| code | remedy |", "| --- | --- |"]


def texts(conditions: Iterable[Condition]) -> list[str]:
    return [condition.text for condition in conditions]


def rows_of(status: Mapping[str, Any], code: Code) -> list[Mapping[str, Any]]:
    """Return the conditions of a status that have this code."""
    return [row for row in status["conditions"] if row["code"] == code]


def page_rows(code: Code) -> tuple[str, str]:
    """Return the rows of a code on the page: its text with its effect, and its remedy."""
    (shown,) = conditiontext.rows({code: KINDS[code]})
    effects = [word for word in ("degrades", "refuses") if shown[word]]
    text, remedy = (str(shown[key]).replace("|", r"\|") for key in ("text", "remedy"))
    return f"| `{code}` | {text} | {', '.join(effects) or '-'} |", f"| `{code}` | {remedy} |"


def tables() -> list[str]:
    """Return the lines of both tables, which end the page."""
    first, second = zip(*map(page_rows, Code), strict=True)
    return [*TEXTS, *first, "", *REMEDIES, *second]


if __name__ == "__main__":
    lines = PAGE.read_text().splitlines()
    PAGE.write_text("\n".join([*lines[: lines.index(TEXTS[0])], *tables()]) + "\n")
