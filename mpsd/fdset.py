"""Names and sets of stored descriptors, as both descriptor stores use them.

A set is stored under one name and comes back whole and in order, or not at all: each descriptor
travels under the label `name#index/count`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from mpsd.errors import StoreError

ANSWER_TIMEOUT_S = 3.0
MAX_NAME = 240
_LABEL = re.compile(r"(?P<name>.+)#(?P<index>\d+)/(?P<count>\d+)", re.DOTALL)


def labelled(name: str, fds: Sequence[int]) -> list[tuple[str, int]]:
    return [(f"{name}#{index}/{len(fds)}", fd) for index, fd in enumerate(fds)]


def whole_sets(held: Mapping[str, Sequence[int]]) -> tuple[dict[str, list[int]], list[str]]:
    """Complete sets by name, and the labels of incomplete ones, whose descriptors are closed.

    A set is incomplete when the daemon died inside `put`. What was not stored here (a socket passed
    by the manager) is left alone.
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
    """Refuse what the protocol cannot carry (sd_notify(3): 255 printable ASCII without colon)."""
    valid = name.isascii() and name.isprintable() and not set(name) & set(":#") and 0 < len(name) <= MAX_NAME
    if not valid or not fds:
        raise StoreError(
            f"{name!r} with {len(fds)} descriptors cannot be stored", remedy="choose another name"
        )
    if name in known:
        raise StoreError(f"{name!r} is stored already", remedy="remove it first")


def close_all(sets: Mapping[str, Sequence[int]]) -> None:
    for fds in sets.values():
        for fd in fds:
            os.close(fd)


def lost(who: str, error: OSError) -> StoreError:
    reason = error.strerror or str(error)
    return StoreError(
        f"{who} does not hold descriptors: {reason}", remedy="leases end with mpsd until it does"
    )
