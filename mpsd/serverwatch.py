"""Whose an exception of the SMs is, before a server says so: that of the one that is in the driver since.

The kernel's log tells of it (Xid 13) and names nobody. The server whose client it was says so in its log,
mostly within 4 ms, at times up to 0.3 s later. In any case it asks the driver for something that takes 15 ms
and more, and no other server was seen to be in one call for half as long (faultinject/reports, *Whose server
is at a fault*).
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import Callable, Iterable, Mapping

from mpsd.linux import procfs
from mpsd.model import ProcessInstance

LONG_S = 0.008
STEP_S = 0.002
LIMIT_S = 0.1
_IOCTL = {"x86_64": 16, "aarch64": 29}.get(platform.machine())

Call = tuple[int, tuple[int, ...]]
"""A thread's id, and the system call that it is in: its number and its first arguments."""


def calls_of(server: ProcessInstance) -> tuple[Call, ...]:
    """The calls of drivers in which threads of a server are now; none where that cannot be told."""
    try:
        found = tuple((tid, call) for tid, call in procfs.calls(server.pid) if call[0] == _IOCTL)
        return found if procfs.start_ticks(server.pid) == server.start_ticks else ()
    except (OSError, ValueError):
        # It has ended, or its calls are not for us to see.
        return ()


class Patience:
    """How long each server has been in the same call. Pure: what is seen goes in."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, Call], float] = {}

    def see(self, now: float, seen: Mapping[str, Iterable[Call]]) -> set[str]:
        """The domains whose servers have been in one call for LONG_S, by looks that do not lie far apart."""
        keys = {(domain, call) for domain, calls in seen.items() for call in calls}
        self._since = {key: self._since.get(key, now) for key in keys}
        return {domain for (domain, _), since in self._since.items() if now - since >= LONG_S}


async def find(
    servers: Mapping[str, ProcessInstance],
    look: Callable[[ProcessInstance], tuple[Call, ...]] = calls_of,
    clock: Callable[[], float] = time.monotonic,
) -> str | None:
    """The domain whose server is at a fault that has just been; None if that cannot be told within LIMIT_S.

    `servers`: of all domains on the GPU, by their domains.
    """
    patience, until = Patience(), clock() + LIMIT_S
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2 * LIMIT_S):
            while clock() < until:
                found = patience.see(clock(), await asyncio.to_thread(_look, servers, look))
                if found:
                    return found.pop() if len(found) == 1 else None
                await asyncio.sleep(STEP_S)
    return None


def _look(
    servers: Mapping[str, ProcessInstance], look: Callable[[ProcessInstance], tuple[Call, ...]]
) -> dict[str, tuple[Call, ...]]:
    return {domain: look(server) for domain, server in servers.items()}
