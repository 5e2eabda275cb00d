"""The socket itself: a libzmq STREAM socket on a Unix path. Receives with asyncio, sends without waiting."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from pathlib import Path

import zmq
import zmq.asyncio

from mpsd.errors import AlreadyRunningError, ConfigError
from mpsd.listener.peers import Credentials
from mpsd.wire.address import MAX_PATH_BYTES

# Messages that libzmq holds per connection and direction: incoming ones have at most 8 KiB each
# (ZMQ_IN_BATCH_SIZE), outgoing ones what one answer or one chunk of events has.
_HIGH_WATER = 32
_LINGER_MS = 200
_CLOSE_S = 2.0


class GoneError(Exception):
    """The connection is not there any more."""


class Grip:
    """A duplicate of one connection's descriptor, to end it with.

    libzmq has a way of its own (an empty message), but when the peer leaves at the same moment it
    loses the session: the descriptor leaks and the context never ends (libzmq 4.3.5, a few in a
    thousand). After a shutdown(2) libzmq sees the end of the stream, as if the peer had left.
    """

    def __init__(self, held: socket.socket) -> None:
        self._socket = held

    def end(self) -> None:
        """Close the connection for both sides. The stream tells when it has gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the duplicate, nothing else."""
        self._socket.close()


class Stream:
    """A bound socket. Raises as bind() says."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _check_path(path)
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        try:
            self._socket = self._context.socket(zmq.STREAM)
            self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
            self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
            self._socket.bind(f"ipc://{path}")
            # Whoever may write to it may connect: now everybody, until now only the daemon's user.
            path.chmod(0o666)
            self._inode = path.stat().st_ino
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot listen on {path}: {error}", remedy="choose another run_dir, or make it writable"
            ) from error

    async def receive(self) -> tuple[bytes, zmq.Frame]:
        """A connection's id and what came on it; empty when it has just come, or has gone."""
        routing_id, data = (await self._socket.recv_multipart(copy=False))[:2]
        return routing_id.bytes, data

    def send(self, routing_id: bytes, data: bytes) -> bool:
        """Hand bytes over; False when there is no room. Raises GoneError."""
        # The future of a call that may not wait is done already. Through the asyncio socket all the
        # same: a send beside it would swallow the wake-up of its receiver.
        sent = self._socket.send_multipart([routing_id, data], flags=zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)
        try:
            sent.result()
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise GoneError(str(error)) from None
        return True

    def grip(self, first: zmq.Frame, credentials: Credentials) -> Grip | None:
        """A hold on the connection whose first message this is; None when it has gone already."""
        try:
            held = socket.socket(fileno=os.dup(int(first.get(zmq.SRCFD))))
        except OSError:
            return None
        # libzmq may have closed its descriptor, and the number may now be anything of this process; at
        # worst a newer connection of the very same peer.
        if held.family == socket.AF_UNIX and _credentials(held) == credentials:
            return Grip(held)
        held.close()
        return None

    async def close(self) -> None:
        """Close, after at most _LINGER_MS, and remove the socket's file if it is still this one.

        A peer may have sent libzmq's thread a descriptor that takes long to close: it is not waited for
        beyond _CLOSE_S.
        """
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        self._socket.close(linger=_LINGER_MS)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            self._context.term()
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=end, name="listener-end", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await ended.wait()


def _credentials(connection: socket.socket) -> Credentials:
    pid, uid, gid = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Credentials(uid, gid, pid)


def _check_path(path: Path) -> None:
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} has {size} bytes; a Unix socket takes {MAX_PATH_BYTES}",
            remedy="choose a shorter run_dir",
        )
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make directory {path.parent}: {error.strerror}", remedy="choose another run_dir"
        ) from error
    # libzmq removes what is at the path, be it in use or not.
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise AlreadyRunningError(
        f"a daemon answers on {path}", remedy="stop it first, or choose another run_dir"
    )
