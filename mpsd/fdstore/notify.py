"""The service manager's datagrams: readiness, status, watchdog, descriptor store, barrier.

The protocol is that of sd_notify(3) and sd_listen_fds(3): text lines KEY=VALUE in one datagram to
$NOTIFY_SOCKET, with descriptors as SCM_RIGHTS. The keeper (mpsd.fdstore.keeper) speaks the same protocol, so
`Channel` serves both. Without a manager a Notifier does nothing. No error here ends the daemon.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import select
import socket
import time
from collections.abc import Mapping, MutableMapping, Sequence

from mpsd.base.errors import StoreError

SEND_TIMEOUT_S = 2.0
FIRST_LISTEN_FD = 3
MAX_REPLY = 4096


class Channel:
    """Datagrams to one Unix socket, by path or by abstract name (`@name`).

    Not connected: the receiver may be restarted between two messages.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._target = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(SEND_TIMEOUT_S)

    def send(self, text: str, fds: Sequence[int] = ()) -> None:
        """Send one datagram. Raises OSError (TimeoutError when the receiver does not read)."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([text.encode()], rights, socket.MSG_NOSIGNAL, self._target)

    def barrier(self, timeout_s: float) -> str:
        """Wait until the receiver has processed everything sent before.

        The receiver gets the write end of a pipe and closes it at that point (BARRIER=1, sd_notify(3)).
        Returns the text that it wrote before: empty from systemd, an answer from the keeper. Raises OSError.
        """
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                self.send("BARRIER=1", [writing])
            finally:
                os.close(writing)
            return self._read_to_end(reading, time.monotonic() + timeout_s)
        finally:
            os.close(reading)

    def _read_to_end(self, reading: int, deadline: float) -> str:
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        text = b""
        while poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            part = os.read(reading, MAX_REPLY)
            if not part or len(text) > MAX_REPLY:
                return text.decode(errors="replace")
            text += part
        raise TimeoutError(errno.ETIMEDOUT, f"{self.address} did not answer in time")

    def close(self) -> None:
        self._socket.close()


class Notifier:
    """Reports the daemon's state to the service manager. Each method returns whether it was sent."""

    def __init__(self, channel: Channel | None) -> None:
        self.channel = channel

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Create from NOTIFY_SOCKET and unset it in `environ`, so that no child can speak for the daemon."""
        address = environ.pop("NOTIFY_SOCKET", "")
        return cls(Channel(address) if address[:1] in ("/", "@") else None)

    def ready(self, status: str) -> bool:
        return self._tell(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, text: str) -> bool:
        return self._tell(f"STATUS={_one_line(text)}")

    def watchdog(self) -> bool:
        return self._tell("WATCHDOG=1")

    def stopping(self, status: str = "stopping") -> bool:
        return self._tell(f"STOPPING=1\nSTATUS={_one_line(status)}")

    def extend_timeout(self, seconds: float) -> bool:
        """Ask for this much more time, counted from now, to start or to stop."""
        return self._tell(f"EXTEND_TIMEOUT_USEC={int(seconds * 1_000_000)}")

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()

    def _tell(self, text: str) -> bool:
        if self.channel is None:
            return False
        try:
            self.channel.send(text)
        except OSError:
            return False
        return True


def _one_line(text: str) -> str:
    """Return the text as one line. It may quote clients and must not start another assignment."""
    return "".join(char if char.isprintable() else " " for char in text)[:512]


def watchdog_interval_s(environ: Mapping[str, str]) -> float | None:
    """Return the interval of Notifier.watchdog: half of WATCHDOG_USEC; None without a watchdog."""
    usec = environ.get("WATCHDOG_USEC", "")
    pid = environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2_000_000


def listen_fds(environ: MutableMapping[str, str]) -> dict[str, list[int]]:
    """Return the descriptors that the manager passed to this process, by name; now close-on-exec.

    Removes the variables, so that a second call and every child see none. Raises StoreError when the
    variables are for this process but do not match the open descriptors.
    """
    pid, count, names = (environ.pop(key, "") for key in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    labels = names.split(":") if names else ["unknown"] * int(count)
    if len(labels) != int(count):
        raise StoreError(
            f"LISTEN_FDS={count} does not match LISTEN_FDNAMES={names!r}",
            remedy="start mpsd from its unit file, or unset the LISTEN_ variables",
        )
    passed: dict[str, list[int]] = {}
    for offset, label in enumerate(labels):
        fd = FIRST_LISTEN_FD + offset
        try:
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        except OSError as error:
            raise StoreError(
                f"descriptor {fd} ({label}) was announced but is not open",
                remedy="unset the LISTEN_ variables",
            ) from error
        passed.setdefault(label, []).append(fd)
    return passed
