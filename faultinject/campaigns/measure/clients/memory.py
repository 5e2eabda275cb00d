"""CUDA memory calls that a client makes on command while its address space is guarded."""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.clients.cuda import Cuda, CudaError

MIB = 1 << 20
_MAP_32BIT = 0x40

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.sbrk.restype = ctypes.c_void_p
libc.sbrk.argtypes = [ctypes.c_long]
libc.dlclose.argtypes = [ctypes.c_void_p]


def map_pages(size: int, *, fd: int = -1, flags: int = mmap.MAP_PRIVATE, address: int = 0) -> int:
    """mmap(2), readable and writable; the address."""
    if fd < 0:
        flags |= mmap.MAP_ANONYMOUS
    found = libc.mmap(address or None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(found)


def lives_at(address: int) -> str:
    """The line of /proc/self/maps that covers an address, shortened."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            if begin <= address < end:
                words = line.split(maxsplit=5)
                return f"{words[0]} {words[1]} {words[5].strip() if len(words) > 5 else ''}"
    return "unmapped"


class Places:
    """Memory of each kind that a program may register. Made before the guard goes on."""

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="mm-pages-")
        shm = os.open("/dev/shm/mm-pages", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.unlink("/dev/shm/mm-pages")
        memfd = os.memfd_create("mm")
        plain = os.open(f"{self.directory}/file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for fd in (shm, memfd, plain):
            os.ftruncate(fd, 4 * MIB)
        brk = int(libc.sbrk(MIB + 8192))
        maps = Path("/proc/self/maps").read_text().splitlines()
        stack = next(line for line in maps if "[stack]" in line)
        top = int(stack.split()[0].split("-")[1], 16)
        self.at: dict[str, int] = {
            "brk heap": (brk + 8191) & ~4095,
            "stack": (top - 0x8000) & ~4095,
            "shm file": map_pages(4 * MIB, fd=shm, flags=mmap.MAP_SHARED),
            "memfd": map_pages(4 * MIB, fd=memfd, flags=mmap.MAP_SHARED),
            "file shared": map_pages(4 * MIB, fd=plain, flags=mmap.MAP_SHARED),
            "file private": map_pages(4 * MIB, fd=plain, flags=mmap.MAP_PRIVATE),
            "anonymous": map_pages(4 * MIB),
            "MAP_32BIT": map_pages(4 * MIB, flags=mmap.MAP_PRIVATE | _MAP_32BIT),
            "malloc 1 MiB": (int(libc.malloc(MIB + 8192)) + 4095) & ~4095,
        }
        self.size = {name: 16384 if name in ("stack",) else MIB for name in self.at}


def register(cuda: Cuda, places: Places, name: str) -> dict[str, Any]:
    """Register host pages, store into them from the GPU, unregister."""
    address, size = places.at[name], places.size[name]
    code = cuda.code_of("cuMemHostRegister", address, size, 0)
    row: dict[str, Any] = {"register": code, "at": hex(address)}
    if code != "CUDA_SUCCESS":
        return row
    device = int(cuda("cuMemHostGetDevicePointer", address, 0))
    row["same_address"] = device == address
    cuda.launch("store", device + 64)
    cuda.sync()
    row["stored"] = ctypes.c_uint32.from_address(address + 64).value
    ctypes.c_uint32.from_address(address + 64).value = 0
    cuda("cuMemHostUnregister", address)
    return row


def allocate(cuda: Cuda, gib: int) -> dict[str, Any]:
    """Every way to get memory, each used once; which addresses came out and which calls failed."""
    d = cuda.driver
    row: dict[str, Any] = {}

    def attempt(name: str, make: Callable[[], int], size: int, free: str) -> None:
        try:
            address = make()
        except CudaError as error:
            row[name] = str(error)
            return
        try:
            cuda.launch("fill", address, size // 4, 5, grid=264, block=256)
            cuda.sync()
            row[name] = f"ok {address:#x}"
        except CudaError as error:
            row[name] = f"{address:#x} unusable: {error}"
            return
        if free == "reserve":
            cuda("cuMemUnmap", address, size)
            cuda("cuMemAddressFree", address, size)
        elif free:
            cuda(free, address)

    flags = d.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
    attempt("cuMemAlloc 1 GiB", lambda: int(cuda("cuMemAlloc", gib << 30)), gib << 30, "cuMemFree")
    for index in range(3):
        attempt(f"cuMemAlloc 16 MiB {index}", lambda: int(cuda("cuMemAlloc", 16 * MIB)), 16 * MIB, "")
    attempt(
        "cuMemHostAlloc 256 MiB",
        lambda: int(cuda("cuMemHostAlloc", 256 * MIB, 0)),
        256 * MIB,
        "cuMemFreeHost",
    )
    attempt(
        "cuMemAllocHost 1 GiB", lambda: int(cuda("cuMemAllocHost", gib << 30)), gib << 30, "cuMemFreeHost"
    )
    attempt(
        "cuMemAllocManaged 64 MiB",
        lambda: int(cuda("cuMemAllocManaged", 64 * MIB, flags)),
        64 * MIB,
        "cuMemFree",
    )
    attempt(
        "cuMemAllocManaged 1 GiB",
        lambda: int(cuda("cuMemAllocManaged", gib << 30, flags)),
        gib << 30,
        "cuMemFree",
    )
    attempt("VMM 2 MiB", lambda: cuda.map(cuda.create_shareable()[0]), 2 * MIB, "reserve")

    def anonymous() -> int:
        address = map_pages(gib << 30)
        cuda("cuMemHostRegister", address, gib << 30, 0)
        return address

    attempt("mmap 1 GiB and register", anonymous, gib << 30, "cuMemHostUnregister")
    return row


class Session:
    """State that outlasts one command: a big file mapping, a library."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.places = Places()
        self.big: tuple[int, int] | None = None
        self.library: Any = None

    def do(self, words: list[str]) -> dict[str, Any]:
        command = words[0]
        if command == "register":
            return {name: register(self.cuda, self.places, name) for name in self.places.at}
        if command == "allocate":
            return allocate(self.cuda, 1)
        if command == "map-file":
            return self._map_file(int(words[1]) << 20)
        if command == "unmap-file":
            assert self.big is not None
            libc.munmap(*self.big)
            return {"unmapped": hex(self.big[0])}
        if command == "land":
            return self._land(words[1])
        if command == "dlopen":
            self.library = ctypes.CDLL(ctypes.util.find_library("sqlite3") or "libsqlite3.so.0")
            return {"loaded": True}
        if command == "dlclose":
            return {"closed": libc.dlclose(self.library._handle)}
        if command == "managed":
            address = int(self.cuda("cuMemAllocManaged", int(words[1]) * MIB, 1))
            return {"at": hex(address)}
        raise ValueError(command)

    def _map_file(self, size: int) -> dict[str, Any]:
        fd = os.open(f"{self.places.directory}/big", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, size)
        address = map_pages(size, fd=fd, flags=mmap.MAP_PRIVATE)
        os.close(fd)
        self.big = (address, size)
        return {"at": hex(address), "size": size}

    def _land(self, how: str) -> dict[str, Any]:
        """Allocate so that the driver is likely, or certain, to land where the big file was."""
        assert self.big is not None
        address, size = self.big
        cuda = self.cuda
        row: dict[str, Any] = {"hole": hex(address), "covered_now_by": lives_at(address)}
        try:
            if how == "reserve":
                got = int(cuda("cuMemAddressReserve", size, 0, address, 0))
                row |= {"reserved": hex(got), "in_hole": got == address}
                handle, _ = cuda.create_shareable()
                cuda("cuMemMap", got, 2 * MIB, 0, handle, 0)
                access = cuda.driver.CUmemAccessDesc()
                access.location.type = cuda.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
                access.location.id = 0
                access.flags = cuda.driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                cuda("cuMemSetAccess", got, 2 * MIB, [access], 1)
                cuda.launch("store", got)
                cuda.sync()
                row["stored"] = int.from_bytes(cuda.read(got, 4), "little")
                cuda("cuMemUnmap", got, 2 * MIB)
                cuda("cuMemAddressFree", got, size)
            elif how == "register":
                got = map_pages(size, address=address)
                row |= {"mapped": hex(got), "in_hole": got == address}
                cuda("cuMemHostRegister", got, 2 * MIB, 0)
                cuda.launch("store", got + 64)
                cuda.sync()
                row["stored"] = ctypes.c_uint32.from_address(got + 64).value
                cuda("cuMemHostUnregister", got)
                libc.munmap(got, size)
            elif how in ("managed", "alloc", "pinned"):
                call, arguments = {
                    "managed": ("cuMemAllocManaged", (size, 1)),
                    "alloc": ("cuMemAlloc", (size,)),
                    "pinned": ("cuMemHostAlloc", (size, 0)),
                }[how]
                got = int(cuda(call, *arguments))
                row |= {"at": hex(got), "in_hole": address <= got < address + size}
                cuda.launch("store", got + 64)
                cuda.sync()
                row["used"] = True
                cuda("cuMemFreeHost" if how == "pinned" else "cuMemFree", got)
        except (CudaError, OSError) as error:
            row["failed"] = str(error)
        return row


def serve(cuda: Cuda, emit: Callable[..., None], _pointer_to: object) -> None:
    """Answer commands from stdin until its end."""
    session = Session(cuda)
    emit("ready", pid=os.getpid(), places={name: lives_at(at) for name, at in session.places.at.items()})
    for line in sys.stdin:
        words = line.split()
        began = time.monotonic()
        try:
            answer = session.do(words)
        except (CudaError, OSError) as error:
            answer = {"failed": str(error)}
        emit("answer", command=line.strip(), ms=round((time.monotonic() - began) * 1e3, 1), answer=answer)
