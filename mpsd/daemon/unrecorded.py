"""The identity of a living domain that no state file names, from sources that only root writes.

The state file loses a domain if the disk is full at the wrong moment. The domain's processes tell the rest.
The control daemon runs as mpsd does, with the environment and arguments that an earlier mpsd gave it.
Its user is in the ACL of its pipe directory, or is the user of its server.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection

from mpsd.base.errors import MpsdError
from mpsd.base.model import ProcessInstance
from mpsd.mps.control import MULTIUSER
from mpsd.os import acl, processes, procfs


def identify(
    pipe_dir: str, control: ProcessInstance, gpus: Collection[str]
) -> tuple[tuple[str, ...], int | None] | None:
    """Return a domain's GPUs and its user (None: all users); None if they are not proven.

    `control`: a process of mpsd's own user in that directory. `gpus`: those of this machine. Whether the
    process is a control daemon is not decided here: ControlDaemon.adopt proves it.
    """
    try:
        arguments = procfs.command_line(control.pid)
        visible = procfs.environment(control.pid).get("CUDA_VISIBLE_DEVICES", "")
        owners = _users_of_servers(control)
        admitted = acl.user_of(pipe_dir)
        mode = os.stat(pipe_dir).st_mode
    except (OSError, MpsdError):
        return None
    named = tuple(visible.split(","))
    if not set(named) <= set(gpus):
        return None
    if MULTIUSER in arguments:
        return named, None
    if admitted is None and not mode & (stat.S_IRWXG | stat.S_IRWXO):
        # The private domain of mpsd's own user needs no ACL.
        admitted = os.geteuid()
    claimed = owners if admitted is None else owners | {admitted}
    return (named, claimed.pop()) if len(claimed) == 1 and -1 not in claimed else None


def _users_of_servers(control: ProcessInstance) -> set[int]:
    """Return the users of a control daemon's servers. Raises OSError, MpsdError."""
    found = set()
    for pid in procfs.children(control.pid):
        server = ProcessInstance(pid, procfs.start_ticks(pid))
        if procfs.stat(pid).state in "ZX":
            continue
        users = processes.users(server)
        # -1: no user. Such a server proves nothing.
        found.add(-1 if users.borrowed else users.real)
    return found
