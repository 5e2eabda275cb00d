"""The client maps a page of 2 MiB over its sparse mappings and unmaps it: the tables below lose their
pointer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from emulator.guest import device, failing, gpu, memory
from emulator.guest.beside import innocent
from emulator.guest.check import Check, expect
from emulator.guest.gpuchecks import STRAY, no_trouble
from emulator.guest.gpuclient import GpuClient
from emulator.guest.isolation import GUILTY, isolating
from emulator.guest.memory import CHUNK, PAGES
from emulator.guest.rows import CHANNEL, RANGE, VEID, guilty
from mpsd.gpu.nvidia.kernel_abi import Action, Why

BASE = RANGE[0]
BIG = PAGES[1]
# Aligned to the width of a client's second sparse mapping, and outside the first.
SECOND = BASE + 4 * BIG
OWN = BASE + 12 * BIG
WHOLE, PART, HALF = b"w", b"p", b"h"


def change(space: int, word: bytes) -> bytes:
    """Map and unmap a page of 2 MiB; map one of 64 KiB; map and unmap one in the second sparse mapping."""
    if word == WHOLE:
        memory.map_external(space, BASE, CHUNK, page=CHUNK)
        memory.unmap_external(space, BASE, CHUNK)
    elif word == PART:
        memory.map_external(space, OWN, BIG, page=BIG)
    else:
        memory.map_external(space, SECOND, BIG, page=BIG)
        memory.unmap_external(space, SECOND, BIG)
    return word


@contextmanager
def changing() -> Iterator[tuple[device.Device, GpuClient]]:
    """Yield a reader, and the client beside an innocent one."""
    opened = isolating()
    with innocent(), guilty(external=RANGE, obey=change) as made:
        gpu.command("forget")
        yield opened, made
    opened.close()
    no_trouble()


def do(made: GpuClient, word: bytes) -> None:
    made.ask(word)
    expect("answer", made.answered(), word)


def access(what: str, address: int, kind: int = gpu.FAULT_PDE) -> gpu.GpuAction:
    """Return the end of an access. Raises CheckError if it was cancelled."""
    before = gpu.tally()
    gpu.command(gpu.Fault(address, CHANNEL, veid=VEID, kind=kind).line())
    gpu.wait_for_rest()
    seen = [gpu.tally()[name] - before[name] for name in ("went-on", "cancel-va")]
    expect(f"{what}: continued, cancelled", seen, [1, 0])
    return [deed for deed in gpu.deeds() if deed.name == "went-on"][-1]


def sparse(what: str, address: int) -> None:
    deed = access(what, address)
    expect(f"{what}: address, sparse", (deed.address, deed.second), (address, 1))


def new_sink() -> str:
    """A sparse mapping elsewhere in the same 2 MiB, then both of them again."""
    with changing() as (opened, made):
        sparse("the first", STRAY)
        do(made, WHOLE)
        sparse("the second", SECOND)
        sparse("the first, which came back with it", STRAY)
        do(made, WHOLE)
        sparse("the second again", SECOND)
        do(made, WHOLE)
        sparse("the first again", STRAY)
        records = opened.read()
    seen = [(record.action, record.sinks) for record in records]
    expect("records", seen, [(Action.SUNK, 1), (Action.SUNK, 2)])
    return "2 sinks, lost 3 times"


def own_page() -> str:
    """Pages of 64 KiB that the client maps there afterwards, and may use."""
    with changing() as (opened, made):
        sparse("the sink", STRAY)
        do(made, WHOLE)
        do(made, PART)
        deed = access("its own page", OWN)
        expect("address, sparse", (deed.address, deed.second), (OWN, 0))
        sparse("the sink, which came back with it", STRAY)
        records = opened.read()
    expect("records", [record.action for record in records], [Action.SUNK])
    return "mapped"


def stays_while_made_anew() -> str:
    """A sparse mapping keeps its remaining part while it is rebuilt, also if that fails."""
    with changing() as (opened, made):
        sparse("the first", STRAY)
        sparse("the second", SECOND)
        do(made, HALF)
        with failing.failing(failing.REPLAYABLE, 2, all_of_them=True):
            gpu.command(gpu.Fault(SECOND, CHANNEL, veid=VEID).line())
            records = opened.until("the refusal", lambda record: record.action is Action.REFUSED)
            gpu.wait_for_rest()
        expect("why", records[-1].why, Why.FAILED)
        gpu.command(f"walk {GUILTY:x} {gpu.OBJECT:x} {SECOND + BIG:x}")
        walked = [deed.directory for deed in gpu.deeds() if deed.name == "walked"]
        expect("the other half, sparse", walked[-2] & 9, 8)
    return "the other half"


CHECKS = (
    Check("window-new-sink", new_sink),
    Check("window-own-page", own_page),
    Check("window-stays", stays_while_made_anew),
)
