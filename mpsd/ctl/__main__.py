"""The entry point of mpsd-ctl: errors become one line and an exit status, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mpsd.ctl import commands, parser
from mpsd.errors import MpsdError


def main(argv: Sequence[str] | None = None) -> int:
    options = parser.build().parse_args(argv)
    try:
        status = commands.run(options, sys.stdout)
        sys.stdout.flush()
    except MpsdError as error:
        print(f"mpsd-ctl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read has gone, as `| head` does: nothing more can be said, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
