"""Cases that only a long run of the tests adds: more of those of which every run has some."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

LONG = bool(os.environ.get("MPSD_TEST_LONG"))
WHY = "another case of what was tried: MPSD_TEST_LONG=1 runs it"
only_long = pytest.mark.skipif(not LONG, reason=WHY)

T = TypeVar("T")


def of(all_of_them: T, some: T) -> T:
    """Return `some` unless this is a long run."""
    return all_of_them if LONG else some
