"""Files from the network that single tests need, kept in mpsd-tests below $XDG_CACHE_HOME or ~/.cache."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def once(name: str, fetch: Callable[[Path], None]) -> Path:
    """Return the folder of this name. If it is missing, `fetch` writes it as `files` into a folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "mpsd-tests" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as made:
                fetch(Path(made))
                (Path(made) / "files").rename(folder)
    return folder
