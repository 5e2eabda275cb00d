"""The entry point of `mpsd`, before anything large is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def _without_weight() -> None:
    """What stays resident and is never used: asyncio takes ssl where there is one (4 MiB; mpsd talks to
    local sockets only), structlog takes rich and better_exceptions for its console (4 MiB; mpsd prints
    plain lines). All do without where the import fails, as it does for None."""
    if "asyncio" not in sys.modules:
        sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]
    if "structlog" not in sys.modules:
        sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
        sys.modules.setdefault("better_exceptions", None)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    _without_weight()
    from mpsd.cli import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
