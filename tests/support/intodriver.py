"""A program with a second thread that stays in an ioctl until the program ends, like a server in the driver.

The thread waits for the notification of a system call that no process makes (seccomp_unotify(2)). The program
first prints "ready", or why it cannot do so.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading

PR_SET_NO_NEW_PRIVS = 38
SECCOMP = {"x86_64": 317, "aarch64": 277}
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER = 1, 8
SECCOMP_IOCTL_NOTIF_RECV = 0xC0502100
# No system call has this number.
NOBODYS = 100_000
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
USER_NOTIF, ALLOW = 0x7FC00000, 0x7FFF0000
FILTER = (
    (LOAD_NUMBER, 0, 0, 0),
    (JUMP_IF_EQUAL, 0, 1, NOBODYS),
    (RETURN, 0, 0, USER_NOTIF),
    (RETURN, 0, 0, ALLOW),
)


def listener(libc: ctypes.CDLL) -> int:
    rows = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *row) for row in FILTER))
    program = ctypes.create_string_buffer(struct.pack("=H6xQ", len(FILTER), ctypes.addressof(rows)))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call = SECCOMP[platform.machine()]
    return int(libc.syscall(call, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, program))


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = listener(libc)
    if fd < 0:
        print(os.strerror(ctypes.get_errno()), flush=True)
        return
    request = ctypes.create_string_buffer(80)
    threading.Thread(
        target=libc.ioctl, args=(fd, ctypes.c_ulong(SECCOMP_IOCTL_NOTIF_RECV), request), daemon=True
    ).start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
