"""Events as text: one line each, and one for each fault and fail-over. Pure functions; names are escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mpsd.base.text import printable
from mpsd.ctl.render import party

Event = Mapping[str, Any]
# A record is revised for seconds only.
RECORDS_KEPT = 1000


class Records:
    """The records that a reader has seen. A record has one line; a later revision has one if it says more."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], str] = {}

    def line(self, seen: Event) -> str | None:
        """Return the line of an event; None for a revision of a record that says nothing new."""
        key = _record(seen)
        if key is None:
            return event(seen)
        text, known = _TEXTS[key[0]](seen), self._seen.get(key)
        if known == text:
            return None
        self._seen[key] = text
        while len(self._seen) > RECORDS_KEPT:
            del self._seen[next(iter(self._seen))]
        kind = key[0] if known is None else f"{key[0]}-revised"
        return f"{_head(seen)} {kind} {text}"


def newest(events: Sequence[Event]) -> list[Event]:
    """Return the events with the newest revision alone of each record."""
    last = {_record(seen): number for number, seen in enumerate(events)}
    return [seen for n, seen in enumerate(events) if _record(seen) is None or last[_record(seen)] == n]


def event(seen: Event) -> str:
    """Return one event that is no record as a line."""
    rest = {k: v for k, v in seen.items() if k not in ("kind", "at", "seq")}
    text = " ".join(f"{k}={_value(v)}" for k, v in rest.items() if v not in ("", None, []))
    return f"{_head(seen)} {seen.get('kind', 'lost')} {text}"


def _head(seen: Event) -> str:
    """Return the number of an event and, if it has one, its time."""
    number, at = str(seen.get("seq", "-")), seen.get("at")
    if not isinstance(at, int | float):
        return number
    return f"{number} {datetime.fromtimestamp(at, UTC).isoformat(timespec='milliseconds')}"


def _record(seen: Event) -> tuple[str, int] | None:
    """Return the kind and number of a record; None for an event that is none."""
    kind = str(seen.get("kind"))
    return (kind, int(seen["id"])) if kind in _TEXTS else None


def _fault(seen: Event) -> str:
    named, suspects = seen.get("offender"), len(seen.get("suspects", ()))
    offender = party(named) if named else f"{suspects} suspect{'' if suspects == 1 else 's'}"
    where = seen["domain"] or "the device"
    return f"#{seen['id']} {seen['class']} in {where}: {offender}, {seen['confidence']}"


def _failover(seen: Event) -> str:
    cause = seen["trigger"] if seen["fault"] is None else f"fault #{seen['fault']}"
    counts = Counter(str(client["outcome"]) for client in seen["clients"])
    outcomes = ", ".join(f"{many} {outcome}" for outcome, many in sorted(counts.items())) or "no program"
    return f"#{seen['id']} from {seen['domain']} to {seen['to'] or 'no domain'}, {cause}: {outcomes}"


_TEXTS: Mapping[str, Callable[[Event], str]] = {"fault": _fault, "failover": _failover}
"""The text of each kind of event that is a record, and so has revisions."""


def gap(why: str, since: int, kept: int) -> str:
    """Return why the shown events are not all events since `since`."""
    shown = f"{kept} kept event{'' if kept == 1 else 's'}"
    match why:
        case "earlier":
            text = f"event {since} is older than the daemon's last start; showing {shown}"
        case "never":
            text = f"there is no event {since} yet; showing {shown}"
        case _:
            text = f"the daemon no longer keeps all events since {since}; showing {shown}"
    return text


def _value(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return printable(text)
