"""MPSD_DEBUG="name=value,name=value": settings for tests and troubleshooting.

The daemon reads die_before_effect and die_after_signal, the proxy reads the others
(clients/libcuda/src/debug.c).
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "MPSD_DEBUG"
DIE_BEFORE_EFFECT = "die_before_effect"
DIE_AFTER_SIGNAL = "die_after_signal"
FIELDS = (
    "vault",
    "window_base",
    "window_bytes",
    "place_base",
    "zone_bytes",
    "zone_budget",
    "far_bytes",
    "quarantine_bytes",
    "quarantine_s",
    "host_guard_bytes",
    "standby",
    "relay",
    "snapshot_mib",
    "patience_ms",
    "rescue_ms",
    "settle_ms",
    "autopsy_ms",
    "cutters",
    "release",
    DIE_BEFORE_EFFECT,
    DIE_AFTER_SIGNAL,
)
"""Every name that a reader knows."""
RETIRED = {
    "MPSD_VAULT": "MPSD_DEBUG=vault=VALUE",
    "MPSD_WINDOW_BASE": "MPSD_DEBUG=window_base=VALUE",
    "MPSD_WINDOW_BYTES": "MPSD_DEBUG=window_bytes=VALUE",
    "MPSD_PLACE_BASE": "MPSD_DEBUG=place_base=VALUE",
    "MPSD_ZONE_BYTES": "MPSD_DEBUG=zone_bytes=VALUE",
    "MPSD_ZONE_BUDGET": "MPSD_DEBUG=zone_budget=VALUE",
    "MPSD_FAR_BYTES": "MPSD_DEBUG=far_bytes=VALUE",
    "MPSD_QUARANTINE_BYTES": "MPSD_DEBUG=quarantine_bytes=VALUE",
    "MPSD_QUARANTINE_S": "MPSD_DEBUG=quarantine_s=VALUE",
    "MPSD_HOST_GUARD_BYTES": "MPSD_DEBUG=host_guard_bytes=VALUE",
    "MPSD_FAILOVER_MIRROR": "MPSD_DEBUG=standby=VALUE",
    "MPSD_FAILOVER_RELAY": "MPSD_DEBUG=relay=VALUE",
    "MPSD_FAILOVER_UNDO_MIB": "MPSD_DEBUG=snapshot_mib=VALUE",
    "MPSD_FAILOVER_PATIENCE_MS": "MPSD_DEBUG=patience_ms=VALUE",
    "MPSD_FAILOVER_SETTLE_MS": "MPSD_DEBUG=settle_ms=VALUE",
    "MPSD_FAILOVER_AUTOPSY_MS": "MPSD_DEBUG=autopsy_ms=VALUE",
    "MPSD_FAILOVER_CUTTERS": "MPSD_DEBUG=cutters=VALUE",
    "MPSD_FAILOVER_GIVE_BACK": "MPSD_DEBUG=release=VALUE",
    "MPSD_FAILOVER_VALIDATE": "MPSD_FAILOVER=validate",
    "MPSD_FAILOVER_UNSURE": "MPSD_FAILOVER_KERNELS=unsure:KERNEL",
    "MPSD_FAILOVER_OPAQUE": "MPSD_FAILOVER_KERNELS=opaque:KERNEL",
}
"""Variables of the previous release, each with its successor. The proxy of this release still reads them."""


def fields(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of MPSD_DEBUG by name. A field without "=" has an empty value."""
    parts = (part.partition("=") for part in environ.get(VARIABLE, "").split(",") if part)
    return {name: value for name, _, value in parts}


def variable(**values: object) -> dict[str, str]:
    """Return the environment variable with these fields; empty if there are none."""
    return {VARIABLE: ",".join(f"{name}={value}" for name, value in values.items())} if values else {}
