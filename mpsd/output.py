"""Standard output of a command, whoever reads it, or whatever cannot be written."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def mute(stream: TextIO) -> None:
    """What is still buffered cannot be written; Python would try once more at exit, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def put(text: str, program: str, status: int = 0) -> int:
    """All that a command prints; its exit status: that, or 1 where it cannot be written, which is said.

    Whoever read may have gone, as `| head` does, or nobody ever wanted to (`>&-`): that is no error.
    """
    if sys.stdout is None:
        return status
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        mute(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            print(f"{program}: cannot write: {error.strerror or error}", file=sys.stderr)
            return 1
    return status
