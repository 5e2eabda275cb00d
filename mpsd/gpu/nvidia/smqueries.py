"""SM queries: the calls by which the driver of a client in a faulted domain asks the SMs for the error.

After a trap or breakpoint, the author's driver has its error at once and makes no such call, whatever the
author does next. The driver of any other client makes a hundred and more, for tens of milliseconds
(mpsd/docs/mechanisms-failover.md). After an exception with an address, authors query as well.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable

from mpsd.base.model import ProcessInstance
from mpsd.os import procfs

RM_CONTROL = 0xC020462A
"""Request of the ioctl that controls an object of the resource manager."""
COMMANDS = frozenset({0x83DE030C, 0x83DE0310})
"""Its commands that read and clear the error states of all SMs."""
COMMAND_AT = 8
"""Offset [bytes] of the command, a u32, in the argument of the ioctl."""
LIMIT_S = 0.5
"""Longest time [s] of a watch. Queries began 22 to 135 ms after a trap, and ended within 300 ms."""
STEP_S = 0.001


def is_querying(client: ProcessInstance) -> bool:
    """Return whether a thread of the client is in an SM query now; False if mpsd may not see that."""
    try:
        calls = (call for _, call in procfs.calls(client.pid))
        asked = [call[3] for call in calls if call[0] == procfs.IOCTL and call[2] == RM_CONTROL]
        return bool(asked) and not COMMANDS.isdisjoint(_commands(client, asked))
    except (OSError, ValueError):
        # The client has ended, or mpsd may not see its calls.
        return False


def _commands(client: ProcessInstance, at: Iterable[int]) -> set[int]:
    """Return the commands in the arguments at these addresses of the client."""
    memory = os.open(f"/proc/{client.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        raw = [os.pread(memory, 4, address + COMMAND_AT) for address in at]
        is_same = procfs.start_ticks(client.pid) == client.start_ticks
    finally:
        os.close(memory)
    return {struct.unpack("=I", word)[0] for word in raw if len(word) == 4} if is_same else set()


async def find(
    clients: Iterable[ProcessInstance],
    probe: Callable[[ProcessInstance], bool] = is_querying,
    clock: Callable[[], float] = time.monotonic,
    *,
    limit_s: float = LIMIT_S,
    step_s: float = STEP_S,
) -> AsyncIterator[ProcessInstance]:
    """Yield each of these clients once it is seen in an SM query, within `limit_s`."""
    waited, until = set(clients), clock() + limit_s
    while waited and clock() < until:
        found = await asyncio.to_thread(_probe, frozenset(waited), probe)
        waited -= found
        for client in sorted(found):
            yield client
        await asyncio.sleep(step_s)


def _probe(
    clients: frozenset[ProcessInstance], probe: Callable[[ProcessInstance], bool]
) -> set[ProcessInstance]:
    return {client for client in clients if probe(client)}
