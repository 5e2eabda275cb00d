"""The configuration's part in the protection level: limits of the settings, and levels of single users."""

from __future__ import annotations

import pwd
from collections.abc import Iterator, Mapping

from mpsd.base.errors import ConfigError
from mpsd.base.protection import Obstacle, ProtectionLevel
from mpsd.config.schema import Config, ReplaySetting

KEEP = Obstacle(
    ProtectionLevel.GUARD,
    "failover.mode",
    'with [failover] mode = "keep" a fault can leave work half done, which protects no program',
    'set [failover] mode = "exact"',
)


def user_levels(config: Config) -> tuple[Mapping[int, ProtectionLevel], tuple[str, ...]]:
    """Return the levels of [users] by uid, and the names that this machine does not know. May block."""
    found: dict[int, ProtectionLevel] = {}
    unknown = []
    for name, level in config.users.items():
        try:
            uid = int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
        except (KeyError, ValueError):
            unknown.append(name)
            continue
        # A user that is named twice has the lower level.
        found[uid] = min(level, found.get(uid, level), key=lambda each: each.rank)
    return found, tuple(unknown)


def unknown_user(name: str) -> ConfigError:
    return ConfigError(
        f"[users] names {name!r}, and this machine has no such user",
        remedy="correct the name, write the uid instead, or remove the line",
    )


def limits(config: Config) -> Iterator[str]:
    """Yield a statement for each setting that keeps a level down."""
    if config.protect.limit is not ProtectionLevel.FAILOVER:
        yield f'protect = "{config.protect.value}"'
    elif config.failover.mode is ReplaySetting.KEEP:
        yield f"{KEEP.why} ({KEEP.remedy})"
    for name, level in config.users.items():
        if level.rank < config.protect.limit.rank:
            yield f"user {name}: at most {level.value}"
