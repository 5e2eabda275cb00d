"""The account of a peer: the user that a connection is charged to, with uid and cgroup."""

from __future__ import annotations

import socket
from bisect import bisect_right
from pathlib import Path

from mpsd.base.errors import MpsdError
from mpsd.os import processes, procfs
from mpsd.peers.credentials import Credentials
from mpsd.peers.quotas import Account
from mpsd.peers.vaultpeer import pin
from mpsd.vault.notes import cgroup_text

SUBUID, PASSWD = Path("/etc/subuid"), Path("/etc/passwd")


class Accounts:
    """Maps peers to accounts. A uid of a range in /etc/subuid is charged to the user of that range.

    Users that only a directory service knows, and ranges of root, have no such user here: the first uid of
    the range stands for all of it. Both files are read again when /etc/subuid changes, at refresh().
    """

    def __init__(self, subuid: Path = SUBUID, passwd: Path = PASSWD) -> None:
        self._subuid, self._passwd = subuid, passwd
        self._read_at: tuple[int, int] | None = None
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, int]] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the ranges again if the file has changed. Never raises."""
        try:
            found = self._subuid.stat()
            read_at = (found.st_mtime_ns, found.st_ino)
            if read_at == self._read_at:
                return
            uids = {row[0]: int(row[2]) for row in _rows(self._passwd, 3) if _is_uid(row[2])}
            rows = _rows(self._subuid, 3)
        except (OSError, ValueError):
            return
        ranges = []
        for name, start, size in ((row[0], row[1], row[2]) for row in rows):
            if _is_uid(start) and _is_uid(size):
                owner = int(name) if _is_uid(name) else uids.get(name, 0)
                ranges.append((int(start), int(start) + int(size), owner or int(start)))
        self._read_at = read_at
        self._ranges = sorted(ranges)
        self._starts = [first for first, _, _ in self._ranges]

    def owner(self, uid: int) -> int:
        """Return the uid of the user that this uid is subordinate to, or the uid itself."""
        at = bisect_right(self._starts, uid) - 1
        if at >= 0 and uid < self._ranges[at][1]:
            return self._ranges[at][2]
        return uid

    def of(self, sock: socket.socket, credentials: Credentials) -> Account:
        """Return the account of a connection's peer. The cgroup is empty if the peer cannot be read."""
        uid = credentials.uid
        return Account(self.owner(uid), uid, cgroup_text(_cgroup(sock, credentials.pid)))


def _cgroup(sock: socket.socket, pid: int) -> str:
    """Return the cgroup of the process that connected; this file of /proc needs no memory of the process."""
    if pid <= 0:
        return ""
    try:
        with pin(sock, pid) as pinned:
            found = processes.cgroup_name(procfs.cgroups(pid))
            # If the process still lives, its pid was not reused.
            return found if pinned.alive() else ""
    except (MpsdError, OSError, ValueError):
        return ""


def _is_uid(text: str) -> bool:
    """Return whether a text is a number that can be a uid, of 32 bits."""
    return text.isascii() and text.isdigit() and len(text) < 11


def _rows(path: Path, fields: int) -> list[list[str]]:
    rows = (line.split(":") for line in path.read_text(errors="replace").splitlines())
    return [row for row in rows if len(row) >= fields]
