"""The daemon's own adapter on a client of the real module: descriptors taken, events read, a lease held."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from emulator.guest import uvm
from emulator.guest.check import CheckError, expect
from mpsd.gpu.nvidia import uvm_abi as abi
from mpsd.gpu.nvidia.uvm import NvidiaUvm, UvmAddressSpace
from mpsd.model import Access, ProcessInstance, UvmFaultType, UvmReason

ADDRESS = 0x7F12_3456_7000
WAIT_MS = 60_000
STAT_START = 19
"""Field 22 of /proc/PID/stat, counted from behind the command's name."""


@dataclass(frozen=True, slots=True)
class Client:
    """A process with an address space, which injects a fault into it when it reads a byte."""

    pid: int
    pidfd: int
    tell: int
    hear: int

    @property
    def instance(self) -> ProcessInstance:
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return ProcessInstance(self.pid, int(stat.rpartition(")")[2].split()[STAT_START]))

    def inject(self) -> None:
        os.write(self.tell, b"i")
        wait_for(self.hear, "the client's answer")
        expect("the client's answer", os.read(self.hear, 1), b"d")


def wait_for(fd: int, what: str) -> None:
    """Raises CheckError where a descriptor does not become readable."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(WAIT_MS):
        raise CheckError(f"{what}: nothing within {WAIT_MS} ms")


def be_client(hear: int, tell: int) -> None:
    """A client's whole life, in its own process."""
    space = uvm.open_space()
    uvm.pin_memory(space)
    os.write(tell, b"r")
    while os.read(hear, 1):
        uvm.inject_fatal(space, abi.branch_of(NvidiaUvm().version), ADDRESS)
        os.write(tell, b"d")


@contextmanager
def client() -> Iterator[Client]:
    """A client that is ready; killed at the end."""
    hear, to_client = os.pipe()
    from_client, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(to_client)
            be_client(hear, tell)
        finally:
            os._exit(0)
    os.close(hear)
    os.close(tell)
    pidfd = os.pidfd_open(pid)
    try:
        wait_for(from_client, "the client's start")
        expect("the client's start", os.read(from_client, 1), b"r")
        yield Client(pid, pidfd, to_client, from_client)
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (pidfd, to_client, from_client):
            os.close(fd)


def take(held: Client) -> UvmAddressSpace:
    """The client's one address space, duplicated by the daemon's adapter."""
    spaces = NvidiaUvm().open(held.instance, held.pidfd)
    expect("address spaces", len(spaces), 1)
    return spaces[0]


def by_pidfd() -> str:
    """A fatal fault of another process' address space wakes the daemon's tracker, field by field."""
    with client() as held:
        space = take(held)
        tracker = space.track()
        held.inject()
        wait_for(tracker.fileno(), "the event")
        batch = tracker.drain()
        tracker.close()
        space.close()
    expect("dropped", batch.dropped, 0)
    expect("events", len(batch.events), 1)
    event = batch.events[0]
    seen = (event.fatal, event.fault_type, event.access, event.reason, event.address, event.gpu_index)
    wanted = (True, UvmFaultType.INVALID_PTE, Access.WRITE, UvmReason.INVALID_ADDRESS, ADDRESS, 1)
    expect("event", seen, wanted)
    return tracker.layout.name


def lease() -> str:
    """The address space outlives its process while the duplicates are held: a tracker still fits."""
    with client() as held:
        space = take(held)
        expect("roles", sorted(space.fds), ["mm", "va"])
    tracker = space.track()
    tracker.close()
    space.close()
    return "held past the client's death"
