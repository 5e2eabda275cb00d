"""Symbol versions in module files: those that a module exports, and those with which another was built.

A kernel refuses a module if its versions differ from those of the modules that it depends on. File layout:
the kernel's own scripts/mod/modpost.c and kernel/module (Linux 6.1). The section __versions has entries of
64 bytes, a number and a name. A symbol __crc_NAME is absolute, or refers to 4 bytes of a section.
"""

from __future__ import annotations

import gzip
import lzma
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kmod.errors import KmodError, Unavailable

HEADER = struct.Struct("<40xQ10xHHH")
"""Header of a 64-bit little-endian ELF file: section table, size and number of entries, section of names."""
SECTION = struct.Struct("<II8x8xQQII8xQ")
SYMBOL = struct.Struct("<IBBHQQ")
VERSION = struct.Struct("<Q56s")
SYMBOL_TABLE = 2
ABSOLUTE = 0xFFF1
UNZSTD_DEADLINE_S = 60.0
CRC = b"__crc_"


@dataclass(frozen=True, slots=True)
class Section:
    name: bytes
    kind: int
    offset: int
    size: int
    link: int


def contents(path: Path) -> bytes:
    """Return a module's ELF file, decompressed. Raises KmodError."""
    try:
        data = path.read_bytes()
        if path.suffix == ".xz":
            return lzma.decompress(data)
        if path.suffix == ".gz":
            return gzip.decompress(data)
        if path.suffix == ".zst":
            return _unzstd(path)
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise KmodError(f"cannot read {path}: {error}") from error
    return data


def _unzstd(path: Path) -> bytes:
    try:
        done = subprocess.run(["zstd", "-dcq", str(path)], capture_output=True, timeout=UNZSTD_DEADLINE_S)
    except FileNotFoundError:
        raise Unavailable(f"cannot read {path}: zstd is not installed") from None
    except subprocess.TimeoutExpired:
        raise KmodError(f"cannot read {path}: zstd took more than {UNZSTD_DEADLINE_S:g} s") from None
    if done.returncode:
        raise KmodError(f"cannot read {path}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def given(path: Path) -> dict[str, int]:
    """Return every exported symbol of a module with its version. Raises KmodError."""
    data = contents(path)
    sections = _sections(path, data)
    found = {}
    for table in sections:
        if table.kind == SYMBOL_TABLE:
            names = sections[table.link]
            for name, section, value in _symbols(data, table, names):
                if name.startswith(CRC):
                    found[name[len(CRC) :].decode()] = _crc(data, sections, section, value)
    return found


def wanted(path: Path) -> dict[str, int]:
    """Return every imported symbol of a module with its version."""
    data = contents(path)
    found = {}
    for section in _sections(path, data):
        if section.name == b"__versions":
            part = data[section.offset : section.offset + section.size]
            for crc, name in VERSION.iter_unpack(part[: len(part) // VERSION.size * VERSION.size]):
                found[name.split(b"\0")[0].decode()] = crc & 0xFFFFFFFF
    return found


def disagreements(giver: Path, user: Path) -> tuple[int, list[str]]:
    """Return (number of symbols that `user` takes from `giver`, those with other versions)."""
    gives, wants = given(giver), wanted(user)
    common = gives.keys() & wants.keys()
    return len(common), sorted(name for name in common if gives[name] != wants[name])


def _sections(path: Path, data: bytes) -> list[Section]:
    try:
        if data[:6] != b"\x7fELF\x02\x01":
            raise KmodError(f"{path} is not a module for a 64-bit little-endian machine")
        offset, size, number, names = HEADER.unpack_from(data)
        raw = [SECTION.unpack_from(data, offset + index * size) for index in range(number)]
        strings = raw[names][2]
        return [
            Section(_string(data, strings + name), kind, start, length, link)
            for name, kind, start, length, link, _, _ in raw
        ]
    except (struct.error, IndexError, ValueError) as error:
        raise KmodError(f"{path} is truncated: {error}") from error


def _symbols(data: bytes, table: Section, names: Section) -> Iterator[tuple[bytes, int, int]]:
    part = data[table.offset : table.offset + table.size]
    for name, _, _, section, value, _ in SYMBOL.iter_unpack(part):
        yield _string(data, names.offset + name), section, value


def _crc(data: bytes, sections: list[Section], section: int, value: int) -> int:
    if section == ABSOLUTE:
        return value & 0xFFFFFFFF
    return int.from_bytes(data[sections[section].offset + value :][:4], "little")


def _string(data: bytes, offset: int) -> bytes:
    return data[offset : data.index(b"\0", offset)]
