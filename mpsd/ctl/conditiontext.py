"""The closed list of conditions as text. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from mpsd.base.conditions import KINDS, Code, Kind
from mpsd.base.errors import NotFoundError

_PLACES = {"subject": "NAME", "detail": "CAUSE", "count": "N"}
"""What stands in a text for the fields of a condition."""
ALL = "All conditions that mpsd knows. mpsd-ctl status shows those that hold now."


def kinds(code: str | None) -> Mapping[Code, Kind]:
    """Return the kind of this code, or all of them in order. Raise NotFoundError naming the nearest code."""
    if code is None:
        return KINDS
    if code not in set(Code):
        near = get_close_matches(code, list(Code), n=1)
        hint = f"did you mean {near[0]}?" if near else "mpsd-ctl conditions lists the codes"
        raise NotFoundError(f"there is no condition {code!r}", remedy=hint)
    return {Code(code): KINDS[Code(code)]}


def rows(found: Mapping[Code, Kind]) -> list[dict[str, object]]:
    """Return each kind as a row, with names in capitals for the parts that vary."""
    return [
        {
            "code": code.value,
            "text": kind.text.format(**_PLACES),
            "remedy": kind.remedy.format(**_PLACES),
            "degrades": kind.degrades,
            "refuses": kind.refuses,
        }
        for code, kind in found.items()
    ]


def lines(found: Mapping[Code, Kind]) -> list[str]:
    """Return three lines for each kind; above all kinds one line about the list."""
    shown = [ALL] if len(found) == len(KINDS) else []
    for row in rows(found):
        effects = ["status exits 10"] if row["degrades"] else []
        effects += ["new clients are refused"] if row["refuses"] else []
        shown += [f"{row['code']}: {row['text']}", f"  do       {row['remedy']}"]
        shown += [f"  effect   {', '.join(effects) or 'none'}"]
    return shown
