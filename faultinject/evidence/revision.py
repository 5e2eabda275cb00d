"""The revision of the code that a report was made with.

A copy of the tree on a measuring machine has no .git, so the revision can be passed in.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNKNOWN = "unknown"
VARIABLE = "MPSD_REVISION"
_ROOT = Path(__file__).resolve().parents[2]
_GIT_S = 10.0
_override = ""


def current() -> str:
    """Return the revision passed in by option or environment, else that of the source tree."""
    return _override or os.environ.get(VARIABLE, "") or of_tree(_ROOT)


@contextmanager
def override(revision: str | None) -> Iterator[None]:
    """Make current() return this revision; None changes nothing."""
    global _override
    before, _override = _override, revision or _override
    try:
        yield
    finally:
        _override = before


def of_tree(root: Path) -> str:
    """Return the short commit of a git checkout, with -dirty for local changes; UNKNOWN without one."""
    if not (root / ".git").exists():
        return UNKNOWN
    try:
        commit = _git(root, "rev-parse", "--short", "HEAD")
        return commit + ("-dirty" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    print(current())
