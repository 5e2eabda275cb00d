"""What a report keeps of mpsd's own records: nothing that tells of the machine that it was made on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from faultinject.history import clock


def fault(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a fault, in short."""
    found = {name: record.get(name) for name in ("id", "domain", "offender", "confidence", "evidence")}
    offender = found["offender"]
    if offender and "command" in offender:
        # Without the place of its interpreter.
        command = offender["command"].replace(os.path.dirname(sys.executable) + os.sep, "")
        found["offender"] = {**offender, "command": command}
    return {**found, "fault_class": record.get("class")}


def words(fault: Mapping[str, Any]) -> str:
    """Of such a one, what it was and by what sign."""
    return f"{fault['fault_class']}: {fault['evidence'][-1]['text']}"


def failover(record: Mapping[str, Any]) -> dict[str, Any]:
    private = ("command", "user", "uid")
    clients = [{k: v for k, v in fate.items() if k not in private} for fate in record["clients"]]
    return {**record, "clients": clients}


def is_settled(record: Mapping[str, Any]) -> bool:
    """Whether it is known of everybody what became of it."""
    return all(fate["outcome"] not in ("told", "moving") for fate in record["clients"])


def since(at: float, time_of_record: str) -> float:
    """In ms; `at` is monotonic."""
    asked = time.time() - (clock() - at)
    return round((datetime.fromisoformat(time_of_record).timestamp() - asked) * 1e3, 1)
