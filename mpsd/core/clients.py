"""Handlers for the life of a client: noticed, leased, exited, lingering, evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mpsd.base.model import ClientId, Liveness, ProcessInstance
from mpsd.core import domains, leases, lists, proof, slots
from mpsd.core import events as ev
from mpsd.core.draft import Draft
from mpsd.core.effects import (
    Answer,
    ArmTimer,
    AskServer,
    Attach,
    AuditEviction,
    ConfirmWork,
    Effect,
    ProbeWork,
    ReleaseLease,
    Terminate,
)
from mpsd.core.failover import handlers
from mpsd.core.faults import hitrecords
from mpsd.core.killing import (
    announce,
    answer_evicted,
    grounds_of,
    kill,
    kill_by_policy,
    pending_eviction,
)
from mpsd.core.lifecycle import ClientTrigger, allows, next_client_state
from mpsd.core.state import POLICY, Client, ClientState, Domain, DomainState, Eviction, State
from mpsd.core.victims import USE, USE_S, kill_frozen

# The server of such a domain has no contexts any more, so no work of an exited client can still run.
_WORK_IS_LOST = (DomainState.FAULTED, DomainState.STOPPING)
TURNED_AWAY_KEPT = 256
UNLISTED = "unlisted"
UNLISTED_STEP_S = 0.05
UNLISTED_S = 5.0
"""How long [s] mpsd asks for the clients of an open domain after its log named a new one. The first pause is
UNLISTED_STEP_S, and each later one half the time since then."""
LISTED_WITHIN_S = 1.0
"""Time [s] after its line in the log within which a server lists a client."""
MAX_UNLISTED = 128
"""The number of processes of one domain that only log lines name. A server has fewer new clients at once."""
_ONLY_NAMED = (ClientState.NOTICED, ClientState.ATTACHED, ClientState.UNPROTECTED)
_ASKABLE = (
    DomainState.ACTIVE,
    DomainState.FULL,
    DomainState.WARM,
    DomainState.POISONED,
    DomainState.RETIRED,
)


def on_noticed(draft: Draft, event: ev.ClientNoticed) -> None:
    """Add a client that the log or the server's list names, and attach to it.

    A client of a domain that is stopping is not added. A newcomer to a faulted domain is counted as refused.
    """
    domain, process = draft.state.domains.get(event.domain), event.facts.instance
    same = [c for c in draft.state.clients_of(event.domain) if c.id.process == process]
    if domain is None or domain.state is DomainState.STOPPING:
        draft.count("clients_of_unknown_domains")
        leases.forget_if_done(draft, process)
    elif domain.private and not event.listed and not domain.owns(event.facts):
        # The log of a user's domain speaks for that user's processes alone; only root can be there too.
        # Pins compare real users only: a setuid program comes this far.
        on_foreign(draft, ev.ForeignNoticed(event.domain))
        leases.forget_if_done(draft, process)
    elif living := [c for c in same if c.living]:
        if event.listed:
            _confirmed(draft, [draft.put_client(replace(c, listed=True)) for c in living])
            kill_frozen(draft, event.domain)
    elif domain.state is DomainState.FAULTED and not draft.state.adopting:
        # During adoption this is no newcomer but a victim from before the daemon's start.
        participant = draft.state.members.get(process)
        if participant is None or participant.home in (None, event.domain):
            # The server still lists participants that have failed over; they are not refused.
            _refuse(draft, domain, process.pid)
        leases.forget_if_done(draft, process)
    else:
        # After an exec the old address space may still linger, so the new address space is another client.
        space = 1 + max((c.id.space for c in same), default=-1)
        client_id = ClientId(event.domain, process, space)
        client = Client(client_id, event.facts, ClientState.NOTICED, draft.now, listed=event.listed)
        draft.put_client(client)
        draft.emit(Attach(event.domain, process, space))
        _confirmed(draft, [client])
        _limit_unlisted(draft, event.domain)


def _confirmed(draft: Draft, clients: list[Client]) -> None:
    """Act on a new client, unless only a log that every user can write names it: then mpsd asks."""
    client = clients[0]
    if not draft.state.is_member(client):
        _ask_for(draft, client)
    else:
        slots.touch(draft, client.id.domain)
        _proof_came(draft, clients)
        handlers.refresh(draft, client.id.process)
    domains.fill(draft, client.id.domain)


def _ask_for(draft: Draft, client: Client) -> None:
    """Ask the server whether it lists a client that only an open log names.

    Not during adoption: the death of an earlier server must be known before its successor is seen.
    """
    if draft.state.is_member(client):
        return
    age = draft.now - _began(client)
    draft.emit(ArmTimer(UNLISTED, client.id.domain, max(UNLISTED_STEP_S, age / 2)))
    if not draft.state.adopting:
        draft.emit(AskServer(client.id.domain, clients=True, patient=True))


def on_unlisted(draft: Draft, name: str) -> None:
    """Ask again while a new client is not listed. Later ones are found by the regular list."""
    living = [c for c in draft.state.clients_of(name) if c.living and not draft.state.is_member(c)]
    youngest = max(living, key=_began, default=None)
    if youngest is not None and draft.now - _began(youngest) < UNLISTED_S:
        _ask_for(draft, youngest)


def _began(client: Client) -> float:
    """Return when mpsd began to ask for this client [monotonic s]."""
    return client.noticed if client.attached is None else client.attached


def on_foreign(draft: Draft, event: ev.ForeignNoticed) -> None:
    """Count a line that is not believed. The domain is not stopped before a list that is asked for later."""
    draft.count("notices_foreign")
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.state is DomainState.STOPPING:
        return
    first = draft.now
    if domain.foreign is not None and draft.now - domain.foreign[1] < lists.UNSURE_S:
        first = domain.foreign[0]
    else:
        draft.emit(ArmTimer(lists.UNSURE, domain.id, lists.UNSURE_S))
    draft.put_domain(replace(domain, foreign=(first, draft.now)))


def on_listed(draft: Draft, event: ev.ClientsListed) -> None:
    """Forget the processes that only log lines name, and that the server has not listed by the deadline.

    A list with such a process makes it a listed client: ClientNoticed follows. During adoption mpsd does not
    know yet which clients the earlier daemon saw.
    """
    if draft.state.adopting:
        return
    for client in tuple(draft.state.clients_of(event.domain)):
        missed = client.noticed + LISTED_WITHIN_S <= event.began and client.id.process.pid not in event.pids
        if missed and not client.absent and not draft.state.is_member(client):
            draft.put_client(replace(client, absent=True))
    due = min(event.began, draft.now - draft.state.policy.attach_deadline_s)
    here = [c for c in draft.state.clients_of(event.domain) if c.noticed <= due]
    _drop(draft, [c for c in here if is_stranger(draft.state, c) and c.id.process.pid not in event.pids])


def on_server_gone(draft: Draft, domain: str) -> None:
    """Forget the same processes of a domain without a server: no list will name them."""
    on_listed(draft, ev.ClientsListed(domain, draft.now, frozenset()))


def on_private(draft: Draft, domain: str) -> None:
    """Forget other users' processes that the log named before the domain was known to be private."""
    here = [c for c in draft.state.clients_of(domain) if is_stranger(draft.state, c)]
    strangers = [c for c in here if not draft.state.is_member(c)]
    for _ in strangers:
        # A setuid program would be a client.
        on_foreign(draft, ev.ForeignNoticed(domain))
    _drop(draft, strangers)


def is_stranger(state: State, client: Client) -> bool:
    """Return whether only log lines say that this living process is a client of its domain.

    Every GPU program can be leased. So a lease counts only where the log may speak for the process
    (State.is_member). A participant with its home there is a client.
    """
    participant = state.members.get(client.id.process)
    at_home = participant is not None and participant.home == client.id.domain
    shown = (
        client.listed or at_home or client.frozen is not None or (client.leased and state.is_member(client))
    )
    return client.state in _ONLY_NAMED and not shown


def _limit_unlisted(draft: Draft, domain: str) -> None:
    """Make space for a process that was named: the oldest one goes, of the user with most of them."""
    here = draft.state.clients_of(domain)
    unlisted = [c for c in here if not c.leased and is_stranger(draft.state, c)]
    if len(unlisted) > MAX_UNLISTED:
        uid = Counter(c.facts.uid for c in unlisted).most_common(1)[0][0]
        _drop(draft, [min((c for c in unlisted if c.facts.uid == uid), key=lambda c: c.noticed)])


def _drop(draft: Draft, strangers: Sequence[Client]) -> None:
    """Forget processes that are no clients of their domain, with their leases.

    The pin of a process is closed, unless it is a client of another domain.
    """
    for client in strangers:
        if client.leased:
            draft.emit(ReleaseLease(client.id, client.facts.uid))
        draft.remove_client(client)
        draft.count("clients_never_listed")
        if not any(c.living for c in draft.state.spaces_of(client.id.process)):
            hitrecords.ended(draft, client.id.process)
        leases.forget_if_done(draft, client.id.process)
    for name in {c.id.domain for c in strangers}:
        leases.release_blind(draft, name)
        domains.settle(draft, name)


def _proof_came(draft: Draft, clients: list[Client]) -> None:
    """Kill a newcomer as soon as it is proven to be a client, if the domains are being stopped."""
    if draft.state.stopping and clients:
        kill_by_policy(draft, clients[0], "mpsd is stopping its domains")


def on_refused(draft: Draft, event: ev.ClientRefused) -> None:
    domain = draft.state.domains.get(event.domain)
    if domain is None:
        return
    if not event.full:
        if event.pid is not None:
            _refuse(draft, domain, event.pid)
        return
    draft.put_domain(replace(domain, refused_full=domain.refused_full + 1))
    draft.count("clients_refused_full")
    # The log of a private domain speaks for its user. Any other log only asks.
    domains.fill(draft, event.domain, refused=domain.private)
    if not domain.private:
        draft.emit(AskServer(event.domain, clients=True, patient=True))


def _refuse(draft: Draft, domain: Domain, pid: int) -> None:
    """Count a client that the server turned away, once per pid although several log lines report it."""
    if pid in domain.turned_away:
        return
    latest = (*domain.turned_away, pid)[-TURNED_AWAY_KEPT:]
    draft.put_domain(replace(domain, refused=domain.refused + 1, turned_away=latest))
    draft.count("clients_refused")


def on_attached(draft: Draft, event: ev.ClientAttached) -> None:
    """Mark the client's address spaces as leased. Release leases of a client that is no longer known."""
    ids = [ClientId(event.domain, event.process, event.space + n) for n in range(event.spaces)]
    first = draft.state.clients.get(ClientId(event.domain, event.process, event.space))
    if first is None or not allows(first.state, ClientTrigger.ATTACHED):
        draft.emit(*(ReleaseLease(i) for i in ids if i not in draft.state.clients))
        return
    state = next_client_state(first.state, ClientTrigger.ATTACHED)
    assert state is not None
    attached = [
        draft.put_client(
            replace(
                first,
                id=client_id,
                state=state,
                leased=True,
                tracked=event.tracked,
                attached=draft.now,
                problem=event.problem,
                unstored=client_id.space in event.unstored,
                apart=event.apart,
            )
        )
        for client_id in ids
    ]
    draft.publish(
        "client-attached",
        first.facts.uid,
        domain=event.domain,
        pid=event.process.pid,
        ms=round((draft.now - first.noticed) * 1e3, 3),
        tracked=event.tracked,
        stored=not event.unstored,
        problem=event.problem,
    )
    for client in attached[:1]:
        _ask_for(draft, client)
    _proof_came(draft, attached)
    if draft.state.domains[event.domain].state is DomainState.FAULTED:
        draft.emit(ArmTimer(USE, event.domain, USE_S))
    handlers.refresh(draft, event.process)


def on_lease_stored(draft: Draft, event: ev.LeaseStored) -> None:
    client = draft.state.clients.get(event.client)
    if client is not None and client.unstored:
        draft.put_client(replace(client, unstored=False))


def on_attach_failed(draft: Draft, event: ev.AttachFailed) -> None:
    """Mark the client as unprotected. It runs on; status shows the lost protection."""
    client = draft.state.clients.get(ClientId(event.domain, event.process, event.space))
    if client is None or not allows(client.state, ClientTrigger.ATTACH_FAILED):
        return
    client = draft.put_client(replace(client, state=ClientState.UNPROTECTED, problem=event.reason))
    draft.count("attach_failures")
    draft.publish(
        "client-unprotected",
        client.facts.uid,
        domain=event.domain,
        pid=event.process.pid,
        reason=event.reason,
    )
    _ask_for(draft, client)
    if draft.state.domains[event.domain].state is DomainState.FAULTED:
        draft.emit(ArmTimer(USE, event.domain, USE_S))
    handlers.refresh(draft, event.process)


def on_lease_restored(draft: Draft, event: ev.LeaseRestored) -> None:
    """Take over the lease of a client that exited while no daemon ran, and watch for the end of its work."""
    domain = draft.state.domains.get(event.domain)
    for space in event.spaces:
        client_id = ClientId(event.domain, event.facts.instance, space)
        if domain is None:
            draft.emit(ReleaseLease(client_id, event.facts.uid))
            continue
        restored = Client(
            client_id, event.facts, ClientState.ATTACHED, draft.now, leased=True, listed=event.listed
        )
        # For a repeated event the known client keeps its state and its pending eviction.
        draft.put_client(draft.state.clients.get(client_id, restored))
    if domain is not None:
        _end(draft, event.facts.instance, "the process has gone")


def on_died(draft: Draft, event: ev.ClientDied) -> None:
    _end(draft, event.process, "the process has gone")


def on_left(draft: Draft, event: ev.ClientLeft) -> None:
    """Handle a process that lives on but is no client any more, after an exec or a closed context."""
    for client in tuple(draft.state.spaces_of(event.process)):
        draft.publish(
            "client-left",
            client.facts.uid,
            domain=client.id.domain,
            pid=event.process.pid,
            how=event.how,
        )
    for domain in tuple(draft.state.domains.values()):
        if event.process in domain.bereft:
            draft.put_domain(replace(domain, bereft=domain.bereft - {event.process}))
    execed = event.how == "exec"
    _end(draft, event.process, f"the process is no client any more: {event.how}", execed=execed)


def _end(draft: Draft, process: ProcessInstance, how: str, *, execed: bool = False) -> None:
    """End a process's clients: forget them, or keep their leases until their work has ended."""
    spaces = [c for c in draft.state.spaces_of(process) if c.living]
    idle = {c.id for c in spaces if not draft.state.at_home(c)}
    participant = draft.state.members.get(process)
    following = {c.id for c in spaces if leases.follows(draft.state, c, participant)}
    hitrecords.ended(draft, process)
    handlers.ended(draft, process, execed=execed)
    answer_evicted(draft, process, how)
    for client in spaces:
        domain = draft.state.domains[client.id.domain]
        client = draft.put_client(replace(client, waited=client.id in idle))
        if not client.leased:
            draft.drop_client(client)
        elif domain.state in _WORK_IS_LOST or not handlers.may_have_launched(client, participant):
            leases.release(draft, client)
        else:
            lingering = replace(client, state=ClientState.LINGERING, died=draft.now)
            # Work is observed per process, so a hang is never attributed to an idle standby context.
            lingering = replace(lingering, blind=lingering.blind or client.id in idle)
            lingering = replace(lingering, follows=client.id in following)
            draft.put_client(replace(lingering, eviction=None, frozen=None))
            linger = draft.state.policy.linger_limit_s
            draft.emit(ProbeWork(client.id), ArmTimer("linger", str(client.id.process), linger))
        draft.publish("client-ended", client.facts.uid, domain=client.id.domain, pid=process.pid)
        # Other users of a shared domain learn that a neighbour has ended, but not which client it was.
        neighbours = draft.users_of(client.id.domain) - {client.facts.uid}
        if neighbours:
            draft.publish("neighbour-ended", None, neighbours, domain=client.id.domain)
    leases.forget_if_done(draft, process)
    for name in {c.id.domain for c in spaces}:
        slots.touch(draft, name)
        leases.release_blind(draft, name)
        domains.settle(draft, name)


def on_work_not_visible(draft: Draft, event: ev.WorkNotVisible) -> None:
    """Keep the lease while other clients live in the domain. Without visibility, nothing is recorded."""
    client = draft.state.clients.get(event.client)
    if client is not None and not client.living:
        draft.put_client(replace(client, blind=True))
        leases.release_blind(draft, client.id.domain)
    draft.count("work_not_visible")


def on_work_ended(draft: Draft, event: ev.WorkEnded) -> None:
    """Release the lease of this client only.

    After an exec the same process may run work as another client.
    """
    client = draft.state.clients.get(event.client)
    if client is None or client.living:
        return
    leases.release(draft, client, work_ended=True)
    draft.publish(
        "lease-released",
        client.facts.uid,
        domain=client.id.domain,
        pid=client.id.process.pid,
        sign=event.sign,
        after_ms=round((draft.now - (client.died or draft.now)) * 1e3, 3),
    )
    domains.settle(draft, client.id.domain)


def on_linger(draft: Draft, subject: str) -> None:
    """Ask for another check of the work. The daemon or the machine may have been suspended meanwhile."""
    for client in tuple(draft.state.clients.values()):
        if str(client.id.process) == subject and _is_awaited(client):
            draft.emit(ConfirmWork(client.id))


def mark_endless(draft: Draft, found: Sequence[ClientId]) -> list[Client]:
    """Mark as HELD, and return, the clients of `found` with work that should have ended by now."""
    clients = [c for name in found if (c := draft.state.clients.get(name)) is not None and _is_awaited(c)]
    return [draft.put_client(replace(c, state=ClientState.HELD)) for c in clients]


def _is_awaited(client: Client) -> bool:
    return client.state is ClientState.LINGERING and not client.blind


def on_evict(draft: Draft, event: ev.EvictRequested) -> None:
    """Evict a process on request. Reject the request if no eviction is possible or one is pending."""
    targets = [c for c in draft.state.spaces_of(event.process) if c.living]
    if not targets:
        _reject(draft, event, "not-found", f"process {event.process} is not a client")
        return
    if pending_eviction(draft, event.process) is not None:
        _reject(draft, event, "busy", f"process {event.process} is being evicted already")
        return
    believed = [c for c in targets if proof.proven(draft.state.domains[c.id.domain], c, asked=True)]
    if not believed:
        draft.count("evictions_unproven")
        text = f"only a line in a log says that {event.process} is a client; retry when the server lists it"
        _reject(draft, event, "unproven", text)
        return
    asked = Eviction(event.request, event.reason, draft.now, owner=event.owner, peer=event.requester)
    if any(c.state is ClientState.TERMINATING for c in targets):
        # Policy began this eviction without a requester. The new requester gets its result, and its limits.
        for client in targets:
            begun = client.eviction or asked
            taken = replace(begun, requester=event.request, owner=event.owner, peer=event.requester)
            draft.put_client(replace(client, eviction=taken))
        draft.emit(AuditEviction(believed[0].id, "joined", grounds_of(draft, believed[0], asked)))
        return
    begin_eviction(draft, believed, asked, event.liveness)


def begin_eviction(
    draft: Draft, believed: list[Client], eviction: Eviction, liveness: Liveness, *, idle: bool = False
) -> None:
    """Evict a process with terminate_client, or with SIGKILL if terminate_client must not be sent.

    `believed`: its proven clients, at least one. `idle`: its ledger reports no running work.
    """
    draft.count("evictions")
    process = believed[0].id.process
    targets = [c for c in draft.state.spaces_of(process) if c.living]
    announce(draft, believed[0], targets, eviction)
    obstacle = _obstacle(draft, targets, believed, liveness)
    if not obstacle and idle and all(c.state is ClientState.ATTACHED for c in targets):
        # terminate_client stalls all other clients for milliseconds. If the ledger is wrong, the lease
        # holds the work.
        obstacle = "the client's ledger reports no running work: SIGKILL under the lease stalls no client"
    if obstacle:
        kill(draft, believed[0], replace(eviction, steps=(obstacle,)))
        return
    for client in targets:
        state = next_client_state(client.state, ClientTrigger.EVICT)
        assert state is not None
        draft.put_client(replace(client, state=state, eviction=eviction))
    draft.emit(*_terminations(draft, process, believed))


def _obstacle(draft: Draft, targets: list[Client], believed: list[Client], liveness: Liveness) -> str:
    """Return why terminate_client must not be sent for any of these clients; empty if it may be sent."""
    if any(c.state is ClientState.KILLING for c in targets):
        return "SIGKILL was sent before and is repeated"
    if any(c.frozen is not None for c in targets):
        # Also if `liveness` is RUNNING: SIGSTOP may be on its way.
        return "mpsd stopped the client; terminate_client would stall other clients: SIGKILL under the lease"
    routes = (_route(draft.state.domains[c.id.domain], liveness) for c in believed)
    return next((text for text in routes if text), "")


def _route(domain: Domain, liveness: Liveness) -> str:
    """Return why terminate_client must not be sent to this domain; empty if it may be sent.

    Sent to the wrong server or for a stopped client, it stalls every client of the domain.
    """
    instead = "SIGKILL under the lease"
    if domain.state not in _ASKABLE:
        return f"domain {domain.id} is {domain.state.value}; terminate_client would block: {instead}"
    if domain.server is None:
        return f"domain {domain.id} has no server: {instead}"
    if liveness is not Liveness.RUNNING:
        return f"the client is {liveness.value}; terminate_client would stall other clients: {instead}"
    return ""


def _terminations(draft: Draft, process: ProcessInstance, targets: list[Client]) -> list[Effect]:
    effects: list[Effect] = []
    for name in sorted({c.id.domain for c in targets}):
        server = draft.state.domains[name].server
        assert server is not None
        deadline = draft.state.policy.terminate_deadline_s
        effects.append(Terminate(name, server, process, deadline))
    return effects


def _reject(draft: Draft, event: ev.EvictRequested, code: str, message: str) -> None:
    draft.emit(Answer(event.request, False, {"code": code, "message": message}))


def on_terminate_finished(draft: Draft, event: ev.TerminateFinished) -> None:
    """Kill the process after terminate_client has returned or missed its deadline."""
    waiting = [c for c in draft.state.spaces_of(event.process) if c.state is ClientState.TERMINATING]
    eviction = next((c.eviction for c in waiting if c.eviction is not None), None)
    if eviction is not None:
        believed = proof.grounds(draft.state, event.process, asked=eviction.requester != POLICY)
        assert believed is not None, "proof of a living client does not go away"
        kill(draft, believed, replace(eviction, steps=(*eviction.steps, event.text, "SIGKILL")))
    if not event.done:
        draft.count("terminate_failures")


def on_clients_unpinned(draft: Draft, event: ev.ClientsUnpinned) -> None:
    """Note whether the domain has clients that mpsd cannot pin. It must not end under them."""
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.unpinned == event.count:
        return
    changed = replace(domain, unpinned=event.count)
    draft.put_domain(changed)
    if changed.list_after is None:
        lists.await_list(draft, changed)
