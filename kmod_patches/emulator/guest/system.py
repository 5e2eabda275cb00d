"""System calls of the guest's first process that Python has no function for."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

SYS_FINIT_MODULE = 313
SYS_DELETE_MODULE = 176
SYS_PIDFD_GETFD = 438
# A module has the symbol versions of the nvidia.ko beside which it was built; the stub differs.
IGNORE_SYMBOL_VERSIONS = 1
POWER_OFF = 0x4321FEDC

PROT_READ, PROT_READ_WRITE = 1, 3
MAP_SHARED_FIXED = 0x11

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


def _checked(what: str, result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(kind: str, target: str) -> None:
    """Mount a file system that needs no device. Raises OSError."""
    words = (kind.encode(), target.encode(), kind.encode())
    _checked(f"mount {target}", _libc.mount(*words, ctypes.c_ulong(0), None))


def load(path: str, parameters: str = "") -> None:
    """Insert a kernel module. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        call = (ctypes.c_long(SYS_FINIT_MODULE), fd, parameters.encode(), IGNORE_SYMBOL_VERSIONS)
        _checked(f"load {path}", _libc.syscall(*call))
    finally:
        os.close(fd)


def unload(name: str) -> None:
    """Remove a kernel module that nothing uses. Raises OSError."""
    call = (ctypes.c_long(SYS_DELETE_MODULE), name.encode(), os.O_NONBLOCK)
    _checked(f"unload {name}", _libc.syscall(*call))


def map_at(fd: int, address: int, length: int) -> None:
    """Map a file at its own offset `address`, shared, for reading and writing. Raises OSError."""
    words = (ctypes.c_void_p(address), ctypes.c_size_t(length), PROT_READ_WRITE, MAP_SHARED_FIXED, fd)
    if _libc.mmap(*words, ctypes.c_long(address)) != address:
        _checked(f"mmap at {address:#x}", -1)


def make_read_only(address: int, length: int) -> None:
    """Protect memory against writes. Raises OSError."""
    words = (ctypes.c_void_p(address), ctypes.c_size_t(length), PROT_READ)
    _checked(f"mprotect at {address:#x}", _libc.mprotect(*words))


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """Duplicate another process's descriptor. Raises OSError."""
    made = int(_libc.syscall(ctypes.c_long(SYS_PIDFD_GETFD), pidfd, fd, 0))
    _checked(f"pidfd_getfd of {fd}", made)
    return made


def power_off() -> None:
    """Power the machine off. Returns only on failure."""
    os.sync()
    _libc.reboot(ctypes.c_int(POWER_OFF))


def character_major(name: str) -> int:
    """Return the major number of a driver in /proc/devices. Raises LookupError."""
    for line in Path("/proc/devices").read_text().split("Block devices")[0].splitlines():
        words = line.split()
        if len(words) == 2 and words[1] == name:
            return int(words[0])
    raise LookupError(f"{name} has no character device")
