"""One connection to the daemon: a blocking Unix socket under the protocol's states, with deadlines."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from types import TracebackType

from mpsd_client._protocol import address, errors, messages, session, zmtp

_READ_BYTES = 256 << 10
_START = "start it (systemctl start mpsd, or mpsd run), or say where it is with --socket or MPSD_SOCKET"


def find_socket(environ: Mapping[str, str], uid: int) -> str:
    """The socket that a client of this user means. Raises NotRunningError when there is none."""
    tried = address.candidates(environ, uid)
    if len(tried) == 1:
        return tried[0]
    for path in tried:
        if os.path.exists(path) and _trusted(path, uid):
            return path
    raise errors.NotRunningError(f"no daemon: there is no socket at {' or '.join(tried)}", remedy=_START)


def _trusted(path: str, uid: int) -> bool:
    """In /tmp anybody can make a directory of any name; one of ours is ours."""
    if not path.startswith("/tmp/"):
        return True
    try:
        return os.lstat(os.path.dirname(path)).st_uid == uid
    except OSError:  # It has just gone.
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
        """Send a request; its id and when to give up on it."""
        try:
            request_id, frame = self.session.request(op, args, time.monotonic(), timeout)
        except messages.ProtocolError as error:
            raise errors.UsageError(error.message, remedy=error.remedy) from None
        wait = messages.OPERATIONS[op].deadline_s if timeout is None else timeout
        # The daemon's own word that time is up says more than ours: it gets a moment to arrive.
        give_up = time.monotonic() + wait + 1.0
        self._zmtp.send(frame)
        self._push(give_up)
        return request_id, give_up

    def next_answer(self, give_up: float | None, what: str) -> messages.Answer:
        """The next answer or event. Raises DeadlineError, NotRunningError, ProtocolError."""
        while True:
            while not self._frames:
                self._pull(give_up, what)
            try:
                answer = self.session.receive(self._frames.pop(0))
            except messages.ProtocolError as error:
                raise self._broken(error) from None
            if answer is not None:
                return answer

    def interrupt(self) -> None:
        """Have a thread that waits here give up: NotRunningError. From any thread; close() is still due."""
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
            raise errors.DeadlineError(f"{self.path} takes no data") from None
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from None

    def _pull(self, deadline: float | None, what: str) -> None:
        try:
            self._socket.settimeout(None if deadline is None else _remaining(deadline, what))
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            self.session.expire(time.monotonic())
            raise errors.DeadlineError(
                f"mpsd at {self.path} gave no answer to {what} in time",
                remedy="if that goes on it hangs: end its process (RUN/lock has its number) and start it "
                "again, as with systemctl restart mpsd; servers and programs live on",
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
            # A PING is answered as it comes. During the handshake the caller sends.
            self._push(time.monotonic() + 1.0)

    def _lost(self, why: str) -> errors.MpsdError:
        return errors.NotRunningError(
            f"the connection to {self.path} was lost: {why}",
            remedy="the daemon stopped, or refused one connection too many of this user: mpsd-ctl status",
        )

    def _broken(self, error: messages.ProtocolError) -> errors.MpsdError:
        return errors.ProtocolError(f"{self.path}: {error.message}", remedy=error.remedy)


def _connect(path: str, timeout: float) -> socket.socket:
    if len(os.fsencode(path)) > address.MAX_PATH_BYTES:
        raise errors.UsageError(f"socket path {path} is longer than {address.MAX_PATH_BYTES} bytes")
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise errors.NotRunningError(f"no socket to ask the daemon by: {error.strerror or error}") from None
    sock.settimeout(max(timeout, 0.001))
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        if isinstance(error, PermissionError):
            raise errors.DeniedError(
                f"may not connect to {path}", remedy="every directory on the way must be searchable"
            ) from None
        raise errors.NotRunningError(
            f"no daemon answers on {path}: {error.strerror or error}", remedy=_START
        ) from None
    return sock


def _remaining(deadline: float, what: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(what)
    return left
