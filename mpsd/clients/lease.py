"""One lease: the resources held for one client, and its form in the descriptor store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpsd.base.errors import GpuError
from mpsd.base.model import ClientId, ProcessInstance
from mpsd.clients.guardnotes import GuardNotes
from mpsd.gpu.base import AddressSpace, Tracker, Uvm
from mpsd.os.descriptors import Charge
from mpsd.os.samefile import can_tell, same_file

GUARD_ROLE = "guard"
WORK_ROLES = frozenset({"areas", "mem"})
_PREFIX = "lease"
_FIRST_ROLES = ("mm", "va", "areas", "mem")
"""The roles of sets with names that do not list them; the last two were always left out together."""


@dataclass(slots=True)
class Lease:
    """The resources held for one client. `name`: in the descriptor store, set when it is put there.

    `charge`: its descriptors in the budget; `stored`: the copies that the descriptor store will have.
    """

    space: AddressSpace
    tracker: Tracker | None
    notes: GuardNotes
    name: str = ""
    charge: Charge | None = None
    stored: Charge | None = None

    @property
    def descriptors(self) -> int:
        """Return the number of its own descriptors."""
        return self.copies(0) + (self.tracker is not None)

    def copies(self, viewed: int) -> int:
        """Return the number of descriptors in its stored set. `viewed`: those that show the client's work."""
        return len(self.space.fds) + 1 + viewed

    def shrink_charge(self) -> None:
        """Return to the budget the charge for a tracker that there is not."""
        if self.charge is not None:
            self.charge.resize(min(self.charge.count, self.descriptors))

    def close(self) -> None:
        """Close the lease. It may take long: the last close ends the address space."""
        if self.tracker is not None:
            self.tracker.close()
        self.notes.close()
        self.space.close()


@dataclass(frozen=True, slots=True)
class RetainedLease:
    """A lease as a store kept it: its name, and its descriptors by role."""

    name: str
    fds: Mapping[str, int]

    @property
    def work(self) -> dict[str, int]:
        """Return the descriptors that show the client's work; its view owns them."""
        return {role: fd for role, fd in self.fds.items() if role in WORK_ROLES}

    @property
    def viewed(self) -> int:
        """Return the number of descriptors of the view of its work, with the mappings of the process."""
        return len(self.work) + 1 if self.work else 0

    @property
    def descriptors(self) -> int:
        """Return the number of descriptors of the adopted lease, with a tracker."""
        own = len(self.fds.keys() - WORK_ROLES) + (GUARD_ROLE not in self.fds)
        return own + 1 + self.viewed

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)


def adopt(uvm: Uvm, retained: RetainedLease) -> Lease:
    """Create a lease from the content of a store, without a tracker. It owns the descriptors but `work`.

    Raises GpuError for a set that holds no lease; all its descriptors are closed then.
    """
    created: GuardNotes | None = None
    try:
        if GUARD_ROLE in retained.fds:
            notes = GuardNotes.adopt(retained.fds[GUARD_ROLE])
        else:
            # Stored by an earlier mpsd, which laid no ranges to note.
            notes = created = GuardNotes.create()
        own = {role: fd for role, fd in retained.fds.items() if role not in {*WORK_ROLES, GUARD_ROLE}}
        return Lease(uvm.adopt(own), None, notes, retained.name)
    except (OSError, GpuError) as error:
        retained.close()
        if created is not None:
            created.close()
        raise GpuError(f"{retained.name} holds no lease: {error}") from error


def lease_name(client: ClientId, roles: Iterable[str]) -> str:
    """Return the name of a lease: its client, and the role of each descriptor of the set, in order."""
    process = client.process
    owner = f"{client.domain}.{process.pid}.{process.start_ticks}.{client.space}"
    return f"{_PREFIX}.{owner}.{'+'.join(roles)}"


def parse_lease_name(name: str) -> tuple[ClientId, tuple[str, ...]] | None:
    """Parse a name: the client of a stored set, and its roles; None for names of another form."""
    parts = name.split(".")
    if len(parts) != 6 or parts[0] != _PREFIX or not all(p.isdigit() for p in parts[2:5]):
        return None
    pid, start, space = (int(p) for p in parts[2:5])
    return ClientId(parts[1], ProcessInstance(pid, start), space), tuple(parts[5].split("+"))


def stored_lease(name: str, count: int) -> tuple[ClientId, tuple[str, ...]] | None:
    """Parse the name of a set of `count` descriptors, including the first format: `lease.d1.7.8.0`.

    Returns None for a name that does not parse.
    """
    if name.count(".") == 4:
        parsed = parse_lease_name(f"{name}.{'+'.join(_FIRST_ROLES[:count])}") if count in (2, 4) else None
    else:
        parsed = parse_lease_name(name)
    return parsed if parsed is not None and len(set(parsed[1])) == len(parsed[1]) == count else None


def is_current(name: str) -> bool:
    """Return whether a set of this name has everything that this mpsd stores for a guarded lease."""
    parsed = parse_lease_name(name)
    return parsed is not None and GUARD_ROLE in parsed[1]


def domain_named(name: str) -> str | None:
    """Return the domain in the name of a set that does not parse; None if the name has none."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == _PREFIX and parts[1].isalnum() else None


def take(spaces: Sequence[AddressSpace]) -> list[Lease]:
    """Create leases of these spaces. Raises OSError without a descriptor for notes; then closes them."""
    try:
        return [Lease(space, None, GuardNotes.create()) for space in spaces]
    except OSError:
        for space in spaces:
            space.close()
        raise


def track(lease: Lease) -> tuple[Lease, str]:
    """Add a tracker to the lease; return the lease and the reason if it has none."""
    try:
        lease.tracker = lease.space.track()
    except (GpuError, OSError) as error:
        return lease, f"mpsd cannot see the faults of this client: {error}"
    return lease, ""


def held_before(leases: Sequence[Lease], elsewhere: Sequence[Lease]) -> list[Lease]:
    """Return the leases of address spaces that are held for another domain of the process.

    With a second driver instance a process is a client of two domains, with an address space for each. The
    earlier space belongs to the first domain.
    """
    return [lease for lease in leases if any(_same(lease, other) for other in elsewhere)]


def held_apart(leases: Sequence[Lease], elsewhere: Sequence[Lease]) -> bool:
    """Return whether none of these is held for another domain too, as far as the kernel can compare files."""
    return can_tell() and not any(_same(lease, other) for lease in leases for other in elsewhere)


def _same(left: Lease, right: Lease) -> bool:
    mine, other = left.space.fds.get("va"), right.space.fds.get("va")
    return mine is not None and other is not None and same_file(mine, other)


def file_of(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
