"""The statistics of the proxy in a process, as plain values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "clients" / "libcuda"
"""The sources of the proxy in this tree, with the package that reads its statistics."""


def read_stats(pid: int) -> Mapping[str, Any] | None:
    """Return the statistics of the proxy in this process, as plain values; None without a proxy."""
    try:
        from mpsd_libcuda.stats import read_stats as read
    except ImportError:
        # In a checkout the package is beside the others, without being installed.
        sys.path.append(str(FOLDER))
        from mpsd_libcuda.stats import read_stats as read
    stats = read(pid)
    return (
        None if stats is None else {field.name: _plain(getattr(stats, field.name)) for field in fields(stats)}
    )


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: members of an enumeration by name."""
    if isinstance(value, Enum):
        return value.name.lower()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else value
