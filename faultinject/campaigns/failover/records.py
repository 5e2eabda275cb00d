"""The parts of mpsd's records that a report keeps, without what identifies the machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from faultinject.registry.history import clock
from mpsd.core.failover.suspects import TRIAL_MOVE


def fault(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fault record in short."""
    found = {name: record.get(name) for name in ("id", "domain", "offender", "confidence", "evidence")}
    offender = found["offender"]
    if offender and "command" in offender:
        # Without the path of its interpreter.
        command = offender["command"].replace(os.path.dirname(sys.executable) + os.sep, "")
        found["offender"] = {**offender, "command": command}
    return {**found, "fault_class": record.get("class")}


def summary(fault: Mapping[str, Any]) -> str:
    """Return the class of a shortened fault record and the text of its last sign."""
    return f"{fault['fault_class']}: {fault['evidence'][-1]['text']}"


def failover(record: Mapping[str, Any]) -> dict[str, Any]:
    private = ("command", "user", "uid")
    clients = [{k: v for k, v in outcome.items() if k not in private} for outcome in record["clients"]]
    return {**record, "clients": clients}


def moves(records: Sequence[Mapping[str, Any]], pid: int) -> int:
    """Return how often mpsd told this program to move because of a fault; planned moves do not count."""
    return sum(
        not record["planned"] and outcome["told_ms"] is not None
        for record in records
        for outcome in record["clients"]
        if outcome["pid"] == pid
    )


def trial_ms(records: Sequence[Mapping[str, Any]], pid: int) -> list[float] | None:
    """Return how long it took until the replay of this program alone was over [ms].

    From the first record, and from the order to move into the trial domain. The replay is over when the
    program says so, or when its trial domain faults. None without a trial domain or without that end.
    """
    trial = next((r for r in records if r["trigger"] == TRIAL_MOVE and _outcome(r, pid)), None)
    if trial is None:
        return None
    alone: float | None = _outcome(trial, pid)["done_ms"]
    if alone is None:
        faulted = next((r for r in records if r["domain"] == trial["to"] and not r["planned"]), None)
        alone = None if faulted is None else _ms_between(trial, faulted)
    return None if alone is None else [round(_ms_between(records[0], trial) + alone, 1), alone]


def _outcome(record: Mapping[str, Any], pid: int) -> Mapping[str, Any]:
    """Return the entry of this program; empty if the record has none."""
    return next((outcome for outcome in record["clients"] if outcome["pid"] == pid), {})


def _ms_between(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    times = [datetime.fromisoformat(record["time"]) for record in (first, second)]
    return round((times[1] - times[0]).total_seconds() * 1e3, 1)


def is_settled(record: Mapping[str, Any]) -> bool:
    """Return whether the fate of every client is known."""
    return all(outcome["outcome"] not in ("told", "moving") for outcome in record["clients"])


def since(at: float, time_of_record: str) -> float:
    """Return the time [ms] from a monotonic moment to the time of a record."""
    asked = time.time() - (clock() - at)
    return round((datetime.fromisoformat(time_of_record).timestamp() - asked) * 1e3, 1)
