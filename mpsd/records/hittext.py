"""A guard hit in one sentence, and as plain values for programs."""

from __future__ import annotations

from typing import Any

from mpsd.base.model import Access, AddressKind, Nearby, Relation, ZoneRole
from mpsd.core.faults.records import FaultRecord, HitFacts, HitOutcome

PAGE = 4096
_VERBS = {
    Access.READ: "read",
    Access.WRITE: "wrote",
    Access.ATOMIC: "made an atomic access",
}


def summary(record: FaultRecord) -> str:
    """Return a sentence such as: pid 4711 wrote 4 KiB past the end of a 20 MiB allocation made 3 s ago;
    evicted after 9 ms; no other client was affected.
    """
    facts, offender = record.hit, record.offender
    assert facts is not None and offender is not None
    verb = _VERBS.get(record.access or Access.UNKNOWN, "accessed memory")
    parts = [f"pid {offender.id.process.pid} {verb} {_where(record, facts)}{_kernel(facts)}", _outcome(facts)]
    if facts.count > 1:
        parts.append(f"{facts.count} such accesses were reported")
    if facts.alone is not None:
        parts.append("no other client was affected" if facts.alone else "its domain faulted as well")
    return "; ".join(parts)


def _where(record: FaultRecord, facts: HitFacts) -> str:
    near = facts.nearby
    if record.lies_there is AddressKind.NULL_PAGE:
        return f"through a null pointer (address {record.address:#x})"
    if near is None:
        where = "where nothing is mapped" if facts.role is ZoneRole.SINK else "in a guard zone"
        return f"at {record.address:#x} {where}"
    freed = f" and freed {duration(near.freed_s)} ago" if near.freed_s is not None else ""
    what = f"a {size(near.size)} allocation made {duration(near.age_s)} ago{freed}"
    return f"{_distance(near)} {near.relation} {what}"


def _distance(near: Nearby) -> str:
    if near.relation is Relation.INSIDE:
        return f"{size(near.distance)} from the start," if near.distance else "at the start,"
    # The driver reports the page of an access, not the address.
    close = 0 if near.relation is Relation.PAST else PAGE
    if near.page and near.distance <= close:
        return f"within {size(PAGE)}"
    return size(near.distance) if near.distance else "right"


def _kernel(facts: HitFacts) -> str:
    return f" (kernel {facts.kernel} was in flight)" if facts.kernel else ""


def _outcome(facts: HitFacts) -> str:
    after = f" after {duration(facts.outcome_s)}" if facts.outcome_s is not None else ""
    match facts.outcome:
        case HitOutcome.ABSORBED:
            return "absorbed, the client continues"
        case HitOutcome.FROZEN:
            return "frozen for inspection"
        case HitOutcome.WITHHELD:
            return f"left alone: {facts.why}"
        case HitOutcome.ENDED:
            return f"absorbed, the client ended{after}"
        case _:
            return f"{facts.outcome}{after}"


def size(value: int) -> str:
    """Format bytes with the largest binary unit that leaves at most three digits."""
    amount, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if amount == int(amount) or amount >= 100 else f"{amount:.1f} {unit}"


def duration(seconds: float) -> str:
    """Format seconds, rounded to a useful precision: 9 ms, 3 s, 12 min, 5 h."""
    if seconds < 0.0095:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    for limit, unit, by in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / by:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def hit_json(facts: HitFacts) -> dict[str, Any]:
    """Return the part of a record that only a guard hit has (schema 1)."""
    near = facts.nearby
    signed = {Relation.BEFORE: -1}
    return {
        "zone": facts.role.value,
        "policy": facts.policy.value,
        "outcome": facts.outcome.value,
        "outcome_ms": None if facts.outcome_s is None else round(facts.outcome_s * 1e3, 3),
        "count": facts.count,
        "kernel": facts.kernel,
        "alone": facts.alone,
        "allocation": None
        if near is None
        else {
            "relation": near.relation.name.lower(),
            "offset": near.distance * signed.get(near.relation, 1),
            "to_page": near.page,
            "address": f"{near.address:#x}",
            "bytes": near.size,
            "order": near.order,
            "age_s": round(near.age_s, 3),
            "freed_s": None if near.freed_s is None else round(near.freed_s, 3),
        },
    }
