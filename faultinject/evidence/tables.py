"""Tables of a report, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from faultinject.evidence.revision import UNKNOWN


def passed(finished: Mapping[str, Any], verdicts: Sequence[str]) -> bool:
    """Return whether something was run, every verdict is valid, and no process was left behind."""
    return not finished["leftovers"] and bool(verdicts) and all(verdict == "valid" for verdict in verdicts)


def left_behind(finished: Mapping[str, Any]) -> str:
    """Return the last line of a page: the processes that had to be ended."""
    return "Left behind: " + ("; ".join(finished["leftovers"]) or "nothing") + "."


def revision(finished: Mapping[str, Any]) -> str:
    """Return the revision of the code that made a report; older reports have none."""
    return str(finished.get("revision", UNKNOWN))


def heading(finished: Mapping[str, Any]) -> str:
    """Return the line above a table on a terminal."""
    made = f"{finished['device']}, driver {finished['driver']}, revision {revision(finished)}"
    return f"{made}, {finished['date']}; repeat: {finished['command']}"


def provenance(finished: Mapping[str, Any]) -> str:
    """Return the lines of a Markdown page that say how its report was made."""
    return f"{finished['date']}, revision {revision(finished)}:\n\n    {finished['command']}"


def spread(values: Sequence[float | None], places: int = 1) -> str:
    """Return median / worst of the known values."""
    known = [value for value in values if value is not None]
    return f"{median(known):z.{places}f} / {max(known):z.{places}f}" if known else "-"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows in aligned columns, for a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in lines)
