"""Files and folders of the cache. They get their names only when complete, despite concurrent runs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kmod.errors import KmodError

NEW = ".new-"


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically. Raises OSError; the old file stays then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


@contextmanager
def making(target: Path, what: str) -> Iterator[Path]:
    """Yield a new folder beside `target`, removed at the end. The caller renames it to `target` to keep it.

    Raises KmodError for an OSError, unless another run has created `target` meanwhile.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(target.parent)
    made = Path(tempfile.mkdtemp(prefix=f"{NEW}{os.getpid()}-", dir=target.parent))
    try:
        yield made
    except OSError as error:
        if not target.is_dir():
            raise KmodError(f"cannot keep {what} in {target.parent}: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_left(folder: Path) -> None:
    """Remove the remains of killed runs."""
    for left in folder.glob(f"{NEW}*"):
        owner = left.name.removeprefix(NEW).split("-")[0]
        if not (owner.isdigit() and Path("/proc", owner).exists()):
            shutil.rmtree(left, ignore_errors=True)
