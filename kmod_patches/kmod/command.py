"""Runs a program to its end or its deadline."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kmod.errors import KmodError, Unavailable

TAIL_LINES = 12


def run(
    command: Sequence[str | Path],
    *,
    deadline_s: float,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What it printed. Raises Unavailable without the program, KmodError when it fails or takes too long."""
    words = [str(word) for word in command]
    if shutil.which(words[0]) is None:
        raise Unavailable(f"{words[0]} is not installed")
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=deadline_s,
        )
    except subprocess.TimeoutExpired:
        raise KmodError(f"{words[0]} took more than {deadline_s:g} s") from None
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-TAIL_LINES:])
        raise KmodError(f"{words[0]} exited with {done.returncode}:\n{tail}")
    return done.stdout
