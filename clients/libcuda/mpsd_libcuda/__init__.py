"""libcuda.so.1, the proxy, as an installed package: its folder, and its statistics of a process."""

from __future__ import annotations

from pathlib import Path

from mpsd_libcuda.stats import State, Stats, read_stats

LIBRARY_NAME = "libcuda.so.1"

__all__ = ["LIBRARY_NAME", "State", "Stats", "library_directory", "read_stats"]


def library_directory() -> Path | None:
    """Return the folder for LD_LIBRARY_PATH, which contains only the proxy; None if it was not built."""
    folder = Path(__file__).resolve().parent / "lib"
    return folder if (folder / LIBRARY_NAME).exists() else None
