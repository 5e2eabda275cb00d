"""Runs a program to its end or its deadline. Its children end with it, unless this program is killed."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from kmod.errors import KmodError, Unavailable

TAIL_LINES = 12
PACKAGES = {
    "spatch": "coccinelle",
    "apt-get": "apt",
    "apt-cache": "apt",
    "dpkg-deb": "dpkg",
    "depmod": "kmod",
    "modprobe": "kmod",
}
"""Those whose package has another name, on Debian."""


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
        raise KmodError(f"{_named(done.args)} exited with {done.returncode}:\n{tail}")
    return done.stdout


def run_any(command: Sequence[str | Path], *, deadline_s: float, cwd: Path | None = None) -> str:
    """The same for a program that says by its status what it found: no status is a failure."""
    return _run(command, deadline_s, cwd).stdout


def run_to(log: Path, command: Sequence[str | Path], *, deadline_s: float, cwd: Path | None = None) -> int:
    """Its exit status; what it prints goes to `log`. Raises Unavailable, KmodError when it takes too long."""
    words = _words(command)
    with log.open("wb") as out, _started(words, cwd, out) as process:
        try:
            return process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise KmodError(f"{words[0]} took more than {deadline_s:g} s, see {log}") from None


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a lost terminal are not heard: half of what is done here is no driver at all."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def end_when_told() -> None:
    """SIGTERM and a terminal that goes raise SystemExit from now on, so that what was started is ended and
    half-made folders go."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _run(
    command: Sequence[str | Path], deadline_s: float, cwd: Path | None
) -> subprocess.CompletedProcess[str]:
    words = _words(command)
    with _started(words, cwd, subprocess.PIPE) as process:
        try:
            said, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise KmodError(f"{words[0]} took more than {deadline_s:g} s") from None
    return subprocess.CompletedProcess(words, process.returncode, said.decode(errors="replace"))


def _words(command: Sequence[str | Path]) -> list[str]:
    words = [str(word) for word in command]
    if shutil.which(words[0]) is None:
        package = PACKAGES.get(words[0], words[0])
        raise Unavailable(f"{words[0]} is not installed: apt-get install {package} (or your distribution's)")
    return words


def _named(words: Sequence[str]) -> str:
    """The program, where env starts it."""
    if words[0] != "env":
        return words[0]
    return next((word for word in words[1:] if "=" not in word), "env")


@contextmanager
def _started(
    words: Sequence[str], cwd: Path | None, out: int | IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own, killed when the block raises: make's children outlive it otherwise.

    It has what may be inherited: a lock is held until it has ended, too, when this program is killed.
    """
    with subprocess.Popen(
        words,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        close_fds=False,
    ) as process:
        try:
            yield process
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def at_least_one(text: str) -> int:
    """For argparse: how many at once."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace | int:
    """What was given; or the status to end with, for it was not right, or was --help."""
    try:
        return parser.parse_args(arguments)
    except SystemExit as end:
        return finished(end.code if isinstance(end.code, int) else 1)


def finished(status: int) -> int:
    """What was printed reaches somebody, or the status says that it did not."""
    try:
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if not isinstance(error, BrokenPipeError):
            print(f"standard output: {error.strerror}", file=sys.stderr)
        return status or 1
    return status
