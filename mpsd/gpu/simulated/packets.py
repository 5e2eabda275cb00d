"""Messages between the processes of a simulated node: one JSON object per SEQPACKET packet.

Descriptors travel beside a message (SCM_RIGHTS) and arrive close-on-exec. Standard library only and
few imports: every client pays for them.

A front end of the control stand-in, which does without JSON, says "ui COMMAND", and is answered with text
and a final newline.

Ranges that a client declares in its own GPU address space, on its context's connection (the one that said
"attach"). Numbers are bytes; each is answered by {"id": N, "error": CODE}: 0, 1 for bounds that cannot
be or overlap memory or another range, or the context's sticky error. Nothing waits for kernels.

    {"op": "managed", "id": N, "base": B, "length": L}      as an mmap on the UVM descriptor: multiples of
                                                            4 KiB, base 0 allowed
    {"op": "unmanaged", "id": N, "base": B, "length": L}    as a munmap: whatever is managed there is so no
                                                            longer, ranges are cut or split; never an error
    {"op": "sparse", "id": N, "base": B, "length": L}       multiples of 64 KiB, base not 0
    {"op": "unsparse", "id": N, "base": B, "length": L}     with the bounds of one range exactly

Loads there give zeros, stores vanish, the kernel goes on. In a managed range the first access to each
64 KiB since it was declared is a serviced fault as well: 0.4 to 0.9 ms later the context's trackers that
asked for GPU faults get an event with `fatal` false, the address of the 4 KiB page and the access. The
kernels "store", "load", "atomic" and "prefetch" make one access; a prefetch elsewhere than in a managed
range does nothing.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    Message = dict[str, Any]

LIMIT = 1 << 16
_MAX_FDS = 8
_CRED = struct.Struct("3i")


class Gone(OSError):
    """The other end is closed, or nothing listens there."""


def encode(message: Mapping[str, object]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """The object in `data`; an empty one when it is not a JSON object."""
    if data.startswith(b"ui "):
        return {"ui": data[3:].decode(errors="replace")}
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def send(sock: socket.socket, message: Mapping[str, object] | str, fds: Sequence[int] = ()) -> None:
    """Send one packet; text is for a front end. Raises Gone, or BlockingIOError on a non-blocking socket
    that is full."""
    data = f"{message}\n".encode() if isinstance(message, str) else encode(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
    except (BrokenPipeError, ConnectionError) as error:
        raise Gone(str(error)) from error


def receive(sock: socket.socket) -> tuple[Message, list[int]]:
    """Receive one packet and the descriptors beside it. Raises Gone at the end of the connection."""
    data, ancillary, flags, _ = _recvmsg(sock)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data:
        close_all(fds)
        raise Gone("end of connection")
    return ({} if flags & socket.MSG_TRUNC else decode(data)), list(fds)


def _recvmsg(sock: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
    try:
        return sock.recvmsg(LIMIT, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC)
    except ConnectionError as error:
        raise Gone(str(error)) from error


def close_all(fds: Sequence[int] | array.array[int]) -> None:
    for fd in fds:
        os.close(fd)


def call(
    sock: socket.socket, message: Mapping[str, object], fds: Sequence[int] = ()
) -> tuple[Message, list[int]]:
    """Send and wait for the one answer. The socket's timeout bounds both."""
    send(sock, message, fds)
    return receive(sock)


def connect(path: str, timeout_s: float | None = 10.0) -> socket.socket:
    """Connect to a listening socket. Raises Gone when nobody listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise Gone(f"{path}: {error.strerror or error}") from error
    return sock


def listen(path: str, mode: int) -> socket.socket:
    """Listen at `path`, which must not exist. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(path)
        os.chmod(path, mode)
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer(sock: socket.socket) -> tuple[int, int, int]:
    """pid, uid, gid of the process that connected (SO_PEERCRED)."""
    pid, uid, gid = _CRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CRED.size))
    return pid, uid, gid
