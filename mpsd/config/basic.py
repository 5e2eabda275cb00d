"""The keys that most sites may want to change. All others are advanced: `mpsd config show --all` prints them.

An advanced key has a default that fits, or exists for one kind of site.
"""

from __future__ import annotations

BASIC = frozenset(
    {
        ("", "protect"),
        ("", "users"),
        ("", "backend"),
        ("", "run_dir"),
        ("", "log_dir"),
        ("", "state_dir"),
        ("", "group"),
        ("domains", "mode"),
        ("domains", "span"),
        ("domains", "serve_default_path"),
        ("domains", "kill_victims_after_s"),
        ("limits", "active_thread_percentage"),
        ("limits", "client_priority"),
        ("limits", "pinned_device_memory"),
        ("limits", "clients"),
        ("guard", "zone_policy"),
        ("kernel", "isolation"),
        ("vault", "kept_bytes"),
        ("vault", "keep_age_s"),
        ("failover", "driver"),
        ("failover", "copies"),
        ("log", "level"),
    }
)
"""(section or "", key)."""


def is_advanced(section: str, key: str) -> bool:
    return (section, key) not in BASIC
