"""Waits in tests: each for a condition, each with a deadline."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")
DEADLINE_S = 60.0
BUILD_S = 1200.0
"""The deadline of compilers. It guards against hangs alone: a build shares its processors with tests."""
_STEP_S = 0.005


class Source(Protocol):
    def fileno(self) -> int: ...


def until(look: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Return the result of `look` once it is true. A missed deadline is a failure that names `what`."""
    end = time.monotonic() + deadline_s
    while not (seen := look()):
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {deadline_s:g} s; last seen: {seen!r}")
        select.select([], [], [], _STEP_S)
    return seen


def readable(source: Source, deadline_s: float) -> bool:
    """Return whether the source has something to drain by the deadline."""
    poll = select.poll()
    poll.register(source.fileno(), select.POLLIN)
    return bool(poll.poll(deadline_s * 1000))
