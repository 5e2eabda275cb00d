"""Processes that belong to a run: all that know its directory, by command line or environment."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from faultinject.history import clock


def _knows(process: psutil.Process, base: str) -> bool:
    try:
        if any(base in word for word in process.cmdline()):
            return True
        return any(base in value for value in process.environ().values())
    except psutil.Error:
        return False


def belonging_to(base: Path) -> Iterator[psutil.Process]:
    """Living processes of the run under `base`, this one excepted."""
    for process in psutil.process_iter():
        try:
            zombie = process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if process.pid != os.getpid() and not zombie and _knows(process, str(base)):
            yield process


def clear(base: Path, grace_s: float) -> list[str]:
    """Wait for what still ends by itself, kill the rest; what had to be killed, in words."""
    end = clock() + grace_s
    while (left := list(belonging_to(base))) and clock() < end:
        time.sleep(0.02)
    found = []
    for process in left:
        try:
            words = " ".join(process.cmdline())[:120]
            process.kill()
            found.append(f"process {process.pid} ({words})")
        except psutil.Error:
            continue
    psutil.wait_procs(left, timeout=3)
    return found


def open_descriptors(pid: int | None = None) -> int:
    """Of this process, or of that one. Raises OSError where there is none."""
    return len(os.listdir(f"/proc/{pid or 'self'}/fd"))


def descriptor_kinds(pid: int) -> dict[str, int]:
    """How many lead to each file, or to something of each kind. Raises OSError where there is no process."""
    found: Counter[str] = Counter()
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{name}")
        except FileNotFoundError:
            # Closed since.
            continue
        kind, colon, _ = target.partition(":[")
        found[kind if colon and kind != "anon_inode" else target] += 1
    return dict(found)
