"""The newest fault of each domain, slot and GPU, as records of the journal: it outlives the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from mpsd.base.model import ProcessInstance
from mpsd.core.faults.taxonomy import DEVICE_CLASSES

Record = Mapping[str, Any]
KEPT = 4096
"""Greatest number of domains, slots and GPUs with a fault that are kept."""


class LastFaults:
    """An index of fault records. A record that an earlier release wrote names no slot."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._found: dict[tuple[str, str], Record] = {}
        for record in records:
            self.note(record)

    def note(self, record: Record) -> None:
        """Take in a record, or a later revision of one."""
        for key in _keys(record):
            known = self._found.pop(key, record)
            self._found[key] = record if known["id"] <= record["id"] else known
        while len(self._found) > KEPT:
            del self._found[next(iter(self._found))]

    def of_domain(self, domain: str) -> Record | None:
        """Return the newest fault in this domain, guard hits included."""
        return self._found.get(("domain", domain))

    def that_took(self, domain: str) -> Record | None:
        """Return the newest fault in this domain that is no guard hit."""
        return self._found.get(("taken", domain))

    def of_slot(self, slot: str, domains: Iterable[str], gpus: Sequence[str]) -> Record | None:
        """Return the newest fault in any domain of this slot, or of its GPUs. `domains`: those it has now."""
        keys = [("slot", slot), *(("domain", name) for name in domains), *(("gpu", uuid) for uuid in gpus)]
        found = [self._found[key] for key in keys if key in self._found]
        return max(found, key=lambda record: int(record["id"]), default=None)


def _keys(record: Record) -> list[tuple[str, str]]:
    if record["domain"] is None:
        device = record["class"] in DEVICE_CLASSES
        return [("gpu", uuid) for uuid in record["gpus"]] if device else []
    keys = [("domain", record["domain"])]
    if record.get("hit") is None:
        keys.append(("taken", record["domain"]))
    if slot := record.get("slot"):
        keys.append(("slot", slot))
    return keys


def offender_of(record: Record) -> ProcessInstance | None:
    """Return the process that the record names. The kernel log alone names one without its start time."""
    named = record["offender"]
    known = named is not None and named["start_ticks"] is not None
    return ProcessInstance(named["pid"], named["start_ticks"]) if known else None


def fault_view(record: Record, wall: float, *, runs: bool) -> dict[str, Any]:
    """Return the row of `status` for a last fault.

    `wall`: calendar seconds now. `runs`: whether the process of offender_of() is a client that runs.
    """
    offender = record["offender"]
    outcome = ""
    if offender_of(record) is not None:
        hit = (record.get("hit") or {}).get("outcome", "")
        outcome = (hit or "runs") if runs else hit if hit == "evicted" else "ended"
    return {
        "id": record["id"],
        "class": record["class"],
        "time": record["time"],
        "age_s": round(max(0.0, wall - datetime.fromisoformat(record["time"]).timestamp()), 3),
        "domain": record["domain"],
        "offender": None if offender is None else dict(offender),
        "confidence": record["confidence"],
        "suspects": len(record["suspects"]),
        "outcome": outcome,
    }
