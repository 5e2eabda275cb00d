"""Text of and for other programs: complaints in it, untrusted text for a terminal, the UUID of a GPU."""

from __future__ import annotations

import re

_COMPLAINT = re.compile(
    r"invalid|error|fail|unknown|unrecogni[sz]ed|unsupported|usage|cannot|can't|no such"
    r"|not (?:found|a valid|support)",
    re.IGNORECASE,
)


def complains(reply: str) -> bool:
    """Return whether a reply of a program, the control daemon for one, reads like a complaint."""
    return bool(_COMPLAINT.search(reply))


def printable(text: str, limit: int = 200) -> str:
    """Return at most `limit` characters of the text on one line, with control characters escaped.

    Bidirectional overrides, lone surrogates and line separators count as control characters.
    """
    cut = text if len(text) <= limit else text[:limit] + "..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)


def gpu_uuid(raw: bytes) -> str:
    """Return the UUID of 16 bytes as NVML prints it: "GPU-" and five groups of hexadecimal digits."""
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
