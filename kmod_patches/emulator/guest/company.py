"""Faults are absorbed if other clients work in the channel group, and left to the driver otherwise."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

from emulator.guest import checks, device, gpu
from emulator.guest.beside import INNOCENT, INNOCENT_CHANNEL, INNOCENT_VEID, innocent
from emulator.guest.check import Check, CheckError, expect
from emulator.guest.gpuchecks import STRAY, no_trouble
from emulator.guest.gpuclient import client
from emulator.guest.isolation import GUILTY, isolating, stopped_or_went_on
from emulator.guest.memory import CHUNK
from emulator.guest.rows import space_of
from mpsd.gpu.nvidia.kernel_abi import Action, KernelRecord, Mode, Why

ANSWERS = (Action.SUNK, Action.REFUSED, Action.REPORTED)
ENDS = ("cancel-va", "cancel-instance", "reported", "went-on")
# The recorded action, and the end of the access.
SUNK = (Action.SUNK, Why.NONE, ["went-on"])
ALONE = (Action.REFUSED, Why.ALONE, ["cancel-va"])
COPY_ALONE = (Action.REFUSED, Why.ALONE, ["reported"])
# Not the innocent client's.
ANOTHER_GROUP = 2
VEID = 3
UNREGISTER = b"u"


def store(number: int = 0, veid: int = VEID) -> gpu.Fault:
    """Return a store. Stores are farther from each other than a sparse mapping can be wide."""
    return gpu.Fault(STRAY + number * 8 * CHUNK, 1, veid=veid)


def answer(
    what: str, opened: device.Device, fault: gpu.Fault, wanted: tuple[Action, Why, list[str]]
) -> KernelRecord:
    """Return the record of the offender's fault; check that page tables are written only for a sparse
    mapping.

    Raises CheckError if it is not the wanted one.
    """
    before = gpu.digest(GUILTY)
    gpu.command("forget")
    gpu.command(fault.line())
    found = stopped_or_went_on()
    record = opened.until("the record", lambda record: record.action in ANSWERS)[-1]
    ends = [deed.name for deed in found if deed.name in ENDS]
    expect(what, (record.action, record.why, ends), wanted)
    expect(f"{what}: a sink", record.sink is not None, record.action is Action.SUNK)
    expect(f"{what}: tables written", gpu.digest(GUILTY) != before, record.action is Action.SUNK)
    return record


def wait_gone(handle: int) -> None:
    """Wait until a client's page directory is unset, after its channels. Raises CheckError."""
    deadline = time.monotonic() + gpu.WAIT_S
    while handle in gpu.directories():
        if time.monotonic() > deadline:
            raise CheckError(f"client {handle:#x} still exists after {gpu.WAIT_S:g} s")
        time.sleep(gpu.POLL_S)


def alone() -> str:
    """A client alone in its channel group: not absorbed, not condemned, not killed."""
    opened = isolating()
    with client(GUILTY, 1, veid=VEID):
        record = answer("no other client", opened, store(), ALONE)
        expect("condemned, step", (record.condemned, record.deadline_ns), (False, None))
    with innocent(), client(GUILTY, 1, group=ANOTHER_GROUP, veid=INNOCENT_VEID):
        answer("other clients in another group", opened, store(veid=INNOCENT_VEID), ALONE)
    opened.close()
    no_trouble()
    return "cancelled"


def plain() -> str:
    """A process without a channel in a subcontext, its kernels and its copies, beside an MPS server."""
    opened = isolating()
    with innocent(), client(GUILTY, 1, group=ANOTHER_GROUP, plain=True):
        answer("a store", opened, store(veid=0), ALONE)
    with innocent(), client(GUILTY, 1, group=ANOTHER_GROUP, plain=True, copies=True):
        copy = gpu.Fault(STRAY, 1, engine=gpu.ENGINE_COPY, access=gpu.READ, replayable=False)
        answer("a copy", opened, copy, COPY_ALONE)
    opened.close()
    no_trouble()
    return "cancelled, returned"


def comes_and_leaves() -> str:
    """Another client protects while it exists; without it even a condemned client gets the stock answer."""
    opened = isolating()
    with client(GUILTY, 1, veid=VEID):
        answer("before", opened, store(0), ALONE)
        with innocent():
            answer("beside another client", opened, store(1), SUNK)
        wait_gone(INNOCENT)
        record = answer("after", opened, store(2), ALONE)
        expect("condemned", record.condemned, True)
    opened.close()
    no_trouble()
    return "cancelled, absorbed, cancelled"


def unregister(space: int, word: bytes) -> bytes:
    """Unregister the innocent client's channel."""
    gpu.unregister_channel(space, INNOCENT, gpu.channel_handle(INNOCENT_CHANNEL, veid=INNOCENT_VEID))
    return word


def lives_on_without_channels() -> str:
    """A process without a channel in the group does not count as another client."""
    opened = isolating()
    other = client(INNOCENT, INNOCENT_CHANNEL, veid=INNOCENT_VEID, obey=unregister)
    with client(GUILTY, 1, veid=VEID), other as company:
        answer("beside another", opened, store(0), SUNK)
        company.ask(UNREGISTER)
        expect("answer", company.answered(), UNREGISTER)
        answer("its channel unregistered", opened, store(1), ALONE)
        expect("alive", company.pid in checks.processes(), True)
    opened.close()
    no_trouble()
    return "absorbed, cancelled"


def dead_and_held() -> str:
    """An exited client's work may still run while its files are held: it counts until they are closed."""
    opened = isolating()
    with client(GUILTY, 1, veid=VEID):
        with ExitStack() as held:
            with client(INNOCENT, INNOCENT_CHANNEL, veid=INNOCENT_VEID, shared=True) as company:
                held.callback(os.close, space_of(company))
            answer("beside an exited client", opened, store(0), SUNK)
        wait_gone(INNOCENT)
        answer("its files closed", opened, store(1), ALONE)
    opened.close()
    no_trouble()
    return "absorbed, cancelled"


def reported() -> str:
    """Mode report records what mode isolate would do."""
    opened = isolating()
    opened.set_mode(Mode.REPORT)
    with client(GUILTY, 1, veid=VEID):
        answer("no other client", opened, store(0), (Action.REPORTED, Why.ALONE, ["cancel-va"]))
        with innocent():
            answer("beside another client", opened, store(1), (Action.REPORTED, Why.NONE, ["cancel-va"]))
    opened.close()
    no_trouble()
    return "ALONE, would be absorbed"


CHECKS = (
    Check("alone", alone),
    Check("alone-plain", plain),
    Check("company-comes-leaves", comes_and_leaves),
    Check("company-unregisters", lives_on_without_channels),
    Check("company-dead-held", dead_and_held),
    Check("company-reported", reported),
)
