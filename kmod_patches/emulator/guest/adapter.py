"""The daemon's own adapter on the real device: it reads a fault and makes requests."""

from __future__ import annotations

import os
import select
import time

from emulator.guest import device, gpu
from emulator.guest.beside import innocent
from emulator.guest.check import Check, CheckError, expect
from emulator.guest.gpuchecks import STRAY, no_trouble
from emulator.guest.gpuclient import client
from emulator.guest.isolation import FAR_MS, GUILTY, NEAR_MS
from mpsd.base.model import Access, IsolationMode, KernelAction, KernelFault, ProcessInstance
from mpsd.gpu.nvidia.kernel import NvidiaIsolation

START_TICKS = 22


def instance(pid: int) -> ProcessInstance:
    """Return the process instance from /proc (proc(5))."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    return ProcessInstance(pid, int(fields[START_TICKS - 3]))


def until(door: NvidiaIsolation, action: KernelAction) -> KernelFault:
    """Return the next record of this kind, read when the device is readable. Raises CheckError."""
    poller = select.poll()
    poller.register(door.fileno(), select.POLLIN)
    deadline = time.monotonic() + device.WAIT_S
    while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        for record in door.drain():
            if record.action is action:
                return record
    raise CheckError(f"no record of {action}")


def as_the_daemon() -> str:
    """Open, set the mode, read the fault, acknowledge it, have the client killed, and read that record."""
    device.set_deadline(FAR_MS)
    door = NvidiaIsolation()
    door.set_mode(IsolationMode.ISOLATE)
    state = door.state()
    expect("state", (state.mode, state.deadline_ms), (IsolationMode.ISOLATE, FAR_MS))
    door.drain()
    with innocent(), client(GUILTY, 1, veid=3) as guilty:
        who = instance(guilty.pid)
        gpu.command(gpu.Fault(STRAY, 1, veid=3).line())
        record = until(door, KernelAction.SUNK)
        seen = (record.process, record.event.address, record.event.access, record.engine, record.why)
        expect("record", seen, (who, STRAY, Access.WRITE, "graphics", ""))
        expect("an unknown space", (door.acknowledge(1 << 40), door.kill(1 << 40)), (False, False))
        expect("asked for", (record.acknowledged, door.acknowledge(record.space)), (False, True))
        # Held address spaces are released after ten deadlines.
        device.set_deadline(NEAR_MS)
        expect("killed", (door.kill(record.space), guilty.ended()), (True, True))
        expect("step", until(door, KernelAction.KILL).process, who)
        expect("again", door.kill(record.space), False)
        expect("released", until(door, KernelAction.GIVE_UP).process, who)
    device.set_deadline(FAR_MS)
    before = len(os.listdir("/proc/self/fd"))
    door.close()
    expect("descriptors", len(os.listdir("/proc/self/fd")), before - 1)
    no_trouble()
    return f"driver {state.driver}, {record.sink_bytes >> 10} KiB"


CHECKS = (Check("daemon-adapter", as_the_daemon),)
