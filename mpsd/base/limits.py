"""Limits of the kernel that more than one layer must respect."""

from __future__ import annotations

SOCKET_PATH_LIMIT = 107
"""Maximum length [bytes] of a Unix socket's path: sun_path holds 108 with its terminating zero (unix(7))."""

PID_LIMIT = 1 << 22
"""The largest pid that any kernel gives (PID_MAX_LIMIT)."""
