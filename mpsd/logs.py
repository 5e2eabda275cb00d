"""mpsd's own log: JSON lines or a readable console, on stderr.

What a log line quotes may come from any user's process (a command line, a log of theirs): control
characters, escape sequences and what reorders text are escaped before anything is rendered. A log
that cannot be written is dropped; it never ends the daemon.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TextIO

import structlog

from mpsd.text import printable

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
MAX_TEXT = 2000
MAX_ITEMS = 50


class Output:
    """A text stream that never raises. `lost` counts what could not be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = 0

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except (OSError, ValueError):
            self.lost += 1
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            pass  # Counted by the write that did not get through, or a later one.


def configure(
    log_format: str = "auto", level: str = "info", stream: TextIO | None = None, *, colors: bool | None = None
) -> Output:
    """Set structlog up for this process. `log_format`: json, console, or auto (console on a TTY).

    Colours are used on a terminal unless NO_COLOR is set; the caller decides with `colors`.
    """
    target = sys.stderr if stream is None else stream
    terminal = target.isatty()
    console = log_format == "console" or (log_format == "auto" and terminal)
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=terminal if colors is None else colors)
        if console
        else structlog.processors.JSONRenderer(default=str)
    )
    output = Output(target)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _escape_values,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(output),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
    return output


def _escape_values(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        event[key] = _escaped(value) if key != "exception" else value
    return event


def _escaped(value: object) -> object:
    if isinstance(value, str):
        return printable(value, MAX_TEXT)
    if isinstance(value, Mapping):
        return {
            printable(str(key), MAX_TEXT): _escaped(item) for key, item in list(value.items())[:MAX_ITEMS]
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_escaped(item) for item in value[:MAX_ITEMS]]
    return value if isinstance(value, int | float | bool | None) else printable(str(value), MAX_TEXT)
