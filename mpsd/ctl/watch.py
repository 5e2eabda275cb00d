"""Repeated output: on a terminal in its alternate screen, elsewhere as blocks.

The alternate screen keeps the scrollback. Each way out of `repeat` leaves it: an error, Ctrl-C, SIGTERM and
SIGHUP.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn, TextIO

ENTER = "\x1b[?1049h\x1b[?25l"
LEAVE = "\x1b[?25h\x1b[?1049l"
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(Exception):
    """A signal ends the command. `number`: the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.strsignal(number))
        self.number = number


def repeat(out: TextIO, period_s: float, lines: Callable[[], Sequence[str]]) -> int:
    """Print the lines again and again. Return the exit status of a command that a signal ends."""
    try:
        with _signals(), _screen(out):
            while True:
                shown = lines()
                out.write(frame(shown, shutil.get_terminal_size().lines) if out.isatty() else block(shown))
                out.flush()
                time.sleep(period_s)
    except Ended as ended:
        return 128 + ended.number


def block(lines: Sequence[str]) -> str:
    """Return the lines, and an empty line that ends the block."""
    return "".join(f"{line}\n" for line in [*lines, ""])


def frame(lines: Sequence[str], height: int) -> str:
    """Return the text that replaces the screen. Where it is too low, its last row counts the lines left."""
    shown = list(lines)
    if len(shown) > height:
        kept = max(height - 1, 0)
        left = len(shown) - kept
        shown = [*shown[:kept], f"... {left} more line{'' if left == 1 else 's'}"]
    return HOME + "\r\n".join(f"{line}{END_OF_LINE}" for line in shown) + END_OF_SCREEN


@contextlib.contextmanager
def _screen(out: TextIO) -> Iterator[None]:
    if not out.isatty():
        yield
        return
    try:
        out.write(ENTER)
        yield
    finally:
        out.write(LEAVE)
        out.flush()


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Turn the signals that end a process into an exception, so that the terminal is restored first."""

    def end(number: int, where: FrameType | None) -> NoReturn:
        for each in before:
            # A second signal must not stop the repair of the terminal.
            signal.signal(each, signal.SIG_IGN)
        raise Ended(number)

    before = {number: signal.getsignal(number) for number in ENDING}
    # nohup(1) ignores SIGHUP.
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
