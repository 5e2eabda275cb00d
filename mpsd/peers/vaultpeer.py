"""Identity of a peer of the vault: a uid, a cgroup, and one life of one process."""

from __future__ import annotations

import errno
import math
import os
import socket
from dataclasses import dataclass

from mpsd.base.errors import MpsdError, NotFoundError
from mpsd.base.model import ProcessInstance
from mpsd.core.vault import Owner
from mpsd.os import processes, procfs
from mpsd.peers.credentials import peer_credentials
from mpsd.vault.notes import cgroup_text

# Linux 6.5, the same number on x86-64 and aarch64; Python names it from 3.14 on.
SO_PEERPIDFD = 77


@dataclass(frozen=True, slots=True)
class VaultPeer:
    """`instance`: not pinned, so that a silent connection costs one descriptor. `owner`: without a token."""

    pid: int
    uid: int
    instance: ProcessInstance
    owner: Owner
    program: processes.ExecIdentity | None


def identify(sock: socket.socket, accepted: float) -> VaultPeer:
    """Return the peer's identity. Reads /proc: call it in a thread.

    `accepted`: as for pin(). Raises MpsdError if the peer has exited or cannot be read.
    """
    found = peer_credentials(sock)
    pid, uid = found.pid, found.uid
    if pid <= 0:
        raise NotFoundError("the peer is a process of another pid namespace")
    with pin(sock, pid, accepted=accepted) as pinned:
        facts = processes.facts(pid, command="")
        try:
            program = processes.exec_identity(pinned.instance)
        except MpsdError:
            program = None
        # If the process still lives, all of the above was read from it and not from a reused pid.
        if facts.instance != pinned.instance or not pinned.alive():
            raise NotFoundError(f"process {pid} has ended")
        return VaultPeer(pid, uid, pinned.instance, Owner(uid, cgroup_text(facts.cgroup)), program)


def pin(
    sock: socket.socket, pid: int, option: int = SO_PEERPIDFD, *, accepted: float = math.inf
) -> processes.Pinned:
    """Pin the process that connected.

    Without SO_PEERPIDFD (`option`), pin the process that has its pid now, if that is not younger than the
    connection. `accepted`: time of the connection [CLOCK_BOOTTIME s]. Raises MpsdError.
    """
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, option)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return _pin_by_number(pid, accepted)
        raise NotFoundError(f"process {pid} has ended") from error
    try:
        return processes.Pinned(ProcessInstance(pid, procfs.start_ticks(pid)), pidfd)
    except OSError as error:
        os.close(pidfd)
        raise NotFoundError(f"process {pid} has ended") from error


def _pin_by_number(pid: int, accepted: float) -> processes.Pinned:
    pinned = processes.Pinned.open(pid)
    if pinned.instance.start_ticks / os.sysconf("SC_CLK_TCK") > accepted:
        pinned.close()
        raise NotFoundError(f"process {pid} has ended, and the pid was used again")
    return pinned
