"""The domain of an SM exception, before its server reports it: the server that has been in the driver since.

The kernel log reports the exception (Xid 13) and names no client. The server of the offender logs it, mostly
within 4 ms, at times up to 0.3 s later. In any case the server makes a driver call that takes 15 ms and more.
No other server was seen in one call for half as long (mpsd/docs/mechanisms-failover.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping

from mpsd.base.model import ProcessInstance
from mpsd.os import procfs

LONG_S = 0.008
STEP_S = 0.002
APART_S = 0.005
LIMIT_S = 0.1

Call = tuple[int, tuple[int, ...]]
"""A thread's id, and the system call that it is in: the call's number and first arguments."""


def calls_of(server: ProcessInstance) -> tuple[Call, ...]:
    """Return the driver calls (ioctl) that threads of a server are in now; none if that is unknown."""
    try:
        found = tuple((tid, call) for tid, call in procfs.calls(server.pid) if call[0] == procfs.IOCTL)
        return found if procfs.start_ticks(server.pid) == server.start_ticks else ()
    except (OSError, ValueError):
        # The server has ended, or mpsd may not see its calls.
        return ()


class CallDurations:
    """The time that each server has been in the same call, as far as closely spaced probes can tell.

    Pure: the observations are arguments. A probe takes time: it happened between `began` and `ended`.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, Call], float] = {}
        self._ended = 0.0

    def see(self, began: float, ended: float, seen: Mapping[str, Iterable[Call]]) -> set[str]:
        """Return the domains of servers that have been in one call for LONG_S at least."""
        if began - self._ended > APART_S:
            self._since = {}
        self._ended = ended
        keys = {(domain, call) for domain, calls in seen.items() for call in calls}
        self._since = {key: self._since.get(key, ended) for key in keys}
        return {domain for (domain, _), since in self._since.items() if began - since >= LONG_S}


async def find(
    servers: Mapping[str, ProcessInstance],
    probe: Callable[[ProcessInstance], tuple[Call, ...]] = calls_of,
    clock: Callable[[], float] = time.monotonic,
    *,
    limit_s: float = LIMIT_S,
    step_s: float = STEP_S,
    patience_s: float = 2 * LIMIT_S,
) -> str | None:
    """Return the domain of the server that handles a fault just now; None if unknown within `limit_s`.

    `servers`: of all domains on the GPU, by domain. A probe that hangs delays the result by `patience_s` at
    most.
    """
    patience, until = CallDurations(), clock() + limit_s
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while clock() < until:
                found = patience.see(*await asyncio.to_thread(_probe, servers, probe, clock))
                if found:
                    return found.pop() if len(found) == 1 else None
                await asyncio.sleep(step_s)
    return None


def _probe(
    servers: Mapping[str, ProcessInstance],
    probe: Callable[[ProcessInstance], tuple[Call, ...]],
    clock: Callable[[], float],
) -> tuple[float, float, dict[str, tuple[Call, ...]]]:
    """Probe all servers. Runs in a thread, which may wait for a processor before and after."""
    began = clock()
    seen = {domain: probe(server) for domain, server in servers.items()}
    return began, clock(), seen
