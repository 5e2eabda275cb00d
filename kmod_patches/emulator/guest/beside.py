"""An innocent client beside the one that faults: nothing of it may be touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from emulator.guest import gpu, memory
from emulator.guest.check import CheckError, expect
from emulator.guest.gpuclient import client

INNOCENT, INNOCENT_CHANNEL, INNOCENT_VEID = 0xC2, 2, 5
# In the upper part of what lies around the addresses that the guilty one faults at.
INNOCENT_RANGE = (0x7F00_1220_0000, 0x40_0000)


@dataclass(frozen=True, slots=True)
class Innocent:
    """Its page directory and what its tables said before."""

    directory: int
    digest: tuple[int, int]

    def untouched(self) -> None:
        """Its tables say what they said, nothing in them was invalidated or cancelled. Raises CheckError."""
        expect("the innocent one's tables", gpu.digest(INNOCENT), self.digest)
        names = ("invalidate", "cancel-va")
        touched = [deed for deed in gpu.deeds() if deed.name in names and deed.directory == self.directory]
        expect("done to the innocent one", touched, [])


def own_some(space: int) -> None:
    """Pages at addresses where the other one faults, too."""
    base, length = INNOCENT_RANGE
    for at in range(base, base + length, length // 4):
        memory.map_external(space, at, 2 * memory.PAGE)


@contextmanager
def innocent() -> Iterator[Innocent]:
    """A client of the same channel group, which is compared at the end. Raises CheckError."""
    made = client(INNOCENT, INNOCENT_CHANNEL, veid=INNOCENT_VEID, external=INNOCENT_RANGE, prepare=own_some)
    with made:
        gpu.command("forget")
        before = gpu.digest(INNOCENT)
        if before[1] < 8:
            raise CheckError(f"the innocent one's tables have {before[1]} entries only")
        found = Innocent(gpu.directories()[INNOCENT], before)
        yield found
        found.untouched()
