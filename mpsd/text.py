"""Untrusted text (command lines, logs, replies) made fit for a terminal or a log line."""

from __future__ import annotations


def printable(text: str, limit: int = 200) -> str:
    """On one line, at most `limit` characters of it, control characters escaped.

    Bidirectional overrides, lone surrogates and line separators count as control characters.
    """
    cut = text if len(text) <= limit else text[:limit] + "..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
