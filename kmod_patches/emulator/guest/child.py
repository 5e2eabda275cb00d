"""A process of a check: the kernel may kill it, and its memory is read from outside."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from emulator.guest.check import CheckError, expect

WAIT_MS = 60_000
READY = b"r"


@dataclass(frozen=True, slots=True)
class Child:
    """The process reads from `tell` and writes to `hear`."""

    pid: int
    pidfd: int
    tell: int
    hear: int


def becomes_readable(fd: int) -> bool:
    """Return whether a descriptor becomes readable within a check's waiting time."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(WAIT_MS))


def wait_for(fd: int, what: str) -> None:
    """Wait for a descriptor. Raises CheckError if it does not become readable."""
    if not becomes_readable(fd):
        raise CheckError(f"{what}: nothing within {WAIT_MS} ms")


@contextmanager
def child(body: Callable[[int, int], None]) -> Iterator[Child]:
    """Run `body(hear, tell)` in a process, from its READY on; kill it at the end.

    Raises CheckError if it does not send READY.
    """
    hear, to_child = os.pipe()
    from_child, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(to_child)
            body(hear, tell)
        except Exception as error:
            Path("/dev/kmsg").write_text(f"client {os.getpid()}: {type(error).__name__}: {error}\n")
        finally:
            os._exit(0)
    os.close(hear)
    os.close(tell)
    pidfd = os.pidfd_open(pid)
    try:
        wait_for(from_child, "the client's start")
        expect("the client's start", os.read(from_child, 1), READY)
        yield Child(pid, pidfd, to_child, from_child)
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (pidfd, to_child, from_child):
            os.close(fd)
