"""The case table of mpsd/docs/kernel-module-internals.md: a fault, its outcome, and its record.

Every row runs beside an innocent client of the same channel group, and that client's page tables are
compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from emulator.guest import failing, gpu, memory, system
from emulator.guest.beside import INNOCENT, INNOCENT_CHANNEL, INNOCENT_VEID, innocent
from emulator.guest.check import Check, CheckError, expect
from emulator.guest.gpuchecks import STRAY, no_trouble
from emulator.guest.gpuclient import GpuClient, client
from emulator.guest.isolation import GUILTY, isolating, parameter, stopped_or_went_on
from mpsd.base.model import UvmFaultType, UvmReason
from mpsd.gpu.nvidia.kernel_abi import IOC_RELEASE, Action, KernelRecord, Why, encode_target

VEID, CHANNEL = 3, 1
RANGE = (STRAY & ~(memory.CHUNK - 1), memory.CHUNK)
MAPPED = RANGE[0] + 0x5000
MANAGED = 0x2000_0000_0000
SPECIAL = 0x3000_0000_0000
# Below 2^40, the limit of channel addresses.
BUFFERS = 0x20_0000_0000
# Farther apart than a sparse mapping can be wide.
APART = 8 * memory.CHUNK
OVERWRITES = 3
STOPPED = ("cancel-va", "cancel-instance", "reported")
TYPES = (
    (gpu.FAULT_PDE_SIZE, UvmFaultType.PDE_SIZE),
    (gpu.FAULT_VA_LIMIT, UvmFaultType.LIMIT),
    (gpu.FAULT_UNBOUND, UvmFaultType.UNBOUND_INSTANCE),
    (gpu.FAULT_PRIVILEGE, UvmFaultType.PRIVILEGE),
    (gpu.FAULT_PITCH, UvmFaultType.PITCH),
    (gpu.FAULT_WORK_CREATION, UvmFaultType.WORK_CREATION),
    (gpu.FAULT_APERTURE, UvmFaultType.APERTURE),
    (gpu.FAULT_COMPRESSION, UvmFaultType.COMPRESSION),
    (gpu.FAULT_MEMORY_KIND, UvmFaultType.KIND),
    (gpu.FAULT_REGION, UvmFaultType.REGION),
    (gpu.FAULT_POISON, UvmFaultType.POISON),
)


@dataclass(frozen=True, slots=True)
class Row:
    """`why` is NONE for an absorbed fault; `made`: arguments of client() for the client that the row
    needs."""

    name: str
    fault: gpu.Fault
    why: Why = Why.NONE
    made: dict[str, Any] = field(default_factory=dict)
    copies: bool = False


def guilty(**made: Any) -> Any:
    """Yield the client that faults."""
    return client(GUILTY, CHANNEL, **({"veid": VEID} | made))


def outcome(row: Row) -> tuple[list[gpu.GpuAction], KernelRecord]:
    """Return all actions and the first record of the row's fault. Raises CheckError."""
    opened = isolating()
    made = row.made | ({"copies": True, "veid": 0} if row.copies else {})
    with innocent(), guilty(**made):
        gpu.command("forget")
        gpu.command(row.fault.line())
        found = stopped_or_went_on()
        actions = (Action.SUNK, Action.REFUSED)
        records = opened.until("the record", lambda record: record.action in actions)
    opened.close()
    no_trouble()
    return found, records[-1]


def run_row(row: Row) -> str:
    """Check the row's outcome, and that no other client is touched."""
    found, record = outcome(row)
    sunk = row.why is Why.NONE
    expect("action", (record.action, record.why), (Action.SUNK if sunk else Action.REFUSED, row.why))
    expect("address", record.address, row.fault.address & ~(memory.PAGE - 1))
    stopped = [deed.name for deed in found if deed.name in STOPPED]
    went = [(deed.name, deed.second) for deed in found if deed.name == "went-on"]
    if sunk:
        expect("stopped", stopped, [])
        expect("continued, sparse", went, [("went-on", 1)])
        return f"sunk, {(record.sink or (0, 0))[1] >> 10} KiB"
    expect("continued", went, [])
    if not stopped:
        raise CheckError("neither stopped nor absorbed")
    return f"{row.why.name}: {stopped[0]}"


def fault_types() -> str:
    """Each type that no mapping helps against, with a client for each: its record is its first."""
    for kind, told in TYPES:
        row = Row(told.name, gpu.Fault(STRAY, CHANNEL, veid=VEID, kind=kind), Why.FAULT_TYPE)
        found, record = outcome(row)
        expect(f"{told.name}: record", (record.why, record.fault_type), (row.why, told))
        expect(f"{told.name}: deeds", [deed.name for deed in found if deed.name in STOPPED], ["cancel-va"])
    return f"{len(TYPES)} types"


def served() -> str:
    """Managed memory: UVM serves the fault, patched or not, and there is no record."""
    opened = isolating()
    with innocent(), guilty(prepare=lambda space: memory.managed(space, MANAGED)):
        gpu.command("forget")
        gpu.command(gpu.Fault(MANAGED, CHANNEL, veid=VEID).line())
        found = stopped_or_went_on()
    went = [(deed.address, deed.second) for deed in found if deed.name == "went-on"]
    expect("continued, sparse", went, [(MANAGED, 0)])
    expect("records", opened.read(), [])
    opened.close()
    no_trouble()
    return "no record"


def read_only_managed(space: int) -> None:
    memory.managed(space, MANAGED)
    system.make_read_only(MANAGED, memory.CHUNK)


def outlived() -> str:
    """Managed memory of an exited process in an address space that another process holds: no page to
    serve."""
    opened = isolating()
    with innocent(), ExitStack() as held:
        with guilty(shared=True, prepare=lambda space: memory.managed(space, MANAGED)) as client_:
            held.callback(os.close, space_of(client_))
        gpu.command("forget")
        gpu.command(gpu.Fault(MANAGED, CHANNEL, veid=VEID).line())
        stopped_or_went_on()
        records = opened.until("the refusal", lambda record: record.action is Action.REFUSED)
        expect("why", (records[-1].why, records[-1].reason), (Why.MANAGED, UvmReason.INVALID_ADDRESS))
    opened.close()
    no_trouble()
    return "MANAGED"


def space_of(made: GpuClient) -> int:
    """Return a duplicate of the client's descriptor of its address space."""
    for fd in os.listdir(f"/proc/{made.pid}/fd"):
        if os.readlink(f"/proc/{made.pid}/fd/{fd}").endswith("/nvidia-uvm"):
            return system.pidfd_getfd(made.pidfd, int(fd))
    raise CheckError("the client has no address space")


def no_memory() -> str:
    """UVM has no memory for its state of the page: the stock answer, with the reason."""
    opened = isolating()
    made = guilty(prepare=lambda space: memory.managed(space, MANAGED))
    with innocent(), made, failing.failing("uvm_va_range_block_create", 1, all_of_them=True):
        gpu.command("forget")
        gpu.command(gpu.Fault(MANAGED, CHANNEL, veid=VEID).line())
        found = stopped_or_went_on()
        records = opened.until("the refusal", lambda record: record.action is Action.REFUSED)
    opened.close()
    expect("why", (records[-1].why, records[-1].reason), (Why.REASON, UvmReason.OUT_OF_MEMORY))
    expect("cancelled", [deed.address for deed in found if deed.name == "cancel-va"], [MANAGED])
    no_trouble()
    return "OUT_OF_MEMORY: cancel-va"


def whole_batch() -> str:
    """UVM abandons a whole batch: good accesses are cancelled with it, and no record blames a client."""
    opened = isolating()
    second = gpu.Fault(MANAGED, INNOCENT_CHANNEL, veid=INNOCENT_VEID)
    own = memory.managed
    with (
        guilty(prepare=lambda space: own(space, MANAGED)),
        client(INNOCENT, INNOCENT_CHANNEL, veid=INNOCENT_VEID, prepare=lambda space: own(space, MANAGED)),
        failing.failing("uvm_va_block_service_locked", 1, all_of_them=True),
    ):
        gpu.command("forget")
        gpu.command("mask")
        gpu.command(gpu.Fault(MANAGED, CHANNEL, veid=VEID).line())
        gpu.command(second.line())
        gpu.command("unmask")
        found = gpu.wait_for_any(("cancel-va", "went-on"), 2)
    expect(
        "ends", sorted(deed.name for deed in found if deed.name in (*STOPPED, "went-on")), ["cancel-va"] * 2
    )
    expect("records", opened.read(), [])
    opened.close()
    no_trouble()
    return "2 cancelled, no record"


def loop() -> str:
    """A sparse mapping that does not help: after some batches that show the page the stock answer ends it."""
    opened = isolating()
    with innocent(), guilty():
        gpu.command("forget")
        gpu.command(gpu.Fault(STRAY, CHANNEL, veid=VEID, stubborn=True).line())
        found = gpu.wait_for("cancel-va")
        records = opened.until("the refusal", lambda record: record.action is Action.REFUSED)
    opened.close()
    told = [(record.action, record.why) for record in records]
    expect("told", told, [(Action.SUNK, Why.NONE), (Action.REFUSED, Why.LOOP)])
    no_trouble()
    return f"after {sum(deed.name == 'faulted' for deed in found)} packets"


def sinks_apart(count: int, first: int = STRAY) -> None:
    """Make this many accesses that need a sparse mapping each; wait until each has continued or not."""
    gpu.command("forget")
    for number in range(count):
        gpu.command(gpu.Fault(first + number * APART, CHANNEL, veid=VEID).line())
        stopped_or_went_on(number + 1)


def too_many() -> str:
    opened = isolating()
    with parameter("max_sinks", 2), innocent(), guilty():
        sinks_apart(3)
        records = opened.until("the refusal", lambda record: record.action is Action.REFUSED)
        expect("ends", (gpu.tally()["went-on"], gpu.tally()["cancel-va"]), (2, 1))
    opened.close()
    expect("why", (records[-1].why, records[-1].sinks), (Why.TOO_MANY, 2))
    no_trouble()
    return "the third"


def released() -> str:
    opened = isolating()
    with innocent(), guilty():
        sinks_apart(1)
        space = opened.until("the sink", lambda record: record.action is Action.SUNK)[-1].space
        expect("release", opened.ask(IOC_RELEASE, encode_target(space)), 0)
        sinks_apart(1, STRAY + APART)
        records = opened.until("the refusal", lambda record: record.action is Action.REFUSED)
        expect("cancelled", gpu.tally()["cancel-va"], 1)
    opened.close()
    expect("why", records[-1].why, Why.RELEASED)
    no_trouble()
    return "RELEASED"


def switched_off() -> str:
    """Copy engines and the host, if the module is set to leave them alone."""
    with parameter("nonreplayable", 0):
        said = [run_row(replace(row, why=Why.NONREPLAYABLE)) for row in ENGINES]
    return "; ".join(said)


def beside_a_page() -> str:
    """A hole next to a mapped page: 4 KiB, and the page's own entry stays."""
    at = MAPPED + memory.PAGE
    opened = isolating()
    with innocent(), guilty(external=RANGE, prepare=one_page):
        gpu.command("forget")
        neighbour = small_entry(MAPPED)
        gpu.command(gpu.Fault(at, CHANNEL, veid=VEID).line())
        stopped_or_went_on()
        records = opened.until("the sink", lambda record: record.action in (Action.SUNK, Action.REFUSED))
        expect("the neighbour's entry", small_entry(MAPPED), neighbour)
        expect("valid", neighbour & 1, 1)
    opened.close()
    expect("sink", records[-1].sink, (at, memory.PAGE))
    no_trouble()
    return "4 KiB"


def one_page(space: int) -> None:
    memory.map_external(space, MAPPED, memory.PAGE)


def small_entry(address: int) -> int:
    """Return an entry of the table of small pages."""
    gpu.command(f"walk {GUILTY:x} {gpu.OBJECT:x} {address:x}")
    return [deed.directory for deed in gpu.deeds() if deed.name == "walked"][-1]


def overwritten() -> str:
    """The client maps memory over its sparse mapping and unmaps it: the same page is absorbed again."""
    return ", ".join(overwritten_by(page) for page in memory.PAGES)


def overwritten_by(page: int) -> str:
    """Overwrite with pages of that size."""

    def change(space: int, word: bytes) -> bytes:
        base = STRAY & ~(page - 1)
        memory.map_external(space, base, page, page=page)
        memory.unmap_external(space, base, page)
        return word

    opened = isolating()
    with innocent(), guilty(external=RANGE, obey=change) as made:
        gpu.command("forget")
        for number in range(1, OVERWRITES + 1):
            gpu.command(gpu.Fault(STRAY, CHANNEL, veid=VEID).line())
            gpu.wait_for_rest()
            expect("continued, cancelled", (gpu.tally()["went-on"], gpu.tally()["cancel-va"]), (number, 0))
            made.ask(b"c")
            expect("answer", made.answered(), b"c")
    opened.close()
    no_trouble()
    return f"{OVERWRITES} times by {page >> 10} KiB"


def widening() -> str:
    """Each sparse mapping of a client is wider than the one before, up to 2 MiB; the 1st, 2nd, 4th, 8th are
    recorded."""
    opened = isolating()
    with innocent(), guilty():
        sinks_apart(8)
        records = opened.until("the sinks", lambda record: record.sinks == 8)
        expect("continued", gpu.tally()["went-on"], 8)
    opened.close()
    seen = {record.sinks: (record.sink or (0, 0))[1] >> 10 for record in records}
    expect("KiB by number", seen, {1: 64, 2: 128, 4: 512, 8: 2048})
    no_trouble()
    return "64 KiB to 2 MiB"


def sm(name: str, fault: gpu.Fault, why: Why = Why.NONE, **made: Any) -> Row:
    return Row(name, replace(fault, veid=VEID), why, made)


def mapped(kind: memory.Mapping) -> Callable[[int], None]:
    return lambda space: memory.map_external(space, MAPPED, memory.PAGE, kind)


def engine(name: str, number: int, access: int) -> Row:
    fault = gpu.Fault(STRAY, CHANNEL, engine=number, access=access, replayable=False)
    return Row(name, fault, copies=True)


READ, WRITE, ATOMIC = gpu.READ, gpu.WRITE, gpu.ATOMIC
ENGINES = (
    engine("copy-engine", gpu.ENGINE_COPY, READ),
    engine("host", gpu.ENGINE_HOST, READ),
)
ROWS = (
    sm("load", gpu.Fault(STRAY, CHANNEL, access=READ)),
    sm("store", gpu.Fault(STRAY, CHANNEL)),
    sm("atomic", gpu.Fault(STRAY, CHANNEL, access=ATOMIC)),
    sm("no-directory", gpu.Fault(STRAY, CHANNEL, kind=gpu.FAULT_PDE)),
    sm("null-pointer", gpu.Fault(0, CHANNEL, access=READ)),
    sm("hole", gpu.Fault(STRAY, CHANNEL), external=RANGE),
    sm("instruction", gpu.Fault(STRAY, CHANNEL, access=READ, unit=gpu.UNIT_INSTRUCTIONS)),
    *ENGINES,
    sm(
        "read-only",
        gpu.Fault(MAPPED, CHANNEL, kind=gpu.FAULT_READ_ONLY),
        Why.PERMISSIONS,
        external=RANGE,
        prepare=mapped(memory.Mapping.READ_ONLY),
    ),
    sm(
        "no-atomics",
        gpu.Fault(MAPPED, CHANNEL, kind=gpu.FAULT_ATOMIC, access=ATOMIC),
        Why.PERMISSIONS,
        external=RANGE,
        prepare=mapped(memory.Mapping.READ_WRITE),
    ),
    sm("managed-read-only", gpu.Fault(MANAGED, CHANNEL), Why.PERMISSIONS, prepare=read_only_managed),
    sm(
        "context-buffer",
        gpu.Fault(BUFFERS, CHANNEL, stubborn=True),
        Why.PROTECTED,
        buffers=(BUFFERS, memory.CHUNK),
    ),
    sm(
        "semaphore-pool",
        gpu.Fault(SPECIAL, CHANNEL, stubborn=True),
        Why.PROTECTED,
        prepare=lambda space: memory.semaphore_pool(space, SPECIAL),
    ),
    sm(
        "sked",
        gpu.Fault(SPECIAL, CHANNEL, stubborn=True),
        Why.PROTECTED,
        prepare=lambda space: memory.sked_region(space, SPECIAL),
    ),
    sm("write-only", gpu.Fault(STRAY, CHANNEL, kind=gpu.FAULT_WRITE_ONLY, access=READ), Why.FAULT_TYPE),
    sm("other-unit", gpu.Fault(STRAY, CHANNEL, hub=True), Why.CLIENT),
    sm("beyond-reach", gpu.Fault(1 << 47, CHANNEL), Why.UNADDRESSABLE),
)

CHECKS = (
    *(Check(f"row-{row.name}", partial(run_row, row)) for row in ROWS),
    Check("row-fault-types", fault_types, 300.0),
    Check("row-managed-served", served),
    Check("row-managed-outlived", outlived),
    Check("row-no-memory", no_memory),
    Check("row-whole-batch", whole_batch),
    Check("row-nonreplayable-off", switched_off),
    Check("loop-guard", loop),
    Check("too-many", too_many),
    Check("released", released),
    Check("granule-4k", beside_a_page),
    Check("granule-widens", widening),
    Check("sink-overwritten", overwritten),
)
