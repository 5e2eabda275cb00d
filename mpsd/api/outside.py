"""Why a GPU process runs outside MPS: its pipe directory is one of mpsd's, and it may not enter there.

libcuda reports no error then: the program gets a context of its own. mpsd computes the answer from the modes
and ACLs of its own directories and from the process's ids, so it changes no credentials and starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from mpsd.base.model import ProcessFacts
from mpsd.base.text import printable
from mpsd.os import acl, procfs

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_PLACES = ("s", "d")


def reason(facts: ProcessFacts, run_dir: str) -> str:
    """Return why this process cannot join at its pipe directory; empty if the cause is another one.

    The path is only compared with `run_dir` unless it is a slot or a domain there: every user can choose it.
    Blocks while the process changes its mappings.
    """
    pid = facts.instance.pid
    try:
        path = procfs.environment(pid).get(PIPE_VARIABLE, "")
        if not _is_ours(path, run_dir):
            return ""
        status = procfs.status_fields(pid)
    except OSError:
        return ""
    # The ids of file accesses are the last of each row.
    uid, gid = int(status["Uid"].split()[3]), int(status["Gid"].split()[3])
    closed = closed_directory(path, uid, (gid, *map(int, status["Groups"].split())))
    if closed is None:
        return ""
    if not closed:
        return f"{printable(path)} leads to no domain; start the program again with mpsd-run"
    return (
        f"uid {uid} may not enter {closed}, to which {printable(path)} leads; start the program with mpsd-run"
    )


def _is_ours(path: str, run_dir: str) -> bool:
    """Return whether the path names a slot or a domain of this run directory, without a look at the path."""
    parent, name = os.path.split(os.path.normpath(path))
    return bool(name) and any(
        parent == os.path.join(root, place)
        for root in (run_dir, os.path.realpath(run_dir))
        for place in _PLACES
    )


def closed_directory(path: str, uid: int, groups: tuple[int, ...]) -> str | None:
    """Return the first directory on the way into `path` that this user may not enter.

    Empty if the path leads nowhere, None if the way is open.
    """
    try:
        target = os.path.realpath(path, strict=True)
        for directory in _from_root(os.path.normpath(path), target):
            if not acl.may_enter(directory, uid, groups):
                return directory
    except OSError:
        return ""
    return None


def _from_root(link: str, target: str) -> Iterator[str]:
    """Yield the directories above the link and, as far as they differ, those of its target, from the root."""
    seen = set()
    for path in (os.path.dirname(link), target):
        parts = [part for part in path.split("/") if part]
        for count in range(len(parts) + 1):
            place = "/" + "/".join(parts[:count])
            if place not in seen:
                seen.add(place)
                yield place
