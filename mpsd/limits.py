"""What the kernel allows, where more than one layer must keep to it."""

from __future__ import annotations

SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket's path: sun_path holds 108 with its closing zero (unix(7))."""
