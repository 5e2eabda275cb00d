"""The daemon's own adapter on a client of the real module: duplicate descriptors, read events, hold a
lease."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from emulator.guest import uvm
from emulator.guest.check import expect
from emulator.guest.child import READY, Child, child, wait_for
from mpsd.base.model import Access, ProcessInstance, UvmFaultType, UvmReason
from mpsd.gpu.nvidia import uvm_abi as abi
from mpsd.gpu.nvidia.uvm import NvidiaUvm, UvmAddressSpace

ADDRESS = 0x7F12_3456_7000
STAT_START = 19
"""Field 22 of /proc/PID/stat, counted from the end of the command's name."""


class Held(Protocol):
    """A client's process."""

    @property
    def pid(self) -> int: ...
    @property
    def pidfd(self) -> int: ...


def instance_of(client: Held) -> ProcessInstance:
    stat = Path(f"/proc/{client.pid}/stat").read_text()
    return ProcessInstance(client.pid, int(stat.rpartition(")")[2].split()[STAT_START]))


def be_client(hear: int, tell: int) -> None:
    """Run a process with an address space, which injects a fault into it for each byte that it reads."""
    space = uvm.open_space()
    uvm.pin_memory(space)
    os.write(tell, READY)
    while os.read(hear, 1):
        uvm.inject_fatal(space, abi.branch_of(NvidiaUvm().version), ADDRESS)
        os.write(tell, b"d")


def inject(client: Child) -> None:
    os.write(client.tell, b"i")
    wait_for(client.hear, "the client's answer")
    expect("the client's answer", os.read(client.hear, 1), b"d")


def take(held: Held) -> UvmAddressSpace:
    """Return the client's one address space, duplicated by the daemon's adapter."""
    spaces = NvidiaUvm().open(instance_of(held), held.pidfd)
    expect("address spaces", len(spaces), 1)
    return spaces[0]


def by_pidfd() -> str:
    """A fatal fault of another process's address space wakes the daemon's tracker, field by field."""
    with child(be_client) as held:
        space = take(held)
        tracker = space.track()
        inject(held)
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
    """The address space outlives its process while the duplicates are held: a tracker still attaches."""
    with child(be_client) as held:
        space = take(held)
        expect("roles", sorted(space.fds), ["mm", "va"])
    tracker = space.track()
    tracker.close()
    space.close()
    return "held past the client's death"
