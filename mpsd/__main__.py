"""The entry point of `mpsd`. It keeps large optional modules out before any other import."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def _skip_optional_modules() -> None:
    """Keep optional modules out of memory that mpsd never uses.

    asyncio imports ssl if it is installed (4 MiB), but mpsd uses local sockets only. structlog imports rich
    and better_exceptions for its console (4 MiB), but mpsd prints plain lines. Both work without them: an
    entry None in sys.modules makes the import fail.
    """
    if "asyncio" not in sys.modules:
        sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]
    if "structlog" not in sys.modules:
        sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
        sys.modules.setdefault("better_exceptions", None)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    _skip_optional_modules()
    from mpsd.daemon.cli import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
