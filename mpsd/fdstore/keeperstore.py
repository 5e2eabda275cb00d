"""The daemon's side of the keeper: the descriptor store on machines where systemd offers none."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpsd.base.errors import StoreError
from mpsd.fdstore import keeper
from mpsd.fdstore.fdset import ANSWER_TIMEOUT_S, MAX_NAME, check_new, close_all, labelled, lost, whole_sets
from mpsd.fdstore.notify import Channel

START_TIMEOUT_S = 10.0
KEEPER_LINGER_S = 60.0
KEEPER_CHECK_S = 10.0


class KeeperStore:
    """The keeper process of this run directory, started if there is none.

    The store keeps duplicates of its own, so that a dead keeper is replaced with nothing lost.
    """

    kind = "keeper"

    def __init__(self, directory: str, limit: int, *, linger_s: float, check_s: float) -> None:
        self._directory = directory
        self._arguments = (str(limit), str(linger_s), str(check_s))
        self._channel = Channel(os.path.join(directory, keeper.SOCKET))
        self._presence: socket.socket | None = None
        self._copies: dict[str, list[int]] = {}
        self._owed: dict[str, int] = {}
        """Names, with a count, of descriptors that the keeper may still hold because it could not be told."""
        self.silence = ""
        """Why the keeper has not been greeted yet; `revive` tries that again."""

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        limit: int = 4096,
        linger_s: float = KEEPER_LINGER_S,
        check_s: float = KEEPER_CHECK_S,
        start: bool = True,
    ) -> KeeperStore:
        """Greet the keeper of the directory; start one if there is none and `start` is set.

        A keeper that lives and does not answer in time does not prevent the start of mpsd: see `silence`.
        What it holds for an earlier daemon stays there, and is not read.
        """
        store = cls(os.path.abspath(directory), limit, linger_s=linger_s, check_s=check_s)
        try:
            store._greet(start=start)
        except StoreError as error:
            if not start or not isinstance(error.__cause__, TimeoutError | BlockingIOError):
                store.close()
                raise
            store.silence = str(error)
        return store

    def put(self, name: str, fds: Sequence[int]) -> None:
        check_new(name, fds, self._copies)
        copies: list[int] = []
        try:
            copies += [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0) for fd in fds]
            try:
                self._store(name, copies)
            except (ConnectionError, FileNotFoundError):
                self.revive()
                self._store(name, copies)
        except (OSError, StoreError) as error:
            self._owed[name] = len(fds)
            with contextlib.suppress(OSError):
                self._forget(name, len(fds))
            close_all({name: copies})
            raise lost("the keeper", error) if isinstance(error, OSError) else error from error
        self._copies[name] = copies
        self._owed.pop(name, None)

    def remove(self, name: str) -> None:
        copies = self._copies.pop(name, [])
        close_all({name: copies})
        count = self._owed[name] = len(copies) or self._owed.get(name, 0)
        try:
            self._forget(name, count)
        except (ConnectionError, FileNotFoundError):
            pass  # The keeper has died and holds nothing any more.
        except OSError as error:
            raise lost("the keeper", error) from error
        del self._owed[name]

    def fetch_all(self) -> dict[str, list[int]]:
        if self.silence:
            return {}
        sets, incomplete = whole_sets(self._fetch())
        for label in incomplete:
            self._channel.send(f"FDSTOREREMOVE=1\nFDNAME={label}")
        for name, fds in sets.items():
            if name not in self._copies:
                self._copies[name] = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0) for fd in fds]
        return sets

    def holds(self, name: str) -> bool:
        """Return whether this store holds the name, as far as it was put or fetched here."""
        return name in self._copies

    def fileno(self) -> int:
        return -1 if self._presence is None else self._presence.fileno()

    def revive(self) -> None:
        self._greet(start=True)
        self.silence = ""
        held = self._fetch()
        close_all(held)
        try:
            for name, copies in self._copies.items():
                if f"{name}#0/{len(copies)}" not in held:
                    self._store(name, copies)
        except OSError as error:
            raise lost("the keeper", error) from error

    def end(self) -> None:
        """Close everything here and in the keeper, and end the keeper."""
        with contextlib.suppress(OSError):
            self._channel.send("EXIT=1")
        self.close()

    def close(self) -> None:
        close_all(self._copies)
        self._copies.clear()
        if self._presence is not None:
            self._presence.close()
            self._presence = None
        self._channel.close()

    def _store(self, name: str, fds: Sequence[int]) -> None:
        for label, fd in labelled(name, fds):
            self._channel.send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={label}", [fd])
        refusal = self._answer()
        if refusal:
            raise StoreError(f"the keeper refused {name}: {refusal}", remedy="see [store] max_descriptors")

    def _answer(self) -> str:
        """Return the keeper's first refusal since the last answer, empty for none. Raises OSError."""
        text = self._channel.barrier(ANSWER_TIMEOUT_S)
        if not text:
            raise ConnectionResetError(errno.ECONNRESET, "the keeper died")
        return "" if text == keeper.OK else text

    def _forget(self, name: str, count: int) -> None:
        for index in range(count):
            self._channel.send(f"FDSTOREREMOVE=1\nFDNAME={name}#{index}/{count}")

    def _greet(self, *, start: bool) -> None:
        """Greet the keeper, with retries until it answers or another one is started.

        A dying keeper can hold the lock a moment longer than its socket. It then neither answers nor lets
        another start.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self._hello()
                return
            except (ConnectionError, FileNotFoundError) as error:
                if not start or time.monotonic() >= deadline:
                    raise lost("the keeper", error) from error
            except OSError as error:
                raise lost("the keeper", error) from error
            self._start_keeper()

    def _hello(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                self._channel.send("HELLO=1", [theirs.fileno()])
                refusal = self._answer()
            except OSError:
                ours.close()
                raise
        if refusal:
            ours.close()
            raise StoreError(
                f"the keeper refused the daemon: {refusal}",
                remedy=f"check which process serves {self._channel.address}",
            )
        if self._presence is not None:
            self._presence.close()
        self._presence = ours

    def _start_keeper(self) -> None:
        command = [sys.executable, "-I", "-S", keeper.__file__, self._directory, *self._arguments]
        try:
            done = subprocess.run(
                command,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                timeout=START_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StoreError(
                "the keeper did not start in time", remedy="check the load of the machine"
            ) from error
        if done.returncode != 0:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise StoreError(f"the keeper did not start: {last}", remedy=f"check {self._directory}")

    def _fetch(self) -> dict[str, list[int]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            try:
                with theirs:
                    self._channel.send("FETCH=1", [theirs.fileno()])
                ours.settimeout(ANSWER_TIMEOUT_S)
                return receive_sets(ours)
            except OSError as error:
                raise lost("the keeper", error) from error


def receive_sets(source: socket.socket) -> dict[str, list[int]]:
    """Receive everything that a keeper hands over. Raises OSError; then nothing stays open."""
    held: dict[str, list[int]] = {}
    count = 0
    try:
        while True:
            size = keeper.BATCH * (MAX_NAME + 16)
            data, ancillary, flags, _ = source.recvmsg(
                size, socket.CMSG_SPACE(keeper.BATCH * 4), socket.MSG_CMSG_CLOEXEC
            )
            fds = [fd for _, _, payload in ancillary for fd in memoryview(payload).cast("i")]
            key, _, value = data.decode("ascii").partition("=")
            names = value.split(":") if key == "NAMES" else []
            for index, fd in enumerate(fds):
                held.setdefault(names[index] if index < len(names) else "", []).append(fd)
            count += len(fds)
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(names) != len(fds):
                raise ConnectionError("the handover was cut short: check RLIMIT_NOFILE")
            if key == "END" and int(value) == count:
                return held
            if key != "NAMES":
                raise ConnectionError("the handover ended early")
    except OSError:
        close_all(held)
        raise
