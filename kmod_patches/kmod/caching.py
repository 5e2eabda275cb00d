"""Files, and folders of the cache: under their names only when they are whole, whoever else makes one."""

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
    """Raises OSError; what there was stays then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


@contextmanager
def making(target: Path, what: str) -> Iterator[Path]:
    """A new folder beside `target`, gone in the end; what is to be kept of it is renamed to `target` before.

    Raises KmodError for an OSError, unless another run has made `target` meanwhile.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(target.parent)
    made = Path(tempfile.mkdtemp(prefix=f"{NEW}{os.getpid()}-", dir=target.parent))
    try:
        yield made
    except OSError as error:
        if not target.is_dir():
            raise KmodError(f"{what} could not be kept in {target.parent}: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_left(folder: Path) -> None:
    """What runs that were killed have left there."""
    for left in folder.glob(f"{NEW}*"):
        owner = left.name.removeprefix(NEW).split("-")[0]
        if not (owner.isdigit() and Path("/proc", owner).exists()):
            shutil.rmtree(left, ignore_errors=True)
