"""A small HTTP server for scrapes: one thread per connection, with limits on time, size and number.

A connection that sends no request, or does not read its answer, cannot delay another one. At the limit on
connections, a new connection displaces one without a complete request, else one whose answer is being sent.
Of these it displaces the oldest one of the user with the most. A connection that waits for the daemon's
answer stays. On a Unix socket each user has a share. A connection beyond it, or one that has ended already,
gets no thread, so that a flood costs little. On a port the users of connections are unknown.
"""

from __future__ import annotations

import io
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from mpsd.base.errors import UsageError

MAX_CONNECTIONS = 32
SHARE = 8
"""The number of connections of one user of a Unix socket that are served at a time."""
BATCH = 256
"""The number of connections that are accepted before the server looks for its end."""
MAX_REQUEST = 16 << 10
"""Limit [bytes] of a request line with its headers; the server reads no further."""
READ_S = 5.0
"""Time limit [s] of a request line with its headers."""
WRITE_S = 5.0
"""Time limit [s] of each part of an answer; there are at most two."""


class _Phase(IntEnum):
    """The phase of a connection. The first two may be displaced, in this order."""

    READING = 0
    SENDING = 1
    ANSWERING = 2


UCRED = struct.Struct("iII")
"""Process, user and group of a peer."""

App = Callable[[Any, Any], Iterable[bytes]]


class _BoundedStream(io.RawIOBase):
    """A connection with a total time limit on reads, a total size limit, and a time limit on each write."""

    def __init__(self, connection: socket.socket, sending: Callable[[], None]) -> None:
        self._connection = connection
        self._sending = sending
        self._end = time.monotonic() + READ_S
        self._left = MAX_REQUEST

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read; 0 at the end of the request, at the size limit and at the time limit."""
        remaining = self._end - time.monotonic()
        if remaining <= 0 or not self._left:
            return 0
        self._connection.settimeout(remaining)
        try:
            count = self._connection.recv_into(memoryview(buffer)[: self._left])
        except OSError:
            return 0
        self._left -= count
        return count

    def write(self, data: Any) -> int:
        self._sending()
        self._connection.settimeout(WRITE_S)
        try:
            self._connection.sendall(data)
        except OSError as error:
            # wsgiref treats this error as a peer that has gone, and others as a bug in the application.
            raise BrokenPipeError(str(error)) from error
        return len(data)


class _Handler(WSGIRequestHandler):
    server: _Server

    def setup(self) -> None:
        self.connection = self.request
        sending = partial(self.server.enter, self.connection, _Phase.SENDING)
        stream = _BoundedStream(self.connection, sending)
        self.rfile, self.wfile = io.BufferedReader(stream), stream  # type: ignore[assignment]

    def finish(self) -> None:
        pass  # Nothing is buffered for writing.

    def get_environ(self) -> dict[str, Any]:
        """Return the environment of the application: the request is complete now."""
        self.server.enter(self.connection, _Phase.ANSWERING)
        return super().get_environ()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    # Threads of open connections must not delay the exit.
    daemon_threads = True
    block_on_close = False
    # The kernel lowers it to net.core.somaxconn. A full queue refuses scrapes.
    request_queue_size = 4096

    def __init__(self, address: Any, app: App) -> None:
        self._lock = threading.Lock()
        # Connections in order of arrival, and the user of each if known.
        self._open: dict[socket.socket, _Phase] = {}
        self._users: dict[socket.socket, int | None] = {}
        super().__init__(address, _Handler)
        self.socket.setblocking(False)
        self.set_app(app)

    def user_of(self, connection: socket.socket) -> int | None:
        """Return the user that has connected, if the kernel tells."""
        return None

    def service_actions(self) -> None:
        """Accept the other connections that wait: one in each turn would let a flood fill the queue."""
        for _ in range(BATCH):
            try:
                request, address = self.get_request()
            except OSError:
                return
            try:
                self.process_request(request, address)
            except Exception:
                self.handle_error(request, address)
                self.shutdown_request(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._admit(request):
            super().process_request(request, client_address)
        else:
            request.close()

    def _admit(self, connection: socket.socket) -> bool:
        """Register a connection. At the limit it displaces another one; return False without one."""
        if _has_ended(connection):
            return False
        user = self.user_of(connection)
        with self._lock:
            held = Counter(self._users.values())
            if user is not None and held[user] >= SHARE:
                return False
            if len(self._open) >= MAX_CONNECTIONS:
                # Of equal connections, min() takes the oldest.
                displaced = min(self._open, key=lambda other: (self._open[other], -held[self._users[other]]))
                if self._open[displaced] is _Phase.ANSWERING:
                    return False
                del self._open[displaced], self._users[displaced]
                with suppress(OSError):
                    displaced.shutdown(socket.SHUT_RDWR)
            self._open[connection], self._users[connection] = _Phase.READING, user
            return True

    def enter(self, connection: socket.socket, phase: _Phase) -> None:
        """Note the phase of a connection, unless it was displaced."""
        with self._lock:
            if connection in self._open:
                self._open[connection] = phase

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
            self._users.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error other than a lost connection in one line."""
        error = sys.exception()
        if not isinstance(error, OSError):
            print(f"mpsd-exporter: a scrape failed: {error!r}", file=sys.stderr)


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the peer has closed a new connection without a request."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


class _UnixServer(_Server):
    address_family = socket.AF_UNIX

    def user_of(self, connection: socket.socket) -> int | None:
        """Return the user of the process that has connected: SO_PEERCRED (unix(7))."""
        _, uid, _ = UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
        return int(uid)

    def server_bind(self) -> None:
        # As http.server does, without a host name: a Unix socket has none.
        UnixStreamServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        # The handler needs an address, and a peer on a Unix socket has none.
        return super().get_request()[0], ("local", 0)


def listen(app: App, where: str) -> WSGIServer:
    """Return a server at unix:PATH or [127.0.0.1:]PORT, not yet running. Raise UsageError."""
    try:
        if where.startswith("unix:"):
            path = where.removeprefix("unix:")
            with suppress(ConnectionRefusedError, FileNotFoundError), socket.socket(socket.AF_UNIX) as other:
                other.connect(path)
                raise UsageError(
                    f"another process listens on {path}",
                    remedy="stop the other mpsd-exporter, or choose another path",
                )
            with suppress(FileNotFoundError):
                os.unlink(path)
            return _UnixServer(path, app)
        host, _, port = where.rpartition(":")
        if host not in ("", "127.0.0.1", "localhost") or not port.isdecimal():
            raise UsageError(
                f"--listen {where} is not an address of this machine", remedy="use unix:PATH or a port"
            )
        return _Server(("127.0.0.1", int(port)), app)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--listen {where}: cannot listen: {error}", remedy="choose another path or port"
        ) from error
