"""Who may lay guard zones: a client that is tracked, so that what its zones absorb is seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mpsd.core.state import Client, State
from mpsd.model import ProcessInstance
from mpsd.trackers import Trackers
from mpsd.zones.book import Zones
from mpsd.zones.grants import Grant

# A program is noticed before it has a context, but the log that tells of it is read when it is read.
CLIENT_S = 2.0
STEP_S = 0.005


class LedgerDesk:
    """`state`: core's, as it is now. `known`: whether the vault will tell of a process's end."""

    def __init__(
        self,
        zones: Zones,
        trackers: Trackers,
        state: Callable[[], State],
        known: Callable[[ProcessInstance], bool],
    ) -> None:
        self._known = known
        self._zones = zones
        self._trackers = trackers
        self._state = state

    async def take(self, process: ProcessInstance, fd: int) -> Grant | None:
        """Take the ledger of a client over; None when it gets no zones. See mpsd.vault.door.LedgerTaker."""
        clients = await self._clients(process)
        if not clients or not self._known(process) or not self._trackers.report(process):
            # Zones that nobody reads of would absorb in silence: ranges that only absorb cost less.
            self._zones.refuse(fd)
            return None
        gpus = sorted({gpu for c in clients for gpu in self._state().domains[c.id.domain].gpus})
        return self._zones.join(process, clients[0].facts.uid, gpus, fd)

    async def _clients(self, process: ProcessInstance) -> list[Client]:
        """Those that are tracked, as soon as there are any."""
        end = time.monotonic() + CLIENT_S
        while True:
            found = [c for c in self._state().spaces_of(process) if c.living and c.tracked]
            if found or time.monotonic() >= end:
                return found
            await asyncio.sleep(STEP_S)
