"""Who is at the other end: the kernel's credentials of a connection, and what they allow.

The uid is the one that the daemon's user namespace gives the peer. In a container without a user
namespace of its own everybody may be uid 0, and so an administrator: give containers the socket only
where that is meant.
"""

from __future__ import annotations

import grp
import os
import pwd
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

# How long a change of group membership may take to be seen.
CACHE_S = 30.0
_CACHED = 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """SO_PEERCRED (unix(7)): taken when the peer connected. `pid` is a claim: for logs only."""

    uid: int
    gid: int
    pid: int


@dataclass(frozen=True, slots=True)
class Peer:
    """One who asks. `groups`: of the connection and, from the user database, supplementary ones."""

    uid: int
    gid: int
    pid: int
    groups: frozenset[int]
    admin: bool

    def may_see(self, owners: Collection[int]) -> bool:
        """Whether something that belongs to these users is this peer's to see."""
        return self.admin or self.uid in owners


def parse_address(address: str) -> Credentials | None:
    """The credentials in libzmq's Peer-Address of an ipc connection, HOST:UID:GID:PID; None if absent."""
    fields = address.rsplit(":", 3)
    if len(fields) != 4 or not all(f.isascii() and f.isdigit() for f in fields[1:]):
        return None
    uid, gid, pid = map(int, fields[1:])
    return Credentials(uid, gid, pid)


class Rights:
    """Turns credentials into a peer. Root, the daemon's own user and the group are administrators.

    peer() may ask a directory service and block for it: call it from a thread unless known() answers.
    """

    def __init__(
        self, group: str, own_uid: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._group = group
        self._own_uid = os.geteuid() if own_uid is None else own_uid
        self._clock = clock
        self._groups: dict[tuple[int, int], tuple[float, frozenset[int], bool]] = {}

    def known(self, credentials: Credentials) -> Peer | None:
        """The peer, where no database need be asked."""
        if credentials.uid in (0, self._own_uid):
            return _peer(credentials, frozenset((credentials.gid,)), admin=True)
        found = self._groups.get((credentials.uid, credentials.gid))
        if found is None or self._clock() - found[0] > CACHE_S:
            return None
        return _peer(credentials, found[1], admin=found[2])

    def peer(self, credentials: Credentials) -> Peer:
        known = self.known(credentials)
        if known is not None:
            return known
        groups = _groups_of(credentials)
        admin = _group_id(self._group) in groups
        if len(self._groups) >= _CACHED:
            self._groups = {}
        self._groups[credentials.uid, credentials.gid] = (self._clock(), groups, admin)
        return _peer(credentials, groups, admin=admin)


def _peer(credentials: Credentials, groups: frozenset[int], *, admin: bool) -> Peer:
    return Peer(credentials.uid, credentials.gid, credentials.pid, groups, admin)


def _groups_of(credentials: Credentials) -> frozenset[int]:
    # Not /proc/PID/status: the pid may by now be another process, with other groups.
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
    """For a log line about what somebody asked."""
    return {"peer_uid": credentials.uid, "peer_gid": credentials.gid, "peer_pid": credentials.pid}
