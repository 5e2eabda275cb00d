"""Exclusive use of a folder by one run and its child processes; a waiting run is told the owner."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kmod.errors import KmodError

PAUSE_S = 0.1
SAYS_AFTER_S = 1.0
MOST_NAMED = 3


@contextmanager
def alone(folder: Path, deadline_s: float) -> Iterator[None]:
    """Create the folder and hold its lock; other runs wait. Raises KmodError after the deadline."""
    folder.mkdir(parents=True, exist_ok=True)
    number = os.open(folder, os.O_RDONLY)
    try:
        # Child processes inherit the lock, because they may outlive a killed run.
        os.set_inheritable(number, True)
        _take(number, folder, deadline_s)
        yield
    finally:
        os.close(number)


def _take(number: int, folder: Path, deadline_s: float) -> None:
    began, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - began
        if waited >= deadline_s:
            raise KmodError(
                f"{folder} is in use by another run, or by children of a killed run: "
                f"{holders(folder)}. Wait for its end, or end it."
            )
        if waited > SAYS_AFTER_S and not said:
            print(f"waiting for another run to finish with {folder}: {holders(folder)}", file=sys.stderr)
            said = True
        time.sleep(PAUSE_S)


def holders(folder: Path) -> str:
    """Return the processes that have the folder open, as far as this process may see."""
    own, wanted = os.getpid(), str(folder.resolve())
    found = [
        f"{process.name} ({_name(process)})"
        for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name))
        if int(process.name) != own and wanted in _open_files(process)
    ]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"process {', '.join(found[:MOST_NAMED])}{more}" if found else "a process of another user"


def _open_files(process: Path) -> set[str]:
    links = set()
    try:
        for link in (process / "fd").iterdir():
            links.add(str(link.readlink()))
    except OSError:
        pass  # The process has ended or belongs to another user.
    return links


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "ended"
