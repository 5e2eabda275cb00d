"""mpsd's own log: JSON lines or a readable console, on stderr.

A log line may quote text of any user's process, such as a command line or a line of its log. Control
characters, escape sequences and characters that reorder text are therefore escaped before rendering. A log
line that cannot be written is dropped; a full disk or a closed pipe never ends the daemon.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from typing import Any, TextIO

import structlog

from mpsd.base.text import printable

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
MAX_TEXT = 2000
MAX_ITEMS = 50
MAX_KINDS = 1024


class Output:
    """A text stream that never raises. `lost` counts the writes that failed."""

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
            pass  # The failed write is already counted, or a later one will be.


def configure(
    log_format: str = "auto", level: str = "info", stream: TextIO | None = None, *, colors: bool | None = None
) -> Output:
    """Set up structlog for this process. `log_format`: json, console, or auto (console on a TTY).

    `colors` forces colours on or off, so that the caller can respect NO_COLOR. None: colours on a terminal.
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
        # The console would print a member of an enumeration as <Name.MEMBER: 'value'>.
        return printable(str(value), MAX_TEXT)
    if isinstance(value, Mapping):
        return {
            printable(str(key), MAX_TEXT): _escaped(item) for key, item in list(value.items())[:MAX_ITEMS]
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_escaped(item) for item in value[:MAX_ITEMS]]
    return value if isinstance(value, int | float | bool | None) else printable(str(value), MAX_TEXT)


class Repeated:
    """Log lines that other users can cause: the first of a kind, then at most one in `interval_s` of it.

    The next line of that kind has the number of lines that were left out since (`left_out`). Kinds are
    bounded: beyond MAX_KINDS the oldest one is forgotten.
    """

    def __init__(
        self, log: Any, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._interval_s = interval_s
        self._clock = clock
        self._said: dict[Hashable, tuple[float, int]] = {}

    def info(self, event: str, kind: Hashable = None, **fields: object) -> None:
        self._say(self._log.info, event, kind, fields)

    def warning(self, event: str, kind: Hashable = None, **fields: object) -> None:
        self._say(self._log.warning, event, kind, fields)

    def error(self, event: str, kind: Hashable = None, **fields: object) -> None:
        self._say(self._log.error, event, kind, fields)

    def _say(
        self, say: Callable[..., object], event: str, kind: Hashable, fields: Mapping[str, object]
    ) -> None:
        now, key = self._clock(), (event, kind)
        said_at, left_out = self._said.get(key, (None, 0))
        if said_at is not None and now - said_at < self._interval_s:
            self._said[key] = (said_at, left_out + 1)
            return
        self._said.pop(key, None)
        while len(self._said) >= MAX_KINDS:
            del self._said[next(iter(self._said))]
        self._said[key] = (now, 0)
        say(event, **fields, **({"left_out": left_out} if left_out else {}))
