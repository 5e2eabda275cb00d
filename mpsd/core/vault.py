"""Who owns which piece of GPU memory in the vault. A ledger of values: no descriptor, no clock, no I/O.

A holding belongs to an owner (a uid in a cgroup, or a uid with a token) and was brought by one process.
It ends with that process, unless it was kept under a name: then it stays for the same owner to come back
to, until it is too old or its owner keeps too much, oldest first. A name is that of all that one process
has and will have, or of one piece alone, which the owner's next process takes over as its own. Whatever
goes is in an answer of the method that let it go, once: who holds the descriptors closes exactly those.
While its process lives, other processes of its owner may open it by a secret that it was shared under.

Times are seconds of the monotonic clock, sizes bytes. Long because its tables change together or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from mpsd.model import ProcessInstance

MAX_NAME = 63


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """In containers everybody may be uid 0, so the cgroup counts too; a token (its digest) stands for one."""

    uid: int
    cgroup: str = ""
    token: str = ""


@dataclass(frozen=True, slots=True)
class Holding:
    """`id` is the vault's own, never given twice. `number` and `address` are the program's words.

    `died`: when its process ended, for what is kept; None while the process lives. `alone`: the name is
    this piece's and no other's. `share`: the digest of the secret under which other processes of the owner
    may open it, empty for none.
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
    """`client`: of one process. `user`: of one uid, kept ones included. `kept`: of one owner's dead."""

    client: Quota
    user: Quota
    kept: Quota
    descriptors: int
    keep_age_s: float


class Refusal(StrEnum):
    """Why something is not taken or not kept. Never an error for the program."""

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
    """`freed` has left the ledger, `changed` is in it with new values."""

    holding: Holding | None = None
    refusal: Refusal | None = None
    freed: tuple[Holding, ...] = ()
    changed: tuple[Holding, ...] = ()


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
    """Who is or was the one to bring it, and what is held under it: of one `alone`, exactly that."""

    process: ProcessInstance
    alone: bool = False
    held: dict[int, None] = field(default_factory=dict)


class _Life(NamedTuple):
    """Of a process that has ended, or has replaced its program."""

    owner: Owner
    process: ProcessInstance
    died: float


@dataclass(slots=True)
class _Remains:
    held: dict[int, None] = field(default_factory=dict)
    sum: _Sum = field(default_factory=_Sum)


def valid_name(name: str) -> bool:
    """1 to 63 printable ASCII characters without blanks, and not a number: numbers are ids."""
    return 0 < len(name) <= MAX_NAME and all("!" <= c <= "~" for c in name) and not name.isdecimal()


@dataclass(slots=True)
class Ledger:
    """All holdings, with sums kept as they change: each method's cost is that of what it touches."""

    limits: Limits
    next_id: int = 1
    _held: dict[int, Holding] = field(default_factory=dict)
    # Of the living: by process and number, and what they want all their memory to be kept as.
    _by_process: dict[ProcessInstance, dict[int, int]] = field(default_factory=dict)
    _clients: dict[ProcessInstance, _Sum] = field(default_factory=dict)
    _wishes: dict[ProcessInstance, tuple[Owner, str]] = field(default_factory=dict)
    _names: dict[tuple[Owner, str], _Name] = field(default_factory=dict)
    _users: dict[int, _Sum] = field(default_factory=dict)
    _shares: dict[tuple[Owner, str], int] = field(default_factory=dict)
    # In the order of their ends. One process can have several: an exec ends what it was.
    _dead: dict[_Life, _Remains] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def holdings(self) -> Iterator[Holding]:
        return iter(tuple(self._held.values()))

    def get(self, holding_id: int) -> Holding | None:
        return self._held.get(holding_id)

    def of(self, process: ProcessInstance) -> tuple[Holding, ...]:
        """What a living process has brought, or taken over."""
        return self._all(self._by_process.get(process, {}).values())

    def bytes_of(self, process: ProcessInstance) -> int:
        return self._clients[process].bytes if process in self._clients else 0

    def _all(self, ids: Iterable[int]) -> tuple[Holding, ...]:
        return tuple(self._held[i] for i in ids)

    # -- what comes --------------------------------------------------------------------------------------

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
        """Take a piece; `alone`: kept, by itself, under this name. What the same owner's dead keep makes
        room for it where quotas want that."""
        if number in self._by_process.get(process, {}):
            return Outcome(refusal=Refusal.TWICE)
        if alone is not None and not valid_name(alone):
            return Outcome(refusal=Refusal.BAD_NAME)
        if alone is not None and (owner, alone) in self._names:
            return Outcome(refusal=Refusal.NAME_TAKEN)
        if not self._clients.get(process, _Sum()).fits(size, self.limits.client):
            return Outcome(refusal=Refusal.CLIENT_QUOTA)
        refusal, going = self._room(owner, size)
        if refusal is not None:
            return Outcome(refusal=refusal)
        freed = self._free_all(i for life in going for i in self._dead[life].held)
        wish = self._wishes.get(process)
        name = alone if alone is not None else wish[1] if wish and wish[0] == owner else None
        holding = Holding(
            self.next_id, owner, process, number, size, address, gpu, now, name, alone=alone is not None
        )
        self._add(holding)
        return Outcome(holding, freed=freed)

    def _room(self, owner: Owner, size: int) -> tuple[Refusal | None, list[_Life]]:
        """Why there is none, or which of the owner's dead must go to make it."""
        user = self._users.get(owner.uid, _Sum())
        used, total, going = _Sum(user.bytes, user.descriptors), len(self._held), list[_Life]()
        dead = iter(self._dead_of(owner))
        while not (fits := used.fits(size, self.limits.user)) or total >= self.limits.descriptors:
            oldest = next(dead, None)
            if oldest is None:
                return (Refusal.FULL if fits else Refusal.USER_QUOTA), []
            going.append(oldest)
            kept = self._dead[oldest].sum
            total -= kept.descriptors
            used.bytes -= kept.bytes
            used.descriptors -= kept.descriptors
        return None, going

    def take(
        self, owner: Owner, process: ProcessInstance, name: str, *, number: int, address: int
    ) -> Outcome:
        """What is kept alone under a name becomes this process's, which calls it `number` and has it at
        `address` (0: it does not say); it stays kept. Refused while another living process has it."""
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
        """The process has done with what is kept alone, and lives on: it is there for the next."""
        found = self._by_process.get(process, {}).get(number)
        if found is None or not self._held[found].alone:
            return Outcome(refusal=Refusal.NOTHING)
        left = replace(self._held[found], died=now, share="")
        self._remove(self._held[found])
        self._add(left)
        freed = self._trim(left.owner)
        return Outcome(left, freed=freed, changed=self._all({found} & self._held.keys()))

    def may_keep(self, owner: Owner, process: ProcessInstance, name: str) -> Refusal | None:
        """Why `keep` would be refused."""
        if not valid_name(name):
            return Refusal.BAD_NAME
        taken = (owner, name) in self._names and self._wishes.get(process) != (owner, name)
        return Refusal.NAME_TAKEN if taken else None

    def keep(self, owner: Owner, process: ProcessInstance, name: str) -> Outcome:
        """What the process has brought, and will bring, stays after it under this name (a new name
        replaces the old), but for what is kept alone."""
        refusal = self.may_keep(owner, process, name)
        if refusal is not None:
            return Outcome(refusal=refusal)
        self._forget_wish(process)
        entry = self._names[owner, name] = _Name(process)
        self._wishes[process] = (owner, name)
        changed = tuple(replace(h, name=name) for h in self.of(process) if not h.alone)
        for holding in changed:
            self._held[holding.id] = holding
            entry.held[holding.id] = None
        return Outcome(changed=changed)

    # -- what goes ---------------------------------------------------------------------------------------

    def drop(self, process: ProcessInstance, number: int) -> Outcome:
        """The program has freed it, kept or not."""
        found = self._by_process.get(process, {}).get(number)
        if found is None:
            return Outcome(refusal=Refusal.NOTHING)
        return Outcome(freed=self._free_all((found,)))

    def share(self, process: ProcessInstance, number: int, share: str) -> Outcome:
        """Other processes of the owner may open it by this secret (its digest), which replaces an earlier
        one, until it is freed or its process ends."""
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

    def shared(self, owner: Owner, share: str) -> Holding | None:
        """What is open to this owner under that secret's digest: None alike for what is unknown and for
        what is another owner's."""
        found = self._shares.get((owner, share))
        return None if found is None else self._held[found]

    def died(self, process: ProcessInstance, now: float) -> Outcome:
        """Its end: what is not kept goes at once, and so do its owner's oldest where too much is kept."""
        held = self.of(process)
        freed = self._free_all(h.id for h in held if h.name is None)
        changed = tuple(replace(h, died=now, share="") for h in held if h.name is not None)
        wish = self._wishes.pop(process, None)
        for holding in changed:
            self._remove(self._held[holding.id])
            self._add(holding)
        if wish is not None and not self._names[wish].held:
            del self._names[wish]
        for owner in {h.owner for h in changed}:
            freed += self._trim(owner)
        return Outcome(freed=freed, changed=self._all(h.id for h in changed if h.id in self._held))

    def _trim(self, owner: Owner) -> tuple[Holding, ...]:
        freed, dead, limit = list[Holding](), self._dead_of(owner), self.limits.kept
        sums = [self._dead[life].sum for life in dead]
        total, pieces = sum(s.bytes for s in sums), sum(s.descriptors for s in sums)
        for life, kept in zip(dead, sums, strict=True):
            if total <= limit.bytes and pieces <= limit.descriptors:
                break
            total, pieces = total - kept.bytes, pieces - kept.descriptors
            freed += self._free_all(self._dead[life].held)
        return tuple(freed)

    def expire(self, now: float) -> Outcome:
        """Let go of what was kept for longer than it may be."""
        old = [kept for life, kept in self._dead.items() if now - life.died >= self.limits.keep_age_s]
        return Outcome(freed=self._free_all(i for kept in old for i in kept.held))

    def next_expiry(self) -> float | None:
        """When `expire` will have something to do; None while nobody's dead are kept."""
        return next((life.died + self.limits.keep_age_s for life in self._dead), None)

    def named(self, owner: Owner, name: str) -> tuple[Holding, ...]:
        """What this owner may come back to, in the order in which it was brought. Nobody else's, ever."""
        entry = self._names.get((owner, name))
        return () if entry is None else self._all(entry.held)

    def free(self, holdings: Iterable[Holding]) -> Outcome:
        return Outcome(freed=self._free_all(h.id for h in tuple(holdings) if h.id in self._held))

    # -- the next daemon ---------------------------------------------------------------------------------

    def restore(self, holding: Holding) -> bool:
        """Take over what an earlier daemon held. False for what contradicts what is there."""
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
            if living and not holding.alone and self._wishes.setdefault(process, key) != key:
                return False
        self._add(holding)
        if not living:
            self._dead = dict(sorted(self._dead.items(), key=lambda item: item[0].died))
        return True

    # -- the tables --------------------------------------------------------------------------------------

    def _dead_of(self, owner: Owner) -> list[_Life]:
        """The owner's, oldest first."""
        return [life for life in self._dead if life.owner == owner]

    def _add(self, holding: Holding) -> None:
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
            remains = self._dead.setdefault(life, _Remains())
            remains.held[holding.id] = None
            remains.sum.add(holding.size)
        if holding.name is not None:
            fresh = _Name(holding.process, holding.alone)
            self._names.setdefault((holding.owner, holding.name), fresh).held[holding.id] = None

    def _free_all(self, ids: Iterable[int]) -> tuple[Holding, ...]:
        freed = self._all(tuple(ids))
        for holding in freed:
            self._remove(holding)
        return freed

    def _remove(self, holding: Holding) -> None:
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
            del self._dead[life].held[holding.id]
            self._dead[life].sum.subtract(holding.size)
            if not self._dead[life].held:
                del self._dead[life]
        if holding.name is not None:
            key = (holding.owner, holding.name)
            del self._names[key].held[holding.id]
            if not self._names[key].held and self._wishes.get(process) != key:
                del self._names[key]

    def _unshare(self, holding: Holding) -> None:
        if self._shares.get((holding.owner, holding.share)) == holding.id:
            del self._shares[holding.owner, holding.share]

    def _forget_wish(self, process: ProcessInstance) -> None:
        wish = self._wishes.pop(process, None)
        if wish is not None:
            del self._names[wish]

    def is_empty(self) -> bool:
        """Nothing is left of anybody, not even a wish."""
        parts = (self._held, self._by_process, self._names, self._wishes)
        return not any((*parts, self._clients, self._users, self._shares, self._dead))
