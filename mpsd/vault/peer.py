"""Who is at the other end of a connection to the vault: a uid, a cgroup, and one life of one process."""

from __future__ import annotations

import errno
import math
import os
import socket
import struct
from dataclasses import dataclass

from mpsd import procs
from mpsd.core.vault import Owner
from mpsd.errors import MpsdError, NotFoundError
from mpsd.linux import procfs
from mpsd.model import ProcessInstance
from mpsd.vault.notes import cgroup_text

CREDENTIALS = struct.Struct("iII")
# Linux 6.5, the same number on x86-64 and aarch64; Python names it from 3.14 on.
SO_PEERPIDFD = 77


@dataclass(frozen=True, slots=True)
class VaultPeer:
    """`pinned` is whoever has this to close. `owner` as it is without a token."""

    pid: int
    uid: int
    pinned: procs.Pinned
    owner: Owner
    program: procs.ExecIdentity | None


def credentials(sock: socket.socket) -> tuple[int, int]:
    """pid and uid of who connected, SO_PEERCRED (unix(7))."""
    pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid


def identify(sock: socket.socket, accepted: float) -> VaultPeer:
    """Reads /proc: call it from a thread. `accepted` as for `pin`. Raises MpsdError when the peer has gone or
    cannot be seen."""
    pid, uid = credentials(sock)
    if pid <= 0:
        raise NotFoundError("the peer is a process of another pid namespace")
    pinned = pin(sock, pid, accepted=accepted)
    try:
        facts = procs.facts(pid, command="")
        try:
            program = procs.exec_identity(pinned.instance)
        except MpsdError:
            program = None
        # Only of a process that has not ended can it be said that all this was read of it.
        if facts.instance != pinned.instance or not pinned.alive():
            raise NotFoundError(f"process {pid} has ended")
        return VaultPeer(pid, uid, pinned, Owner(uid, cgroup_text(facts.cgroup)), program)
    except BaseException:
        pinned.close()
        raise


def pin(
    sock: socket.socket, pid: int, option: int = SO_PEERPIDFD, *, accepted: float = math.inf
) -> procs.Pinned:
    """The very process that connected; where the kernel does not tell, the one that has its pid now and keeps
    it, if it is not younger than the connection: `accepted` by CLOCK_BOOTTIME. Raises MpsdError."""
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, option)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return _pin_by_number(pid, accepted)
        raise NotFoundError(f"process {pid} has ended") from error
    try:
        return procs.Pinned(ProcessInstance(pid, procfs.start_ticks(pid)), pidfd)
    except OSError as error:
        os.close(pidfd)
        raise NotFoundError(f"process {pid} has ended") from error


def _pin_by_number(pid: int, accepted: float) -> procs.Pinned:
    pinned = procs.Pinned.open(pid)
    if pinned.instance.start_ticks / os.sysconf("SC_CLK_TCK") > accepted:
        pinned.close()
        raise NotFoundError(f"process {pid} has ended, and the pid was used again")
    return pinned
