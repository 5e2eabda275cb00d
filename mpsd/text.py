"""Text as people and other programs read it: untrusted text made fit for a terminal, a GPU's uuid."""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: str, limit: int = 200) -> str:
    """On one line, at most `limit` characters of it, control characters escaped.

    Bidirectional overrides, lone surrogates and line separators count as control characters.
    """
    cut = text if len(text) <= limit else text[:limit] + "..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)


def gpu_uuid(raw: bytes) -> str:
    """16 bytes as NVML prints them: "GPU-" and five groups of hexadecimal digits."""
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


SILENT_GUARD = "outer guard is silent"


def degrading(problems: Iterable[str]) -> list[str]:
    """Those of a status that make it degraded: all but what is so on a healthy node, and is to be known."""
    return [text for text in problems if SILENT_GUARD not in text]
