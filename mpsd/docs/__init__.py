"""Read the operator's pages, the Markdown files of this package, for `mpsd help [TOPIC]`.

A page's name is its file name without `.md`. Its title is its first heading.
"""

from __future__ import annotations

import difflib
from importlib import resources

from mpsd.base.errors import UsageError

SUFFIX = ".md"
FIRST = ("quickstart", "concepts", "protection", "operate", "status", "guards", "failover", "memory")
"""Pages that a new reader needs first. The list of pages begins with them."""


def names() -> list[str]:
    """Return the names of all pages: those of FIRST, then the remaining names in order."""
    found = {
        entry.name.removesuffix(SUFFIX)
        for entry in resources.files(__name__).iterdir()
        if entry.name.endswith(SUFFIX)
    }
    first = [name for name in FIRST if name in found]
    return [*first, *sorted(found.difference(first))]


def text(name: str) -> str:
    """Return a page as Markdown. Raise UsageError, with the nearest name, if there is no such page."""
    topic = name.lower().removesuffix(SUFFIX)
    known = names()
    if topic not in known:
        near = difflib.get_close_matches(topic, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "mpsd help lists the pages"
        raise UsageError(f"no help page {name!r}", remedy=hint)
    return resources.files(__name__).joinpath(topic + SUFFIX).read_text(encoding="utf-8")


def title(name: str) -> str:
    """Return the first heading of a page."""
    for line in text(name).splitlines():
        if line.startswith("# "):
            return line[2:].strip()
    return ""


def contents() -> str:
    """Return the list of pages: a line each, its name and its title."""
    known = names()
    width = max(map(len, known), default=0)
    return "".join(f"{name:<{width}}  {title(name)}\n" for name in known)
