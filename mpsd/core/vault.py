"""Ledger of the GPU memory segments in the vault: values only, no descriptor, no clock, no I/O.

A holding is a segment that belongs to an owner (a uid in a cgroup, or a uid with a token). One process
brought it. A holding ends with its process unless the process keeps it under a name. A kept holding stays for
the same owner until it is too old. If its owner keeps too much, the oldest holdings are freed first.

A name covers all present and future segments of one process, or one segment alone. The owner's next process
can take over a segment that is kept alone. While its process lives, a segment can be shared: other processes
of the owner open it by a secret.

A freed holding is in the answer of exactly one method, so that the caller, which holds the descriptors,
closes exactly those. Times are monotonic seconds, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from mpsd.base.model import ProcessInstance

MAX_NAME = 63


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """Owner of segments. The cgroup counts because in containers every user may be uid 0.

    `token`: digest of a token that takes the place of the cgroup.
    """

    uid: int
    cgroup: str = ""
    token: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment in the vault. `id` is never reused. `number` and `address` are the program's claims.

    `died`: when its process ended, for a kept segment; None while the process lives. `alone`: the name covers
    this segment only. `share`: digest of the secret for other processes of the owner; empty for none.
    """

    id: int
    owner: Owner
    process: ProcessInstance
    number: int
    size: int
    address: int
    gpu: str
    since: float
    name: str | None = None
    died: float | None = None
    alone: bool = False
    share: str = ""


@dataclass(frozen=True, slots=True)
class Quota:
    bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Quotas of the vault.

    `client`: for one process. `user`: for one uid, kept segments included. `kept`: for the segments that one
    owner's exited processes keep.
    """

    client: Quota
    user: Quota
    kept: Quota
    descriptors: int
    keep_age_s: float


class Refusal(StrEnum):
    """Reason why a segment is not taken or not kept. Never an error for the program."""

    CLIENT_QUOTA = "the client's quota"
    USER_QUOTA = "the user's quota"
    FULL = "the vault is full"
    TWICE = "that number is held already"
    NAME_TAKEN = "another process keeps memory under that name"
    BAD_NAME = "not a name"
    NOTHING = "nothing is held"
    IN_USE = "a living process has it"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a method. `freed` has left the ledger; `changed` is in it with new values."""

    holding: Segment | None = None
    refusal: Refusal | None = None
    freed: tuple[Segment, ...] = ()
    changed: tuple[Segment, ...] = ()


@dataclass(slots=True)
class _Sum:
    bytes: int = 0
    descriptors: int = 0

    def fits(self, size: int, quota: Quota) -> bool:
        return self.bytes + size <= quota.bytes and self.descriptors < quota.descriptors

    def add(self, size: int) -> None:
        self.bytes += size
        self.descriptors += 1

    def subtract(self, size: int) -> None:
        self.bytes -= size
        self.descriptors -= 1


@dataclass(slots=True)
class _Name:
    """The process that brought the segments of a name, and their ids. `alone`: exactly one segment."""

    process: ProcessInstance
    alone: bool = False
    held: dict[int, None] = field(default_factory=dict)


class _Life(NamedTuple):
    """One life of a process that has exited or has replaced its program by exec."""

    owner: Owner
    process: ProcessInstance
    died: float


@dataclass(slots=True)
class _Remains:
    held: dict[int, None] = field(default_factory=dict)
    sum: _Sum = field(default_factory=_Sum)


def valid_name(name: str) -> bool:
    """Return whether the name has 1 to 63 printable ASCII characters without blanks and is not a number.

    Numbers are ids.
    """
    return 0 < len(name) <= MAX_NAME and all("!" <= c <= "~" for c in name) and not name.isdecimal()


@dataclass(slots=True)
class Ledger:
    """All holdings, with sums that each change updates.

    A method's cost depends only on the holdings that it changes.
    """

    limits: Limits
    next_id: int = 1
    _held: dict[int, Segment] = field(default_factory=dict)
    # Of living processes: segments by number, sums, and the names under which they keep all their memory.
    _by_process: dict[ProcessInstance, dict[int, int]] = field(default_factory=dict)
    _clients: dict[ProcessInstance, _Sum] = field(default_factory=dict)
    _keep_requests: dict[ProcessInstance, tuple[Owner, str]] = field(default_factory=dict)
    _names: dict[tuple[Owner, str], _Name] = field(default_factory=dict)
    _users: dict[int, _Sum] = field(default_factory=dict)
    _shares: dict[tuple[Owner, str], int] = field(default_factory=dict)
    # In the order of their ends. One process can have several lives: an exec ends the previous one.
    _exited: dict[_Life, _Remains] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def holdings(self) -> Iterator[Segment]:
        return iter(tuple(self._held.values()))

    def get(self, holding_id: int) -> Segment | None:
        return self._held.get(holding_id)

    def of(self, process: ProcessInstance) -> tuple[Segment, ...]:
        """Return the segments that a living process has brought or taken over."""
        return self._all(self._by_process.get(process, {}).values())

    def bytes_of(self, process: ProcessInstance) -> int:
        return self._clients[process].bytes if process in self._clients else 0

    def _all(self, ids: Iterable[int]) -> tuple[Segment, ...]:
        return tuple(self._held[i] for i in ids)

    # -- additions ---------------------------------------------------------------------------------------

    def admit(
        self,
        owner: Owner,
        process: ProcessInstance,
        *,
        number: int,
        size: int,
        address: int,
        gpu: str,
        now: float,
        alone: str | None = None,
    ) -> Outcome:
        """Take a segment. `alone`: keep it, by itself, under this name.

        If a quota requires it, kept segments of the owner's exited processes are freed first, oldest first.
        """
        if number in self._by_process.get(process, {}):
            return Outcome(refusal=Refusal.TWICE)
        if alone is not None and not valid_name(alone):
            return Outcome(refusal=Refusal.BAD_NAME)
        if alone is not None and (owner, alone) in self._names:
            return Outcome(refusal=Refusal.NAME_TAKEN)
        if not self._clients.get(process, _Sum()).fits(size, self.limits.client):
            return Outcome(refusal=Refusal.CLIENT_QUOTA)
        refusal, going = self._check_capacity(owner, size)
        if refusal is not None:
            return Outcome(refusal=refusal)
        freed = self._free_all(i for life in going for i in self._exited[life].held)
        keep_request = self._keep_requests.get(process)
        name = (
            alone
            if alone is not None
            else keep_request[1]
            if keep_request and keep_request[0] == owner
            else None
        )
        holding = Segment(
            self.next_id, owner, process, number, size, address, gpu, now, name, alone=alone is not None
        )
        self._add(holding)
        return Outcome(holding, freed=freed)

    def _check_capacity(self, owner: Owner, size: int) -> tuple[Refusal | None, list[_Life]]:
        """Return the refusal, or the exited lives of the owner to free so that the segment fits."""
        user = self._users.get(owner.uid, _Sum())
        used, total, going = _Sum(user.bytes, user.descriptors), len(self._held), list[_Life]()
        exited = iter(self._exited_of(owner))
        while not (fits := used.fits(size, self.limits.user)) or total >= self.limits.descriptors:
            oldest = next(exited, None)
            if oldest is None:
                return (Refusal.FULL if fits else Refusal.USER_QUOTA), []
            going.append(oldest)
            kept = self._exited[oldest].sum
            total -= kept.descriptors
            used.bytes -= kept.bytes
            used.descriptors -= kept.descriptors
        return None, going

    def take(
        self, owner: Owner, process: ProcessInstance, name: str, *, number: int, address: int
    ) -> Outcome:
        """Hand a segment that is kept alone to this process, with the process's `number` and `address`.

        `address` 0: unknown, keep the old one. The segment stays kept. Refused while another living process
        has it.
        """
        entry = self._names.get((owner, name))
        if entry is None:
            return Outcome(refusal=Refusal.NOTHING)
        if not entry.alone:
            return Outcome(refusal=Refusal.NAME_TAKEN)
        (holding,) = self._all(entry.held)
        if holding.died is None and holding.process != process:
            return Outcome(refusal=Refusal.IN_USE)
        if self._by_process.get(process, {}).get(number, holding.id) != holding.id:
            return Outcome(refusal=Refusal.TWICE)
        already = holding.size if holding.died is None else 0
        if not already and not self._clients.get(process, _Sum()).fits(holding.size, self.limits.client):
            return Outcome(refusal=Refusal.CLIENT_QUOTA)
        self._remove(holding)
        address = address or holding.address
        taken = replace(holding, process=process, number=number, address=address, died=None)
        self._add(taken)
        return Outcome(taken, changed=(taken,))

    def leave(self, process: ProcessInstance, number: int, now: float) -> Outcome:
        """Keep a segment for the owner's next process: this process has finished with it and lives on."""
        found = self._by_process.get(process, {}).get(number)
        if found is None or not self._held[found].alone:
            return Outcome(refusal=Refusal.NOTHING)
        left = replace(self._held[found], died=now, share="")
        self._remove(self._held[found])
        self._add(left)
        freed = self._trim(left.owner)
        return Outcome(left, freed=freed, changed=self._all({found} & self._held.keys()))

    def refusal_to_keep(self, owner: Owner, process: ProcessInstance, name: str) -> Refusal | None:
        """Return why `keep` would be refused; None if it would succeed."""
        if not valid_name(name):
            return Refusal.BAD_NAME
        taken = (owner, name) in self._names and self._keep_requests.get(process) != (owner, name)
        return Refusal.NAME_TAKEN if taken else None

    def keep(self, owner: Owner, process: ProcessInstance, name: str) -> Outcome:
        """Keep all present and future segments of the process under this name after its end.

        A new name replaces the old name. Segments that are kept alone are not affected.
        """
        refusal = self.refusal_to_keep(owner, process, name)
        if refusal is not None:
            return Outcome(refusal=refusal)
        self._forget_keep_request(process)
        entry = self._names[owner, name] = _Name(process)
        self._keep_requests[process] = (owner, name)
        changed = tuple(replace(h, name=name) for h in self.of(process) if not h.alone)
        for holding in changed:
            self._held[holding.id] = holding
            entry.held[holding.id] = None
        return Outcome(changed=changed)

    # -- removals ----------------------------------------------------------------------------------------

    def drop(self, process: ProcessInstance, number: int) -> Outcome:
        """Free a segment, kept or not: the program has freed it."""
        found = self._by_process.get(process, {}).get(number)
        if found is None:
            return Outcome(refusal=Refusal.NOTHING)
        return Outcome(freed=self._free_all((found,)))

    def share(self, process: ProcessInstance, number: int, share: str) -> Outcome:
        """Let other processes of the owner open the segment by this secret (its digest).

        The secret replaces an earlier one and ends when the segment is freed or its process ends.
        """
        found = self._by_process.get(process, {}).get(number)
        if found is None:
            return Outcome(refusal=Refusal.NOTHING)
        holding = self._held[found]
        if self._shares.get((holding.owner, share), found) != found:
            return Outcome(refusal=Refusal.TWICE)
        self._unshare(holding)
        shared = self._held[found] = replace(holding, share=share)
        self._shares[holding.owner, share] = found
        return Outcome(shared, changed=(shared,))

    def shared(self, owner: Owner, share: str) -> Segment | None:
        """Return the segment shared under that secret's digest, or None.

        The answer for another owner's segment does not differ from that for an unknown secret.
        """
        found = self._shares.get((owner, share))
        return None if found is None else self._held[found]

    def died(self, process: ProcessInstance, now: float) -> Outcome:
        """End a process: free its segments that are not kept, and the owner's oldest above the quota."""
        held = self.of(process)
        freed = self._free_all(h.id for h in held if h.name is None)
        changed = tuple(replace(h, died=now, share="") for h in held if h.name is not None)
        keep_request = self._keep_requests.pop(process, None)
        for holding in changed:
            self._remove(self._held[holding.id])
            self._add(holding)
        if keep_request is not None and not self._names[keep_request].held:
            del self._names[keep_request]
        for owner in {h.owner for h in changed}:
            freed += self._trim(owner)
        return Outcome(freed=freed, changed=self._all(h.id for h in changed if h.id in self._held))

    def _trim(self, owner: Owner) -> tuple[Segment, ...]:
        """Free the owner's oldest kept segments until the rest fits its quota."""
        freed, exited, limit = list[Segment](), self._exited_of(owner), self.limits.kept
        sums = [self._exited[life].sum for life in exited]
        total, segments = sum(s.bytes for s in sums), sum(s.descriptors for s in sums)
        for life, retained in zip(exited, sums, strict=True):
            if total <= limit.bytes and segments <= limit.descriptors:
                break
            total, segments = total - retained.bytes, segments - retained.descriptors
            freed += self._free_all(self._exited[life].held)
        return tuple(freed)

    def expire(self, now: float) -> Outcome:
        """Free segments that were kept longer than the age limit."""
        old = [
            retained for life, retained in self._exited.items() if now - life.died >= self.limits.keep_age_s
        ]
        return Outcome(freed=self._free_all(i for kept in old for i in kept.held))

    def next_expiry(self) -> float | None:
        """Return when `expire` is due; None if no segment of an exited process is kept."""
        return next((life.died + self.limits.keep_age_s for life in self._exited), None)

    def named(self, owner: Owner, name: str) -> tuple[Segment, ...]:
        """Return the owner's segments under this name, in the order in which they were brought.

        Segments of another owner are never returned.
        """
        entry = self._names.get((owner, name))
        return () if entry is None else self._all(entry.held)

    def free(self, holdings: Iterable[Segment]) -> Outcome:
        return Outcome(freed=self._free_all(h.id for h in tuple(holdings) if h.id in self._held))

    # -- the next daemon ---------------------------------------------------------------------------------

    def restore(self, holding: Segment) -> bool:
        """Take over a holding of an earlier daemon. Return False if it contradicts the ledger."""
        living, process = holding.died is None, holding.process
        known = living and holding.number in self._by_process.get(process, {})
        if holding.id in self._held or known:
            return False
        if not living or (holding.owner, holding.share) in self._shares:
            holding = replace(holding, share="")
        if holding.name is not None:
            key = (holding.owner, holding.name)
            entry = self._names.get(key, _Name(process))
            others = any((h.died is None) != living for h in self._all(entry.held))
            if entry.alone or (entry.held and holding.alone) or entry.process != process or others:
                return False
            if living and not holding.alone and self._keep_requests.setdefault(process, key) != key:
                return False
        self._add(holding)
        if not living:
            self._exited = dict(sorted(self._exited.items(), key=lambda item: item[0].died))
        return True

    # -- the tables --------------------------------------------------------------------------------------

    def _exited_of(self, owner: Owner) -> list[_Life]:
        """Return the exited lives of the owner, oldest first."""
        return [life for life in self._exited if life.owner == owner]

    def _add(self, holding: Segment) -> None:
        self.next_id = max(self.next_id, holding.id + 1)
        self._held[holding.id] = holding
        self._users.setdefault(holding.owner.uid, _Sum()).add(holding.size)
        if holding.died is None:
            self._by_process.setdefault(holding.process, {})[holding.number] = holding.id
            self._clients.setdefault(holding.process, _Sum()).add(holding.size)
            if holding.share:
                self._shares[holding.owner, holding.share] = holding.id
        else:
            life = _Life(holding.owner, holding.process, holding.died)
            remains = self._exited.setdefault(life, _Remains())
            remains.held[holding.id] = None
            remains.sum.add(holding.size)
        if holding.name is not None:
            fresh = _Name(holding.process, holding.alone)
            self._names.setdefault((holding.owner, holding.name), fresh).held[holding.id] = None

    def _free_all(self, ids: Iterable[int]) -> tuple[Segment, ...]:
        freed = self._all(tuple(ids))
        for holding in freed:
            self._remove(holding)
        return freed

    def _remove(self, holding: Segment) -> None:
        process, uid = holding.process, holding.owner.uid
        del self._held[holding.id]
        self._unshare(holding)
        self._users[uid].subtract(holding.size)
        if not self._users[uid].descriptors:
            del self._users[uid]
        if holding.died is None:
            del self._by_process[process][holding.number]
            self._clients[process].subtract(holding.size)
            if not self._by_process[process]:
                del self._by_process[process], self._clients[process]
        else:
            life = _Life(holding.owner, process, holding.died)
            del self._exited[life].held[holding.id]
            self._exited[life].sum.subtract(holding.size)
            if not self._exited[life].held:
                del self._exited[life]
        if holding.name is not None:
            key = (holding.owner, holding.name)
            del self._names[key].held[holding.id]
            if not self._names[key].held and self._keep_requests.get(process) != key:
                del self._names[key]

    def _unshare(self, holding: Segment) -> None:
        if self._shares.get((holding.owner, holding.share)) == holding.id:
            del self._shares[holding.owner, holding.share]

    def _forget_keep_request(self, process: ProcessInstance) -> None:
        keep_request = self._keep_requests.pop(process, None)
        if keep_request is not None:
            del self._names[keep_request]

    def is_empty(self) -> bool:
        """Return whether the ledger has no segment, no name and no pending request to keep."""
        parts = (self._held, self._by_process, self._names, self._keep_requests)
        return not any((*parts, self._clients, self._users, self._shares, self._exited))
