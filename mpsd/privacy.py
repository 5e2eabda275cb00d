"""What an answer or event shows of other users' processes: that they are there, never which they are.

The daemon reads pids and command lines as root, past a hidepid mount and past pid namespaces; command
lines hold secrets. Root and the group see everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mpsd.listener import Peer

HIDDEN = "[another user's]"
_IDENTITY: Mapping[str, Any] = {
    "pid": None,
    "start_ticks": None,
    "uid": None,
    "user": HIDDEN,
    "command": HIDDEN,
    # What a program says of itself.
    "reason": "",
    "why": "",
    "opaque": [],
    "unsure": [],
}
_TEXTS = ("problem", "pending")
# Where a text of the driver or of a server begins to speak of processes; names in it are untrusted text.
_NAMES_PROCESS = re.compile(r"\bpid\b|\bprocess \d|\{|\b\d+@\d+|\bclients?\b|\bserver \d", re.IGNORECASE)


def shown_to(peer: Peer, value: Any) -> Any:
    """An answer or an event as this peer may see it. The value itself is left as it is."""
    if peer.admin:
        return value
    if isinstance(value, Mapping):
        if "victim_uids" in value:
            value = _record(value, peer.uid)
        fields = {key: shown_to(peer, inner) for key, inner in value.items()}
        if "command" in fields and fields.get("uid") != peer.uid:
            fields |= {key: hidden for key, hidden in _IDENTITY.items() if key in fields}
            fields |= {key: _cut(fields[key]) for key in _TEXTS if key in fields}
        return fields
    if isinstance(value, list):
        return [shown_to(peer, inner) for inner in value]
    return value


def owners(record: Mapping[str, Any]) -> frozenset[int]:
    """The users whose clients a fault record speaks of."""
    parties = [record.get("offender"), *record.get("suspects", ())]
    return frozenset(p["uid"] for p in parties if p is not None) | frozenset(record.get("victim_uids", ()))


def _record(record: Mapping[str, Any], uid: int) -> Mapping[str, Any]:
    """A fault record without the victims of others and, if it concerns others, without pids in its texts."""
    pairs = list(zip(record["victims"], record["victim_uids"], strict=True))
    seen = {
        "victims": [pid for pid, owner in pairs if owner == uid],
        "victim_uids": [owner for _, owner in pairs if owner == uid],
        "victims_hidden": sum(1 for _, owner in pairs if owner != uid),
    }
    if owners(record) - {uid}:
        seen["evidence"] = [{**sign, "text": _cut(sign["text"])} for sign in record["evidence"]]
    return {**record, **seen}


def _cut(text: str) -> str:
    found = _NAMES_PROCESS.search(text)
    return text if found is None else f"{text[: found.start()].rstrip(' ,')} [...]".lstrip()
