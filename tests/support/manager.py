"""A small stand-in for systemd: notifications, descriptor store, start and restart of one service.

A thread receives datagrams as sd_notify(3) describes and keeps them. The service starts with LISTEN_FDS as in
sd_listen_fds(3). As systemd does, it passes stored descriptors in an order of its own (newest first), and
keeps only the first descriptor of each open file.
"""

from __future__ import annotations

import array
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from mpsd.os.samefile import same_file

DEADLINE_S = 60.0

# Puts the descriptors at 3, 4, ... in the order given and becomes the service, as systemd does.
_EXEC = """
import fcntl, os, sys
count = int(sys.argv[1])
numbers = [fcntl.fcntl(int(n), fcntl.F_DUPFD, 100 + count) for n in sys.argv[2:2 + count]]
for place, number in enumerate(numbers):
    os.dup2(number, 3 + place)
os.closerange(3 + count, 3 + count + 400)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2 + count], sys.argv[2 + count:])
"""


class Manager:
    """A context manager. `store_max` is FileDescriptorStoreMax; `tells`: FDSTORE is in the environment."""

    def __init__(
        self, directory: Path, *, store_max: int = 64, tells: bool = True, abstract: bool = False
    ) -> None:
        self.address = f"@mpsd-test-{os.getpid()}-{id(self)}" if abstract else str(directory / "notify")
        self.store_max = store_max
        self.tells = tells
        self.messages: list[dict[str, str]] = []
        self.stored: list[tuple[str, int]] = []
        self.answering = True
        self.process: subprocess.Popen[bytes] | None = None
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self.address[1:] if abstract else self.address)
        self._unanswered: list[int] = []
        self._stop_reading, self._stop_writing = os.pipe()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Manager:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        os.close(self._stop_writing)
        self._thread.join(DEADLINE_S)
        os.close(self._stop_reading)
        self._socket.close()
        for _, fd in self.stored:
            os.close(fd)
        for fd in self._unanswered:
            os.close(fd)

    def environment(self) -> dict[str, str]:
        """Return the service's variables besides LISTEN_PID and LISTEN_FDS."""
        told = {"FDSTORE": str(self.store_max)} if self.tells else {}
        return {"NOTIFY_SOCKET": self.address, **told}

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the service with all stored descriptors; after its death, restart it."""
        passed = list(reversed(self.stored))
        names = ":".join(name for name, _ in passed)
        variables = {**environ, **self.environment()}
        if passed:
            variables |= {"LISTEN_FDS": str(len(passed)), "LISTEN_FDNAMES": names}
        fds = [fd for _, fd in passed]
        shim = [sys.executable, "-I", "-S", "-c", _EXEC, str(len(fds)), *map(str, fds), *command]
        self.process = subprocess.Popen(shim, env=variables, pass_fds=fds, stdin=subprocess.DEVNULL)
        return self.process

    def kill(self) -> None:
        """SIGKILL the service, if any, and reap it. Its stored descriptors stay."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(DEADLINE_S)
            self.process = None

    def wait_for(self, key: str, value: str | None = None) -> dict[str, str]:
        """Wait for the first message with this assignment. Remove it from `messages` and return it."""

        def found() -> dict[str, str] | None:
            for message in self.messages:
                if key in message and value in (None, message[key]):
                    return message
            return None

        with self._changed:
            message = self._changed.wait_for(found, DEADLINE_S)
            assert message is not None, f"no {key}={value} within {DEADLINE_S} s, only {self.messages}"
            self.messages.remove(message)
            return message

    def names(self) -> list[str]:
        with self._changed:
            return [name for name, _ in self.stored]

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._stop_reading, select.POLLIN)
        while all(fd == self._socket.fileno() for fd, _ in poll.poll()):
            fds = array.array("i")
            space = socket.CMSG_SPACE(253 * fds.itemsize)
            data, ancillary, _, _ = self._socket.recvmsg(8192, space, socket.MSG_CMSG_CLOEXEC)
            for _, _, payload in ancillary:
                fds.frombytes(payload)
            fields = dict(line.partition("=")[::2] for line in data.decode().split("\n"))
            with self._changed:
                self._take(fields, list(fds))
                self._changed.notify_all()

    def _take(self, fields: dict[str, str], fds: list[int]) -> None:
        name = fields.get("FDNAME", "stored")
        if "BARRIER" in fields and not self.answering:
            self._unanswered += fds
            return
        if "FDSTORE" in fields and fields.get("FDPOLL") == "0":
            new = [fd for fd in fds if not any(same_file(fd, held) for _, held in self.stored)]
            new = new[: self.store_max - len(self.stored)]
            self.stored += [(name, fd) for fd in new]
            fds = [fd for fd in fds if fd not in new]
        elif "FDSTOREREMOVE" in fields:
            fds = [fd for label, fd in self.stored if label == name]
            self.stored = [(label, fd) for label, fd in self.stored if label != name]
        elif "BARRIER" not in fields:
            self.messages.append(fields)
        for fd in fds:
            os.close(fd)
