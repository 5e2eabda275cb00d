"""CUDA_MEMCPY2D and CUDA_MEMCPY3D for ctypes, and copies of rows."""

from __future__ import annotations

import ctypes

HOST, DEVICE, ARRAY, UNIFIED = 1, 2, 3, 4

_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_uint64


class Plane(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (side + name, kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", _SIZE),
            ("Y", _SIZE),
            ("MemoryType", ctypes.c_int),
            ("Host", _POINTER),
            ("Device", _POINTER),
            ("Array", _POINTER),
            ("Pitch", _SIZE),
        )
    ]
    _fields_ += [("WidthInBytes", _SIZE), ("Height", _SIZE)]


class Box(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = [
        (side + name, kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", _SIZE),
            ("Y", _SIZE),
            ("Z", _SIZE),
            ("LOD", _SIZE),
            ("MemoryType", ctypes.c_int),
            ("Host", _POINTER),
            ("Device", _POINTER),
            ("Array", _POINTER),
            ("Reserved", _POINTER),
            ("Pitch", _SIZE),
            ("Height", _SIZE),
        )
    ]
    _fields_ += [("WidthInBytes", _SIZE), ("Height", _SIZE), ("Depth", _SIZE)]


Side = tuple[int, int, int]
"""The memory's type, its address, and the pitch."""


def plane(to: Side, source: Side, width: int, height: int, **more: int) -> Plane:
    """Return a copy of rows of `width` bytes; `more` are further fields by name."""
    given = Plane(WidthInBytes=width, Height=height, **more)
    _sides(given, to, source)
    return given


def box(to: Side, source: Side, width: int, height: int, depth: int, **more: int) -> Box:
    given = Box(WidthInBytes=width, Height=height, Depth=depth, **more)
    _sides(given, to, source)
    return given


def _sides(given: Plane | Box, to: Side, source: Side) -> None:
    for side, (kind, address, pitch) in (("dst", to), ("src", source)):
        setattr(given, f"{side}MemoryType", kind)
        setattr(given, f"{side}{'Host' if kind == HOST else 'Device'}", address)
        setattr(given, f"{side}Pitch", pitch)
