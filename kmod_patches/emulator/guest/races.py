"""Faults that race with the end or a change of an address space, repeated from a seed."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from itertools import cycle

from emulator.guest import checks, gpu, memory, uvm
from emulator.guest.beside import innocent
from emulator.guest.check import Check, CheckError, expect
from emulator.guest.gpuchecks import no_trouble
from emulator.guest.gpuclient import GpuClient, client
from emulator.guest.isolation import GUILTY, isolating, stray_store
from emulator.guest.memory import CHUNK, PAGE
from mpsd.gpu.nvidia import uvm_abi as abi
from mpsd.gpu.nvidia.kernel_abi import Action

SEED = 20_260_000
RANGE = (0x7F00_1200_0000, CHUNK)
ROUNDS = 20
NEIGHBOUR_ROUNDS = 30
FAULTS = 60
STEPS = 12
ENDS = ("went-on", "cancel-va", "cancel-instance", "reported")
DEINITIALIZE = 0x3000_0002
GO = b"g"


def faults(rng: random.Random, count: int) -> list[gpu.Fault]:
    """Return accesses of all kinds at pages of the range and around it."""
    found = []
    for _ in range(count):
        page = rng.randrange(-64, CHUNK // PAGE + 64)
        access = rng.choice((gpu.READ, gpu.WRITE, gpu.ATOMIC))
        found.append(gpu.Fault(RANGE[0] + page * PAGE, 1, veid=3, access=access))
    return found


def send(some: list[gpu.Fault]) -> None:
    for fault in some:
        gpu.command(fault.line())


def taken(fault: gpu.Fault) -> bool:
    """Send a fault and return whether its channel still exists. A full fault buffer drops the access."""
    try:
        gpu.command(fault.line())
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ENOSPC):
            raise
        return error.errno == errno.ENOSPC
    return True


def send_till_gone(some: list[gpu.Fault]) -> None:
    """Send faults until the channel is gone, so also at that very moment. Raises CheckError if it stays."""
    deadline = time.monotonic() + gpu.WAIT_S
    for fault in cycle(some):
        if not taken(fault):
            return
        if time.monotonic() > deadline:
            raise CheckError(f"the channel still exists after {gpu.WAIT_S:g} s")


def change_neighbours(seed: int) -> Callable[[int, bytes], bytes]:
    """Map pages in the range and unmap them, at once and in parts."""

    def obey(space: int, word: bytes) -> bytes:
        rng = random.Random(seed)
        for _ in range(STEPS):
            first = rng.randrange(0, CHUNK // PAGE - 32)
            base, length = RANGE[0] + first * PAGE, PAGE * rng.randrange(1, 32)
            memory.map_external(space, base, length)
            if rng.random() < 0.7:
                memory.unmap_external(space, base, length)
        return word

    return obey


def neighbours() -> str:
    """Accesses in an external range with changing pages: each ends, and none harms another client."""
    opened = isolating()
    ended = {name: 0 for name in ENDS}
    with innocent() as other:
        for number in range(NEIGHBOUR_ROUNDS):
            seed = SEED + number
            made = client(GUILTY, 1, veid=3, external=RANGE, obey=change_neighbours(seed))
            with made as guilty:
                gpu.command("forget")
                guilty.ask(GO)
                send(faults(random.Random(seed), FAULTS))
                gpu.wait_for_rest()
                expect("answer", guilty.answered(), GO)
                for name in ENDS:
                    ended[name] += gpu.tally()[name]
                other.untouched()
                no_trouble()
    why = sorted({record.why.name for record in opened.read() if record.action is Action.REFUSED})
    opened.close()
    return f"{NEIGHBOUR_ROUNDS} rounds, seed {SEED}: {said(ended)}; refused: {', '.join(why) or 'none'}"


def said(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def ending(obey: Callable[[int, bytes], bytes] | None, act: Callable[[GpuClient], None]) -> str:
    """Faults before, during and after the end of a client's address space, beside a continuing client."""
    opened = isolating()
    with innocent() as other:
        for number in range(ROUNDS):
            rng = random.Random(SEED + number)
            early = rng.randrange(FAULTS)
            with client(GUILTY, 1, veid=3, external=RANGE, obey=obey) as guilty:
                gpu.command("forget")
                masked = rng.random() < 0.5
                if masked:
                    gpu.command("mask")
                some = faults(rng, FAULTS)
                send(some[:early])
                act(guilty)
                send_till_gone(some[early:])
                if masked:
                    gpu.command("unmask")
                settle(guilty, obey is not None)
                gpu.wait_for_rest()
                other.untouched()
            no_trouble()
    opened.close()
    stray_store()
    return f"{ROUNDS} rounds, seed {SEED}"


def settle(guilty: GpuClient, answers: bool) -> None:
    """Wait until the client has done it, or has ended."""
    if answers:
        expect("answer", guilty.answered(), GO)
    else:
        expect("gone", guilty.ended(), True)


def kill(guilty: GpuClient) -> None:
    signal.pidfd_send_signal(guilty.pidfd, signal.SIGKILL)


def ask(guilty: GpuClient) -> None:
    guilty.ask(GO)


def unregister(request: int) -> Callable[[int, bytes], bytes]:
    def obey(space: int, word: bytes) -> bytes:
        memory.unregister(space, request)
        return word

    return obey


def deinitialize(space: int, word: bytes) -> bytes:
    """End like UVM's own library: the request, and both descriptors closed."""
    expect("UVM_DEINITIALIZE", uvm.call(space, DEINITIALIZE, bytes(8), 4), abi.UNWRITTEN)
    for fd in sorted(uvm.descriptors()):
        os.close(fd)
    return word


def alive() -> str:
    """Check that no client is left over, and that the kernel logged nothing."""
    log = checks.kernel_log()
    if len(gpu.directories()) > 1:
        raise CheckError(f"left over: {gpu.directories()}")
    return log


CHECKS = (
    Check("race-neighbours", neighbours, 600.0),
    Check("race-exit", lambda: ending(None, kill), 600.0),
    Check("race-unregister-space", lambda: ending(unregister(memory.UNREGISTER_GPU_VASPACE), ask), 600.0),
    Check("race-unregister-gpu", lambda: ending(unregister(memory.UNREGISTER_GPU), ask), 600.0),
    Check("race-deinitialize", lambda: ending(deinitialize, ask), 600.0),
    Check("nobody-left", alive),
)
