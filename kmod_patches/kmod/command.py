"""Runs a program to its end or its deadline."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kmod.errors import KmodError, Unavailable

TAIL_LINES = 12


def run(
    command: Sequence[str | Path],
    *,
    deadline_s: float,
    cwd: Path | None = None,
) -> str:
    """What it printed. Raises Unavailable without the program, KmodError when it fails or takes too long."""
    done = _run(command, deadline_s, cwd)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-TAIL_LINES:])
        raise KmodError(f"{done.args[0]} exited with {done.returncode}:\n{tail}")
    return done.stdout


def run_any(command: Sequence[str | Path], *, deadline_s: float, cwd: Path | None = None) -> str:
    """The same for a program that says by its status what it found: no status is a failure."""
    return _run(command, deadline_s, cwd).stdout


def _run(
    command: Sequence[str | Path], deadline_s: float, cwd: Path | None
) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    if shutil.which(words[0]) is None:
        raise Unavailable(f"{words[0]} is not installed")
    try:
        return subprocess.run(
            words,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=deadline_s,
        )
    except subprocess.TimeoutExpired:
        raise KmodError(f"{words[0]} took more than {deadline_s:g} s") from None
