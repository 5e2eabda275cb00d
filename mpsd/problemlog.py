"""What degrades the daemon, in its log: a line when it comes, one when it goes. `status` has what is now."""

from __future__ import annotations

import re
from collections.abc import Iterable

import structlog

from mpsd.text import degrading

log = structlog.get_logger("mpsd.problems")

_NUMBER = re.compile(r"\d+")


class ProblemLog:
    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def look(self, problems: Iterable[str]) -> None:
        """`problems`: all there are now. One that differs by its numbers alone is the same one."""
        now = {_NUMBER.sub("#", text): text for text in degrading(problems)}
        for kind, text in now.items():
            if kind not in self._known:
                log.warning("degraded", reason=text)
        for kind, text in self._known.items():
            if kind not in now:
                log.info("no longer degraded", reason=text)
        self._known = now
