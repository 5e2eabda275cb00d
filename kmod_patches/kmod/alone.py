"""One run at a time in a folder, and in what it starts; whoever waits is told for whom."""

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
    """Whoever else asks for the folder, which is made, waits. Raises KmodError in the end."""
    folder.mkdir(parents=True, exist_ok=True)
    number = os.open(folder, os.O_RDONLY)
    try:
        # By what is started meanwhile: it may outlive a run that is killed.
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
                f"{folder} is in use by another run, or by what one that was killed has started: "
                f"{holders(folder)}. Wait for its end, or end it."
            )
        if waited > SAYS_AFTER_S and not said:
            print(f"waiting for another run to end with {folder}: {holders(folder)}", file=sys.stderr)
            said = True
        time.sleep(PAUSE_S)


def holders(folder: Path) -> str:
    """The processes that have the folder open, as far as this one may know."""
    own, wanted = os.getpid(), str(folder.resolve())
    found = [
        f"{process.name} ({_name(process)})"
        for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name))
        if int(process.name) != own and wanted in _open_files(process)
    ]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"process {', '.join(found[:MOST_NAMED])}{more}" if found else "a process of somebody else's"


def _open_files(process: Path) -> set[str]:
    links = set()
    try:
        for link in (process / "fd").iterdir():
            links.add(str(link.readlink()))
    except OSError:
        pass  # it has ended, or is not ours to look at
    return links


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "ended"
