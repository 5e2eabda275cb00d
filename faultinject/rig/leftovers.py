"""Processes of a run: all that know its directory, by command line or environment."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from faultinject.registry.history import clock


def _belongs_to(process: psutil.Process, base: str) -> bool:
    try:
        if any(base in word for word in process.cmdline()):
            return True
        return any(base in value for value in process.environ().values())
    except psutil.Error:
        return False


def processes_under(base: Path) -> Iterator[psutil.Process]:
    """Yield the living processes of the run under `base`, without this one."""
    for process in psutil.process_iter():
        try:
            zombie = process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if process.pid != os.getpid() and not zombie and _belongs_to(process, str(base)):
            yield process


def clear(base: Path, grace_s: float) -> list[str]:
    """Wait for processes that end by themselves, kill the rest; return what was killed, in words."""
    end = clock() + grace_s
    while (remaining := list(processes_under(base))) and clock() < end:
        time.sleep(0.02)
    found = []
    for process in remaining:
        try:
            words = " ".join(process.cmdline())[:120]
            process.kill()
            found.append(f"process {process.pid} ({words})")
        except psutil.Error:
            continue
    psutil.wait_procs(remaining, timeout=3)
    return found


def open_descriptors(pid: int | None = None) -> int:
    """Return how many descriptors this process, or that one, has open. Raises OSError without a process."""
    return len(os.listdir(f"/proc/{pid or 'self'}/fd"))


def descriptor_kinds(pid: int) -> dict[str, int]:
    """Count the descriptors by file or kind. Raises OSError without a process."""
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
