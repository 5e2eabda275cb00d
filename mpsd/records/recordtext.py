"""Fault records and clients as the plain values of the wire and the journal (schema 1)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from mpsd.api.usernames import user_name
from mpsd.core.failover.participants import FailoverRecord, ParticipantOutcome
from mpsd.core.faults.records import FaultRecord, MovedClient, Party
from mpsd.core.faults.taxonomy import CLASSES
from mpsd.records import hittext


def party_json(party: Party) -> dict[str, Any]:
    facts = party.facts
    return {
        "pid": facts.instance.pid,
        "start_ticks": facts.instance.start_ticks,
        "uid": facts.uid,
        "user": user_name(facts.uid),
        "command": facts.command,
    }


def _offender_json(record: FaultRecord) -> dict[str, Any] | None:
    """Return the offender. A process that only the kernel log names has no start time and no user."""
    if record.offender is not None:
        return party_json(record.offender)
    if record.logged is None:
        return None
    logged = record.logged
    return {"pid": logged.pid, "start_ticks": None, "uid": None, "user": None, "command": logged.name}


def _one_for_each(moved: Iterable[MovedClient]) -> Iterable[MovedClient]:
    """Return one entry for each process, whatever the number of its address spaces."""
    return {m.party.id.process: m for m in moved}.values()


def record_json(record: FaultRecord, wall_at_zero: float, record_ms: float | None) -> dict[str, Any]:
    """Return a record as the wire shows it.

    `wall_at_zero`: calendar seconds at monotonic zero. `record_ms`: from the driver's time stamp to the
    moment the record was written, None if the driver gave no stamp.
    """
    victims = sorted({(v.id.process.pid, v.facts.uid) for v in record.victims})
    when = datetime.fromtimestamp(wall_at_zero + record.at, UTC)
    return {
        "id": record.id,
        "time": when.isoformat(timespec="milliseconds"),
        "domain": record.domain,
        "gpus": list(record.gpus),
        "class": record.fault_class,
        "title": CLASSES[record.fault_class].title,
        "offender": _offender_json(record),
        "confidence": record.confidence.value,
        "suspects": [party_json(p) for p in record.suspects],
        "address": f"{record.address:#x}" if record.address is not None else None,
        "access": record.access.value if record.access else None,
        "fault_type": record.fault_type,
        "summary": hittext.summary(record) if record.hit else None,
        "hit": hittext.hit_json(record.hit) if record.hit else None,
        "lies_there": record.lies_there.value if record.lies_there else None,
        "evidence": [
            {"source": e.source.value, "at_ms": round((e.at - record.at) * 1e3, 3), "text": e.text}
            for e in record.evidence
        ],
        "victims": [pid for pid, _ in victims],
        "victim_uids": [uid for _, uid in victims],
        "moved": [
            {**party_json(m.party), "pause_ms": m.pause_ms, "why": m.why} for m in _one_for_each(record.moved)
        ],
        "revision": record.revision,
        "refused_807": record.refused,
        "action": record.action,
        "record_ms": record_ms,
    }


def failover_json(record: FailoverRecord, wall_at_zero: float, sent_ms: float | None) -> dict[str, Any]:
    """Return a fail-over record as the wire shows it.

    `sent_ms`: from the driver's stamp of the fault until all clients were told; None without a stamp.
    """
    when = datetime.fromtimestamp(wall_at_zero + record.at, UTC)
    return {
        "id": record.id,
        "time": when.isoformat(timespec="milliseconds"),
        "slot": record.slot,
        "domain": record.domain,
        "to": record.to,
        "generation": record.generation,
        "trigger": record.trigger,
        "planned": record.planned,
        "fault": record.fault,
        "decision_ms": record.decision_ms,
        "sent_ms": sent_ms,
        "clients": [_fate_json(fate) for fate in record.fates],
        "revision": record.revision,
    }


def _fate_json(fate: ParticipantOutcome) -> dict[str, Any]:
    return {
        "pid": fate.process.pid,
        "start_ticks": fate.process.start_ticks,
        "uid": fate.uid,
        "user": user_name(fate.uid),
        "command": fate.command,
        "outcome": fate.outcome.value,
        "why": fate.why,
        "suspect": fate.suspect,
        "told_ms": fate.told_ms,
        "held_ms": fate.held_ms,
        "fence_ms": fate.fence_ms,
        "first_ms": fate.first_ms,
        "turn_ms": fate.turn_ms,
        "done_ms": fate.done_ms,
        "whose": fate.whose.name.lower(),
        # The budget for which it had left fail-over: "memory" or "time".
        "left": fate.left.name.lower() if fate.left is not None else None,
        "restored_bytes": fate.restored_bytes,
        "replayed": fate.replayed,
    }
