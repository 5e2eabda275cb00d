"""Credentials of a peer, as the kernel states them, and the rights that follow.

The uid is the one that the daemon's user namespace gives the peer. In a container without a user namespace of
its own every process may be uid 0, and so an administrator. Give such containers the socket only if that is
meant.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from mpsd.base.model import Requester
from mpsd.os import procfs

# Time [s] after which a change of group membership is noticed at the latest.
CACHE_S = 30.0
_CACHED = 1024
# struct ucred and SO_PEERGROUPS (unix(7), Linux 4.13), which Python does not name.
UCRED = struct.Struct("iII")
SO_PEERGROUPS = 59
_GROUPS_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """SO_PEERCRED (unix(7)): taken when the peer connected. `pid` is a claim: for logs only."""

    uid: int
    gid: int
    pid: int


@dataclass(frozen=True, slots=True)
class Peer:
    """A client of the daemon's socket. `groups`: of the connection, and the supplementary ones of the user
    database."""

    uid: int
    gid: int
    pid: int
    groups: frozenset[int]
    admin: bool

    def may_see(self, owners: Collection[int]) -> bool:
        """Return whether this peer may see an object that belongs to these users."""
        return self.admin or self.uid in owners


def peer_credentials(sock: socket.socket) -> Credentials:
    """Return the credentials of the process that connected: SO_PEERCRED."""
    pid, uid, gid = UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
    return Credentials(uid, gid, pid)


def requester(peer: Credentials | Peer) -> Requester:
    """Return a peer as the audit log names it. Reads the cgroup of the process that has its pid now."""
    return Requester(peer.uid, peer.gid, peer.pid, procfs.unified_cgroup(peer.pid))


def peer_groups(sock: socket.socket) -> frozenset[int]:
    """Return the supplementary groups of the process that connected; none if there are more than 256."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return frozenset()
    return frozenset(struct.unpack(f"{len(raw) // 4}I", raw))


class Rights:
    """Map credentials to a peer. Root, the daemon's own user and members of the group are administrators.

    The constructor and peer() may block on a directory service: call peer() in a thread unless known()
    answers.
    """

    def __init__(
        self, group: str, own_uid: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._group = group
        self._own_uid = os.geteuid() if own_uid is None else own_uid
        self._clock = clock
        self._groups: dict[tuple[int, int], tuple[float, frozenset[int], bool]] = {}
        self._gid = _group_id(group)

    def known(self, credentials: Credentials) -> Peer | None:
        """Return the peer if no database lookup is needed, else None."""
        if credentials.uid in (0, self._own_uid):
            return _peer(credentials, frozenset((credentials.gid,)), admin=True)
        found = self._groups.get((credentials.uid, credentials.gid))
        if found is None or self._clock() - found[0] > CACHE_S:
            return None
        return _peer(credentials, found[1], admin=found[2])

    def privileged(self, credentials: Credentials, groups: Collection[int]) -> bool:
        """Return whether the reserve of a door is for this peer. Never blocks.

        `groups`: peer_groups(). A process whose session is older than its membership may not count yet.
        """
        known = self.known(credentials)
        return (known is not None and known.admin) or self._gid in (credentials.gid, *groups)

    def peer(self, credentials: Credentials) -> Peer:
        known = self.known(credentials)
        if known is not None:
            return known
        groups = _groups_of(credentials)
        self._gid = _group_id(self._group)
        admin = self._gid in groups
        if len(self._groups) >= _CACHED:
            self._groups = {}
        self._groups[credentials.uid, credentials.gid] = (self._clock(), groups, admin)
        return _peer(credentials, groups, admin=admin)


def _peer(credentials: Credentials, groups: frozenset[int], *, admin: bool) -> Peer:
    return Peer(credentials.uid, credentials.gid, credentials.pid, groups, admin)


def _groups_of(credentials: Credentials) -> frozenset[int]:
    # Not from /proc/PID/status: the pid may belong to another process by now.
    try:
        user = pwd.getpwuid(credentials.uid)
        return frozenset((credentials.gid, *os.getgrouplist(user.pw_name, user.pw_gid)))
    except (KeyError, OSError):
        return frozenset((credentials.gid,))


def _group_id(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, OSError):
        return None


def log_fields(credentials: Credentials) -> Mapping[str, int]:
    """Return the fields of a log line about a request of this peer."""
    return {"peer_uid": credentials.uid, "peer_gid": credentials.gid, "peer_pid": credentials.pid}
