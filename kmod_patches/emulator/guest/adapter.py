"""The daemon's own adapter on the real device: what it reads of a fault, and what it asks for."""

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
from mpsd.gpu.nvidia.kernel import NvidiaIsolation
from mpsd.model import Access, IsolationMode, KernelAction, KernelFault, ProcessInstance

START_TICKS = 22


def instance(pid: int) -> ProcessInstance:
    """As /proc has it (proc(5))."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    return ProcessInstance(pid, int(fields[START_TICKS - 3]))


def until(door: NvidiaIsolation, action: KernelAction) -> KernelFault:
    """The next record of this kind, as the daemon's loop would be woken for it. Raises CheckError."""
    poller = select.poll()
    poller.register(door.fileno(), select.POLLIN)
    deadline = time.monotonic() + device.WAIT_S
    while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        for record in door.drain():
            if record.action is action:
                return record
    raise CheckError(f"no record of {action}")


def as_the_daemon() -> str:
    """Opens, sets the mode, reads the fault, acknowledges, has the client killed and reads of that."""
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
        expect("of nobody", (door.acknowledge(1 << 40), door.kill(1 << 40)), (False, False))
        expect("asked for", (record.acknowledged, door.acknowledge(record.space)), (False, True))
        # What is held after that is let go after ten deadlines.
        device.set_deadline(NEAR_MS)
        expect("killed", (door.kill(record.space), guilty.ended()), (True, True))
        expect("step", until(door, KernelAction.KILL).process, who)
        expect("again", door.kill(record.space), False)
        expect("let go", until(door, KernelAction.GIVE_UP).process, who)
    device.set_deadline(FAR_MS)
    before = len(os.listdir("/proc/self/fd"))
    door.close()
    expect("descriptors", len(os.listdir("/proc/self/fd")), before - 1)
    no_trouble()
    return f"driver {state.driver}, {record.sink_bytes >> 10} KiB"


CHECKS = (Check("daemon-adapter", as_the_daemon),)
