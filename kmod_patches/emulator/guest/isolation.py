"""What the patch is for, on the GPU in software: the fault stays with the client that made it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from functools import partial

from emulator.guest import checks, device, gpu
from emulator.guest.check import Check, CheckError, expect
from emulator.guest.gpuchecks import BUILTINS, START, STRAY, builtin, cancelled, no_trouble, orphan, reported
from emulator.guest.gpuclient import client
from mpsd.gpu.nvidia.kernel_abi import Action, KernelRecord, Mode, Why
from mpsd.model import Access, UvmFaultType, UvmReason

GUILTY, INNOCENT = 0xC1, 0xC2
FAR_MS = 60_000
NEAR_MS = 200
STORM_PAGES = 10_000
STORM_STEP = 500
BURST_PAGES = 1000
EXITS = 5
EXIT_PAGES = 100
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the case table: a fault, and the client whose it is."""

    name: str
    fault: gpu.Fault
    copies: bool = False
    external: tuple[int, int] | None = None


def mode(wanted: Mode) -> None:
    """Sets the mode where there is one to set: a stock module has none, and does what it does.

    No step against a client comes while a check looks: the machine may be slow.
    """
    if device.present():
        device.set_deadline(FAR_MS)
        opened = device.Device()
        opened.set_mode(wanted)
        opened.close()


def stopped_or_went_on(count: int = 1) -> list[gpu.Deed]:
    """All deeds, once so many accesses were cancelled, given back, or went on."""
    return gpu.wait_for_any(("cancel-va", "cancel-instance", "reported", "went-on"), count)


def stray_store() -> str:
    """The work goes on, on a sparse page, and nothing was cancelled. Fails on the stock module."""
    mode(Mode.ISOLATE)
    with client(GUILTY, 1, veid=3):
        gpu.command("forget")
        gpu.command(gpu.Fault(STRAY, 1, veid=3).line())
        found = stopped_or_went_on()
    expect("cancelled", [deed.name for deed in found if deed.name.startswith("cancel")], [])
    went = [(deed.address, deed.second) for deed in found if deed.name == "went-on"]
    expect("went on, sparse", went, [(STRAY, 1)])
    no_trouble()
    return "sparse"


def stray_copy() -> str:
    """The same of a copy engine. Fails on the stock module, which gives the fault back."""
    mode(Mode.ISOLATE)
    with client(GUILTY, 1, copies=True):
        gpu.command("forget")
        fault = gpu.Fault(STRAY, 1, engine=gpu.ENGINE_COPY, access=gpu.READ, replayable=False)
        gpu.command(fault.line())
        found = stopped_or_went_on()
    expect("given back", [deed for deed in found if deed.name == "reported"], [])
    went = [(deed.address, deed.second) for deed in found if deed.name == "went-on"]
    expect("went on, sparse", went, [(STRAY, 1)])
    no_trouble()
    return "cleared"


def isolating() -> device.Device:
    """A reader that has read everything, in mode isolate."""
    mode(Mode.ISOLATE)
    opened = device.Device()
    opened.skip()
    return opened


def record_of(records: list[KernelRecord], action: Action) -> KernelRecord:
    found = [record for record in records if record.action is action]
    expect(f"records {action.name}", len(found), 1)
    return found[0]


def told() -> str:
    """The record names the process, field by field, and it can be acknowledged."""
    opened = isolating()
    with client(GUILTY, 1, veid=3) as guilty:
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
        raise CheckError(f"the sink {record.sink} does not hold the address")
    return f"{record.sink[1] >> 10} KiB"


def told_apart() -> str:
    """Two clients of one group: the packet names the innocent one's channel, the VEID the guilty one."""
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
        expect("the innocent one's tables", walked(INNOCENT), before)
        invalidated = {deed.directory for deed in found if deed.name == "invalidate"}
        expect("invalidated in the other's tables", gpu.directories()[INNOCENT] in invalidated, False)
    opened.close()
    return "blamed by VEID"


def walked(handle: int) -> list[tuple[int, int]]:
    """What a client's page tables say of the stray address: level and entry, for big and small pages."""
    gpu.command(f"walk {handle:x} {gpu.OBJECT:x} {STRAY:x}")
    return [(deed.first, deed.directory) for deed in gpu.deeds() if deed.name == "walked"][-2:]


def refused(kind: int, why: Why) -> str:
    """A fault that no mapping helps against gets the stock answer, and the record says why."""
    opened = isolating()
    with client(GUILTY, 1, veid=3):
        gpu.command("forget")
        gpu.command(gpu.Fault(STRAY, 1, veid=3, kind=kind).line())
        found = gpu.wait_for("cancel-va")
        records = opened.until("the refusal", lambda record: record.action is Action.REFUSED)
    opened.close()
    expect("went on", [deed for deed in found if deed.name == "went-on"], [])
    expect("why", record_of(records, Action.REFUSED).why, why)
    return why.name


def killed() -> str:
    """Nobody acknowledges: the client is killed, and its files are held until the last step."""
    opened = isolating()
    device.set_deadline(NEAR_MS)
    with client(GUILTY, 1, veid=3) as guilty:
        gpu.command(gpu.Fault(STRAY, 1, veid=3).line())
        records = opened.until("the kill", lambda record: record.action is Action.KILL)
        expect("killed", guilty.ended(), True)
        if not any(record.action is Action.GIVE_UP for record in records):
            expect("page directory", GUILTY in gpu.directories(), True)
            opened.until("the last step", lambda record: record.action is Action.GIVE_UP)
    device.set_deadline(FAR_MS)
    opened.close()
    expect("who", record_of(records, Action.KILL).pid, guilty.pid)
    return "SIGKILL, then let go"


def storm() -> str:
    """Page after page while UVM is at it: each access goes on, with few sinks."""
    opened = isolating()
    with client(GUILTY, 1, veid=3):
        gpu.command("forget")
        for first in range(0, STORM_PAGES, STORM_STEP):
            for page in range(first, first + STORM_STEP):
                gpu.command(gpu.Fault(STRAY + page * PAGE, 1, veid=3).line())
            found = stopped_or_went_on(first + STORM_STEP)
    sinks = all_went_on(opened, found)
    return f"{STORM_PAGES} pages, {sinks} sinks"


def burst() -> str:
    """As many pages as the fault buffer holds, all there before UVM looks."""
    opened = isolating()
    with client(GUILTY, 1, veid=3):
        gpu.command("forget")
        gpu.command("mask")
        for page in range(BURST_PAGES):
            gpu.command(gpu.Fault(STRAY + page * PAGE, 1, veid=3).line())
        gpu.command("unmask")
        found = stopped_or_went_on(BURST_PAGES)
    sinks = all_went_on(opened, found)
    return f"{BURST_PAGES} pages, {sinks} sinks"


def exit_under_fault() -> str:
    """A client is killed with faults that UVM has not looked at: all of it goes, the next one is served."""
    opened = isolating()
    for _ in range(EXITS):
        with client(GUILTY, 1, veid=3) as guilty:
            gpu.command("mask")
            for page in range(EXIT_PAGES):
                gpu.command(gpu.Fault(STRAY + page * PAGE, 1, veid=3).line())
            signal.pidfd_send_signal(guilty.pidfd, signal.SIGKILL)
            gpu.command("unmask")
            expect("gone", guilty.ended(), True)
    opened.close()
    stray_store()
    return f"{EXITS} times {EXIT_PAGES} pages"


def all_went_on(opened: device.Device, found: list[gpu.Deed]) -> int:
    """How many sinks it took. Raises CheckError where an access was cancelled, with the reasons told."""
    records = opened.read()
    opened.close()
    why = sorted({record.why.name for record in records if record.action is Action.REFUSED})
    expect(f"cancelled ({why})", [deed for deed in found if deed.name.startswith("cancel")][:3], [])
    no_trouble()
    return max(record.sinks for record in records)


def sunk(row: Row) -> str:
    """A row of the case table whose accesses go on."""
    opened = isolating()
    with client(GUILTY, 1, veid=row.fault.veid, copies=row.copies, external=row.external):
        gpu.command("forget")
        gpu.command(row.fault.line())
        found = stopped_or_went_on()
        records = opened.until("the sink", lambda record: record.action in (Action.SUNK, Action.REFUSED))
    opened.close()
    expect("action", (records[-1].action, records[-1].why), (Action.SUNK, Why.NONE))
    expect("went on", [deed.address for deed in found if deed.name == "went-on"], [row.fault.address])
    expect("cancelled", [deed.name for deed in found if deed.name in ("cancel-va", "reported")], [])
    no_trouble()
    return f"{(records[-1].sink or (0, 0))[1] >> 10} KiB"


def in_mode(wanted: Mode, actions: list[Action]) -> str:
    """The stock answer, and what is told of it."""
    opened = isolating()
    opened.set_mode(wanted)
    cancelled()
    records = opened.read()
    opened.close()
    expect("told", [record.action for record in records], actions)
    return f"{len(records)} records"


def orphan_told() -> str:
    """An orphan's fault ends the group, patched or not: it is told at once, and of nobody."""
    opened = isolating()
    orphan()
    records = opened.until("the orphan", lambda record: record.action is Action.ORPHAN)
    opened.close()
    expect("who", record_of(records, Action.ORPHAN).pid, None)
    return "told"


def sm_row(name: str, fault: gpu.Fault, external: tuple[int, int] | None = None) -> Row:
    return Row(name, replace(fault, veid=3), external=external)


ROWS = (
    sm_row("load", gpu.Fault(STRAY, 1, access=gpu.READ)),
    sm_row("atomic", gpu.Fault(STRAY, 1, access=gpu.ATOMIC)),
    sm_row("no-directory", gpu.Fault(STRAY, 1, kind=gpu.FAULT_PDE)),
    sm_row("null-pointer", gpu.Fault(0, 1, access=gpu.READ)),
    sm_row("hole-in-external", gpu.Fault(STRAY, 1), (STRAY & ~0x1F_FFFF, 0x20_0000)),
    Row(
        "semaphore",
        gpu.Fault(STRAY, 1, engine=gpu.ENGINE_HOST, access=gpu.READ, replayable=False),
        copies=True,
    ),
)

ISOLATED = (
    *START,
    Check("stray-store-goes-on", stray_store),
    Check("stray-copy-goes-on", stray_copy),
)
"""Passes on the patched module and fails on the stock one: the bar."""

GPU_PATCHED = (
    *START,
    *(builtin(test) for test in BUILTINS),
    Check("report-store-cancelled", cancelled),
    Check("report-copy-reported", reported),
    Check("report-orphan", orphan),
    *ISOLATED[len(START) :],
    Check("record", told),
    Check("two-clients", told_apart),
    *(Check(f"row-{row.name}", partial(sunk, row)) for row in ROWS),
    Check("row-privilege", lambda: refused(gpu.FAULT_PRIVILEGE, Why.FAULT_TYPE)),
    Check("row-va-limit", lambda: refused(gpu.FAULT_VA_LIMIT, Why.FAULT_TYPE)),
    Check("mode-off", lambda: in_mode(Mode.OFF, [])),
    Check("mode-report", lambda: in_mode(Mode.REPORT, [Action.REPORTED])),
    Check("orphan-told", orphan_told),
    Check("burst", burst, 300.0),
    Check("storm", storm, 900.0),
    Check("exit-under-fault", exit_under_fault, 300.0),
    Check("killed-at-deadline", killed),
    Check("unload-gpu", checks.unload),
    Check("kernel-log", checks.kernel_log),
)
