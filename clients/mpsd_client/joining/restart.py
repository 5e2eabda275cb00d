"""Requests to a daemon that may be restarting: repeat them while its socket has no listener."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import TypeVar

from mpsd_client._protocol import errors
from mpsd_client.transport import find_socket

T = TypeVar("T")

RESTART_S = 10.0
"""Time [s] that the start of a program waits for a daemon whose socket exists but does not answer."""
QUIET_S = 1.0
"""Time [s] after which one line reports the wait."""
PAUSE_S = 0.1


def until_answered(
    ask: Callable[[str | None], T], socket_path: str | None, wait_s: float, tell: Callable[[str], None]
) -> T:
    """Return what `ask` returns for a socket path. Repeat it for up to `wait_s` seconds if no daemon answers.

    A path without a socket is not waited for: no daemon has run there, or it was stopped. `tell` gets one
    line about a long wait. Raises the errors of `ask`.
    """
    began, told = time.monotonic(), False
    try:
        return ask(socket_path)
    except errors.NotRunningError:
        # Chosen once: while a daemon replaces its socket, another daemon's must not be taken instead.
        path = socket_path or find_socket(os.environ, os.getuid())
        if wait_s <= 0 or not _is_socket(path):
            raise
    while True:
        waited = time.monotonic() - began
        if waited >= QUIET_S and not told:
            told = True
            tell(f"no daemon answers on {path}: waiting up to {wait_s:g} s, because mpsd may be restarting")
        time.sleep(PAUSE_S)
        try:
            return ask(path)
        except errors.NotRunningError:
            if time.monotonic() - began >= wait_s:
                raise


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False
