"""An innocent client beside the offender: nothing of it may be touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from emulator.guest import gpu, memory
from emulator.guest.check import CheckError, expect
from emulator.guest.gpuclient import client

INNOCENT, INNOCENT_CHANNEL, INNOCENT_VEID = 0xC2, 2, 5
# In the upper part of the tables around the offender's fault addresses.
INNOCENT_RANGE = (0x7F00_1220_0000, 0x40_0000)


@dataclass(frozen=True, slots=True)
class Innocent:
    """The client's page directory, and the contents of its tables before the fault."""

    directory: int
    digest: tuple[int, int]

    def untouched(self) -> None:
        """Check that its tables are unchanged, not invalidated and not cancelled. Raises CheckError."""
        expect("the innocent client's tables", gpu.digest(INNOCENT), self.digest)
        names = ("invalidate", "cancel-va")
        touched = [deed for deed in gpu.deeds() if deed.name in names and deed.directory == self.directory]
        expect("effects on the innocent client", touched, [])


def own_some(space: int) -> None:
    """Map pages at addresses where the offender also faults."""
    base, length = INNOCENT_RANGE
    for at in range(base, base + length, length // 4):
        memory.map_external(space, at, 2 * memory.PAGE)


@contextmanager
def innocent() -> Iterator[Innocent]:
    """Yield a client of the same channel group, and compare it at the end. Raises CheckError."""
    made = client(INNOCENT, INNOCENT_CHANNEL, veid=INNOCENT_VEID, external=INNOCENT_RANGE, prepare=own_some)
    with made:
        gpu.command("forget")
        before = gpu.digest(INNOCENT)
        if before[1] < 8:
            raise CheckError(f"the innocent client's tables have only {before[1]} entries")
        found = Innocent(gpu.directories()[INNOCENT], before)
        yield found
        found.untouched()
