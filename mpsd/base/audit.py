"""The audit log: one structured line for each act of force, each change of a setting, each refused right.

mpsd/docs/operate.md has the fields. Lines have the level "warning": only `[log] level = "error"` hides them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from mpsd.base.model import Requester

LOGGER = "mpsd.audit"
_log = structlog.get_logger(LOGGER)

REFUSALS_S = 60.0
"""Time [s] within which a user causes one line at most for refusals of one operation."""
REFUSALS_KEPT = 64
_OVERFLOW = (-1, "any")


def record(
    action: str, outcome: str, requester: Requester | None = None, *, by: str = "policy", **fields: object
) -> None:
    """Write one line, without the fields that have no value. `by`: the origin if there is no requester."""
    origin = {"by": by} if requester is None else {"by": "peer", **_requester_fields(requester)}
    known = {key: value for key, value in fields.items() if value not in (None, "", ())}
    _log.warning("audit", logger=LOGGER, action=action, outcome=outcome, **origin, **known)


def _requester_fields(requester: Requester) -> Mapping[str, object]:
    """Return the fields of a requester; the names of mere claims say so."""
    return {
        "peer_uid": requester.uid,
        "peer_gid": requester.gid,
        "claimed_pid": requester.pid,
        "claimed_cgroup": requester.cgroup,
    }


@dataclass(slots=True)
class _Window:
    began: float
    suppressed: int = 0


class Refusals:
    """Lines about refused rights: the first at once, then one count per user and operation in REFUSALS_S.

    Strangers can cause refusals at any rate. Beyond REFUSALS_KEPT users and operations, all count as one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[tuple[int, str], _Window] = {}

    def refuse(self, uid: int, operation: str, requester: Callable[[], Requester], reason: str) -> None:
        """Record a refused right. `requester` is asked only if a line is written."""
        self.flush()
        key = (uid, operation)
        if key not in self._windows and len(self._windows) >= REFUSALS_KEPT:
            key = _OVERFLOW
        if (window := self._windows.get(key)) is not None:
            window.suppressed += 1
            return
        self._windows[key] = _Window(self._clock())
        record("right", "refused", requester(), operation=operation, reason=reason)

    def flush(self) -> None:
        """Write the counts of windows that have ended."""
        now = self._clock()
        for key, window in tuple(self._windows.items()):
            if now - window.began < REFUSALS_S:
                # Windows are in order of their beginning.
                break
            del self._windows[key]
            if window.suppressed:
                # The count is a line too, so a new window begins.
                self._windows[key] = _Window(now)
                uid, operation = key
                count = window.suppressed
                record("right", "refused", by="peer", peer_uid=uid, operation=operation, suppressed=count)


refusals = Refusals()
