"""Runs the failed tests of the last pytest run once more, one after the other, with nothing beside them.

A deadline that passed because the machine stood still says nothing about the code. At most MOST tests get a
second run; the exit status is pytest's. A test that passes only alone is named in the last lines: mend it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 5
CACHE = Path(".pytest_cache/v/cache/lastfailed")


def failed(cache: Path = CACHE) -> list[str]:
    """Return the ids of the tests that failed in the last run."""
    try:
        return sorted(json.loads(cache.read_text()))
    except (OSError, ValueError):
        return []


def main(cache: Path = CACHE) -> int:
    """Return 0 if the failed tests pass alone, else pytest's exit status."""
    names = failed(cache)
    if not 0 < len(names) <= MOST:
        print(f"again: no second run: {len(names)} failed tests are known, of at most {MOST}")
        return 1
    status = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *names], check=False
    ).returncode
    if status == 0:
        for name in names:
            print(f"again: {name} failed beside others and passed alone")
    return status


if __name__ == "__main__":
    sys.exit(main())
