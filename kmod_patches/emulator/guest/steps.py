"""Steps against a condemned client: without a process to act on, and with two acknowledging readers."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack

from emulator.guest import checks, device, gpu
from emulator.guest.beside import innocent
from emulator.guest.check import Check, expect
from emulator.guest.gpuchecks import STRAY
from emulator.guest.gpuclient import client
from emulator.guest.isolation import FAR_MS, GUILTY, NEAR_MS, isolating, parameter, record_of
from emulator.guest.memory import CHUNK
from emulator.guest.rows import space_of
from mpsd.gpu.nvidia.kernel_abi import IOC_ACKNOWLEDGE, Action, KernelRecord, Why, encode_target

BOUNDS = ((0, 0, 10, 0), (5000, 7, 5000, 7), (1 << 31, 1 << 31, 60_000, 65_536))
"""Deadline and most sparse mappings: as set, and as reported."""


def let_go(space: int, word: bytes) -> bytes:
    """Close the file of the address space, and live on."""
    os.close(space)
    return word


def sink(opened: device.Device, number: int = 0) -> KernelRecord:
    """Return the record of an access that needs a sparse mapping of its own."""
    gpu.command(gpu.Fault(STRAY + number * 8 * CHUNK, 1, veid=3).line())
    return opened.until("the sink", lambda record: record.action is Action.SUNK)[-1]


def nobody_there() -> str:
    """A process that closed its files is not killed for another process's; nothing is claimed."""
    opened = isolating()
    obeying = client(GUILTY, 1, veid=3, shared=True, obey=let_go)
    with innocent(), obeying as guilty, ExitStack() as held, parameter("stop_channels", 1):
        held.callback(os.close, space_of(guilty))
        guilty.ask(b"c")
        expect("answer", guilty.answered(), b"c")
        device.set_deadline(NEAR_MS)
        sink(opened)
        records = opened.until("the last step", lambda record: record.action is Action.GIVE_UP)
        expect("alive", guilty.pid in checks.processes(), True)
        stopped = gpu.tally()["stopped"]
    device.set_deadline(FAR_MS)
    opened.close()
    seen = [(record.action, record.why) for record in records if record.action is not Action.SUNK]
    steps = [(Action.KILL, Why.FAILED), (Action.STOP, Why.FAILED), (Action.GIVE_UP, Why.NONE)]
    expect("steps, channels stopped", (seen, stopped), (steps, 0))
    return "alive"


def stopped() -> str:
    """A living client: killed, its channels stopped, and each step recorded once it is taken."""
    opened = isolating()
    with innocent(), client(GUILTY, 1, veid=3) as guilty, parameter("stop_channels", 1):
        device.set_deadline(NEAR_MS)
        gpu.command("forget")
        sink(opened)
        records = opened.until("the stop", lambda record: record.action is Action.STOP)
        expect("channels stopped", gpu.tally()["stopped"] > 0, True)
        records += opened.until("the last step", lambda record: record.action is Action.GIVE_UP)
        expect("ended", guilty.ended(), True)
    device.set_deadline(FAR_MS)
    opened.close()
    for action in (Action.KILL, Action.STOP, Action.GIVE_UP):
        expect(action.name, record_of(records, action).why, Why.NONE)
    return "killed, stopped, released"


def acknowledged_once() -> str:
    """The second reader's acknowledgement is refused, and the first one stays."""
    isolating().close()
    with innocent(), client(GUILTY, 1, veid=3) as guilty:
        # Opened after the clients were forked: closing a file that they share would not release it.
        opened, other = device.Device(), device.Device()
        opened.skip()
        space = encode_target(sink(opened).space)
        expect("the first reader", opened.ask(IOC_ACKNOWLEDGE, space), 0)
        expect("the second reader", other.ask(IOC_ACKNOWLEDGE, space), errno.EALREADY)
        expect("the first reader again", opened.ask(IOC_ACKNOWLEDGE, space), 0)
        other.close()
        record = sink(opened, 1)
        expect("acknowledged still", record.acknowledged, True)
        after = device.Device()
        opened.close()
        expect("another reader, after the first has closed", after.ask(IOC_ACKNOWLEDGE, space), 0)
        expect("alive", guilty.pid in checks.processes(), True)
    after.close()
    return "EALREADY"


def bounds() -> str:
    """The module reports the effective limits, not the written ones."""
    opened = device.Device()
    for deadline, sinks, *told in BOUNDS:
        with parameter("deadline_ms", deadline), parameter("max_sinks", sinks):
            state = opened.query()
        expect(f"reported for {deadline}, {sinks}", [state.deadline_ms, state.max_sinks], told)
    opened.close()
    return f"{len(BOUNDS)} pairs"


CHECKS = (
    Check("killed-nobody", nobody_there),
    Check("killed-and-stopped", stopped),
    Check("acknowledged-once", acknowledged_once),
    Check("query-bounds", bounds),
)
