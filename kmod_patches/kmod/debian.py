"""Download of the driver's source from Debian's suites, with a private apt state.

The package holds the driver's build tree, as DKMS gets it, with the core objects that the vendor compiled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kmod import aptsources
from kmod.alone import alone
from kmod.caching import making
from kmod.command import run
from kmod.errors import KmodError, Unavailable

PACKAGE = "nvidia-open-kernel-source"
TARBALL = Path("usr/src/nvidia-open-kernel.tar.xz")
TREE = Path("modules/nvidia-open-kernel")
UPDATE_DEADLINE_S = 180.0
DOWNLOAD_DEADLINE_S = 300.0
UNPACK_DEADLINE_S = 180.0
LOCK_DEADLINE_S = 600.0
NAME = re.compile(r"[a-z][a-z0-9.-]*")


@dataclass(frozen=True, slots=True)
class Suite:
    """A Debian suite. The absence of a required one is an error; the absence of others is reported."""

    name: str
    required: bool


SUITES = (
    Suite("bookworm", True),
    Suite("trixie", True),
    Suite("sid", False),
    Suite("experimental", False),
)


@dataclass(frozen=True, slots=True)
class Fetched:
    """An unpacked driver source: `version` in Debian's numbering; `tree` must not be changed."""

    suite: str
    version: str
    tree: Path


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/mpsd-kmod, or ~/.cache/mpsd-kmod. Raises KmodError without a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpsd-kmod"
    except RuntimeError as error:
        raise KmodError(f"no folder for the cache: {error} Set XDG_CACHE_HOME, or use --cache") from error


def fetch(suite: str, cache: Path, apt_folder: Path = aptsources.ARCHIVE) -> Fetched:
    """Return a suite's present source, from the cache if possible.

    Raises Unavailable, KmodError, and OSError with the cache's file.
    """
    if not NAME.fullmatch(suite):
        known = ", ".join(each.name for each in SUITES)
        raise KmodError(f"{suite!r} is not the name of a Debian suite; tested suites: {known}")
    state = cache / "apt" / suite
    stanza = aptsources.derive(aptsources.debian(aptsources.read(apt_folder)), suite)
    with alone(state, LOCK_DEADLINE_S):
        options = private_state(state, stanza)
        try:
            run(["apt-get", *options, "update", "--error-on=any"], deadline_s=UPDATE_DEADLINE_S)
            version = _candidate(options)
        except KmodError as error:
            raise Unavailable(f"suite {suite}: {error}") from error
        tree = cache / "trees" / version
        if not tree.is_dir():
            _download(version, tree, options)
    return Fetched(suite, version, tree)


def private_state(folder: Path, stanza: str) -> list[str]:
    """Create an apt state with one stanza and return the options that make apt use only that state."""
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    source = folder / "suite.sources"
    source.write_text(stanza, encoding="utf-8")
    settings = {
        "Dir::Etc::SourceList": source,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Architecture": "amd64",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    if os.geteuid() == 0:
        settings["APT::Sandbox::User"] = "root"
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]


def _candidate(options: Sequence[str]) -> str:
    shown = run(["apt-cache", *options, "show", "--no-all-versions", PACKAGE], deadline_s=60.0)
    match = re.search(r"^Version: (\S+)$", shown, re.MULTILINE)
    if match is None:
        raise Unavailable(f"it has no {PACKAGE}")
    return match[1]


def _download(version: str, tree: Path, options: Sequence[str]) -> None:
    with making(tree, f"{PACKAGE} {version}") as made:
        command = ["apt-get", *options, "download", f"{PACKAGE}={version}"]
        run(command, deadline_s=DOWNLOAD_DEADLINE_S, cwd=made)
        package = next(made.glob("*.deb"))
        run(["dpkg-deb", "-x", package, made / "package"], deadline_s=UNPACK_DEADLINE_S)
        run(["tar", "-xJf", made / "package" / TARBALL, "-C", made], deadline_s=UNPACK_DEADLINE_S)
        os.rename(made / TREE, tree)
