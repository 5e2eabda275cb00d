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
APART_S = 0.005
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
    """How long each server has been in the same call, as far as looks tell that do not lie far apart.

    Pure: what is seen goes in. A look takes time: it saw what it saw between `began` and `ended`.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, Call], float] = {}
        self._ended = 0.0

    def see(self, began: float, ended: float, seen: Mapping[str, Iterable[Call]]) -> set[str]:
        """The domains whose servers have been in one call for LONG_S at least."""
        if began - self._ended > APART_S:
            self._since = {}
        self._ended = ended
        keys = {(domain, call) for domain, calls in seen.items() for call in calls}
        self._since = {key: self._since.get(key, ended) for key in keys}
        return {domain for (domain, _), since in self._since.items() if began - since >= LONG_S}


async def find(
    servers: Mapping[str, ProcessInstance],
    look: Callable[[ProcessInstance], tuple[Call, ...]] = calls_of,
    clock: Callable[[], float] = time.monotonic,
    *,
    limit_s: float = LIMIT_S,
    step_s: float = STEP_S,
    patience_s: float = 2 * LIMIT_S,
) -> str | None:
    """The domain whose server is at a fault that has just been; None if that cannot be told within `limit_s`.

    `servers`: of all domains on the GPU, by their domains. A look that hangs is waited for no longer than
    `patience_s`.
    """
    patience, until = Patience(), clock() + limit_s
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while clock() < until:
                found = patience.see(*await asyncio.to_thread(_look, servers, look, clock))
                if found:
                    return found.pop() if len(found) == 1 else None
                await asyncio.sleep(step_s)
    return None


def _look(
    servers: Mapping[str, ProcessInstance],
    look: Callable[[ProcessInstance], tuple[Call, ...]],
    clock: Callable[[], float],
) -> tuple[float, float, dict[str, tuple[Call, ...]]]:
    """In a thread, which may have to wait for a processor before and after."""
    began = clock()
    seen = {domain: look(server) for domain, server in servers.items()}
    return began, clock(), seen
