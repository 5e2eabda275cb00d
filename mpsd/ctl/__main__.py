"""The entry point of mpsd-ctl. An error becomes one line and an exit status, never a traceback."""

from __future__ import annotations

import io
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TextIO

from mpsd.base.errors import MpsdError
from mpsd.base.output import discard_buffer
from mpsd.ctl import commands, parser

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    options = parser.build().parse_args(argv)
    out = sys.stdout
    if out is None:  # The shell closed it (`>&-`).
        out = open(os.devnull, "w")  # noqa: SIM115
    for stream in (out, sys.stderr):
        # A terminal that cannot show a character gets an escape; printing must not fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = commands.run(options, out)
        out.flush()
    except MpsdError as error:
        _say_failed(options, out)
        return _failed(str(error), error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe exited, as in `| head`: no error.
        discard_buffer(out)
        return 0
    except OSError as error:
        discard_buffer(out)
        return _failed(f"cannot write: {error.strerror or error}", 1)
    except (LookupError, TypeError, ValueError) as error:
        _say_failed(options, out)
        what = f"{type(error).__name__}: {error}"
        return _failed(
            f"cannot understand the daemon's answer: {what} (use mpsd and mpsd-ctl of one release)", 1
        )
    return status


def _say_failed(options: Namespace, out: TextIO) -> None:
    try:
        commands.failed(options, out)
        out.flush()
    except OSError:
        discard_buffer(out)


def _failed(text: str, status: int) -> int:
    try:
        print(f"mpsd-ctl: {text}", file=sys.stderr)
    except OSError:
        discard_buffer(sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
