"""Messages between the processes of a simulated node: one JSON object per SEQPACKET packet.

Descriptors travel with a message (SCM_RIGHTS) and arrive close-on-exec. Standard library and few imports,
because every client pays for them.

A front end of the control stand-in works without JSON: it sends "ui COMMAND" and receives text with a final
newline.

A client declares ranges in its own GPU address space on its context's connection (which sent "attach").
Numbers are bytes. The answer is {"id": N, "error": CODE}: 0, 1 for invalid bounds or an overlap with memory
or another range, or the context's sticky error. No request waits for kernels.

    {"op": "managed", "id": N, "base": B, "length": L}      like mmap on the UVM descriptor: multiples of
                                                            4 KiB, base 0 allowed
    {"op": "unmanaged", "id": N, "base": B, "length": L}    like munmap: ends managed ranges inside, cuts or
                                                            splits others; never an error
    {"op": "sparse", "id": N, "base": B, "length": L}       multiples of 64 KiB, base not 0
    {"op": "unsparse", "id": N, "base": B, "length": L}     with the bounds of one range exactly

In such ranges loads return zeros, stores vanish, and the kernel continues. In a managed range the first
access to each 64 KiB after the declaration is a serviced fault too: 0.4 to 0.9 ms later the context's
trackers that asked for GPU faults get an event with `fatal` false, the address of the 4 KiB page and the
access. The kernels "store", "load", "atomic" and "prefetch" make one access; a prefetch outside managed
ranges does nothing.
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
    """The other end is closed, or no process listens there."""


def encode(message: Mapping[str, object]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """Return the object in `data`; an empty one if it is not a JSON object."""
    if data.startswith(b"ui "):
        return {"ui": data[3:].decode(errors="replace")}
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def send(sock: socket.socket, message: Mapping[str, object] | str, fds: Sequence[int] = ()) -> None:
    """Send one packet; text is for a front end.

    Raises Gone, or BlockingIOError on a full non-blocking socket."""
    data = f"{message}\n".encode() if isinstance(message, str) else encode(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
    except (BrokenPipeError, ConnectionError) as error:
        raise Gone(str(error)) from error


def receive(sock: socket.socket) -> tuple[Message, list[int]]:
    """Receive one packet and its descriptors. Raises Gone at the end of the connection."""
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
    """Send a message and wait for its answer. The socket's timeout bounds both."""
    send(sock, message, fds)
    return receive(sock)


def connect(path: str, timeout_s: float | None = 10.0) -> socket.socket:
    """Connect to a listening socket. Raises Gone if no process listens there."""
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
    """Return pid, uid and gid of the connected process (SO_PEERCRED)."""
    pid, uid, gid = _CRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CRED.size))
    return pid, uid, gid
