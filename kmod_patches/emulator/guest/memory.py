"""Contents of a client's address space: external and managed memory, special ranges."""

from __future__ import annotations

import struct
from enum import IntEnum
from pathlib import Path

from emulator.guest import gpu, system, uvm
from emulator.guest.check import expect
from mpsd.gpu.nvidia import uvm_abi as abi

MAP_EXTERNAL = 33
MAP_SKED_REGION = 65
UNMAP_EXTERNAL = 66
ALLOC_SEMAPHORE_POOL = 68
UNREGISTER_GPU_VASPACE = 26
UNREGISTER_GPU = 38
ATTRIBUTES = struct.Struct("=16sIIIII")
PAGE = 4096
CHUNK = 2 << 20
PAGES = (PAGE, 0x10000, CHUNK)


class Mapping(IntEnum):
    """UvmGpuMappingType."""

    DEFAULT = 0
    READ_WRITE_ATOMIC = 1
    READ_WRITE = 2
    READ_ONLY = 3


def attribute_slots() -> int:
    """Return the number of GPU attributes in a request: 32, from 545 on 256."""
    return 256 if abi.branch_of(Path("/sys/module/nvidia/version").read_text().strip()) >= 545 else 32


def map_external(
    space: int, base: int, length: int, kind: Mapping = Mapping.DEFAULT, *, page: int = PAGE
) -> None:
    """Map memory with pages of that size (the stub knows three) in an external range. Raises CheckError."""
    slots = attribute_slots() * ATTRIBUTES.size
    attributes = ATTRIBUTES.pack(gpu.UUID, kind, 0, 0, 0, 0).ljust(slots, b"\0")
    given = (
        struct.pack("=QQQ", base, length, 0)
        + attributes
        + struct.pack("=QiIII", 1, -1, gpu.OBJECT, 4 + PAGES.index(page), 0)
    )
    expect("UVM_MAP_EXTERNAL_ALLOCATION", uvm.call(space, MAP_EXTERNAL, given, len(given) - 4), abi.STATUS_OK)


def unmap_external(space: int, base: int, length: int) -> None:
    """Unmap external memory. Raises CheckError."""
    given = struct.pack("=QQ", base, length) + gpu.UUID
    expect("UVM_UNMAP_EXTERNAL", uvm.call(space, UNMAP_EXTERNAL, given, 32), abi.STATUS_OK)


def semaphore_pool(space: int, base: int) -> None:
    """Create a semaphore pool of 64 KiB. Raises CheckError."""
    slots = attribute_slots() * ATTRIBUTES.size
    given = struct.pack("=QQ", base, 0x10000) + bytes(slots) + struct.pack("=QII", 0, 0, 0)
    expect("UVM_ALLOC_SEMAPHORE_POOL", uvm.call(space, ALLOC_SEMAPHORE_POOL, given, len(given) - 8), 0)


def sked_region(space: int, base: int) -> None:
    """Map one page with accesses that go to the kernel scheduler. Raises CheckError."""
    given = struct.pack("=QQ", base, PAGE) + gpu.UUID
    status = uvm.call(space, MAP_SKED_REGION, given, 32)
    expect("UVM_MAP_DYNAMIC_PARALLELISM_REGION", status, abi.STATUS_OK)


def managed(space: int, base: int, length: int = CHUNK) -> None:
    """Map managed memory at that address, for the CPU too. Raises OSError."""
    system.map_at(space, base, length)


def unregister(space: int, request: int) -> None:
    """Unregister the GPU or its address space. Raises CheckError."""
    expect(f"UVM request {request}", uvm.call(space, request, gpu.UUID, 16), abi.STATUS_OK)
