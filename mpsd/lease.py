"""One lease: what is held for one client, and the name it has in the descriptor store."""

from __future__ import annotations

from dataclasses import dataclass

from mpsd.gpu.base import AddressSpace, Tracker
from mpsd.model import ClientId, ProcessInstance

ROLES = ("mm", "va")
WORK_ROLES = ("areas", "mem")
_PREFIX = "lease"


@dataclass(slots=True)
class Lease:
    """What is held for one client. `name`: in the descriptor store, from the time it is put there."""

    space: AddressSpace
    tracker: Tracker | None
    name: str = ""

    def close(self) -> None:
        """May take long: the last close ends the address space."""
        if self.tracker is not None:
            self.tracker.close()
        self.space.close()


def lease_name(client: ClientId) -> str:
    return f"{_PREFIX}.{client.domain}.{client.process.pid}.{client.process.start_ticks}.{client.space}"


def parse_lease_name(name: str) -> ClientId | None:
    """The client a stored set belongs to; None for names that are not ours."""
    parts = name.split(".")
    if len(parts) != 5 or parts[0] != _PREFIX or not all(p.isdigit() for p in parts[2:]):
        return None
    pid, start, space = (int(p) for p in parts[2:])
    return ClientId(parts[1], ProcessInstance(pid, start), space)
