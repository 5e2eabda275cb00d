"""Privacy of answers and events: a user sees that other users' processes exist, but not their identity.

The daemon reads pids and command lines as root, despite a hidepid mount and pid namespaces, and command
lines may hold secrets. Root and the group see everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mpsd.peers import Peer

HIDDEN = "[another user's]"
_IDENTITY: Mapping[str, Any] = {
    "pid": None,
    "start_ticks": None,
    "uid": None,
    "user": HIDDEN,
    "command": HIDDEN,
    # Texts that a program reports.
    "reason": "",
    "why": "",
    "opaque": [],
    "unsure": [],
}
_TEXTS = ("problem", "pending")
# Start of the part of a driver's or server's text that names processes. Names in it are untrusted.
_NAMES_PROCESS = re.compile(r"\bpid\b|\bprocess \d|\{|\b\d+@\d+|\bclients?\b|\bserver \d", re.IGNORECASE)


def visible_to(peer: Peer, value: Any) -> Any:
    """Return an answer or event as this peer may see it. The value itself stays unchanged."""
    if peer.admin:
        return value
    if isinstance(value, Mapping):
        if "victim_uids" in value:
            value = _record(value, peer.uid)
        fields = {key: visible_to(peer, inner) for key, inner in value.items()}
        if "command" in fields and fields.get("uid") != peer.uid:
            fields |= {key: hidden for key, hidden in _IDENTITY.items() if key in fields}
            if "protected" in fields:
                # A client reports parts of this text.
                why = HIDDEN if fields["protected"]["why"] else ""
                fields["protected"] = {**fields["protected"], "why": why}
            if fields.get("failover"):
                told = fields["failover"]
                fields["failover"] = {**told, **{key: _IDENTITY[key] for key in told if key in _IDENTITY}}
            fields |= {key: _without_processes(fields[key]) for key in _TEXTS if key in fields}
        return fields
    if isinstance(value, list):
        return [visible_to(peer, inner) for inner in value]
    return value


def owners(record: Mapping[str, Any]) -> frozenset[int]:
    """Return the users of all clients in a fault record."""
    # Records of an earlier release lack `moved`. A process that only the kernel log names has no user.
    parties = [record.get("offender"), *record.get("suspects", ()), *record.get("moved", ())]
    known = {p["uid"] for p in parties if p is not None and p["uid"] is not None}
    return frozenset(known) | frozenset(record.get("victim_uids", ()))


def _record(record: Mapping[str, Any], uid: int) -> Mapping[str, Any]:
    """Return a fault record without other users' victims, and without pids in texts that may be theirs."""
    pairs = list(zip(record["victims"], record["victim_uids"], strict=True))
    seen = {
        "victims": [pid for pid, owner in pairs if owner == uid],
        "victim_uids": [owner for _, owner in pairs if owner == uid],
        "victims_hidden": sum(1 for _, owner in pairs if owner != uid),
    }
    offender = record.get("offender")
    if owners(record) - {uid} or (offender is not None and offender["uid"] is None):
        seen["evidence"] = [{**sign, "text": _without_processes(sign["text"])} for sign in record["evidence"]]
    return {**record, **seen}


def _without_processes(text: str) -> str:
    found = _NAMES_PROCESS.search(text)
    return text if found is None else f"{text[: found.start()].rstrip(' ,')} [...]".lstrip()
