"""A program with a second thread that stays in an ioctl until the program ends, like a server in the driver.

The thread waits for the notification of a system call that no process makes (seccomp_unotify(2)). With two
numbers as arguments, it waits for the answer to an ioctl instead: its request, and the command in the ioctl's
argument (NVOS54). The program first prints "ready", or why it cannot do so.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading

from mpsd.os import procfs

PR_SET_NO_NEW_PRIVS = 38
SECCOMP = {"x86_64": 317, "aarch64": 277}
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER = 1, 8
SECCOMP_IOCTL_NOTIF_RECV = 0xC0502100
# No system call has this number.
NOBODYS = 100_000
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
USER_NOTIF, ALLOW = 0x7FC00000, 0x7FFF0000
# Offset of the low half of the second argument in struct seccomp_data.
REQUEST_AT = 24
SHOWN = ((RETURN, 0, 0, USER_NOTIF), (RETURN, 0, 0, ALLOW))
Filter = tuple[tuple[int, int, int, int], ...]


def never_made() -> Filter:
    return ((LOAD_NUMBER, 0, 0, 0), (JUMP_IF_EQUAL, 0, 1, NOBODYS), *SHOWN)


def ioctl_of(request: int) -> Filter:
    return (
        (LOAD_NUMBER, 0, 0, 0),
        (JUMP_IF_EQUAL, 0, 3, procfs.IOCTL or 0),
        (LOAD_NUMBER, 0, 0, REQUEST_AT),
        (JUMP_IF_EQUAL, 0, 1, request),
        *SHOWN,
    )


def listener(libc: ctypes.CDLL, rules: Filter) -> int:
    rows = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *row) for row in rules))
    program = ctypes.create_string_buffer(struct.pack("=H6xQ", len(rules), ctypes.addressof(rows)))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call = SECCOMP[platform.machine()]
    return int(libc.syscall(call, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, program))


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    request, command = map(int, sys.argv[1:3]) if len(sys.argv) > 2 else (0, 0)
    fd = listener(libc, ioctl_of(request) if request else never_made())
    if fd < 0:
        print(os.strerror(ctypes.get_errno()), flush=True)
        return
    argument = ctypes.create_string_buffer(struct.pack("=8xI", command) if request else b"", 80)
    call = (fd, ctypes.c_ulong(request or SECCOMP_IOCTL_NOTIF_RECV), argument)
    threading.Thread(target=libc.ioctl, args=call, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
