"""The entry point of `mpsd`, before anything large is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def _without_ssl() -> None:
    """asyncio takes ssl where there is one, and with it come 4 MiB that stay resident. mpsd talks to
    local sockets only, and asyncio does without where the import fails, as it does for None."""
    if "asyncio" not in sys.modules:
        sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    _without_ssl()
    from mpsd.cli import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
