"""Whether two descriptors share one open file, as after dup(2) and pidfd_getfd(2): kcmp(2)."""

from __future__ import annotations

import ctypes
import os

_KCMP_FILE = 0
_SYS_KCMP = {"x86_64": 312, "aarch64": 272}
_libc = ctypes.CDLL(None, use_errno=True)


def same_file(left: int, right: int) -> bool:
    """Return whether two own descriptors share one open file; False if the kernel cannot tell."""
    number = _SYS_KCMP.get(os.uname().machine)
    if number is None:
        return False
    me = os.getpid()
    arguments = (number, me, me, _KCMP_FILE, left, right)
    return int(_libc.syscall(*map(ctypes.c_long, arguments))) == 0


def can_tell() -> bool:
    """Return whether this kernel has kcmp(2) (CONFIG_KCMP) and permits it."""
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return same_file(fd, fd)
    finally:
        os.close(fd)
