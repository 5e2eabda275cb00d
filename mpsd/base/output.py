"""Standard output of a command, including readers that go away and devices that are full."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def discard_buffer(stream: TextIO) -> None:
    """Discard the rest of the stream's buffer; otherwise Python flushes at exit and reports an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def put(text: str, program: str, status: int = 0) -> int:
    """Print a command's whole output and return its exit status: `status`, or 1 after a reported write error.

    A closed reader (`| head`) or a closed standard output (`>&-`) is no error.
    """
    if sys.stdout is None:
        return status
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        discard_buffer(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            print(f"{program}: cannot write: {error.strerror or error}", file=sys.stderr)
            return 1
    return status
