"""The purpose of the patch, on the software GPU: a fault stays with the client that caused it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from emulator.guest import checks, device, gpu, tracking, uvm
from emulator.guest.beside import innocent
from emulator.guest.check import Check, CheckError, expect
from emulator.guest.gpuchecks import BUILTINS, START, STRAY, builtin, cancelled, no_trouble, orphan, reported
from emulator.guest.gpuclient import client
from mpsd.base.model import Access, UvmFaultType, UvmReason
from mpsd.gpu.nvidia.kernel_abi import Action, KernelRecord, Mode, Why

GUILTY, INNOCENT = 0xC1, 0xC2
FAR_MS = 60_000
NEAR_MS = 200
DUPLICATES, LAST_DESCRIPTOR = 16, 250


def mode(wanted: Mode) -> None:
    """Set the mode, if the module has one: a stock module has none.

    No step against a client comes during a check, because the machine may be slow.
    """
    if device.present():
        device.set_deadline(FAR_MS)
        opened = device.Device()
        opened.set_mode(wanted)
        opened.close()


@contextmanager
def parameter(name: str, value: int) -> Iterator[None]:
    """Set one of the patched module's parameters, and restore it at the end."""
    path = device.PARAMETERS / f"uvm_mpsd_{name}"
    before = path.read_text()
    path.write_text(str(value))
    try:
        yield
    finally:
        path.write_text(before)


def stopped_or_went_on(count: int = 1) -> list[gpu.GpuAction]:
    """Return all actions once this many accesses were cancelled, returned or continued."""
    return gpu.wait_for_any(("cancel-va", "cancel-instance", "reported", "went-on"), count)


def stray_store() -> str:
    """The work continues on a sparse page, and nothing is cancelled. Fails on the stock module."""
    mode(Mode.ISOLATE)
    with innocent(), client(GUILTY, 1, veid=3):
        gpu.command("forget")
        gpu.command(gpu.Fault(STRAY, 1, veid=3).line())
        found = stopped_or_went_on()
    expect("cancelled", [deed.name for deed in found if deed.name.startswith("cancel")], [])
    went = [(deed.address, deed.second) for deed in found if deed.name == "went-on"]
    expect("continued, sparse", went, [(STRAY, 1)])
    no_trouble()
    return "sparse"


def stray_copy() -> str:
    """The same for a copy engine. Fails on the stock module, which returns the fault."""
    mode(Mode.ISOLATE)
    with innocent(), client(GUILTY, 1, copies=True):
        gpu.command("forget")
        fault = gpu.Fault(STRAY, 1, engine=gpu.ENGINE_COPY, access=gpu.READ, replayable=False)
        gpu.command(fault.line())
        found = stopped_or_went_on()
    expect("returned", [deed for deed in found if deed.name == "reported"], [])
    went = [(deed.address, deed.second) for deed in found if deed.name == "went-on"]
    expect("continued, sparse", went, [(STRAY, 1)])
    no_trouble()
    return "cleared"


def isolating() -> device.Device:
    """Return a reader that has read everything, in mode isolate."""
    mode(Mode.ISOLATE)
    opened = device.Device()
    opened.skip()
    return opened


def record_of(records: list[KernelRecord], action: Action) -> KernelRecord:
    found = [record for record in records if record.action is action]
    expect(f"records {action.name}", len(found), 1)
    return found[0]


def told() -> str:
    """The record names the process, field by field, and can be acknowledged."""
    opened = isolating()
    with innocent(), client(GUILTY, 1, veid=3) as guilty:
        gpu.command(gpu.Fault(STRAY, 1, veid=3).line())
        records = opened.until("the sink", lambda record: record.action is Action.SUNK)
        record = record_of(records, Action.SUNK)
        opened.acknowledge(record.space)
        expect("alive after that", guilty.pid in checks.processes(), True)
    opened.close()
    seen = (record.pid, record.address, record.why, record.veid, record.condemned, record.replayable)
    expect("record", seen, (guilty.pid, STRAY, Why.NONE, 3, True, True))
    kinds = (record.fault_type, record.access, record.reason)
    expect("fault", kinds, (UvmFaultType.INVALID_PTE, Access.WRITE, UvmReason.INVALID_ADDRESS))
    expect("gpu", record.gpu_uuid.replace("-", "").lower(), "gpu" + gpu.UUID.hex())
    if record.sink is None or not record.sink[0] <= STRAY < sum(record.sink):
        raise CheckError(f"the sink {record.sink} does not contain the address")
    return f"{record.sink[1] >> 10} KiB"


def told_apart() -> str:
    """Two clients of one group: the packet names the innocent client's channel and the offender's VEID."""
    opened = isolating()
    with client(GUILTY, 1, veid=3) as guilty, client(INNOCENT, 2, veid=5):
        before = walked(INNOCENT)
        gpu.command("forget")
        gpu.command(gpu.Fault(STRAY, 2, veid=3).line())
        records = opened.until("the sink", lambda record: record.action is Action.SUNK)
        record = record_of(records, Action.SUNK)
        opened.acknowledge(record.space)
        found = stopped_or_went_on()
        expect("cancelled", [deed.name for deed in found if deed.name.startswith("cancel")], [])
        expect("blamed", record.pid, guilty.pid)
        expect("the innocent client's tables", walked(INNOCENT), before)
        invalidated = {deed.directory for deed in found if deed.name == "invalidate"}
        expect("invalidated in the other's tables", gpu.directories()[INNOCENT] in invalidated, False)
    opened.close()
    return "blamed by VEID"


def heard(wanted: Mode, fault: gpu.Fault, *, copies: bool) -> list[int]:
    """Return addresses of fatal faults that a tracker on the offender's address space reports."""
    mode(wanted)
    with innocent(), client(GUILTY, 1, veid=fault.veid, copies=copies) as guilty:
        space = tracking.take(guilty)
        tracker = space.track()
        gpu.command("forget")
        gpu.command(fault.line())
        stopped_or_went_on()
        events = tracker.drain().events
        tracker.close()
        space.close()
    no_trouble()
    return [event.address for event in events if event.fatal]


def trackers_hear() -> str:
    """Absorbed faults reach no tracker: its reader would take the whole group for lost."""
    store = gpu.Fault(STRAY, 1, veid=3)
    copy = gpu.Fault(STRAY, 1, engine=gpu.ENGINE_COPY, access=gpu.READ, replayable=False)
    for fault, copies in ((store, False), (copy, True)):
        expect("heard in mode report", heard(Mode.REPORT, fault, copies=copies), [STRAY])
        expect("heard in mode isolate", heard(Mode.ISOLATE, fault, copies=copies), [])
    return "the stock answer alone"


def walked(handle: int) -> list[tuple[int, int]]:
    """Return level and entry of a client's page tables for an unmapped address, for big and small pages."""
    gpu.command(f"walk {handle:x} {gpu.OBJECT:x} {STRAY:x}")
    return [(deed.first, deed.directory) for deed in gpu.deeds() if deed.name == "walked"][-2:]


def behind_duplicates(space: int) -> None:
    """Give the descriptor that pins the memory a number behind many duplicates of the address space's."""
    (memory,) = uvm.descriptors() - {space}
    os.dup2(memory, LAST_DESCRIPTOR)
    os.close(memory)
    for _ in range(DUPLICATES):
        os.dup(space)


def killed(prepare: Callable[[int], None] | None = None) -> str:
    """Without an acknowledgement the client is killed, and its files are held until the last step."""
    opened = isolating()
    device.set_deadline(NEAR_MS)
    with innocent(), client(GUILTY, 1, veid=3, prepare=prepare) as guilty:
        gpu.command(gpu.Fault(STRAY, 1, veid=3).line())
        records = opened.until("the kill", lambda record: record.action is Action.KILL)
        expect("killed", guilty.ended(), True)
        if not any(record.action is Action.GIVE_UP for record in records):
            expect("page directory", GUILTY in gpu.directories(), True)
            opened.until("the last step", lambda record: record.action is Action.GIVE_UP)
    device.set_deadline(FAR_MS)
    opened.close()
    expect("who", record_of(records, Action.KILL).pid, guilty.pid)
    return "SIGKILL, then released"


def all_went_on(opened: device.Device, found: list[gpu.GpuAction]) -> int:
    """Return the number of sparse mappings. Raises CheckError with the recorded reasons if an access was
    cancelled."""
    records = opened.read()
    opened.close()
    why = sorted({record.why.name for record in records if record.action is Action.REFUSED})
    expect(f"cancelled ({why})", [deed for deed in found if deed.name.startswith("cancel")][:3], [])
    no_trouble()
    return max(record.sinks for record in records)


def in_mode(wanted: Mode, actions: list[Action]) -> str:
    """The stock answer, and its record."""
    opened = isolating()
    opened.set_mode(wanted)
    cancelled()
    records = opened.read()
    opened.close()
    expect("told", [record.action for record in records], actions)
    return f"{len(records)} records"


def orphan_told() -> str:
    """The fault of work without an owner ends the group, patched or not: recorded at once, without a
    process."""
    opened = isolating()
    orphan()
    records = opened.until("the orphan", lambda record: record.action is Action.ORPHAN)
    opened.close()
    expect("who", record_of(records, Action.ORPHAN).pid, None)
    return "told"


ISOLATED = (
    *START,
    Check("stray-store-goes-on", stray_store),
    Check("stray-copy-goes-on", stray_copy),
)
"""Passes on the patched module and fails on the stock module: the decisive set."""

TOLD = (
    *(builtin(test) for test in BUILTINS),
    Check("report-store-cancelled", cancelled),
    Check("report-copy-reported", reported),
    Check("report-orphan", orphan),
    *ISOLATED[len(START) :],
    Check("record", told),
    Check("two-clients", told_apart),
    Check("trackers", trackers_hear),
    Check("mode-off", lambda: in_mode(Mode.OFF, [])),
    Check("mode-report", lambda: in_mode(Mode.REPORT, [Action.REPORTED])),
    Check("orphan-told", orphan_told),
    Check("killed-at-deadline", killed),
    Check("killed-with-duplicates", lambda: killed(behind_duplicates)),
)
