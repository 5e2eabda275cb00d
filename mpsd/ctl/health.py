"""The exit status of `mpsd-ctl status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpsd.base.conditions import Code, degrading_texts

HEALTHY, DEGRADED, FAULTED = 0, 10, 11


def health(view: Mapping[str, Any]) -> int:
    """Return 0: healthy, 10: degraded, 11: a domain in use is in FAULT, or out of reach with clients."""
    active = {d["id"]: d for d in view["domains"] if d["role"] == "active"}
    states = {d["state"] for d in active.values()}
    if "faulted" in states or any(active[name]["clients"] for name in _unreachable(view) & active.keys()):
        return FAULTED
    # The states say it too where the daemon is of an earlier release and sends no conditions.
    lost = states - {"active", "starting"}
    unprotected = any(c["state"] == "unprotected" for c in view["clients"])
    return DEGRADED if degrading_texts(view) or lost or unprotected else HEALTHY


def _unreachable(view: Mapping[str, Any]) -> set[str]:
    """Return the domains that no new client reaches."""
    rows = view.get("conditions", ())
    return {row["subject"] for row in rows if row["code"] == Code.DOMAIN_UNREACHABLE}
