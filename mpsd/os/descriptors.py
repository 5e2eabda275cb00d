"""The limit of open descriptors of this process, RLIMIT_NOFILE (getrlimit(2)), and its budget."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

# Children inherit the limit, and old daemons close every number below it one by one when they start.
MAX_DESCRIPTORS = 1 << 20
# WANTED is enough for MPS with all the clients that it can have; LEAST for two domains with a few.
WANTED, LEAST = 16384, 256
REMEDY = "LimitNOFILE= in the unit, or ulimit -n as root"


def raise_limit() -> int:
    """Raise the soft limit to the hard limit, or to MOST where that is lower; return the limit that holds
    now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return soft
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if wanted <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        # fs.nr_open may be lower still. mpsd then works with the old limit, and `doctor` shows it.
        return soft
    return wanted


def open_limit() -> int:
    """Return the number of descriptors that this process may have open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def open_count() -> int:
    """Return the number of descriptors that this process has open."""
    # The list of the directory has its own descriptor.
    return len(os.listdir("/proc/self/fd")) - 1


class Purpose(StrEnum):
    """The use of a descriptor of the daemon."""

    CLIENT = "clients"
    """Pins of clients."""
    LEASE = "leases"
    """Leases, trackers and views of clients, and their copies for the descriptor store."""
    SEGMENT = "segments"
    """Memory that the vault holds."""
    CONNECTION = "connections"
    """Connections of peers, and descriptors that peers send."""
    DOMAIN = "domains"
    """Watches and logs of domains."""


OPENED_LATER = 24
"""Descriptors that the daemon opens for itself after its budget is made: sockets, journals, sources."""
RESERVE = 64
"""Descriptors that no purpose may take: for accept, the journal, state files, and killing."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a budget for one purpose: `percent` of it, with `spared` left for more important ones."""

    percent: int = 100
    spared: int = 0


SHARES: Mapping[Purpose, Share] = MappingProxyType(
    {
        # A fault needs a standby domain at once. A pinned process is shown even if it cannot be leased.
        Purpose.CLIENT: Share(spared=16),
        Purpose.LEASE: Share(spared=32),
        Purpose.SEGMENT: Share(percent=50, spared=32),
        Purpose.CONNECTION: Share(percent=25, spared=32),
    }
)
"""Shares of the daemon. A flood of connections or segments cannot take the descriptors of leases."""


class DescriptorBudget:
    """The descriptors that this process may still open, divided among purposes.

    `limit`: RLIMIT_NOFILE. `used`: descriptors that are open already and stay so. A purpose without an entry
    in `shares` may take all. Not thread-safe: for the event loop only.
    """

    def __init__(
        self,
        limit: int,
        used: int = 0,
        *,
        reserve: int = RESERVE,
        shares: Mapping[Purpose, Share] = MappingProxyType({}),
    ) -> None:
        self.capacity = max(0, limit - used - reserve)
        self._shares = shares
        self._taken: Counter[Purpose] = Counter()

    @classmethod
    def unlimited(cls) -> DescriptorBudget:
        """Return a budget that refuses nothing."""
        return cls(1 << 62)

    def fits(self, purpose: Purpose, count: int = 1) -> bool:
        """Return whether so many descriptors are left for this purpose."""
        share = self._shares.get(purpose, Share())
        most = self.capacity * share.percent // 100
        return count <= self.left - share.spared and self._taken[purpose] + count <= most

    def take(self, purpose: Purpose, count: int = 1) -> bool:
        """Take so many descriptors for this purpose. Returns False, and takes none, if too few are left."""
        if not self.fits(purpose, count):
            return False
        self._taken[purpose] += count
        return True

    def release(self, purpose: Purpose, count: int = 1) -> None:
        """Return descriptors that are closed now. Raises ValueError for more than were taken."""
        if count > self._taken[purpose]:
            raise ValueError(f"{count} descriptors released for {purpose}, {self._taken[purpose]} taken")
        self._taken[purpose] -= count

    def charge(self, purpose: Purpose, count: int) -> Charge | None:
        """Take descriptors as one charge; None if too few are left."""
        return Charge(self, purpose, count) if self.take(purpose, count) else None

    def charge_open(self, purpose: Purpose, count: int) -> Charge:
        """Charge descriptors that are open already, as after a restart. `left` can become negative."""
        self._taken[purpose] += count
        return Charge(self, purpose, count)

    def taken(self, purpose: Purpose) -> int:
        return self._taken[purpose]

    @property
    def left(self) -> int:
        return self.capacity - self._taken.total()


class Charge:
    """Descriptors of one purpose that a budget counts as taken, until they are released, once."""

    def __init__(self, budget: DescriptorBudget, purpose: Purpose, count: int) -> None:
        self._budget, self._purpose = budget, purpose
        self.count = count

    def split(self, count: int) -> Charge:
        """Move so many descriptors, or as many as there are, to a charge of their own."""
        moved = min(count, self.count)
        self.count -= moved
        return Charge(self._budget, self._purpose, moved)

    def join(self, other: Charge) -> None:
        """Take over the descriptors of another charge of the same budget and purpose."""
        self.count, other.count = self.count + other.count, 0

    def resize(self, count: int) -> bool:
        """Change the count. Returns False, and changes nothing, if too few are left."""
        more = count - self.count
        if more > 0 and not self._budget.take(self._purpose, more):
            return False
        if more < 0:
            self._budget.release(self._purpose, -more)
        self.count = count
        return True

    def release(self) -> None:
        """Return the descriptors to the budget. Idempotent."""
        count, self.count = self.count, 0
        self._budget.release(self._purpose, count)
