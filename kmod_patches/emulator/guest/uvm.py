"""/dev/nvidia-uvm from a client's side: address spaces, and the tests that are built into the module."""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from emulator.guest.check import expect
from mpsd.gpu.nvidia import uvm_abi as abi

DEVICE = "/dev/nvidia-uvm"
INITIALIZE = 0x30000001
MM_INITIALIZE = 75
INJECT_EVENT = 228
MULTI_PROCESS_SHARING = 2
# Larger than any of the structures: the module copies as much as its own structure has.
BUFFER_BYTES = 256


@dataclass(frozen=True, slots=True)
class Builtin:
    """One of UVM's own tests: ioctl number, packed input, and offset of the status."""

    name: str
    request: int
    given: bytes = b""
    status_at: int = 0


# Tests that need no GPU. Numbers and structures: uvm_test_ioctl.h of 535 to 555, the same in all.
BUILTINS = (
    Builtin("rng", 201),
    Builtin("range-tree", 202),
    Builtin("page-tree", 210),
    Builtin("locks", 218),
    Builtin("perf-utils", 219),
    Builtin("kvmalloc", 220),
    Builtin("perf-events", 223),
    # verbose, seed, iterations
    Builtin("range-allocator", 225, struct.pack("=III", 0, 1, 1000), 12),
    # iterations
    Builtin("thread-context", 281, struct.pack("=I", 4), 4),
    Builtin("rb-tree", 286),
    # iterations, largest key, nodes at most, seed
    Builtin("rb-tree-random", 287, struct.pack("=QQII", 1000, 1 << 20, 64, 1), 24),
)


def call(fd: int, request: int, given: bytes, status_at: int) -> int:
    """Make one ioctl and return its status, abi.UNWRITTEN if the module left it alone. Raises OSError."""
    buffer = bytearray(given.ljust(BUFFER_BYTES, b"\0"))
    struct.pack_into("=I", buffer, status_at, abi.UNWRITTEN)
    fcntl.ioctl(fd, request, buffer, True)
    return abi.read_u32(buffer, status_at)


def open_space(*, shared: bool = False) -> int:
    """Open a new address space; `shared`: it outlives its process's memory. Raises CheckError."""
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    flags = MULTI_PROCESS_SHARING if shared else 0
    expect("UVM_INITIALIZE", call(fd, INITIALIZE, struct.pack("=Q", flags), 8), abi.STATUS_OK)
    return fd


def pin_memory(space: int) -> int:
    """Open the second descriptor of a CUDA process, which pins its memory. Raises CheckError."""
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    expect("UVM_MM_INITIALIZE", call(fd, MM_INITIALIZE, struct.pack("=i", space), 4), abi.STATUS_OK)
    return fd


def descriptors() -> set[int]:
    """Return this process's descriptors of UVM's device."""
    links = {int(link.name): os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
    return {fd for fd, target in links.items() if target == DEVICE}


def run_builtin(test: Builtin) -> str:
    """Run one of UVM's own tests in an address space of its own. Raises CheckError."""
    space = open_space()
    try:
        status = call(space, test.request, test.given, test.status_at)
    finally:
        os.close(space)
    expect(f"UVM test {test.request}", status, abi.STATUS_OK)
    return f"ioctl {test.request}"


def inject_fatal(space: int, branch: int, address: int) -> None:
    """Have UVM record a fatal fault (invalid PTE, write, invalid address) of `space`. Raises CheckError.

    `branch` is the driver's: the structure has a version field from 550 on.
    """
    entry = struct.pack("=BBBBBxxxQ", abi.EVENT_FATAL_FAULT, 2, 2, 1, 1, address)
    if branch >= 550:
        given, status_at = struct.pack("=72sII", entry, 1, 1), 80
    else:
        given, status_at = struct.pack("=64sI", entry, 1), 68
    expect("inject a fatal fault", call(space, INJECT_EVENT, given, status_at), abi.STATUS_OK)
