"""Code images as nvcc writes them, made byte by byte, with a text for the stand-in driver in them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

ELF, PTX = 2, 1
ZSTD, LZ4 = 0x8000, 0x2000
TEXT = b"standin module\nkernel count count 0\nkernel add add 0\nglobal counter 4\nglobal other 64\n\n"
"""Kernel `count` adds one to the first variable."""

_SYMTAB, _STRTAB, _NOBITS, _PROGBITS = 2, 3, 8, 1
_OBJECT, _FUNC = 1, 2
_SECTION = struct.Struct("<2I4Q2I2Q")
_SYMBOL = struct.Struct("<I2BH2Q")


def _strings(texts: Sequence[str]) -> tuple[bytes, dict[str, int]]:
    data, places = b"\0", {"": 0}
    for text in texts:
        places[text] = len(data)
        data += text.encode() + b"\0"
    return data, places


def elf(variables: Sequence[str], *, undefined: Sequence[str] = (), text: bytes = TEXT) -> bytes:
    """Return an ELF file (elf(5)): variables in .nv.global, and undefined functions."""
    names, at = _strings([*variables, *undefined])
    symbols = _SYMBOL.pack(0, 0, 0, 0, 0, 0)
    symbols += b"".join(_SYMBOL.pack(at[name], _OBJECT, 0, 4, 0, 4) for name in variables)
    symbols += b"".join(_SYMBOL.pack(at[name], 1 << 4 | _FUNC, 0, 0, 0, 0) for name in undefined)
    heads = [".shstrtab", ".strtab", ".symtab", ".nv.global", ".text"]
    section_names, place = _strings(heads)
    parts = [section_names, names, symbols, b"", text]
    kinds = [_STRTAB, _STRTAB, _SYMTAB, _NOBITS, _PROGBITS]
    table, data, offset = bytes(_SECTION.size), b"", 64
    for name, part, kind in zip(heads, parts, kinds, strict=True):
        size = 4 * len(variables) if kind == _NOBITS else len(part)
        step = _SYMBOL.size if kind == _SYMTAB else 0
        table += _SECTION.pack(place[name], kind, 0, 0, offset, size, 2, 1, 8, step)
        data += part
        offset += len(part)
    head = struct.pack("<16sHHIQQQI6H", b"\x7fELF\2\1\1", 2, 190, 1, 0, 0, offset, 0, 64, 0, 0, 64, 6, 1)
    return head + data + table


def packed(data: bytes, how: int) -> bytes:
    """Compress with the machine's library. Raises OSError if the machine has none."""
    if how == ZSTD:
        zstd = ctypes.CDLL("libzstd.so.1")
        room = ctypes.create_string_buffer(len(data) + 1024)
        zstd.ZSTD_compress.restype = ctypes.c_size_t
        sizes = (ctypes.c_size_t(len(room)), ctypes.c_size_t(len(data)))
        size = zstd.ZSTD_compress(room, sizes[0], data, sizes[1], 3)
    else:
        lz4 = ctypes.CDLL("liblz4.so.1")
        room = ctypes.create_string_buffer(len(data) + 1024)
        size = lz4.LZ4_compress_default(data, room, len(data), len(room))
    assert 0 < size <= len(room)
    return room.raw[:size]


def part(kind: int, arch: int, data: bytes, how: int = 0) -> bytes:
    """Return one part of a fat binary."""
    inside = packed(data, how) if how else data
    filled = inside + bytes(-len(inside) % 8)
    small = len(inside) if how else 0
    whole = len(data) if how else 0
    return (
        struct.pack(
            "<HHIQIIIIQQQQ", kind, 0x101, 64, len(filled), small, 0, 0x10008, arch, 0, 0x11 | how, 0, whole
        )
        + filled
    )


def fatbin(*parts: bytes, text: bytes = TEXT) -> bytes:
    """Return a fat binary of these parts, and one more of a kind that only the stand-in driver reads."""
    body = b"".join(parts) + part(0x40, 1, text)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
