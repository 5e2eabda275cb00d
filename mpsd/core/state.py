"""The daemon's whole state as frozen values, and its invariants.

A SLOT is a stable path that clients use: one set of GPUs for one user, or shared. It leads to its ACTIVE
domain and keeps a standby domain warm (`spare`). A DOMAIN is one control daemon with its server and clients,
which fail together. A CLIENT is one address space of one process instance in one domain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from mpsd.base.model import (
    ClientId,
    FailoverMode,
    ProcessFacts,
    ProcessInstance,
    Requester,
    ServerState,
    ZonePolicy,
)
from mpsd.base.protection import ProtectionLevel
from mpsd.core.failover.participants import FailoverRecord, Participant
from mpsd.core.faults.records import Evidence, FaultRecord, LoggedProcess, UnconfirmedFault


class DomainState(StrEnum):
    STARTING = "starting"
    WARM = "warm"
    ACTIVE = "active"
    FULL = "full"
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


class LogState(StrEnum):
    """Whether a domain's log announces every client. In the other states its clients may be incomplete.

    INCOMPLETE: lines wait, were skipped or could not be written, and no later client list has come yet.
    QUIET: the log does not announce clients any more.
    """

    WORKS = "works"
    INCOMPLETE = "incomplete"
    QUIET = "quiet"


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
"""States in which new clients may be sent to a domain, now or after its start."""
HOSTING = SERVING | {DomainState.FULL}
"""States in which clients of a domain work, or will; the slot keeps a standby domain for them."""


TIME_BUDGET = 25
"""Thousandths of an epoch that saving may add. A program that exceeds them leaves by itself. With the proxy's
own calls a program takes at most 3 % longer."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's settings; times in seconds. mpsd.config.schema explains each key."""

    spare: bool = True
    # A slot's server and standby domain start with its first client, and end when it is idle for idle_s.
    on_demand: bool = False
    idle_s: float = 300.0
    kill_victims_after_s: float = 0.0
    exclusive_drain_s: float = 5.0
    laggard_report_s: float = 10.0
    linger_limit_s: float = 30.0
    terminate_deadline_s: float = 0.05
    stop_deadline_s: float = 5.0
    start_retry_s: float = 1.0
    start_retry_max_s: float = 60.0
    evidence_window_s: float = 2.0
    # A user namespace has 65536 users: without a limit it could start as many servers.
    max_slots: int = 64
    slot_idle_s: float = 600.0
    slot_forget_s: float = 86400.0
    zone_policy: ZonePolicy = ZonePolicy.EVICT
    # The highest level that driver, GPU and machine allow, whatever the setting.
    reach: ProtectionLevel = ProtectionLevel.FAILOVER
    # OFF: no fail-over. Otherwise the highest mode that a program may get.
    failover: FailoverMode = FailoverMode.OFF
    # Users (uid) and GPUs (UUID) whose protection level is below fail-over.
    users_without_failover: frozenset[int] = frozenset()
    gpus_without_failover: frozenset[str] = frozenset()
    # Memory of each GPU [bytes], by UUID.
    gpu_memory: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    # Most standby contexts on one GPU.
    standby_contexts: int = 12
    # Thousandths of an epoch that saving may add in mode exact; 0: no limit.
    time_budget: int = TIME_BUDGET
    moves_per_minute: int = 3
    move_wait_s: float = 2.0
    standby_linger_s: float = 60.0
    evict_offender: bool = True
    attach_deadline_s: float = 60.0
    clients_per_domain: int = 48


@dataclass(frozen=True, slots=True)
class Slot:
    """A stable path. `uid` None: shared by all users. `exclusive`: the GPU's compute mode admits one server.

    `used`: monotonic seconds of its last request, or of the last start or end of a client. `retiring`: its
    path is removed; the slot goes with its last domain, unless a user asks for it before. `lost`: number of
    domains in a row that became unreachable. `paused`: the next domain starts with the timer "ensure".
    `quiet_replaced`: monotonic seconds at which a domain was last replaced because of its quiet log.
    `starts`: the latest starts of its domains [monotonic s]. `delayed`: their number delays the next one.
    `account`: the user that answers for `uid` (its owner if it is a subordinate uid); None: `uid` itself.
    `joined`: a client has used the slot. `resting`: it is idle, so it wants no standby domain. `second`: the
    second standby domain (core/failover/secondstandby.py). `second_from`: when the next one may start
    [monotonic s]; None if no participant would replay.
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
    lost: int = 0
    paused: bool = False
    quiet_replaced: float | None = None
    starts: tuple[float, ...] = ()
    delayed: bool = False
    account: int | None = None
    joined: bool = False
    resting: bool = False
    second: str | None = None
    second_from: float | None = None

    @property
    def accountable(self) -> int | None:
        """Return the user whose share the slot counts against; None for a shared slot."""
        return self.uid if self.account is None else self.account


@dataclass(frozen=True, slots=True)
class Domain:
    """A fault domain. `refused`: count of processes with error 807; `turned_away`: the latest of their pids.

    `refused_full`: count of processes with error 808, because the server had no place for another client.

    `bereft`: processes with contexts that died with an earlier server; later clients may have a new server.
    `trial`: the suspect that replays here, or will, while no other client works here: see
    core/failover/trial.py. `list_after`: the domain is not stopped before its server has listed its
    clients later than this [monotonic s]. `private`: only its user and root can enter it and write its log.
    `suspected`: when a log that every user can write last reported a fault [monotonic s].
    `server_lost`: when its idle server ended and its control daemon was given time to start another one.
    `foreign`: times of the first and the latest log line with a process of another user. It may be a client
    until a list has told. A domain that hands its path over has such times too: see mpsd.core.slots.
    `unpinned`: the number of listed clients that mpsd does not show for want of descriptors.
    `successor`: it was started to take the place of an idle domain.
    `without_denial`: the processes with work here at its fault that were not told to move in mode exact, and
    have not denied a trap by an SM query; None: no fault, or not known.
    """

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
    refused_full: int = 0
    turned_away: tuple[int, ...] = ()
    problem: str = ""
    former_server: ProcessInstance | None = None
    bereft: frozenset[ProcessInstance] = frozenset()
    trial: ProcessInstance | None = None
    log: LogState = LogState.WORKS
    list_after: float | None = None
    private: bool = False
    suspected: float = -math.inf
    server_lost: float | None = None
    foreign: tuple[float, float] | None = None
    unpinned: int = 0
    successor: bool = False
    without_denial: frozenset[ProcessInstance] | None = None

    @property
    def may_lack_clients(self) -> bool:
        """Return whether the domain may have clients that mpsd does not know."""
        return self.log is not LogState.WORKS or self.unpinned > 0

    def owns(self, facts: ProcessFacts) -> bool:
        """Return whether the process belongs to the domain's user, and to no other user besides."""
        return self.uid is not None and facts.uid == self.uid and not facts.borrowed

    @property
    def generation(self) -> int:
        """Its number as a standby domain; 0 if mpsd did not give this name."""
        digits = self.id.removeprefix("d")
        return int(digits) if digits.isdecimal() else 0

    @property
    def is_dead(self) -> bool:
        """Return whether its contexts are dead, or no control daemon is left to end them in order."""
        served_out = self.state is DomainState.RETIRED and self.server is None
        return served_out or self.state in (DomainState.FAULTED, DomainState.HEADLESS)


POLICY = "policy"
"""Requester of an eviction that policy began; it gets no answer."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """A pending eviction: its requester (a request id or POLICY), its start, and the time of SIGKILL.

    `owner`: the requesting user, with power over that user's own processes only; None for policy and an
    administrator. `peer`, `fault`, `fault_class`: for the audit log, as in core.effects.Grounds.
    """

    requester: str
    reason: str
    began: float
    steps: tuple[str, ...] = ()
    killed: float | None = None
    owner: int | None = None
    peer: Requester | None = None
    fault: int | None = None
    fault_class: str = ""


@dataclass(frozen=True, slots=True)
class Client:
    """A client of MPS. `leased`, `listed` (named by the server when asked): see mpsd.core.proof.

    `unstored`: only the daemon holds its lease. `blind`: the end of its work is not visible. `zone_policy`:
    set for its process, None for the default. `frozen`: time since which mpsd has it stopped. `apart`: its
    address spaces are known to differ from those that its process has in other domains. `waited`: its process
    ran no work there when it ended. `follows`: see mpsd.core.leases. `unused`: it has launched nothing.
    `absent`: a list that should name it does not. `fault`: see UnconfirmedFault.
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
    follows: bool = False
    unused: bool = False
    absent: bool = False
    fault: UnconfirmedFault | None = None

    @property
    def living(self) -> bool:
        return self.state in LIVING


@dataclass(frozen=True, slots=True)
class Departed:
    """Facts kept for a while about a client that has gone.

    `leased`: its lease outlived it. `waited`: its process ran no work there at the end. `member`: see
    State.is_member. `absent`: as of a Client.
    """

    id: ClientId
    facts: ProcessFacts
    at: float
    leased: bool
    waited: bool = False
    member: bool = True
    absent: bool = False


@dataclass(frozen=True, slots=True)
class ServerEnd:
    """A domain with a server that is ended while work of exited clients may run there.

    `pids`: processes with a present or past context there. `at`: monotonic seconds at which the server had
    gone, None before. `told`: sources that have reported the end of that work.
    """

    domain: str
    gpus: tuple[str, ...]
    pids: frozenset[int]
    at: float | None = None
    told: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class UnattributedXid:
    """An unattributed Xid: evidence about a GPU without a domain. It waits for a fault, or is reported alone.

    `foreign`: the line names a process that is no client, so it never joins a domain's fault. `logged`: that
    process, if the sign is the line itself.
    """

    gpu: str
    xid: int
    evidence: Evidence
    foreign: bool = False
    logged: LoggedProcess | None = None


@dataclass(frozen=True, slots=True)
class EndedDomain:
    """A domain that has ended. `pids`: of its control daemon and servers. `at`: monotonic seconds."""

    id: str
    pids: frozenset[int]
    at: float


@dataclass(frozen=True, slots=True)
class AccessCount:
    """Accesses of one process that guard zones absorbed.

    `recorded`: monotonic seconds of the last new record.
    """

    count: int
    recorded: float


@dataclass(frozen=True, slots=True)
class State:
    """The whole state.

    `open_faults`: records that may still be revised (bounded). `hits`: those of guard hits. `tallies`: of
    living clients. `departed`: past clients of each domain, newest last (bounded). `ended`: past domains
    (bounded). `members`: see mpsd.core.failover.participants; `homes_changed` counts changes that a later
    daemon must know. `lost_gpus`: by GPU, why it does not work any more.
    `adopted`: when the domains of an earlier daemon were taken over [monotonic s].
    `failovers`: records that may still be revised (bounded). `copies_problem`: why programs have no driver
    files for a second driver instance. `slot_starts`: time and account of new slots of accounts without
    clients (bounded). `exceptions`: when the driver logged the last SM exception on each GPU, and, as "",
    on an unknown one [monotonic s]. `log_read_since`: since when mpsd reads each line of the kernel log
    [monotonic s]; None: it does not.
    """

    policy: Policy = Policy()
    slots: Mapping[str, Slot] = field(default_factory=lambda: MappingProxyType({}))
    domains: Mapping[str, Domain] = field(default_factory=lambda: MappingProxyType({}))
    clients: Mapping[ClientId, Client] = field(default_factory=lambda: MappingProxyType({}))
    departed: tuple[Departed, ...] = ()
    open_faults: tuple[FaultRecord, ...] = ()
    hits: tuple[FaultRecord, ...] = ()
    tallies: Mapping[ProcessInstance, AccessCount] = field(default_factory=lambda: MappingProxyType({}))
    strays: tuple[UnattributedXid, ...] = ()
    exceptions: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    log_read_since: float | None = None
    endings: tuple[ServerEnd, ...] = ()
    ended: tuple[EndedDomain, ...] = ()
    drained: frozenset[str] = frozenset()
    lost_gpus: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    stopping: bool = False
    adopting: bool = False
    adopted: float = -math.inf
    next_fault: int = 1
    next_domain: int = 1
    next_failover: int = 1
    slot_starts: tuple[tuple[float, int], ...] = ()
    members: Mapping[ProcessInstance, Participant] = field(default_factory=lambda: MappingProxyType({}))
    failovers: tuple[FailoverRecord, ...] = ()
    homes_changed: int = 0
    copies_problem: str = "mpsd has not copied the driver yet: wait a moment"
    counters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def clients_of(self, domain: str) -> Iterator[Client]:
        return (c for c in self.clients.values() if c.id.domain == domain)

    def living_of(self, domain: str) -> Iterator[Client]:
        """Return the clients that a fault of the domain would harm, including clients under eviction."""
        return (c for c in self.clients_of(domain) if c.living and not self.is_idle(c))

    def may_be_in_use(self, domain: str) -> bool:
        """Return whether the domain may have living clients. During adoption its clients are unknown."""
        return self.adopting or any(self.living_of(domain))

    def is_member(self, client: Client) -> bool:
        """Return whether a source that may decide says that this is a client of its domain.

        The log of a private domain may say so of its user's processes. Otherwise the server must list it.
        """
        domain = self.domains[client.id.domain]
        return client.listed or (domain.private and domain.owns(client.facts))

    def at_home(self, client: Client) -> bool:
        """Return False for a participant's context outside its home domain, where none of its work runs.

        A home domain that has no living client of the process does not count.
        """
        participant = self.members.get(client.id.process)
        if participant is None or participant.home in (None, client.id.domain):
            return True
        return not any(
            c.living and c.id.domain == participant.home for c in self.spaces_of(client.id.process)
        )

    def is_standby_context(self, client: Client) -> bool:
        """Return whether this is an idle context: that of a living participant outside its home domain."""
        return client.living and not self.at_home(client)

    def is_idle(self, client: Client) -> bool:
        """Return whether the client may end with its domain although its process lives."""
        return client.eviction is None and (self.is_standby_context(client) or self.is_unused(client))

    def is_unused(self, client: Client) -> bool:
        """Return whether this living client of a faulted domain has launched nothing, and so loses nothing.

        A participant is none: it may still move, or be told to later. Nor is a client of a slot with one
        server at a time, which waits for the end of each client's process.
        """
        domain = self.domains[client.id.domain]
        if not client.unused or not client.living or self.slots[domain.slot].exclusive:
            return False
        return domain.state is DomainState.FAULTED and client.id.process not in self.members

    def has_lost(self, participant: Participant) -> bool:
        """Return whether this participant's contexts in its home domain are dead.

        They die with the domain, or died with a server before the present one.
        """
        home = self.domains.get(participant.home or "")
        return home is not None and (home.is_dead or participant.process in home.bereft)

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
    """The state contradicts itself: a bug in core, never a consequence of outside events."""


def check_invariants(state: State) -> None:
    """Raise InvariantViolation if an invariant of the state does not hold."""
    for slot in state.slots.values():
        _check_slot(state, slot)
    roles = [d for s in state.slots.values() for d in (s.active, s.spare, s.second) if d is not None]
    _hold(len(roles) == len(set(roles)), "a domain serves two roles")
    for domain in state.domains.values():
        _hold(domain.slot in state.slots, "domain {} has no slot", domain.id)
        _hold(domain.uid is not None or not domain.private, "shared domain {} is private", domain.id)
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
        _hold(any(c.living for c in state.spaces_of(process)), "hits of {} have no living client", process)


def _check_slot(state: State, slot: Slot) -> None:
    for role in (slot.active, slot.spare, slot.second):
        if role is not None:
            _hold(role in state.domains, "slot {} leads to unknown domain {}", slot.id, role)
            _hold(state.domains[role].slot == slot.id, "slot {} borrows domain {}", slot.id, role)
            _hold(
                state.domains[role].state is not DomainState.FULL, "slot {} leads to full {}", slot.id, role
            )
    if slot.active is not None:
        is_stopping = state.domains[slot.active].state is DomainState.STOPPING
        _hold(not is_stopping, "slot {} leads to a domain that is being stopped", slot.id)
    standbys = [d for d in (slot.spare, slot.second) if d is not None]
    for standby in standbys:
        ready = state.domains[standby].state in (DomainState.STARTING, DomainState.WARM)
        _hold(ready, "standby domain of {} is {}", slot.id, state.domains[standby].state)
    _hold(not (slot.retiring and (slot.active or standbys)), "slot {} serves while it is retired", slot.id)
    _hold(not (slot.exclusive and standbys), "slot {} has a standby domain in exclusive mode", slot.id)


def _check_client(state: State, client: Client) -> None:
    _hold(client.id.domain in state.domains, "client {} has no domain", client.id)
    _hold(client.id.process == client.facts.instance, "client {} has foreign facts", client.id)
    exited = client.state in (ClientState.LINGERING, ClientState.HELD)
    _hold(
        exited == (client.died is not None), "client {} is {}, died {}", client.id, client.state, client.died
    )
    _hold(not exited or client.leased, "dead client {} is kept without a lease", client.id)
    evicting = client.state in (ClientState.TERMINATING, ClientState.KILLING)
    _hold(not evicting or client.eviction is not None, "client {} is evicted without an eviction", client.id)
    _hold(client.frozen is None or client.living, "client {} is dead and frozen", client.id)
    asked = client.state is ClientState.TERMINATING
    _hold(client.frozen is None or not asked, "frozen client {} is asked to leave", client.id)


def _hold(condition: bool, what: str, *of: object) -> None:
    if not condition:
        raise InvariantViolation(what.format(*of))
