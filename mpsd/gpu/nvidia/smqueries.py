"""SM queries: the calls by which the driver of a client in a faulted domain asks the SMs for the error.

After a trap or breakpoint, the author's driver has its error at once and makes no such call, whatever the
author does next. The driver of any other client makes a hundred and more, for tens of milliseconds
(mpsd/docs/mechanisms-failover.md). After an exception with an address, authors query as well.

Each query takes the lock that the driver needs for a new context. The client is lost in any case. So mpsd
holds the threads that query until participants have moved, and the client learns of its loss later.

A thread is stopped by ptrace(2) if it was seen in a query; it may have begun another call by then. It goes on
when the thread that stopped it ends, so no client stays stopped if mpsd dies. A client under a debugger is
left alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack

from mpsd.base.model import ProcessInstance
from mpsd.os import procfs

RM_CONTROL = 0xC020462A
"""Request of the ioctl that controls an object of the resource manager."""
COMMANDS = frozenset({0x83DE030C, 0x83DE0310})
"""Its commands that read and clear the error states of all SMs."""
COMMAND_AT = 8
"""Offset [bytes] of the command, a u32, in the argument of the ioctl."""
LIMIT_S = 0.5
"""Longest time [s] that clients are watched, and their threads held. A context in a trial domain takes 160 ms
without queries, and loading a program's kernels may take as long again."""
STEP_S = 0.001
"""Shortest pause [s] between two looks at a client. A query takes about as long."""
CLOSE_S = 1.0
"""Longest time [s] that the end of mpsd waits for the release of clients."""
THREADS_MOST = 64
"""Number of a client's threads that mpsd looks at, the oldest first."""
ENTRY, PRESENT = 8, 1 << 63
"""Size [bytes] of an entry of /proc/PID/pagemap, and its bit for a page in memory (proc(5))."""
SEIZE, INTERRUPT = 0x4206, 0x4207
WALL = 0x40000000
"""__WALL of waitpid(2): wait for threads as well."""
Seen = Callable[[ProcessInstance], None]


def querying_threads(client: ProcessInstance) -> set[int]:
    """Return the threads of the client that are in an SM query now; none if mpsd may not see that.

    Only the first THREADS_MOST threads count.
    """
    try:
        calls = dict(procfs.calls(client.pid, THREADS_MOST))
        asked = {
            tid: call[3] for tid, call in calls.items() if call[0] == procfs.IOCTL and call[2] == RM_CONTROL
        }
        commands = _commands(client, asked) if asked else {}
        return {tid for tid, command in commands.items() if command in COMMANDS}
    except (OSError, ValueError):
        # The client has ended, or mpsd may not see its calls.
        return set()


def _commands(client: ProcessInstance, at: Mapping[int, int]) -> dict[int, int]:
    """Return the command of each thread. `at`: the address of its argument."""
    with ExitStack() as stack:
        memory, pages = (_opened(stack, f"/proc/{client.pid}/{name}") for name in ("mem", "pagemap"))
        values = {tid: _u32(memory, pages, address + COMMAND_AT) for tid, address in at.items()}
        is_same = procfs.start_ticks(client.pid) == client.start_ticks
    return {tid: value for tid, value in values.items() if value is not None and is_same}


def _opened(stack: ExitStack, path: str) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _u32(memory: int, pages: int, address: int) -> int | None:
    """Return the u32 at this address; None if its page is not present.

    The kernel has just read the argument of a query, so its page is present. A read of any other page could
    wait for a file system of the client's own.
    """
    page = address // procfs.PAGE_SIZE
    if address % 4 or not int.from_bytes(os.pread(pages, ENTRY, page * ENTRY), sys.byteorder) & PRESENT:
        return None
    raw = os.pread(memory, 4, address)
    return int.from_bytes(raw, sys.byteorder) if len(raw) == 4 else None


class HeldQueries:
    """Queries held, by faulted domain. Use from one thread."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._holds: dict[str, tuple[threading.Event, list[threading.Thread]]] = {}

    def hold(self, domain: str, clients: Collection[ProcessInstance], seen: Seen) -> None:
        """Hold the queries of these clients, until release() or the time limit.

        `seen`: called once for each client that makes one, by another thread. Raises RuntimeError, and holds
        none, if no further thread can be started.
        """
        self.release(domain)
        over, until = threading.Event(), time.monotonic() + self._limit_s
        threads: list[threading.Thread] = []
        self._holds[domain] = over, threads
        # One thread for each, so that no client delays another one's release.
        for client in clients:
            about = (client, len(clients), over, until, seen)
            thread = threading.Thread(target=_hold, args=about, name=f"hold-{client.pid}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self.release(domain)
                raise
            threads.append(thread)

    def release(self, domain: str) -> None:
        """Let the clients go on. Returns at once."""
        over, _ = self._holds.pop(domain, (None, []))
        if over is not None:
            over.set()

    def close(self) -> None:
        """Let all clients go on, and wait until they can, CLOSE_S at most."""
        holds, self._holds = self._holds, {}
        for over, _ in holds.values():
            over.set()
        until = time.monotonic() + CLOSE_S
        for thread in [thread for _, threads in holds.values() for thread in threads]:
            thread.join(max(0.0, until - time.monotonic()))


def _hold(client: ProcessInstance, count: int, over: threading.Event, until: float, seen: Seen) -> None:
    """Hold threads of a client until `over` is set. The kernel lets them go on when this thread ends.

    `count`: the number of clients that are watched, each by such a thread. Together these threads take at
    most half a processor.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    held: set[int] = set()
    told, pause_s = False, STEP_S
    while not over.wait(pause_s) and time.monotonic() < until:
        began = time.monotonic()
        held = {tid for tid in held if _lives(tid)}
        querying = querying_threads(client)
        if querying and not told:
            told = True
            seen(client)
        for tid in querying - held:
            if not libc.ptrace(SEIZE, tid, None, None):
                held.add(tid)
                if not _interrupt(libc, client, tid):
                    return
        pause_s = count * max(STEP_S, 2 * (time.monotonic() - began))


def _interrupt(libc: ctypes.CDLL, client: ProcessInstance, tid: int) -> bool:
    """Stop a thread, whose id stays in use because it is traced; False if it is not the client's."""
    try:
        is_same = os.path.exists(f"/proc/{client.pid}/task/{tid}")
        is_same = is_same and procfs.start_ticks(client.pid) == client.start_ticks
    except OSError:
        is_same = False
    return is_same and not libc.ptrace(INTERRUPT, tid, None, None)


def _lives(tid: int) -> bool:
    """Return whether this held thread lives. A killed client ends only after this call (ptrace(2))."""
    try:
        ended, status = os.waitpid(tid, os.WNOHANG | WALL)
    except ChildProcessError:
        return False
    return not ended or os.WIFSTOPPED(status)
