"""This machine's source of Debian packages, read from its apt configuration.

A source for other suites and components of the same archive is derived from it, for a private apt state. So
the project names no host, and a machine behind a mirror uses its mirror.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kmod.errors import Unavailable

ARCHIVE = Path("/etc/apt")
SUITES = frozenset({"oldstable", "stable", "testing", "unstable", "sid", "experimental", "bullseye"})
RELEASES = frozenset({"bookworm", "trixie", "forky", "duke"})
FIELD = re.compile(r"^([A-Za-z][A-Za-z0-9-]*):[ \t]*(.*)$")
OPTION = re.compile(r"([a-z-]+)=(\S+)")


@dataclass(frozen=True, slots=True)
class Source:
    """One stanza: archive addresses, suites, and the keyring that signs them (a path, a key, or "")."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    signed_by: str = ""


def read(folder: Path = ARCHIVE) -> list[Source]:
    """Return all binary sources of an apt folder, in apt's order of files, without unreadable files."""
    found: list[Source] = []
    parts = folder / "sources.list.d"
    listed = sorted(parts.iterdir()) if parts.is_dir() else []
    for path in [folder / "sources.list", *listed]:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            continue
        if path.suffix == ".list":
            found += parse_lines(text)
        elif path.suffix == ".sources":
            found += parse_stanzas(text)
    return found


def parse_lines(text: str) -> Iterator[Source]:
    """Parse the one-line form: deb [signed-by=KEYRING] ADDRESS SUITE COMPONENT..."""
    for line in text.splitlines():
        match = re.match(r"deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)", line.split("#")[0].strip())
        if match:
            options = dict(OPTION.findall(match[1] or ""))
            yield Source((match[2],), (match[3],), options.get("signed-by", ""))


def parse_stanzas(text: str) -> Iterator[Source]:
    """Parse the deb822 form. A key inside the file keeps its continuation lines."""
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields = _fields(stanza)
        types = fields.get("types", "deb").split()
        if "deb" in types and fields.get("enabled", "yes").strip().lower() not in ("no", "false", "0"):
            uris, suites = fields.get("uris", "").split(), fields.get("suites", "").split()
            if uris and suites:
                yield Source(tuple(uris), tuple(suites), fields.get("signed-by", ""))


def _fields(stanza: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    last = ""
    for line in stanza.splitlines():
        if line.startswith("#"):
            continue
        match = FIELD.match(line)
        if match:
            last = match[1].lower()
            fields[last] = match[2]
        elif last and line.startswith((" ", "\t")):
            fields[last] += "\n" + line
    return fields


def debian(sources: Sequence[Source]) -> Source:
    """Return the first source with a release of Debian itself. Raises Unavailable without one."""
    for source in sources:
        if any(suite.removesuffix("-updates") in SUITES | RELEASES for suite in source.suites):
            return source
    raise Unavailable("this machine's apt configuration has no Debian archive: add one to its sources")


def derive(archive: Source, suite: str, component: str = "contrib") -> str:
    """Return a deb822 stanza for another suite of the same archive, with the same signature."""
    lines = ["Types: deb", f"URIs: {' '.join(archive.uris)}", f"Suites: {suite}", f"Components: {component}"]
    if archive.signed_by:
        separator = "" if archive.signed_by.startswith("\n") else " "
        lines.append(f"Signed-By:{separator}{archive.signed_by}")
    return "\n".join(lines) + "\n"
