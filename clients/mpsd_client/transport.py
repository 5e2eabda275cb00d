"""One connection to the daemon: a blocking Unix socket with deadlines."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Mapping
from types import TracebackType

from mpsd_client._protocol import address, errors, messages, session, zmtp

_READ_BYTES = 256 << 10
_START = "start it (systemctl start mpsd, or mpsd run), or name its socket with --socket or MPSD_SOCKET"


def find_socket(environ: Mapping[str, str], uid: int) -> str:
    """Return the path of the socket for this user. Raises NotRunningError if there is none."""
    tried = address.candidates(environ, uid)
    if len(tried) == 1:
        return tried[0]
    for path in tried:
        if os.path.exists(path) and _trusted(path, uid):
            return path
    raise errors.NotRunningError(f"no daemon: there is no socket at {' or '.join(tried)}", remedy=_START)


def _trusted(path: str, uid: int) -> bool:
    """Return whether a socket belongs to this user: every user can create a directory in /tmp."""
    if not path.startswith("/tmp/"):
        return True
    try:
        return os.lstat(os.path.dirname(path)).st_uid == uid
    except OSError:  # The directory was just removed.
        return False


class Transport:
    """Frames of the protocol over one socket. Not for several threads at once."""

    def __init__(self, path: str, timeout: float) -> None:
        """Connect and shake hands. Raises NotRunningError, DeniedError, DeadlineError, ProtocolError."""
        self.path = path
        self.session = session.ClientSession()
        self._zmtp = zmtp.Connection(zmtp.DEALER, messages.MAX_ANSWER_BYTES)
        self._frames: list[bytes] = []
        deadline = time.monotonic() + timeout
        self._socket = _connect(path, timeout)
        try:
            while self._zmtp.phase is not zmtp.Phase.OPEN:
                self._push(deadline)
                self._pull(deadline, "the handshake")
        except BaseException:
            self._socket.close()
            raise

    def ask(self, op: str, args: Mapping[str, object], timeout: float | None) -> tuple[int, float]:
        """Send a request. Return its id and the time at which to stop waiting for the answer."""
        try:
            request_id, frame = self.session.request(op, args, time.monotonic(), timeout)
        except messages.ProtocolError as error:
            raise errors.UsageError(error.message, remedy=error.remedy) from None
        wait = messages.OPERATIONS[op].deadline_s if timeout is None else timeout
        # The daemon's own deadline error says more than ours, so wait a moment longer for it.
        deadline = time.monotonic() + wait + 1.0
        self._zmtp.send(frame)
        self._push(deadline)
        return request_id, deadline

    def next_answer(self, deadline: float | None, what: str) -> messages.Answer:
        """Return the next answer or event. Raises DeadlineError, NotRunningError, ProtocolError."""
        while True:
            while not self._frames:
                self._pull(deadline, what)
            try:
                answer = self.session.receive(self._frames.pop(0))
            except messages.ProtocolError as error:
                raise self._broken(error) from None
            if answer is not None:
                return answer

    def interrupt(self) -> None:
        """Make a waiting thread raise NotRunningError. From any thread; close() must still be called."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.session.close()
        self._socket.close()

    def __enter__(self) -> Transport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _push(self, deadline: float) -> None:
        data = self._zmtp.to_send()
        if not data:
            return
        try:
            self._socket.settimeout(_remaining(deadline, "sending"))
            self._socket.sendall(data)
        except TimeoutError:
            raise errors.DeadlineError(f"{self.path} accepts no data in time") from None
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from None

    def _pull(self, deadline: float | None, what: str) -> None:
        try:
            self._socket.settimeout(None if deadline is None else _remaining(deadline, what))
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            self.session.expire(time.monotonic())
            raise errors.DeadlineError(
                f"mpsd at {self.path} did not answer in time: {what}",
                remedy="if this persists, restart mpsd: systemctl restart mpsd, or kill the process named in "
                "RUN/lock and start mpsd; servers and programs keep running",
            ) from None
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from None
        if not data:
            raise self._lost("closed by the daemon")
        try:
            self._frames += self._zmtp.receive(data)
        except messages.ProtocolError as error:
            raise self._broken(error) from None
        if self._zmtp.phase is zmtp.Phase.OPEN:
            # Answer a PING at once. During the handshake the caller sends.
            self._push(time.monotonic() + 1.0)

    def _lost(self, why: str) -> errors.MpsdError:
        return errors.NotRunningError(
            f"the connection to {self.path} was lost: {why}",
            remedy="the daemon stopped, or refused a connection beyond this user's limit: mpsd-ctl status",
        )

    def _broken(self, error: messages.ProtocolError) -> errors.MpsdError:
        return errors.ProtocolError(f"{self.path}: {error.message}", remedy=error.remedy)


def _connect(path: str, timeout: float) -> socket.socket:
    if len(os.fsencode(path)) > address.MAX_PATH_BYTES:
        raise errors.UsageError(
            f"socket path {path} is longer than {address.MAX_PATH_BYTES} bytes", remedy="use a shorter path"
        )
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise errors.NotRunningError(f"cannot create a socket: {error.strerror or error}") from None
    try:
        # Not settimeout(): a socket that does not block fails at once where the daemon's queue is full.
        seconds, part = divmod(max(timeout, 0.001), 1)
        limit = struct.pack("ll", int(seconds), int(part * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.connect(path)
    except OSError as error:
        sock.close()
        if isinstance(error, PermissionError):
            raise errors.DeniedError(
                f"may not connect to {path}", remedy="make every directory of the path searchable"
            ) from None
        raise errors.NotRunningError(
            f"no daemon answers on {path}: {error.strerror or error}", remedy=_START
        ) from None
    return sock


def _remaining(deadline: float, what: str) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError(what)
    return remaining
