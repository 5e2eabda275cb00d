"""Single attempts. Each returns its outcome: `refused: WHY`, or `done`."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import mpsd_client
from mpsd.failover.messages import Kind, Message, pack

WAIT_S = 5.0
DONE = "done"
MEMORY_ERROR = 700


def refused(why: str) -> str:
    return f"refused: {why}"


def _by_system(error: OSError) -> str:
    return refused(errno.errorcode.get(error.errno or 0, str(error)))


def list_directory(path: str) -> str:
    os.listdir(path)
    return DONE


def write_line(path: str, text: str) -> str:
    """Write a line into a pipe or file, without waiting for a reader."""
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode() + b"\n")
    finally:
        os.close(fd)
    return DONE


def open_for_writing(path: str) -> str:
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    return DONE


def connect(path: str) -> str:
    """Connect to a Unix socket of any type."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as sock:
            sock.settimeout(WAIT_S)
            try:
                sock.connect(path)
                return DONE
            except OSError as error:
                if error.errno != errno.EPROTOTYPE:
                    raise
    return refused("EPROTOTYPE")


def remove(path: str) -> str:
    os.unlink(path)
    return DONE


def request(path: str, op: str, args: Mapping[str, object]) -> str:
    """Make a request on the control socket."""
    with mpsd_client.connect(path) as client:
        client.call(op, args, WAIT_S)
    return DONE


def claim_error(path: str, text: str) -> str:
    """Register as a fail-over participant and claim an error of the own context."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(path)
        sock.send(pack(Message(Kind.HELLO, values=(3,))))
        sock.send(pack(Message(Kind.OWN_ERROR, values=(MEMORY_ERROR,), text=text)))
        with contextlib.suppress(TimeoutError):
            sock.recv(4096)
    return DONE


ATTEMPTS: Mapping[str, Callable[..., str]] = {
    "list": list_directory,
    "write": write_line,
    "open": open_for_writing,
    "connect": connect,
    "remove": remove,
    "request": request,
    "claim": claim_error,
}


def attempt(what: str, args: Mapping[str, Any]) -> str:
    """Make one attempt and return its outcome."""
    try:
        return ATTEMPTS[what](**args)
    except mpsd_client.MpsdError as error:
        return refused(error.code)
    except OSError as error:
        return _by_system(error)
