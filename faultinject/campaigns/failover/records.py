"""The parts of mpsd's records that a report keeps, without what identifies the machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from faultinject.registry.history import clock


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


def is_settled(record: Mapping[str, Any]) -> bool:
    """Return whether the fate of every client is known."""
    return all(outcome["outcome"] not in ("told", "moving") for outcome in record["clients"])


def since(at: float, time_of_record: str) -> float:
    """Return the time [ms] from a monotonic moment to the time of a record."""
    asked = time.time() - (clock() - at)
    return round((datetime.fromisoformat(time_of_record).timestamp() - asked) * 1e3, 1)
