"""The life of a worker program's children."""

from __future__ import annotations

import ctypes
import os
import signal

REFUSED = 10
"""Exit status of a child without a context, or after its parent's death."""


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(REFUSED)
