"""Names and sets of stored descriptors, as both descriptor stores use them.

A set is stored under one name and is restored whole and in order, or not at all. Each descriptor travels
under the label `name#index/count`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from mpsd.base.errors import StoreError

ANSWER_TIMEOUT_S = 3.0
MAX_NAME = 240
_LABEL = re.compile(r"(?P<name>.+)#(?P<index>\d+)/(?P<count>\d+)", re.DOTALL)


def labelled(name: str, fds: Sequence[int]) -> list[tuple[str, int]]:
    return [(f"{name}#{index}/{len(fds)}", fd) for index, fd in enumerate(fds)]


def whole_sets(held: Mapping[str, Sequence[int]]) -> tuple[dict[str, list[int]], list[str]]:
    """Return complete sets by name, and the labels of incomplete ones with their descriptors closed.

    A set is incomplete when the daemon died inside `put`. Descriptors of another origin (a socket passed by
    the manager) are ignored.
    """
    groups: dict[tuple[str, int], dict[int, tuple[str, int]]] = {}
    for label, fds in held.items():
        match = _LABEL.fullmatch(label)
        if match is None:
            continue
        members = groups.setdefault((match["name"], int(match["count"])), {})
        members[int(match["index"])] = (label, fds[0])
        close_all({label: fds[1:]})
    whole: dict[str, list[int]] = {}
    incomplete: list[str] = []
    for (name, count), members in groups.items():
        if sorted(members) == list(range(count)) and name not in whole:
            whole[name] = [members[index][1] for index in range(count)]
        else:
            incomplete += [label for label, _ in members.values()]
            close_all({name: [fd for _, fd in members.values()]})
    return whole, incomplete


def check_new(name: str, fds: Sequence[int], known: Mapping[str, object]) -> None:
    """Refuse names that the protocol cannot carry (sd_notify(3): 255 printable ASCII without colon)."""
    valid = name.isascii() and name.isprintable() and not set(name) & set(":#") and 0 < len(name) <= MAX_NAME
    if not valid or not fds:
        raise StoreError(f"cannot store {name!r} with {len(fds)} descriptors", remedy="choose another name")
    if name in known:
        raise StoreError(f"{name!r} is stored already", remedy="remove it first")


def close_all(sets: Mapping[str, Sequence[int]]) -> None:
    for fds in sets.values():
        for fd in fds:
            os.close(fd)


def lost(who: str, error: OSError) -> StoreError:
    reason = error.strerror or str(error)
    return StoreError(
        f"{who} does not hold descriptors: {reason}", remedy="until it does, leases end with mpsd"
    )
