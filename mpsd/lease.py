"""One lease: what is held for one client, and how it is kept in the descriptor store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mpsd.errors import GpuError
from mpsd.gpu.base import AddressSpace, Tracker, Uvm
from mpsd.guardnotes import GuardNotes
from mpsd.model import ClientId, ProcessInstance

GUARD_ROLE = "guard"
WORK_ROLES = frozenset({"areas", "mem"})
_PREFIX = "lease"


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
    try:
        if GUARD_ROLE not in kept.fds:
            raise GpuError(f"{kept.name} has no notes of its guard")
        notes = GuardNotes.adopt(kept.fds[GUARD_ROLE])
        own = {role: fd for role, fd in kept.fds.items() if role not in {*WORK_ROLES, GUARD_ROLE}}
        return Lease(uvm.adopt(own), None, notes, kept.name)
    except OSError as error:
        kept.close()
        raise GpuError(f"{kept.name} holds no lease: {error}") from error
    except GpuError:
        kept.close()
        raise


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
