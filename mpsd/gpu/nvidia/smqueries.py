"""SM queries: the calls by which the driver of a client in a faulted domain asks the SMs for the error.

After a trap or breakpoint, the author's driver has its error at once and makes no such call, whatever the
author does next. The driver of any other client makes a hundred and more, for tens of milliseconds
(mpsd/docs/mechanisms-failover.md). After an exception with an address, authors query as well.

Each query takes the lock that the driver needs for a new context. On an H200 one lost client made a context
in another domain wait for 160 to 412 ms, and not at all while it was stopped. The client is lost in any case,
and learns that later. So mpsd holds the threads that query until participants have moved.

A thread is stopped by ptrace(2), and only if it was seen in a query, so no other call of the client is
interrupted. It goes on when the thread that stopped it ends, so no client stays stopped if mpsd dies. A
client under a debugger is left alone.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from mpsd.base.model import ProcessInstance
from mpsd.os import procfs

RM_CONTROL = 0xC020462A
"""Request of the ioctl that controls an object of the resource manager."""
COMMANDS = frozenset({0x83DE030C, 0x83DE0310})
"""Its commands that read and clear the error states of all SMs."""
COMMAND_AT = 8
"""Offset [bytes] of the command, a u32, in the argument of the ioctl."""
LIMIT_S = 0.5
"""Longest time [s] that clients are watched, and their threads held. A context in a trial domain took 160 ms
without queries; a program's kernels take up to as long again."""
STEP_S = 0.002
SEIZE, INTERRUPT = 0x4206, 0x4207
WALL = 0x40000000
"""__WALL of waitpid(2): wait for threads as well."""
Seen = Callable[[ProcessInstance], None]


def querying_threads(client: ProcessInstance) -> set[int]:
    """Return the threads of the client that are in an SM query now; none if mpsd may not see that."""
    try:
        calls = {tid: call for tid, call in procfs.calls(client.pid) if call[0] == procfs.IOCTL}
        asked = {tid: call[3] for tid, call in calls.items() if call[2] == RM_CONTROL}
        commands = _commands(client, asked) if asked else {}
        return {tid for tid, command in commands.items() if command in COMMANDS}
    except (OSError, ValueError):
        # The client has ended, or mpsd may not see its calls.
        return set()


def _commands(client: ProcessInstance, at: Mapping[int, int]) -> dict[int, int]:
    """Return the command of each thread. `at`: the address of its argument."""
    memory = os.open(f"/proc/{client.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        raw = {tid: os.pread(memory, 4, address + COMMAND_AT) for tid, address in at.items()}
        is_same = procfs.start_ticks(client.pid) == client.start_ticks
    finally:
        os.close(memory)
    return {tid: struct.unpack("=I", word)[0] for tid, word in raw.items() if len(word) == 4 and is_same}


class HeldQueries:
    """Queries held, by faulted domain. Use from one thread."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._holds: dict[str, tuple[threading.Event, threading.Thread]] = {}

    def hold(self, domain: str, clients: Iterable[ProcessInstance], seen: Seen) -> None:
        """Hold the queries of these clients, until release() or the time limit.

        `seen`: called once for each client that makes one, by another thread.
        """
        self.release(domain)
        over = threading.Event()
        about = frozenset(clients), over, self._limit_s, seen
        thread = threading.Thread(target=_hold, args=about, name=f"hold-{domain}", daemon=True)
        self._holds[domain] = over, thread
        thread.start()

    def release(self, domain: str) -> None:
        """Let the clients go on. Returns at once."""
        over, _ = self._holds.pop(domain, (None, None))
        if over is not None:
            over.set()

    def close(self) -> None:
        """Let all clients go on, and wait until they can."""
        holds, self._holds = self._holds, {}
        for over, _ in holds.values():
            over.set()
        for _, thread in holds.values():
            thread.join()


def _hold(clients: frozenset[ProcessInstance], over: threading.Event, limit_s: float, seen: Seen) -> None:
    """Hold threads until `over` is set. The kernel lets them go on when this thread ends (ptrace(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    held: set[tuple[ProcessInstance, int]] = set()
    told: set[ProcessInstance] = set()
    until = time.monotonic() + limit_s
    while not over.wait(STEP_S) and time.monotonic() < until:
        held = {(client, tid) for client, tid in held if _lives(tid)}
        for client in clients:
            querying = querying_threads(client)
            if querying and client not in told:
                told.add(client)
                seen(client)
            for tid in querying:
                if (client, tid) not in held and _stop(libc, client, tid):
                    held.add((client, tid))


def _lives(tid: int) -> bool:
    """Return whether this held thread lives. The end of a client that is killed waits for this answer."""
    try:
        ended, status = os.waitpid(tid, os.WNOHANG | WALL)
    except ChildProcessError:
        return False
    return not ended or os.WIFSTOPPED(status)


def _stop(libc: ctypes.CDLL, client: ProcessInstance, tid: int) -> bool:
    """Stop this thread; False if it is another process's by now, or is traced, or may not be."""
    if libc.ptrace(SEIZE, tid, None, None):
        return False
    # From here on its number stays taken.
    try:
        is_same = os.path.exists(f"/proc/{client.pid}/task/{tid}")
        is_same = is_same and procfs.start_ticks(client.pid) == client.start_ticks
    except OSError:
        is_same = False
    return is_same and not libc.ptrace(INTERRUPT, tid, None, None)
