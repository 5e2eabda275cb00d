"""The open descriptors of this process, for tests that nothing leaks."""

from __future__ import annotations

import os
from pathlib import Path


def open_descriptors() -> dict[int, str]:
    """Map number to target of every open descriptor, without that of the listing itself."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(Path("/proc/self/fd") / name)
        except FileNotFoundError:
            pass  # The descriptor that listed the directory.
    return found


def inheritable() -> dict[int, str]:
    """Return those beyond the standard three that a child would inherit."""
    return {fd: target for fd, target in open_descriptors().items() if fd > 2 and os.get_inheritable(fd)}
