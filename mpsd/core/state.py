"""The daemon's whole state as frozen values, and what must always hold of it.

A SLOT is a stable path that clients use: one set of GPUs for one user (or shared). It leads to its
ACTIVE domain and keeps a SPARE one warm. A DOMAIN is one control daemon with its server: what dies
together. A CLIENT is one address space of one process instance in one domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from mpsd.core.records import Evidence, FaultRecord
from mpsd.core.standby import FailoverRecord, Member
from mpsd.model import ClientId, FailoverMode, ProcessFacts, ProcessInstance, ServerState, ZonePolicy


class DomainState(StrEnum):
    STARTING = "starting"
    WARM = "warm"
    ACTIVE = "active"
    FAULTED = "faulted"
    POISONED = "poisoned"
    RETIRED = "retired"
    HEADLESS = "headless"
    STOPPING = "stopping"
    FAILED = "failed"


class ClientState(StrEnum):
    NOTICED = "noticed"
    ATTACHED = "attached"
    UNPROTECTED = "unprotected"
    TERMINATING = "terminating"
    KILLING = "killing"
    LINGERING = "lingering"
    HELD = "held"


LIVING = frozenset(
    {
        ClientState.NOTICED,
        ClientState.ATTACHED,
        ClientState.UNPROTECTED,
        ClientState.TERMINATING,
        ClientState.KILLING,
    }
)
SERVING = frozenset({DomainState.STARTING, DomainState.WARM, DomainState.ACTIVE})
"""States in which a new client may be sent to a domain, now or in a moment."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator chose; times in seconds. See mpsd.config for the meaning of each key."""

    spare: bool = True
    kill_victims_after_s: float = 0.0
    exclusive_drain_s: float = 5.0
    laggard_report_s: float = 10.0
    linger_limit_s: float = 30.0
    terminate_deadline_s: float = 0.05
    stop_deadline_s: float = 5.0
    start_retry_s: float = 1.0
    start_retry_max_s: float = 60.0
    evidence_window_s: float = 2.0
    # Anybody who can become many users (a user namespace has 65536) must not start as many servers.
    max_slots: int = 64
    slot_idle_s: float = 600.0
    slot_forget_s: float = 86400.0
    zone_policy: ZonePolicy = ZonePolicy.EVICT
    # OFF: there is no fail-over. Otherwise the most that a program may have.
    failover: FailoverMode = FailoverMode.OFF
    moves_per_minute: int = 3
    move_wait_s: float = 2.0
    standby_linger_s: float = 60.0
    evict_offender: bool = True


@dataclass(frozen=True, slots=True)
class Slot:
    """`uid` None means shared by all users. `exclusive`: the GPU's compute mode admits one server.

    `used`: monotonic seconds when it was last asked for, or a client of it came or went. `retiring`: its
    path is gone; the slot itself goes with its last domain, unless somebody asks for it before.
    """

    id: str
    gpus: tuple[str, ...]
    uid: int | None
    exclusive: bool = False
    active: str | None = None
    spare: str | None = None
    failures: int = 0
    used: float = 0.0
    retiring: bool = False


@dataclass(frozen=True, slots=True)
class Unproven:
    """Monotonic seconds: before `until` a fault may be of its work, and before `named` it is taken for that,
    where it can be of nobody else's."""

    process: ProcessInstance
    until: float
    named: float


@dataclass(frozen=True, slots=True)
class Domain:
    """`refused`: processes that saw error 807 here; `turned_away`: the latest of their pids. `bereft`: whose
    contexts died with a server; another one may have come since, for those who still joined. `unproven`:
    whose turns here ended before their work was known to have."""

    id: str
    slot: str
    gpus: tuple[str, ...]
    uid: int | None
    state: DomainState
    since: float
    control: ProcessInstance | None = None
    server: ProcessInstance | None = None
    server_state: ServerState = ServerState.GONE
    last_fault: int | None = None
    refused: int = 0
    turned_away: tuple[int, ...] = ()
    problem: str = ""
    former_server: ProcessInstance | None = None
    bereft: frozenset[ProcessInstance] = frozenset()
    unproven: tuple[Unproven, ...] = ()

    @property
    def generation(self) -> int:
        """Its number as a standby; 0 for a name that is none of ours."""
        digits = self.id.removeprefix("d")
        return int(digits) if digits.isdecimal() else 0

    @property
    def is_dead(self) -> bool:
        """Whether the contexts in it are dead, or nobody is left who could end it in order."""
        served_out = self.state is DomainState.RETIRED and self.server is None
        return served_out or self.state in (DomainState.FAULTED, DomainState.HEADLESS)


POLICY = "policy"
"""The requester of an eviction that nobody waits for."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """An eviction under way: who asked (a request id or POLICY), since when, and when SIGKILL was sent.

    `owner`: the user who asked, who may have only his own processes killed; None for policy and the admin.
    """

    requester: str
    reason: str
    began: float
    steps: tuple[str, ...] = ()
    killed: float | None = None
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class Client:
    """`leased`, `listed` (by the server, when asked): see mpsd.core.proof. `unstored`: its lease is held
    by the daemon alone. `blind`: the end of its work is not seen. `zone_policy`: set for its process, None
    where the default holds. `frozen`: stopped by mpsd itself, since when. `apart`: its address spaces were
    told from those that its process has in other domains. `waited`: nothing of its process ran there when
    that ended.
    """

    id: ClientId
    facts: ProcessFacts
    state: ClientState
    noticed: float
    attached: float | None = None
    died: float | None = None
    leased: bool = False
    tracked: bool = False
    listed: bool = False
    blind: bool = False
    unstored: bool = False
    eviction: Eviction | None = None
    problem: str = ""
    zone_policy: ZonePolicy | None = None
    frozen: float | None = None
    apart: bool = False
    waited: bool = False

    @property
    def living(self) -> bool:
        return self.state in LIVING


@dataclass(frozen=True, slots=True)
class Departed:
    """What is remembered for a while of a client that has gone. `leased`: its lease outlived it; `waited`:
    nothing of its process ran there at the end."""

    id: ClientId
    facts: ProcessFacts
    at: float
    leased: bool
    waited: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """A domain whose server is ended while what the dead left there may run. `pids`: of whoever has, or had,
    a context there; `at`: monotonic seconds of when its server had gone, None before that; `told`: who has
    told of the end of that work by now."""

    domain: str
    gpus: tuple[str, ...]
    pids: frozenset[int]
    at: float | None = None
    told: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Stray:
    """Evidence about a GPU that no domain owns yet; it waits for one, or is reported alone.

    `foreign`: the line names a process that is none of ours, so it never joins a domain's fault.
    """

    gpu: str
    xid: int
    evidence: Evidence
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class Tally:
    """Accesses of one process that its guard zones absorbed; `recorded`: when that last began a record."""

    count: int
    recorded: float


@dataclass(frozen=True, slots=True)
class State:
    """`hits`: records of guard hits that may yet be revised (bounded). `tallies`: of living clients.

    `departed` remembers which processes were clients of which domain, newest last (bounded). `members`: see
    mpsd.core.standby; `homes_changed` counts changes of what a later daemon needs of them. `failovers`:
    records that may yet be revised (bounded). `copies_problem`: why programs have no second copy of the
    driver to load.
    """

    policy: Policy = Policy()
    slots: Mapping[str, Slot] = field(default_factory=lambda: MappingProxyType({}))
    domains: Mapping[str, Domain] = field(default_factory=lambda: MappingProxyType({}))
    clients: Mapping[ClientId, Client] = field(default_factory=lambda: MappingProxyType({}))
    departed: tuple[Departed, ...] = ()
    open_faults: tuple[FaultRecord, ...] = ()
    hits: tuple[FaultRecord, ...] = ()
    tallies: Mapping[ProcessInstance, Tally] = field(default_factory=lambda: MappingProxyType({}))
    strays: tuple[Stray, ...] = ()
    endings: tuple[Ending, ...] = ()
    drained: frozenset[str] = frozenset()
    stopping: bool = False
    adopting: bool = False
    next_fault: int = 1
    next_domain: int = 1
    next_failover: int = 1
    members: Mapping[ProcessInstance, Member] = field(default_factory=lambda: MappingProxyType({}))
    failovers: tuple[FailoverRecord, ...] = ()
    homes_changed: int = 0
    copies_problem: str = "the driver is not copied yet"
    counters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def clients_of(self, domain: str) -> Iterator[Client]:
        return (c for c in self.clients.values() if c.id.domain == domain)

    def living_of(self, domain: str) -> Iterator[Client]:
        """Whose work would be lost with the domain, and who is being put out of it."""
        return (c for c in self.clients_of(domain) if c.living and not self.is_idle(c))

    def may_be_in_use(self, domain: str) -> bool:
        """A daemon that has just been started does not know its clients yet."""
        return self.adopting or any(self.living_of(domain))

    def at_home(self, client: Client) -> bool:
        """False for the context of a member outside its home: nothing of it runs there.

        A home in which the process is no client is a word, and no more.
        """
        member = self.members.get(client.id.process)
        if member is None or member.home in (None, client.id.domain):
            return True
        return not any(c.living and c.id.domain == member.home for c in self.spaces_of(client.id.process))

    def is_in_waiting(self, client: Client) -> bool:
        """Whether this is a context in which nothing is to run: a living member's, outside its home."""
        return client.living and not self.at_home(client)

    def is_idle(self, client: Client) -> bool:
        """Whether it may go with its domain, though its process lives: nobody waits for its end, either."""
        return client.eviction is None and self.is_in_waiting(client)

    def has_lost(self, member: Member) -> bool:
        """Whether the contexts of this program are dead where its work runs: with the domain, or with a
        server before the present one."""
        home = self.domains.get(member.home or "")
        return home is not None and (home.is_dead or member.process in home.bereft)

    def spaces_of(self, process: ProcessInstance) -> Iterator[Client]:
        return (c for c in self.clients.values() if c.id.process == process)

    def slot_for(self, gpus: tuple[str, ...], uid: int | None) -> Slot | None:
        return next((s for s in self.slots.values() if s.gpus == gpus and s.uid == uid), None)

    def domains_on(self, gpu: str) -> Iterator[Domain]:
        return (d for d in self.domains.values() if gpu in d.gpus)

    def counted(self, name: str, by: int = 1) -> State:
        counters = dict(self.counters)
        counters[name] = counters.get(name, 0) + by
        return replace(self, counters=MappingProxyType(counters))


class InvariantViolation(AssertionError):
    """The state contradicts itself: a bug in core, never the outside world's doing."""


def check_invariants(state: State) -> None:
    """Raise InvariantViolation if anything that must always hold does not."""
    for slot in state.slots.values():
        _check_slot(state, slot)
    roles = [d for s in state.slots.values() for d in (s.active, s.spare) if d is not None]
    _hold(len(roles) == len(set(roles)), "a domain serves two roles")
    for domain in state.domains.values():
        _hold(domain.slot in state.slots, "domain {} has no slot", domain.id)
        if domain.state is DomainState.STOPPING:
            living = [str(c.id) for c in state.living_of(domain.id)]
            _hold(not living, "domain {} is being stopped under living clients {}", domain.id, living)
    for client in state.clients.values():
        _check_client(state, client)
    for record in (*state.open_faults, *state.hits):
        _hold(
            record.offender is None or record.offender.id not in {v.id for v in record.victims},
            "fault {} names a victim as its offender",
            record.id,
        )
    for process in state.tallies:
        _hold(any(c.living for c in state.spaces_of(process)), "hits of {} are counted for nobody", process)


def _check_slot(state: State, slot: Slot) -> None:
    for role in (slot.active, slot.spare):
        if role is not None:
            _hold(role in state.domains, "slot {} leads to unknown domain {}", slot.id, role)
            _hold(state.domains[role].slot == slot.id, "slot {} borrows domain {}", slot.id, role)
    if slot.active is not None:
        dead = state.domains[slot.active].state is DomainState.STOPPING
        _hold(not dead, "slot {} leads to a domain that is being stopped", slot.id)
    if slot.spare is not None:
        ready = state.domains[slot.spare].state in (DomainState.STARTING, DomainState.WARM)
        _hold(ready, "spare of {} is {}", slot.id, state.domains[slot.spare].state)
    _hold(not (slot.retiring and (slot.active or slot.spare)), "slot {} serves while it is retired", slot.id)
    _hold(not (slot.exclusive and slot.spare), "slot {} has a spare in exclusive mode", slot.id)


def _check_client(state: State, client: Client) -> None:
    _hold(client.id.domain in state.domains, "client {} has no domain", client.id)
    _hold(client.id.process == client.facts.instance, "client {} has foreign facts", client.id)
    dead = client.state in (ClientState.LINGERING, ClientState.HELD)
    _hold(dead == (client.died is not None), "client {} is {}, died {}", client.id, client.state, client.died)
    _hold(not dead or client.leased, "dead client {} is kept without a lease", client.id)
    evicting = client.state in (ClientState.TERMINATING, ClientState.KILLING)
    _hold(not evicting or client.eviction is not None, "client {} is evicted by nobody", client.id)
    _hold(client.frozen is None or client.living, "client {} is dead and frozen", client.id)
    asked = client.state is ClientState.TERMINATING
    _hold(client.frozen is None or not asked, "frozen client {} is asked to leave", client.id)


def _hold(condition: bool, what: str, *of: object) -> None:
    if not condition:
        raise InvariantViolation(what.format(*of))
