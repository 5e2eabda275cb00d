"""Who owns which piece of GPU memory in the vault. A ledger of values: no descriptor, no clock, no I/O.

A holding belongs to an owner (a uid in a cgroup, or a uid with a token) and was brought by one process.
It ends with that process, unless it was kept under a name: then it stays for the same owner to come back
to, until it is too old or its owner keeps too much, oldest first. Whatever goes is in an answer of the
method that let it go, once: who holds the descriptors closes exactly those. While its process lives, other
processes of its owner may open it by a secret that it was shared under.

Times are seconds of the monotonic clock, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

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

    `died`: when its process ended, for what is kept; None while the process lives. `share`: the digest of
    the secret under which other processes of the owner may open it, empty for none.
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


def valid_name(name: str) -> bool:
    """1 to 63 printable ASCII characters without blanks, and not a number: numbers are ids."""
    return 0 < len(name) <= MAX_NAME and all("!" <= c <= "~" for c in name) and not name.isdecimal()


@dataclass(slots=True)
class Ledger:
    """All holdings, with sums kept as they change: each method's cost is that of what it touches."""

    limits: Limits
    next_id: int = 1
    _held: dict[int, Holding] = field(default_factory=dict)
    _by_process: dict[ProcessInstance, dict[int, int]] = field(default_factory=dict)
    _names: dict[tuple[Owner, str], ProcessInstance] = field(default_factory=dict)
    _wishes: dict[ProcessInstance, tuple[Owner, str]] = field(default_factory=dict)
    _clients: dict[ProcessInstance, _Sum] = field(default_factory=dict)
    _users: dict[int, _Sum] = field(default_factory=dict)
    _shares: dict[tuple[Owner, str], int] = field(default_factory=dict)
    # Ended processes of which something is kept, in the order of their ends.
    _dead: dict[ProcessInstance, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def holdings(self) -> Iterator[Holding]:
        return iter(tuple(self._held.values()))

    def get(self, holding_id: int) -> Holding | None:
        return self._held.get(holding_id)

    def of(self, process: ProcessInstance) -> tuple[Holding, ...]:
        return tuple(self._held[i] for i in self._by_process.get(process, {}).values())

    def bytes_of(self, process: ProcessInstance) -> int:
        return self._clients[process].bytes if process in self._clients else 0

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
    ) -> Outcome:
        """Take a piece. What the same owner's dead keep makes room for it where quotas want that."""
        if number in self._by_process.get(process, {}):
            return Outcome(refusal=Refusal.TWICE)
        if not self._clients.get(process, _Sum()).fits(size, self.limits.client):
            return Outcome(refusal=Refusal.CLIENT_QUOTA)
        refusal, going = self._room(owner, size)
        if refusal is not None:
            return Outcome(refusal=refusal)
        freed = self._free_all(h for p in going for h in self.of(p))
        wish = self._wishes.get(process)
        name = wish[1] if wish and wish[0] == owner else None
        holding = Holding(self.next_id, owner, process, number, size, address, gpu, now, name)
        self._add(holding)
        return Outcome(holding, freed=freed)

    def _room(self, owner: Owner, size: int) -> tuple[Refusal | None, list[ProcessInstance]]:
        """Why there is none, or which of the owner's dead must go to make it."""
        user = self._users.get(owner.uid, _Sum())
        used, total, going = _Sum(user.bytes, user.descriptors), len(self._held), list[ProcessInstance]()
        dead = self._dead_of(owner)
        while not (fits := used.fits(size, self.limits.user)) or total >= self.limits.descriptors:
            oldest = next(dead, None)
            if oldest is None:
                return (Refusal.FULL if fits else Refusal.USER_QUOTA), []
            going.append(oldest)
            total -= self._clients[oldest].descriptors
            used.bytes -= self._clients[oldest].bytes
            used.descriptors -= self._clients[oldest].descriptors
        return None, going

    def drop(self, process: ProcessInstance, number: int) -> Outcome:
        """The program has freed it, kept or not."""
        found = self._by_process.get(process, {}).get(number)
        if found is None:
            return Outcome(refusal=Refusal.NOTHING)
        return Outcome(freed=self._free_all((self._held[found],)))

    def share(self, process: ProcessInstance, number: int, share: str) -> Outcome:
        """Other processes of the owner may open it by this secret (its digest), which replaces an earlier
        one, until it is freed or its process ends."""
        found = self._by_process.get(process, {}).get(number)
        if found is None or process in self._dead:
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

    def may_keep(self, owner: Owner, process: ProcessInstance, name: str) -> Refusal | None:
        """Why `keep` would be refused."""
        if not valid_name(name):
            return Refusal.BAD_NAME
        if process in self._dead:
            return Refusal.NOTHING
        taken = self._names.get((owner, name), process) != process
        return Refusal.NAME_TAKEN if taken else None

    def keep(self, owner: Owner, process: ProcessInstance, name: str) -> Outcome:
        """What the process has brought, and will bring, stays after it under this name (a new name
        replaces the old). A process that has ended keeps what it kept."""
        refusal = self.may_keep(owner, process, name)
        if refusal is not None:
            return Outcome(refusal=refusal)
        self._forget_name(process)
        self._names[owner, name] = process
        self._wishes[process] = (owner, name)
        changed = [replace(h, name=name) for h in self.of(process)]
        for holding in changed:
            self._held[holding.id] = holding
        return Outcome(changed=tuple(changed))

    def died(self, process: ProcessInstance, now: float) -> Outcome:
        """Its end: what is not kept goes at once, and so do its owner's oldest where too much is kept."""
        held = self.of(process)
        freed = self._free_all(h for h in held if h.name is None)
        changed = tuple(replace(h, died=now, share="") for h in held if h.name is not None)
        for holding in held:
            self._unshare(holding)
        for holding in changed:
            self._held[holding.id] = holding
        if not changed:
            self._forget_name(process)
            return Outcome(freed=freed)
        self._dead[process] = now
        freed += self._trim(changed[0].owner)
        return Outcome(freed=freed, changed=tuple(h for h in changed if h.id in self._held))

    def _trim(self, owner: Owner) -> tuple[Holding, ...]:
        freed: tuple[Holding, ...] = ()
        dead = list(self._dead_of(owner))
        total = _Sum(
            sum(self._clients[p].bytes for p in dead), sum(self._clients[p].descriptors for p in dead)
        )
        for process in dead:
            if total.bytes <= self.limits.kept.bytes and total.descriptors <= self.limits.kept.descriptors:
                break
            total.bytes -= self._clients[process].bytes
            total.descriptors -= self._clients[process].descriptors
            freed += self._free_all(self.of(process))
        return freed

    def expire(self, now: float) -> Outcome:
        """Let go of what was kept for longer than it may be."""
        old = [p for p, died in self._dead.items() if now - died >= self.limits.keep_age_s]
        return Outcome(freed=self._free_all(h for p in old for h in self.of(p)))

    def next_expiry(self) -> float | None:
        """When `expire` will have something to do; None while nobody's dead are kept."""
        return next((died + self.limits.keep_age_s for died in self._dead.values()), None)

    def named(self, owner: Owner, name: str) -> tuple[Holding, ...]:
        """What this owner may come back to, in the order in which it was brought. Nobody else's, ever."""
        process = self._names.get((owner, name))
        return () if process is None else self.of(process)

    def free(self, holdings: Iterable[Holding]) -> Outcome:
        return Outcome(freed=self._free_all(h for h in tuple(holdings) if h.id in self._held))

    def restore(self, holding: Holding) -> bool:
        """Take over what an earlier daemon held. False for what contradicts what is there."""
        taken = self._names.get((holding.owner, holding.name or ""), holding.process) != holding.process
        wish = self._wishes.get(holding.process, (holding.owner, holding.name))
        known = holding.number in self._by_process.get(holding.process, {})
        if holding.id in self._held or known or taken or wish != (holding.owner, holding.name):
            return False
        if holding.died is not None or (holding.owner, holding.share) in self._shares:
            holding = replace(holding, share="")
        self._add(holding)
        if holding.name is not None:
            self._names[holding.owner, holding.name] = holding.process
            self._wishes[holding.process] = (holding.owner, holding.name)
            if holding.died is not None:
                self._dead[holding.process] = holding.died
                self._dead = dict(sorted(self._dead.items(), key=lambda item: item[1]))
        return True

    def _dead_of(self, owner: Owner) -> Iterator[ProcessInstance]:
        """The owner's, oldest first."""
        return iter([p for p in self._dead if self._wishes[p][0] == owner])

    def _add(self, holding: Holding) -> None:
        self.next_id = max(self.next_id, holding.id + 1)
        self._held[holding.id] = holding
        self._by_process.setdefault(holding.process, {})[holding.number] = holding.id
        if holding.share:
            self._shares[holding.owner, holding.share] = holding.id
        for total in (
            self._clients.setdefault(holding.process, _Sum()),
            self._users.setdefault(holding.owner.uid, _Sum()),
        ):
            total.bytes += holding.size
            total.descriptors += 1

    def _free_all(self, holdings: Iterable[Holding]) -> tuple[Holding, ...]:
        freed = tuple(holdings)
        for holding in freed:
            self._remove(holding)
        return freed

    def _remove(self, holding: Holding) -> None:
        process, uid = holding.process, holding.owner.uid
        del self._held[holding.id]
        self._unshare(holding)
        del self._by_process[process][holding.number]
        for total in (self._clients[process], self._users[uid]):
            total.bytes -= holding.size
            total.descriptors -= 1
        if not self._users[uid].descriptors:
            del self._users[uid]
        if not self._by_process[process]:
            del self._by_process[process], self._clients[process]
            if process in self._dead:
                self._forget_name(process)
                del self._dead[process]

    def _unshare(self, holding: Holding) -> None:
        if self._shares.get((holding.owner, holding.share)) == holding.id:
            del self._shares[holding.owner, holding.share]

    def _forget_name(self, process: ProcessInstance) -> None:
        wish = self._wishes.pop(process, None)
        if wish is not None:
            del self._names[wish]

    def is_empty(self) -> bool:
        """Nothing is left of anybody, not even a wish."""
        parts = (self._held, self._by_process, self._names, self._wishes)
        return not any((*parts, self._clients, self._users, self._shares, self._dead))
