"""The software GPU as a test sees it: registration of a client with UVM, and the stub's /proc/mpsd-gpu."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from emulator.guest import uvm
from emulator.guest.check import CheckError, expect
from mpsd.gpu.nvidia import uvm_abi as abi

CONTROL = Path("/proc/mpsd-gpu")
TALLY = Path("/proc/mpsd-gpu-tally")
UUID = b"mpsd software 0".ljust(16, b"\0")
REGISTER_GPU = 37
REGISTER_GPU_VASPACE = 25
REGISTER_CHANNEL = 27
UNREGISTER_CHANNEL = 28
OBJECT = 0xAA
# The hardware's numbers (Turing): memory management unit's engines, access and fault kinds, a unit.
ENGINE_GRAPHICS = 64
ENGINE_COPY = 15
ENGINE_HOST = 32
READ, WRITE, ATOMIC, PREFETCH = range(4)
FAULT_PDE, FAULT_PDE_SIZE, FAULT_PTE, FAULT_VA_LIMIT = range(4)
FAULT_UNBOUND, FAULT_PRIVILEGE, FAULT_READ_ONLY, FAULT_WRITE_ONLY = range(4, 8)
FAULT_PITCH, FAULT_WORK_CREATION, FAULT_APERTURE, FAULT_COMPRESSION = range(8, 12)
FAULT_MEMORY_KIND, FAULT_REGION, FAULT_POISON, FAULT_ATOMIC = range(12, 16)
UNIT_INSTRUCTIONS = 0x11
WAIT_S = 60.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class GpuAction:
    """One action that UVM had the GPU do; fields as in the stub's gpu.h."""

    name: str
    address: int
    directory: int
    first: int
    second: int
    ns: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """A packet of the fault buffer. `veid` counts only for graphics; `channel` selects the instance block.

    `hub`: from a unit outside the SMs, as all except graphics; `stubborn`: no mapping lets the access
    continue.
    """

    address: int
    channel: int
    veid: int = 0
    engine: int = ENGINE_GRAPHICS
    kind: int = FAULT_PTE
    access: int = WRITE
    replayable: bool = True
    unit: int = 0
    hub: bool = False
    stubborn: bool = False

    def line(self) -> str:
        engine = self.engine + self.veid
        unit = "h" if self.hub or self.engine != ENGINE_GRAPHICS else "g"
        numbers = (self.address, self.channel, engine, self.kind, self.access, self.unit, 0)
        words = ["fault", "rn"[not self.replayable], *(f"{number:x}" for number in numbers), unit]
        return " ".join(words + ["s"] * self.stubborn)


def command(text: str) -> None:
    """Send a command. Raises OSError if the GPU refuses."""
    fd = os.open(CONTROL, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def deeds() -> list[GpuAction]:
    """Return all actions since the last "forget". Raises CheckError if some were lost."""
    rows = [line.split() for line in CONTROL.read_text().splitlines()]
    if any(row[0] == "lost" for row in rows):
        raise CheckError("more actions than the stub keeps")
    return [GpuAction(row[2], *(int(word, 16) for word in row[3:])) for row in rows if row[0] == "deed"]


def tally() -> dict[str, int]:
    """Return the number of actions of each name since the last "forget"."""
    rows = (line.split() for line in TALLY.read_text().splitlines())
    return {name: int(count) for name, count in rows}


def digest(client: int) -> tuple[int, int]:
    """Return a digest of a client's page tables, and the number of valid entries."""
    command(f"digest {client:x} {OBJECT:x}")
    said = [deed for deed in deeds() if deed.name == "digested"][-1]
    return said.address, said.first


def directories() -> dict[int, int]:
    """Return the page directory of each client's address space, by client handle; UVM's own has handle 0."""
    rows = [line.split() for line in CONTROL.read_text().splitlines()]
    return {int(row[1], 16): int(row[3], 16) for row in rows if row[0] == "space"}


def wait_for(name: str, count: int = 1) -> list[GpuAction]:
    """Return all actions once there are this many of a name. Raises CheckError."""
    return wait_for_any((name,), count)


def wait_for_any(names: tuple[str, ...], count: int = 1) -> list[GpuAction]:
    """Return all actions once there are this many of these names together. Raises CheckError."""
    wait_for_tally(names, count)
    return deeds()


def wait_for_tally(names: tuple[str, ...], count: int, within_s: float = WAIT_S) -> None:
    """Wait like wait_for_any(), without returning the actions. Raises CheckError."""
    deadline = time.monotonic() + within_s
    while True:
        seen = tally()
        if sum(seen[name] for name in names) >= count:
            return
        if time.monotonic() > deadline:
            said = {name: number for name, number in seen.items() if number}
            raise CheckError(f"not {count} of {', '.join(names)} within {within_s:g} s; seen: {said}")
        time.sleep(POLL_S)


def wait_for_rest(within_s: float = WAIT_S) -> None:
    """Wait until no access stalls any more. Raises CheckError."""
    deadline = time.monotonic() + within_s
    while tally()["standing"]:
        if time.monotonic() > deadline:
            said = {name: number for name, number in tally().items() if number}
            raise CheckError(f"accesses still stall after {within_s:g} s; seen: {said}")
        time.sleep(POLL_S)


def channel_handle(
    channel: int,
    *,
    group: int = 1,
    veid: int = 0,
    copies: bool = False,
    buffers: bool = False,
    plain: bool = False,
) -> int:
    """Return a channel handle with the meaning that the stub expects. `plain`: in no subcontext."""
    return channel | group << 8 | veid << 16 | copies << 24 | buffers << 25 | plain << 26


def register(space: int) -> None:
    """Register the GPU with UVM. Raises CheckError."""
    status = uvm.call(space, REGISTER_GPU, UUID + struct.pack("=iiiII", 0, 0, -1, 0, 0), 36)
    expect("UVM_REGISTER_GPU", status, abi.STATUS_OK)


def register_client(space: int, client: int, channel: int, buffers: tuple[int, int] = (0, 0)) -> None:
    """Register the GPU, a page directory of the space, and one channel by its handle. Raises CheckError.

    `buffers`: base and bytes of the addresses that the channel's context buffers may have.
    """
    register(space)
    given = UUID + struct.pack("=iII", -1, client, OBJECT)
    expect("UVM_REGISTER_GPU_VASPACE", uvm.call(space, REGISTER_GPU_VASPACE, given, 28), abi.STATUS_OK)
    register_channel(space, client, channel, buffers)


def register_channel(space: int, client: int, channel: int, buffers: tuple[int, int] = (0, 0)) -> None:
    """Register another channel of a registered client. Raises CheckError."""
    given = UUID + struct.pack("=iIIxxxxQQ", -1, client, channel, *buffers)
    expect("UVM_REGISTER_CHANNEL", uvm.call(space, REGISTER_CHANNEL, given, 48), abi.STATUS_OK)


def unregister_channel(space: int, client: int, channel: int) -> None:
    """Unregister a channel. Raises CheckError."""
    given = UUID + struct.pack("=II", client, channel)
    expect("UVM_UNREGISTER_CHANNEL", uvm.call(space, UNREGISTER_CHANNEL, given, 24), abi.STATUS_OK)
