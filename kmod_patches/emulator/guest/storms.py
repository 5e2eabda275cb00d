"""Many faults at once: a full fault buffer, 10,000 faults side by side, 10,000 far from each other."""

from __future__ import annotations

from emulator.guest import device, gpu
from emulator.guest.beside import innocent
from emulator.guest.check import Check, CheckError, expect
from emulator.guest.gpuchecks import STRAY, no_trouble
from emulator.guest.gpuclient import client
from emulator.guest.isolation import GUILTY, isolating, parameter
from emulator.guest.memory import CHUNK, PAGE
from mpsd.gpu.nvidia.kernel_abi import Action, Why

PAGES = 10_000
STEP = 500
BURST_PAGES = 1000
WITHIN_S = 300.0
DEFAULT_MAX_SINKS = 1024
ENDS = ("went-on", "cancel-va", "cancel-instance", "reported")


def send(first: int, count: int, stride: int) -> None:
    for page in range(first, first + count):
        gpu.command(gpu.Fault(STRAY + page * stride, 1, veid=3).line())


def all_at_once() -> str:
    """As many pages as the fault buffer holds, all present before UVM reads."""
    opened = isolating()
    with innocent(), client(GUILTY, 1, veid=3):
        gpu.command("forget")
        gpu.command("mask")
        send(0, BURST_PAGES, PAGE)
        gpu.command("unmask")
        gpu.wait_for_tally(ENDS, BURST_PAGES, WITHIN_S)
    sinks = all_went_on(opened, BURST_PAGES)
    return f"{BURST_PAGES} pages, {sinks} sinks"


def storm(stride: int) -> tuple[device.Device, dict[str, int]]:
    """Fault page after page while UVM works, with at most STEP in flight. Return the reader and the tally."""
    opened = isolating()
    with innocent(), client(GUILTY, 1, veid=3):
        gpu.command("forget")
        gpu.command("quiet")
        for first in range(0, PAGES, STEP):
            send(first, STEP, stride)
            if not first:
                opened.acknowledge(opened.until("the sink", lambda record: record.sinks > 0)[0].space)
            gpu.wait_for_tally(ENDS, first + STEP, WITHIN_S)
        seen = gpu.tally()
    no_trouble()
    expect("ends", sum(seen[name] for name in ENDS) >= PAGES, True)
    return opened, seen


def all_went_on(opened: device.Device, count: int) -> int:
    """Return the number of sparse mappings. Raises CheckError with the recorded reasons if an access was
    cancelled."""
    records = opened.read()
    opened.close()
    why = sorted({record.why.name for record in records if record.action is Action.REFUSED})
    seen = gpu.tally()
    expect(f"ends ({why})", [seen[name] for name in ENDS], [count, 0, 0, 0])
    no_trouble()
    return max(record.sinks for record in records)


def dense() -> str:
    opened, _ = storm(PAGE)
    return f"{PAGES} pages side by side, {all_went_on(opened, PAGES)} sinks told"


def scattered() -> str:
    """All of them fit: one sparse mapping each."""
    with parameter("max_sinks", PAGES):
        opened, _ = storm(2 * CHUNK)
        sinks = all_went_on(opened, PAGES)
    return f"{PAGES} pages 4 MiB apart, {sinks} or more sinks"


def past_the_bound() -> str:
    """Past max_sinks each further page gets the stock answer; the records give the reason and the number."""
    opened, seen = storm(2 * CHUNK)
    records = opened.read()
    opened.close()
    refused = [record for record in records if record.action is Action.REFUSED]
    expect("continued", seen["went-on"], DEFAULT_MAX_SINKS)
    if {record.why for record in refused} != {Why.TOO_MANY} or refused[-1].sinks != DEFAULT_MAX_SINKS:
        raise CheckError(f"told: {[(record.why.name, record.sinks) for record in refused][-3:]}")
    return f"{seen['went-on']} absorbed, {seen['cancel-va']} cancelled, {len(refused)} records of that"


CHECKS = (
    Check("burst", all_at_once, 300.0),
    Check("storm-dense", dense, 900.0),
    Check("storm-scattered", scattered, 900.0),
    Check("storm-past-bound", past_the_bound, 900.0),
)
