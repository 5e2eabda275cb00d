"""A second driver instance in one process: two ways to separate its bind() and getenv().

Slots: the relocated slots of the loaded instance are overwritten. Symbols: in the file, before it is loaded,
the undefined symbols get names that only our helper exports. A name is a tail of the file's own soname, so
nothing in it moves. The process's environment and its other libraries stay as they are. Only for x86-64.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HELPER = Path(__file__).with_name("bind.c")
# Symbol of the driver -> function of the helper, and how much of the soname's head its new name lacks.
REPLACED = {
    "bind": ("failover_bind", 1),
    "getenv": ("failover_getenv", 2),
    "secure_getenv": ("failover_secure_getenv", 3),
}
COUNTS = ("binds", "renamed", "environment reads", "pipe reads", "pipe reads of other threads")

_LOAD, _DYNAMIC, _TLS, _RELRO = 1, 2, 7, 0x6474E552
_STRTAB, _SYMTAB, _RELA, _RELASZ, _SONAME, _PLTRELSZ, _JMPREL = 5, 6, 7, 8, 14, 2, 23
_FLAGS, _FLAGS_1, _BIND_NOW, _NOW, _VERSYM = 30, 0x6FFFFFFB, 0x8, 0x1, 0x6FFFFFF0
_STATIC_TLS = 0x10
_SYMBOL_BYTES, _RELOCATION = 24, struct.Struct("<QQq")
_ABSOLUTE, _GLOB_DAT, _JUMP_SLOT = 1, 6, 7
_KINDS = {_ABSOLUTE: "64", _GLOB_DAT: "GLOB_DAT", _JUMP_SLOT: "JUMP_SLOT"}
_ANY_VERSION = 1


class Slot(NamedTuple):
    """A relocated word that holds the address of `symbol`; `where` is relative to the load address."""

    symbol: str
    number: int
    where: int
    kind: str
    relro: bool


class Elf:
    """The dynamic part of a 64-bit little-endian shared library. Raises ValueError for anything else."""

    def __init__(self, data: bytes | bytearray | mmap.mmap) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        self.data = data
        begin, size, count = (*struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54))
        heads = [struct.unpack_from("<IIQQQQQQ", data, begin + size * n) for n in range(count)]
        self._loads = [(h[3], h[2], h[5]) for h in heads if h[0] == _LOAD]
        self._relro = [(h[3], h[3] + h[6]) for h in heads if h[0] == _RELRO]
        self.tls_bytes = sum(h[6] for h in heads if h[0] == _TLS)
        found = [h for h in heads if h[0] == _DYNAMIC]
        if not found:
            raise ValueError("no dynamic section")
        self.dynamic = dict(struct.iter_unpack("<QQ", data[found[0][2] : found[0][2] + found[0][5]]))

    def offset(self, address: int) -> int:
        """Return where in the file a virtual address is."""
        for begin, at, size in self._loads:
            if begin <= address < begin + size:
                return int(address - begin + at)
        raise ValueError(f"address {address:#x} is not in the file")

    def text(self, name: int) -> str:
        begin = self.offset(self.dynamic[_STRTAB]) + name
        return bytes(self.data[begin : self.data.find(b"\0", begin)]).decode()

    @property
    def soname(self) -> str:
        return self.text(self.dynamic[_SONAME])

    @property
    def binds_now(self) -> bool:
        flags, more = self.dynamic.get(_FLAGS, 0), self.dynamic.get(_FLAGS_1, 0)
        return bool(flags & _BIND_NOW or more & _NOW)

    @property
    def static_tls(self) -> bool:
        """Return whether it needs static thread-local memory, which is limited for late libraries."""
        return bool(self.dynamic.get(_FLAGS, 0) & _STATIC_TLS)

    def name_at(self, index: int) -> int:
        """Return the file offset of the symbol's name field."""
        return self.offset(self.dynamic[_SYMTAB]) + index * _SYMBOL_BYTES

    def name(self, index: int) -> str:
        return self.text(struct.unpack_from("<I", self.data, self.name_at(index))[0])

    def stands_alone(self, index: int) -> bool:
        """Return whether the name is no tail of another: only then could it be renamed in place."""
        begin = (
            self.offset(self.dynamic[_STRTAB]) + struct.unpack_from("<I", self.data, self.name_at(index))[0]
        )
        return bytes(self.data[begin - 1 : begin]) == b"\0"

    def slots(self, wanted: tuple[str, ...]) -> list[Slot]:
        """Yield every relocated word of these undefined symbols."""
        names: dict[int, str] = {}
        found = []
        for where, index, kind in self._relocations():
            if kind not in _KINDS or not index:
                continue
            symbol = names.setdefault(index, self.name(index))
            if symbol in wanted:
                relro = any(begin <= where < end for begin, end in self._relro)
                found.append(Slot(symbol, index, where, _KINDS[kind], relro))
        return found

    def _relocations(self) -> Iterator[tuple[int, int, int]]:
        for table, size in ((_RELA, _RELASZ), (_JMPREL, _PLTRELSZ)):
            if table in self.dynamic:
                begin = self.offset(self.dynamic[table])
                for where, info, _ in _RELOCATION.iter_unpack(self.data[begin : begin + self.dynamic[size]]):
                    yield where, info >> 32, info & 0xFFFFFFFF

    def rename(self, slot: Slot, removed: int) -> str:
        """Rename the symbol to the soname without `lacking` characters. Return the new name.

        The symbol may have any version.
        """
        assert isinstance(self.data, mmap.mmap | bytearray)
        struct.pack_into("<I", self.data, self.name_at(slot.number), self.dynamic[_SONAME] + removed)
        if _VERSYM in self.dynamic:
            at = self.offset(self.dynamic[_VERSYM]) + 2 * slot.number
            struct.pack_into("<H", self.data, at, _ANY_VERSION)
        return self.name(slot.number)


def real_library() -> Path:
    """Return the libcuda that this machine's loader finds. Loads it, which starts nothing."""
    ctypes.CDLL("libcuda.so.1")
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libcuda.so" in path:
            return Path(path).resolve()
    raise FileNotFoundError("libcuda.so.1 is not mapped")


def describe(path: Path) -> dict[str, Any]:
    """Return what the file says about the calls to be replaced."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        elf = Elf(data)
        slots = elf.slots(tuple(REPLACED))
        return {
            "soname": elf.soname,
            "binds now": elf.binds_now,
            "tls bytes": elf.tls_bytes,
            "static tls": elf.static_tls,
            "slots": [[s.symbol, s.kind, "relro" if s.relro else "writable"] for s in slots],
            "name stands alone": {s.symbol: elf.stands_alone(s.number) for s in slots},
        }


def copy_plain(source: Path, target: Path) -> Path:
    shutil.copyfile(source, target)
    return target


def copy_renamed(source: Path, target: Path) -> Path:
    """Return a driver file with the helper's names for its undefined bind, getenv and secure_getenv."""
    copy_plain(source, target)
    with target.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as data:
        elf = Elf(data)
        for slot in elf.slots(tuple(REPLACED)):
            if elf.name(slot.number) == slot.symbol:
                elf.rename(slot, REPLACED[slot.symbol][1])
    return target


def build_helper(source: Path, target: Path) -> Path:
    """Compile the helper for instances of this library. Raises CalledProcessError."""
    soname = describe(source)["soname"]
    names = {symbol: soname[removed:] for symbol, (_, removed) in REPLACED.items()}
    defines = [f'-D{symbol.upper()}_NAME="{name}"' for symbol, name in names.items()]
    command = ["gcc", "-shared", "-fPIC", "-O2", "-Wall", *defines, "-o", str(target), str(HELPER)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return target


class Helper:
    """Return the loaded helper. Libraries that are loaded after it find its names."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.library.failover_begin.argtypes = [ctypes.c_char_p, ctypes.c_int]
        self.library.failover_count.restype = ctypes.c_ulong

    def address(self, function: str) -> int:
        return ctypes.cast(getattr(self.library, function), ctypes.c_void_p).value or 0

    def counts(self) -> dict[str, int]:
        return {name: int(self.library.failover_count(n)) for n, name in enumerate(COUNTS)}

    def within(self, pipe: Path, number: int, act: Callable[[], Any]) -> Any:
        """Call `act` with the instance's environment in place, on this thread."""
        directory = os.fsencode(pipe)
        self.library.failover_begin(directory, number)
        try:
            return act()
        finally:
            self.library.failover_end()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def overwrite_slots(library: ctypes.CDLL, path: Path, helper: Helper) -> dict[str, Any]:
    """Point the loaded instance's slots at the helper; return what was done. Raises OSError."""
    base = ctypes.c_uint64.from_address(library._handle).value  # link_map.l_addr
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        slots = Elf(data).slots(tuple(REPLACED))
    page = mmap.PAGESIZE
    for slot in slots:
        at = base + slot.where
        begin = at // page * page
        if _libc.mprotect(begin, page, 3):
            raise OSError(ctypes.get_errno(), f"mprotect of the slot of {slot.symbol}")
        ctypes.c_uint64.from_address(at).value = helper.address(REPLACED[slot.symbol][0])
        if slot.relro and _libc.mprotect(begin, page, 1):
            raise OSError(ctypes.get_errno(), f"mprotect of the slot of {slot.symbol}")
    return {"slots written": len(slots), "behind relro": sum(slot.relro for slot in slots)}
