"""Protection levels: what a fault in one client costs the other clients of its domain.

- observe: the daemon alone. Death, eviction or hang of a client costs nothing; a memory fault or an SM
  exception ends the work of all clients.
- guard: adds the proxy and its guard zones. Stray accesses near memory, null and use after free cost nothing.
- failover: adds standby contexts. Every other fault costs a pause.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ProtectionLevel(StrEnum):
    """A protection level, lowest first."""

    OBSERVE = "observe"
    GUARD = "guard"
    FAILOVER = "failover"

    @property
    def rank(self) -> int:
        """Return the position of the level, 0 for the lowest."""
        return list(ProtectionLevel).index(self)


class ProtectSetting(StrEnum):
    """A value of `protect`. `auto`: the level in mpsd.gpu.drivers, as far as this machine allows it."""

    AUTO = "auto"
    OBSERVE = "observe"
    GUARD = "guard"
    FAILOVER = "failover"

    @property
    def limit(self) -> ProtectionLevel:
        """Return the highest level that the setting allows."""
        return ProtectionLevel.FAILOVER if self is ProtectSetting.AUTO else ProtectionLevel(self.value)


@dataclass(frozen=True, slots=True)
class Protection:
    """The level of a node, a user, or a client. `why`: why it is not higher, with `remedy`; both are empty
    at the highest level."""

    level: ProtectionLevel
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A cause that keeps the level down. `limit`: the highest level that is left with it. `name`: for a line
    of doctor. `why` is a statement, `remedy` an advice. `passing`: it ends by itself within seconds."""

    limit: ProtectionLevel
    name: str
    why: str
    remedy: str
    passing: bool = False
