"""The beginnings and ends of conditions: one line of the log and one event for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from mpsd.base.conditions import Code, Condition

log = structlog.get_logger("mpsd.conditions")

Publish = Callable[[Condition, bool], None]


class ConditionLog:
    """Compares the conditions of one moment with those of the one before.

    `publish`: publishes the event that a condition begins (True) or ends (False).
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._known: dict[tuple[Code, str], Condition] = {}

    def look(self, conditions: Iterable[Condition]) -> None:
        """Compare with all present conditions. Code and subject identify a condition."""
        now: dict[tuple[Code, str], Condition] = {}
        for condition in conditions:
            now.setdefault(condition.key, condition)
        for key, condition in now.items():
            if key not in self._known:
                tell = log.warning if condition.kind.degrades else log.info
                tell("degraded" if condition.kind.degrades else "condition", **_fields(condition))
                self._publish(condition, True)
        for key, condition in self._known.items():
            if key not in now:
                text = "no longer degraded" if condition.kind.degrades else "condition ended"
                log.info(text, **_fields(condition))
                self._publish(condition, False)
        self._known = now


def _fields(condition: Condition) -> dict[str, str]:
    return {"code": condition.code.value, "reason": condition.text, "remedy": condition.remedy}
