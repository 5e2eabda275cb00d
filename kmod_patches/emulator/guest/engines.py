"""Faults of copy engines and of the host, served one by one, and faults that UVM returns itself."""

from __future__ import annotations

from emulator.guest import failing, gpu, memory
from emulator.guest.beside import innocent
from emulator.guest.check import Check, CheckError, expect
from emulator.guest.gpuchecks import STRAY, no_trouble
from emulator.guest.isolation import GUILTY, isolating
from emulator.guest.rows import CHANNEL, MANAGED, TYPES, Row, guilty, outcome
from mpsd.base.model import UvmReason
from mpsd.gpu.nvidia.kernel_abi import Action, KernelRecord, Why

# More than the loop guard lets repeat; all of one client, and none with another's number.
CHANNELS = (CHANNEL, 3, 4, 5, 6, 7)
MORE = CHANNELS[1:]
ENDS = ("went-on", "reported")


def copy(address: int = STRAY, channel: int = CHANNEL, kind: int = gpu.FAULT_PTE) -> gpu.Fault:
    return gpu.Fault(address, channel, engine=gpu.ENGINE_COPY, access=gpu.READ, kind=kind, replayable=False)


def more_channels(space: int) -> None:
    for channel in MORE:
        gpu.register_channel(space, GUILTY, gpu.channel_handle(channel, copies=True))


def at_once() -> str:
    """Copies of six channels into one freed area, all present before UVM reads: one sparse mapping, no
    loop."""
    opened = isolating()
    with innocent(), guilty(copies=True, veid=0, prepare=more_channels):
        gpu.command("forget")
        gpu.command("mask")
        for channel in CHANNELS:
            gpu.command(copy(channel=channel).line())
        gpu.command("unmask")
        gpu.wait_for_tally(ENDS, len(CHANNELS))
        seen = gpu.tally()
    records = opened.read()
    opened.close()
    expect("refused", [record.why for record in records if record.action is Action.REFUSED], [])
    expect("ends", [seen[name] for name in ENDS], [len(CHANNELS), 0])
    expect("sinks", max(record.sinks for record in records), 1)
    no_trouble()
    return f"{len(CHANNELS)} channels, one sink"


def given_back(row: Row) -> KernelRecord:
    """Return the record of a fault that UVM returns. Raises CheckError."""
    found, record = outcome(row)
    expect(f"{row.name}: told", (record.action, record.why), (Action.REFUSED, row.why))
    expect(f"{row.name}: end", [deed.name for deed in found if deed.name in ENDS], ["reported"])
    expect(f"{row.name}: counted", (record.faults, record.replayable), (1, False))
    return record


def fault_types() -> str:
    """Each fault type of a copy engine that no mapping helps against."""
    for kind, told in TYPES:
        record = given_back(Row(told.name, copy(kind=kind), Why.FAULT_TYPE, copies=True))
        expect(f"{told.name}: type", record.fault_type, told)
    return f"{len(TYPES)} types"


def no_memory() -> str:
    """UVM has no memory to serve a copy engine's fault: it ends the channel, which is recorded."""
    row = Row(
        "no memory",
        copy(MANAGED),
        Why.REASON,
        made={"prepare": lambda space: memory.managed(space, MANAGED)},
        copies=True,
    )
    with failing.failing("uvm_va_range_block_create", 1, all_of_them=True):
        record = given_back(row)
        if failing.failed()[1] == "nothing":
            raise CheckError("nothing failed")
    expect("reason", record.reason, UvmReason.UNKNOWN)
    return "returned, recorded"


CHECKS = (
    Check("copies-at-once", at_once),
    Check("row-copy-fault-types", fault_types, 300.0),
    Check("row-copy-no-memory", no_memory),
)
