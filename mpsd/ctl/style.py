"""Layout for a terminal or a pipe: colour, units, tables and lines that fit a width. Pure functions."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_STYLES = {"bad": "\x1b[31m", "warn": "\x1b[33m", "good": "\x1b[32m", "head": "\x1b[1m"}
_RESET = "\x1b[0m"
GAP = "  "


class Style:
    """Colour, the width of the terminal in characters (0: unlimited), and whether it shows ASCII alone."""

    def __init__(self, *, colour: bool = False, width: int = 0, ascii_only: bool = False) -> None:
        self.colour = colour
        self.width = width
        self.mark = "..." if ascii_only else "…"

    def paint(self, text: str, kind: str) -> str:
        return f"{_STYLES[kind]}{text}{_RESET}" if self.colour and kind in _STYLES else text

    def cut(self, text: str, width: int) -> str:
        """Return the text in at most `width` columns; a mark ends a text that is cut."""
        if columns(text) <= width:
            return text
        kept = text
        while kept and columns(kept) + len(self.mark) > width:
            kept = kept[:-1]
        return (kept.rstrip() + self.mark)[:width]

    def wrap(self, text: str, indent: str = "") -> list[str]:
        """Return the text in lines of the terminal's width; later lines have the indent and two spaces."""
        if not self.width or columns(indent + text) <= self.width:
            return [indent + text]
        later = indent + GAP
        lines = textwrap.wrap(
            text, max(self.width, 20), initial_indent=indent, subsequent_indent=later, break_on_hyphens=False
        )
        return [self.cut(line, self.width) for line in lines]


class Cell(NamedTuple):
    """A cell of a table with its colour."""

    text: str
    kind: str = ""


def columns(text: str) -> int:
    """Return the columns that a terminal needs for the text."""
    if text.isascii():
        return len(text)
    return sum(
        2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text
    )


def size(value: int | None) -> str:
    """Return bytes with a binary unit; a dash if the size is unknown."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{gib(value)} GiB"


def gib(value: int) -> str:
    """Return bytes as GiB with at most one decimal, without the unit."""
    return f"{value / (1 << 30):.1f}".removesuffix(".0")


def segment_count(many: int, total: int) -> str:
    """Return a number of vault segments with their bytes."""
    return f"{many} segment{'' if many == 1 else 's'}, {size(total)}"


def age(seconds: float | None) -> str:
    """Return seconds in the two largest units; a dash if unknown."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def ago(seconds: float) -> str:
    """Return a time in the past in its largest unit."""
    whole = max(0, int(seconds))
    for name, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if whole >= length:
            many = whole // length
            return f"{many} {'day' if name == 'days' and many == 1 else name} ago"
    return f"{whole} s ago"


def table(
    rows: Sequence[Sequence[str | Cell]],
    heads: Sequence[str] | None,
    style: Style,
    flexible: Mapping[int, int] | None = None,
) -> list[str]:
    """Return the lines of a table. Columns fit their widest cell; the last one takes the rest of the line.

    `flexible`: the columns that give way where the terminal is narrower, with the least width of each.
    Without it the last column gives way.
    """
    shown = [[_cell(c) for c in row] for row in ([heads] if heads else []) + list(rows)]
    if not shown:
        return []
    widths = [max(columns(row[i].text) for row in shown) for i in range(len(shown[0]))]
    if style.width:
        widths = _fitted(widths, style.width, flexible or {len(widths) - 1: 8})
    lines = []
    for number, row in enumerate(shown):
        texts = [style.cut(cell.text, width) for cell, width in zip(row, widths, strict=True)]
        padded = [text + " " * (width - columns(text)) for text, width in zip(texts, widths, strict=True)]
        padded[-1] = texts[-1]
        used = columns(GAP.join(padded))
        if style.width and used > style.width:
            lines.append(style.cut(GAP.join(padded), style.width))
        elif heads and number == 0:
            lines.append(style.paint(GAP.join(padded).rstrip(), "head"))
        else:
            painted = [style.paint(text, cell.kind) for text, cell in zip(padded, row, strict=True)]
            lines.append(GAP.join(painted).rstrip())
    return lines


def _cell(value: str | Cell) -> Cell:
    return value if isinstance(value, Cell) else Cell(value)


def _fitted(widths: list[int], width: int, flexible: Mapping[int, int]) -> list[int]:
    """Return the widths of columns for a terminal: the widest flexible column gives way first."""
    found = list(widths)
    excess = sum(found) + len(GAP) * (len(found) - 1) - width
    while excess > 0:
        able = [i for i, least in flexible.items() if found[i] > least]
        if not able:
            break
        found[max(able, key=lambda i: found[i])] -= 1
        excess -= 1
    return found
