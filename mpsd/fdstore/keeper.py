"""The keeper: a small process that holds mpsd's descriptors, so that kill -9 of mpsd drops none.

It replaces systemd's descriptor store and speaks the same datagrams on DIRECTORY/keeper.sock:

  FDSTORE=1 FDNAME=name         + descriptors   hold them under that name (more are added to it)
  FDSTOREREMOVE=1 FDNAME=name                   close all of that name
  BARRIER=1                     + a pipe        write "ok" or the first refusal since the last, close it
  FETCH=1                       + a socket      send duplicates of everything over it, then END=count
  HELLO=1                       + a socket      the daemon is alive as long as its end stays open
  EXIT=1                                        close everything and end

The last three are the keeper's own, and so is the text in the pipe. Without the text, a keeper that dies,
which closes the pipe too, would pass for one that has obeyed. The keeper obeys only processes of its own uid.

It ends on EXIT, when its directory is gone, or when it has held nothing and seen no daemon for LINGER
seconds. A lock on DIRECTORY/keeper.lock admits one keeper per directory. It waits in poll(2); a timer runs
only while there is no daemon.

It runs as a file by `python -I -S`: it imports little, and nothing of mpsd.
"""

from __future__ import annotations

import _thread
import fcntl
import os
import resource
import select
import socket
import struct
import sys
import time

SOCKET = "keeper.sock"
LOCK = "keeper.lock"
OK = "ok"
MAX_TEXT = 4096
MAX_FDS = 253
"""SCM_MAX_FD of Linux: descriptors in one message."""
OWN_FDS = 32
"""Descriptors that are never used for holding. Without one free, no request and no question can arrive."""
BATCH = 64
"""Descriptors per message of a handover: their names, up to 255 bytes each, fit a socket buffer easily."""
HANDOVER_TIMEOUT_S = 5.0
CREDENTIALS = struct.Struct("iII")


class Keeper:
    def __init__(self, directory: str, *, limit: int, linger_s: float, check_s: float) -> None:
        self.directory = directory
        self.path = os.path.join(directory, SOCKET)
        self.limit = limit
        self.linger_s = linger_s
        self.check_s = check_s
        self.held: dict[str, list[int]] = {}
        self.refusal = ""
        self.daemon: socket.socket | None = None
        self.alone_since = time.monotonic()
        self.ended = False
        self.poll = select.poll()
        self.listener = self.bind()

    def bind(self) -> socket.socket:
        """Listen, readable and writable for this uid only. The caller holds the lock."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.setblocking(False)
        before = os.umask(0o177)
        try:
            listener.bind(self.path)
        finally:
            os.umask(before)
        self.poll.register(listener, select.POLLIN)
        return listener

    def run(self) -> None:
        while not self.ended:
            self.turn()
        try:
            os.unlink(self.path)
        except OSError:
            pass

    def turn(self) -> None:
        ready = self.poll.poll(None if self.daemon else self.check_s * 1000)
        for fd, _ in ready:
            if fd == self.listener.fileno():
                self.receive()
            elif self.daemon and fd == self.daemon.fileno():
                self.daemon_gone()
        if not self.daemon and not ready:
            self.check()

    def check(self) -> None:
        """Without a daemon: end when there is no reason to stay, and bind again when the socket is gone."""
        idle = not self.held and time.monotonic() - self.alone_since >= self.linger_s
        if idle or not os.path.isdir(self.directory):
            self.ended = True
        elif not os.path.exists(self.path):
            self.poll.unregister(self.listener)
            self.listener.close()
            self.listener = self.bind()

    def daemon_gone(self) -> None:
        if self.daemon:
            self.poll.unregister(self.daemon)
            self.daemon.close()
        self.daemon = None
        self.alone_since = time.monotonic()

    def receive(self) -> None:
        space = socket.CMSG_SPACE(MAX_FDS * 4) + socket.CMSG_SPACE(CREDENTIALS.size)
        try:
            data, ancillary, flags, _ = self.listener.recvmsg(MAX_TEXT, space, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return
        fds: list[int] = []
        uid = -1
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds += struct.unpack(f"{len(payload) // 4}i", payload[: len(payload) // 4 * 4])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                uid = CREDENTIALS.unpack(payload)[1]
        lines = (line.partition("=") for line in data.decode("ascii", "replace").split("\n"))
        fields = {key: value for key, _, value in lines}
        if uid != os.geteuid():
            self.answer(fields, fds, f"denied: uid {uid} is not that of the keeper")
        elif flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            self.refuse(fds, "truncated: the message was too large, or no descriptor is free here")
        else:
            self.obey(fields, fds)

    def obey(self, fields: dict[str, str], fds: list[int]) -> None:
        name = fields.get("FDNAME", "stored")
        if "FDSTORE" in fields:
            self.store(name, fds)
        elif "FDSTOREREMOVE" in fields:
            close_elsewhere(self.held.pop(name, []))
        elif "BARRIER" in fields:
            self.answer(fields, fds, self.refusal or OK)
            self.refusal = ""
        elif "FETCH" in fields:
            self.hand_over(fds)
        elif "HELLO" in fields:
            self.greet(fds)
        else:
            close(fds)
            self.ended = "EXIT" in fields

    def greet(self, fds: list[int]) -> None:
        daemon = as_socket(fds)
        if daemon:
            self.daemon_gone()
            self.daemon = daemon
            self.poll.register(daemon, select.POLLIN)

    def store(self, name: str, fds: list[int]) -> None:
        count = sum(len(group) for group in self.held.values())
        if not fds:
            self.refuse(fds, f"{name} came without descriptors")
        elif count + len(fds) > self.limit:
            self.refuse(
                fds, f"full: {count} of {self.limit} descriptors are held, {len(fds)} more do not fit"
            )
        else:
            self.held.setdefault(name, []).extend(fds)

    def refuse(self, fds: list[int], reason: str) -> None:
        close(fds)
        self.refusal = self.refusal or reason

    def answer(self, fields: dict[str, str], fds: list[int], text: str) -> None:
        """Write the answer to a barrier into its pipe and close it. The pipe is empty: no waiting."""
        if "BARRIER" in fields and len(fds) == 1:
            try:
                os.set_blocking(fds[0], False)
                os.write(fds[0], text.encode()[:MAX_TEXT])
            except OSError:
                pass
        close(fds)

    def hand_over(self, fds: list[int]) -> None:
        peer = as_socket(fds)
        if peer is None:
            return
        peer.settimeout(HANDOVER_TIMEOUT_S)
        pairs = [(name, fd) for name, group in self.held.items() for fd in group]
        try:
            for start in range(0, len(pairs), BATCH):
                part = pairs[start : start + BATCH]
                rights = struct.pack(f"{len(part)}i", *(fd for _, fd in part))
                names = ":".join(name for name, _ in part)
                peer.sendmsg(
                    [f"NAMES={names}".encode()],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)],
                    socket.MSG_NOSIGNAL,
                )
            peer.sendmsg([f"END={len(pairs)}".encode()], (), socket.MSG_NOSIGNAL)
        except OSError:
            pass  # The reader is gone or hangs; the keeper still holds everything.
        finally:
            peer.close()


def as_socket(fds: list[int]) -> socket.socket | None:
    """Return the one socket that came with a message; close anything else."""
    try:
        (fd,) = fds
        return socket.socket(fileno=fd)
    except (OSError, ValueError):
        close(fds)
        return None


def close(fds: list[int]) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def close_elsewhere(fds: list[int]) -> None:
    """Close in a thread: the last close of a GPU address space takes long (22 ms were seen).

    A client that stores meanwhile does not wait for it.
    """
    if fds:
        _thread.start_new_thread(close, (fds,))


def lock(directory: str) -> bool:
    """Return whether this is the only keeper of the directory. The lock lives as long as the process."""
    fd = os.open(os.path.join(directory, LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return False
    return True


def raise_limit(wanted: int) -> int:
    """Raise the limit of descriptors as far as the keeper may need, and the hard limit allows.

    Return how many the keeper can hold: at most `wanted`, with OWN_FDS left to obey and to answer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A message that does not fit brings up to MAX_FDS more, which are open until it is refused.
    most = max(soft, wanted + MAX_FDS + 16)
    try:
        capacity = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (capacity, hard))
    except (OSError, ValueError):
        capacity = soft
    return max(0, min(wanted, capacity - OWN_FDS))


def detach() -> None:
    """Continue as an orphan process without a working directory and a terminal."""
    if os.fork():
        os._exit(0)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    with open("/proc/self/comm", "w") as comm:
        comm.write("mpsd-keeper")


def main(argv: list[str]) -> int:
    """Run the keeper: DIRECTORY LIMIT LINGER_S CHECK_S. Returns to its starter once the socket listens."""
    directory, limit, linger_s, check_s = argv
    try:
        if not lock(directory):
            return 0
        capacity = raise_limit(int(limit))
        keeper = Keeper(directory, limit=capacity, linger_s=float(linger_s), check_s=float(check_s))
    except OSError as error:
        print(f"keeper: {error}", file=sys.stderr)
        return 1
    detach()
    keeper.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
