"""Fair shares of a door's connections: pure, without sockets and clocks.

A door has a capacity. While it has room, every newcomer enters. When it is full, a newcomer displaces a
connection of the largest holder, if that holder has at least two more than the newcomer's account. Otherwise
the newcomer is refused. So the largest holder shrinks until all accounts that ask have the same share.

Accounts have two levels. The owner is a user, with the subordinate ids of that user. Within an owner, each
uid and each cgroup is an account of its own. An owner at its own limit shares it among these in the same way.

A tie: where each account holds one connection, an account without any displaces the longest one that does no
work. Holders with many uids therefore cannot lock out a newcomer with silent connections.

A reserve belongs to privileged peers. Other peers never take it, and they never displace a privileged peer
that is inside the reserve.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


class Standing(IntEnum):
    """The use of a connection. A lower standing is displaced first."""

    NEW = 0
    """The peer has not greeted."""
    IDLE = 1
    """The peer has greeted, and waits for nothing."""
    WORKING = 2
    """The peer is a client with a greeting, a request or a subscription."""


@dataclass(frozen=True, slots=True)
class Account:
    """The account that a connection is charged to. `cgroup`: empty if unknown."""

    owner: int
    uid: int
    cgroup: str = ""


class Seat:
    """One connection, as the shares see it. `number`: grows with each admitted seat."""

    def __init__(self, account: Account, *, privileged: bool = False) -> None:
        self.account = account
        self.privileged = privileged
        self.standing = Standing.NEW
        self.number = 0


class FairShares:
    """The seats of one door. `each`: limit of one owner. `reserve`: seats for privileged peers alone."""

    def __init__(self, capacity: int, each: int, reserve: int) -> None:
        self.capacity = capacity
        self.each = each
        self.reserve = min(reserve, capacity)
        self._owners: dict[int, dict[Seat, None]] = {}
        self._total = self._privileged = 0
        self._numbers = count(1)

    def __len__(self) -> int:
        return self._total

    def held_by(self, owner: int) -> int:
        return len(self._owners.get(owner, ()))

    def add(self, seat: Seat) -> None:
        seat.number = next(self._numbers)
        self._owners.setdefault(seat.account.owner, {})[seat] = None
        self._total += 1
        self._privileged += seat.privileged

    def remove(self, seat: Seat) -> None:
        seats = self._owners[seat.account.owner]
        del seats[seat]
        if not seats:
            del self._owners[seat.account.owner]
        self._total -= 1
        self._privileged -= seat.privileged

    def has_room(self, newcomer: Seat) -> bool:
        """Return whether the newcomer may enter without displacing a connection."""
        if self.held_by(newcomer.account.owner) >= self.each:
            return False
        if newcomer.privileged:
            return self._total < self.capacity
        outside_reserve = self._total - self._privileged + max(0, self._privileged - self.reserve)
        return outside_reserve < self.capacity - self.reserve

    def displaced_by(self, newcomer: Seat) -> Seat | None:
        """Return the connection that makes room for the newcomer; None if the newcomer is refused."""
        owner = newcomer.account.owner
        if self.held_by(owner) >= self.each:
            return self._within(owner, newcomer)
        groups = self._owners
        if not newcomer.privileged and self._privileged <= self.reserve:
            groups = {
                key: {seat: None for seat in seats if not seat.privileged} for key, seats in groups.items()
            }
        chosen = _yielding(groups, owner)
        if isinstance(chosen, Seat):
            return chosen
        if chosen is None:
            largest = max(map(len, groups.values()), default=0)
            return self._within(owner, newcomer) if 0 < largest == len(groups.get(owner, ())) else None
        account = max(_by_account(chosen).values(), key=len)
        return _least(account)

    def _within(self, owner: int, newcomer: Seat) -> Seat | None:
        """Share an owner's connections among its uids and cgroups."""
        seats = [s for s in self._owners[owner] if newcomer.privileged or not s.privileged]
        chosen = _yielding(_by_account(seats), newcomer.account)
        return chosen if chosen is None or isinstance(chosen, Seat) else _least(chosen)


def _by_account(seats: Collection[Seat]) -> dict[Account, list[Seat]]:
    found: dict[Account, list[Seat]] = {}
    for seat in seats:
        found.setdefault(seat.account, []).append(seat)
    return found


def _yielding(groups: Mapping[K, Collection[Seat]], own: K) -> Collection[Seat] | Seat | None:
    """Return the group that gives up a connection, or that connection itself in a tie; None: no group."""
    sizes = {key: len(seats) for key, seats in groups.items()}
    largest, mine = max(sizes.values(), default=0), sizes.get(own, 0)
    if largest > mine + 1:
        # Among equals, prefer a holder with a connection that does no work.
        equals = [seats for seats in groups.values() if len(seats) == largest]
        return min(equals, key=lambda seats: _least(seats).standing)
    if mine:
        return None
    unused = [s for seats in groups.values() for s in seats if s.standing is not Standing.WORKING]
    return min(unused, key=lambda seat: seat.number, default=None)


def _least(seats: Collection[Seat]) -> Seat:
    """Return the seat of the lowest standing, and of those the newest."""
    return min(seats, key=lambda seat: (seat.standing, -seat.number))
