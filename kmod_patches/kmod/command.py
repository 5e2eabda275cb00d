"""Execution of a program to its end or deadline. Its children end with it, unless this program is killed."""

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
"""Programs in a Debian package of another name."""


def run(
    command: Sequence[str | Path],
    *,
    deadline_s: float,
    cwd: Path | None = None,
) -> str:
    """Return a program's output. Raises Unavailable without it, KmodError on failure or timeout."""
    done = _run(command, deadline_s, cwd)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-TAIL_LINES:])
        raise KmodError(f"{_named(done.args)} exited with {done.returncode}:\n{tail}")
    return done.stdout


def run_any(command: Sequence[str | Path], *, deadline_s: float, cwd: Path | None = None) -> str:
    """Return the output of a program that reports findings by its status: no status is a failure."""
    return _run(command, deadline_s, cwd).stdout


def run_to(log: Path, command: Sequence[str | Path], *, deadline_s: float, cwd: Path | None = None) -> int:
    """Run a program with output to `log` and return its exit status. Raises Unavailable, KmodError."""
    words = _words(command)
    with log.open("wb") as out, _started(words, cwd, out) as process:
        try:
            return process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise KmodError(f"{words[0]} took more than {deadline_s:g} s; see {log}") from None


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and the loss of the terminal: a half-done step would leave no driver at all."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def end_when_told() -> None:
    """Raise SystemExit on SIGTERM and the loss of the terminal from now on.

    Child processes are ended and incomplete folders are removed then."""
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
    """Return the program, also if env starts it."""
    if words[0] != "env":
        return words[0]
    return next((word for word in words[1:] if "=" not in word), "env")


@contextmanager
def _started(
    words: Sequence[str], cwd: Path | None, out: int | IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start in a new session and kill it when the block raises: make's children would outlive it otherwise.

    Descriptors are inherited, so a lock is held until the child's end, even if this program is killed.
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
    """Convert a number of parallel jobs, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace | int:
    """Parse the arguments, or return the exit status after an error or --help."""
    try:
        return parser.parse_args(arguments)
    except SystemExit as end:
        return finished(end.code if isinstance(end.code, int) else 1)


def finished(status: int) -> int:
    """Flush the output, and change the status if it cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if not isinstance(error, BrokenPipeError):
            print(f"standard output: {error.strerror}", file=sys.stderr)
        return status or 1
    return status
