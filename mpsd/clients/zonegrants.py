"""Permission to lay guard zones: only tracked clients get it, so that absorbed accesses are seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mpsd.base.model import ProcessInstance
from mpsd.clients.trackers import Trackers
from mpsd.core.state import Client, State
from mpsd.zones.grants import Grant
from mpsd.zones.ledgers import Zones

# A program is named before it has a context, but the log that names it is read later.
CLIENT_S = 2.0
STEP_S = 0.005


class ZoneGrants:
    """Grants zones. `state`: core's present one. `known`: whether the vault will report the process's end."""

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
        """Take over a client's ledger; None: the client gets no zones.

        See mpsd.peers.vaultserver.LedgerTaker.
        """
        clients = await self._clients(process)
        if not clients or not self._known(process) or not self._trackers.report(process):
            # Zones without a reader would absorb in silence; plain sparse ranges cost less.
            self._zones.refuse(fd)
            return None
        gpus = sorted({gpu for c in clients for gpu in self._state().domains[c.id.domain].gpus})
        return self._zones.join(process, clients[0].facts.uid, gpus, fd)

    async def _clients(self, process: ProcessInstance) -> list[Client]:
        """Return the tracked clients of a process, as soon as there are any."""
        end = time.monotonic() + CLIENT_S
        while True:
            found = [c for c in self._state().spaces_of(process) if c.living and c.tracked]
            if found or time.monotonic() >= end:
                return found
            await asyncio.sleep(STEP_S)
