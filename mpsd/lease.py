"""One lease: what is held for one client, and how it is kept in the descriptor store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpsd.errors import GpuError
from mpsd.gpu.base import AddressSpace, Tracker, Uvm
from mpsd.guardnotes import GuardNotes
from mpsd.linux.samefile import can_tell, same_file
from mpsd.model import ClientId, ProcessInstance

GUARD_ROLE = "guard"
WORK_ROLES = frozenset({"areas", "mem"})
_PREFIX = "lease"
_FIRST_ROLES = ("mm", "va", "areas", "mem")
"""Of the sets whose names do not say them; the last two were left out together."""


@dataclass(slots=True)
class Lease:
    """What is held for one client. `name`: in the descriptor store, from the time it is put there."""

    space: AddressSpace
    tracker: Tracker | None
    notes: GuardNotes
    name: str = ""

    def close(self) -> None:
        """May take long: the last close ends the address space."""
        if self.tracker is not None:
            self.tracker.close()
        self.notes.close()
        self.space.close()


@dataclass(frozen=True, slots=True)
class Kept:
    """A lease as a store kept it: its name there, its descriptors by role."""

    name: str
    fds: Mapping[str, int]

    @property
    def work(self) -> dict[str, int]:
        """What shows the client's work; its view owns it."""
        return {role: fd for role, fd in self.fds.items() if role in WORK_ROLES}

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)


def adopt(uvm: Uvm, kept: Kept) -> Lease:
    """A lease from what a store kept, without a tracker. It owns the descriptors, but for `work`.

    Raises GpuError for a set that holds no lease; then all its descriptors are closed.
    """
    created: GuardNotes | None = None
    try:
        if GUARD_ROLE in kept.fds:
            notes = GuardNotes.adopt(kept.fds[GUARD_ROLE])
        else:
            # Of an earlier mpsd, which laid no ranges that it could note.
            notes = created = GuardNotes.create()
        own = {role: fd for role, fd in kept.fds.items() if role not in {*WORK_ROLES, GUARD_ROLE}}
        return Lease(uvm.adopt(own), None, notes, kept.name)
    except (OSError, GpuError) as error:
        kept.close()
        if created is not None:
            created.close()
        raise GpuError(f"{kept.name} holds no lease: {error}") from error


def lease_name(client: ClientId, roles: Iterable[str]) -> str:
    """Says whose lease it is, and what each descriptor of the set is for, in order."""
    process = client.process
    whose = f"{client.domain}.{process.pid}.{process.start_ticks}.{client.space}"
    return f"{_PREFIX}.{whose}.{'+'.join(roles)}"


def parse_lease_name(name: str) -> tuple[ClientId, tuple[str, ...]] | None:
    """The client a stored set belongs to, and the roles in it; None for names that are not ours."""
    parts = name.split(".")
    if len(parts) != 6 or parts[0] != _PREFIX or not all(p.isdigit() for p in parts[2:5]):
        return None
    pid, start, space = (int(p) for p in parts[2:5])
    return ClientId(parts[1], ProcessInstance(pid, start), space), tuple(parts[5].split("+"))


def stored_lease(name: str, count: int) -> tuple[ClientId, tuple[str, ...]] | None:
    """As parse_lease_name, for a set of so many descriptors, also of the first mpsd: `lease.d1.7.8.0`.

    None for what is not understood.
    """
    if name.count(".") == 4:
        parsed = parse_lease_name(f"{name}.{'+'.join(_FIRST_ROLES[:count])}") if count in (2, 4) else None
    else:
        parsed = parse_lease_name(name)
    return parsed if parsed is not None and len(set(parsed[1])) == len(parsed[1]) == count else None


def is_current(name: str) -> bool:
    """Whether a set of this name has everything that this mpsd keeps with a lease that has a guard."""
    parsed = parse_lease_name(name)
    return parsed is not None and GUARD_ROLE in parsed[1]


def domain_named(name: str) -> str | None:
    """Whose lease a set may be that is not understood; None where its name does not tell."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == _PREFIX and parts[1].isalnum() else None


def take(spaces: Sequence[AddressSpace]) -> list[Lease]:
    """Raises OSError where no descriptor is left for the notes; then the spaces are closed."""
    try:
        return [Lease(space, None, GuardNotes.create()) for space in spaces]
    except OSError:
        for space in spaces:
            space.close()
        raise


def track(lease: Lease) -> tuple[Lease, str]:
    """The lease with its tracker, or why it has none."""
    try:
        lease.tracker = lease.space.track()
    except (GpuError, OSError) as error:
        return lease, f"faults are not seen: {error}"
    return lease, ""


def held_before(leases: Sequence[Lease], elsewhere: Sequence[Lease]) -> list[Lease]:
    """Those of address spaces that are held for another domain of the process.

    With a second copy of libcuda a process is a client of two domains, with an address space for each: what
    was there before is the first one's.
    """
    return [lease for lease in leases if any(_same(lease, other) for other in elsewhere)]


def kept_apart(leases: Sequence[Lease], elsewhere: Sequence[Lease]) -> bool:
    """Whether none of these is held for another domain too, as far as the kernel can tell files apart."""
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
