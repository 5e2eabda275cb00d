"""Folders of the cache: under their names only when they are whole, whoever else makes one meanwhile."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kmod.errors import KmodError


@contextmanager
def making(target: Path, what: str) -> Iterator[Path]:
    """A new folder beside `target`, gone in the end; what is to be kept of it is renamed to `target` before.

    Raises KmodError for an OSError, unless another run has made `target` meanwhile.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        yield made
    except OSError as error:
        if not target.is_dir():
            raise KmodError(f"{what} could not be kept in {target.parent}: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
