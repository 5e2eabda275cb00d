"""What descriptors this process has open, for tests that nothing leaks."""

from __future__ import annotations

import os
from pathlib import Path


def open_descriptors() -> dict[int, str]:
    """Number to target of every open descriptor, that of the listing itself left out."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(Path("/proc/self/fd") / name)
        except FileNotFoundError:
            pass  # The descriptor that listed the directory.
    return found


def inheritable() -> dict[int, str]:
    """Those beyond the standard three that a child would get."""
    return {fd: target for fd, target in open_descriptors().items() if fd > 2 and os.get_inheritable(fd)}
