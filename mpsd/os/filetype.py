"""The kind of file behind a descriptor, statx(2), read without waiting for a file system.

fstat(2) of a file on FUSE or NFS waits for the file server, without a limit. AT_STATX_DONT_SYNC returns what
the kernel has cached.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass

_AT_EMPTY_PATH = 0x1000
_DONT_SYNC = 0x4000
_BASIC = 0x7FF
# struct statx of <linux/stat.h>: the fields used of its 256 bytes.
_MODE = struct.Struct("=28xH")
_SIZE = struct.Struct("=40xQ")
_DEVICES = struct.Struct("=128xIIII")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class FileType:
    """Type and identity of a file.

    `device`: of a device node itself (st_rdev). `on`: of the file system that holds the file (st_dev).
    """

    mode: int
    size: int
    device: int
    on: int


def file_type(fd: int) -> FileType:
    """Return the type of an open file. Raises OSError."""
    answer = ctypes.create_string_buffer(256)
    if _libc.statx(fd, b"", _AT_EMPTY_PATH | _DONT_SYNC, _BASIC, answer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    raw = answer.raw
    major, minor, on_major, on_minor = _DEVICES.unpack_from(raw)
    return FileType(
        _MODE.unpack_from(raw)[0],
        _SIZE.unpack_from(raw)[0],
        os.makedev(major, minor),
        os.makedev(on_major, on_minor),
    )
