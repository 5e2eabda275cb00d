"""Handlers for clients: noticed, leased, dead, lingering, evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mpsd.core import domains, hitrecords, leases, members, proof, slots
from mpsd.core import events as ev
from mpsd.core.draft import Draft
from mpsd.core.effects import (
    Answer,
    ArmTimer,
    Attach,
    ConfirmWork,
    Effect,
    ProbeWork,
    ReleaseLease,
    Terminate,
)
from mpsd.core.killing import announce, answer_gone, awaited, kill, kill_by_policy
from mpsd.core.lifecycle import ClientTrigger, allows, next_client_state
from mpsd.core.state import POLICY, Client, ClientState, Domain, DomainState, Eviction
from mpsd.model import ClientId, Liveness, ProcessInstance

# Where the server has lost its contexts, nothing that a dead client left can still run.
_WORK_IS_LOST = (DomainState.FAULTED, DomainState.STOPPING)
TURNED_AWAY_KEPT = 256
_ASKABLE = (DomainState.ACTIVE, DomainState.WARM, DomainState.POISONED, DomainState.RETIRED)


def on_noticed(draft: Draft, event: ev.ClientNoticed) -> None:
    domain, process = draft.state.domains.get(event.domain), event.facts.instance
    same = [c for c in draft.state.clients_of(event.domain) if c.id.process == process]
    if domain is None or domain.state is DomainState.STOPPING:
        draft.count("clients_of_unknown_domains")
        leases.forget_if_done(draft, process)
    elif living := [c for c in same if c.living]:
        if event.listed:
            _proof_came(draft, [draft.put_client(replace(c, listed=True)) for c in living])
    elif domain.state is DomainState.FAULTED and not draft.state.adopting:
        # While adopting it is a victim that was there before the daemon.
        member = draft.state.members.get(process)
        if member is None or member.home in (None, event.domain):
            # Its server still lists who has moved away.
            _refuse(draft, domain, process.pid)
        leases.forget_if_done(draft, process)
    else:
        # After an exec the old address space may still linger: the new one is another client.
        space = 1 + max((c.id.space for c in same), default=-1)
        client_id = ClientId(event.domain, process, space)
        client = Client(client_id, event.facts, ClientState.NOTICED, draft.now, listed=event.listed)
        draft.put_client(client)
        slots.touch(draft, event.domain)
        draft.emit(Attach(event.domain, process, space))
        _proof_came(draft, [client])
        members.refresh(draft, process)


def _proof_came(draft: Draft, clients: list[Client]) -> None:
    """While the domains are being stopped, a newcomer goes as soon as it is proven to be a client."""
    if draft.state.stopping and clients:
        kill_by_policy(draft, clients[0], "mpsd is stopping its domains")


def on_refused(draft: Draft, event: ev.ClientRefused) -> None:
    domain = draft.state.domains.get(event.domain)
    if domain is not None:
        _refuse(draft, domain, event.pid)


def _refuse(draft: Draft, domain: Domain, pid: int) -> None:
    """Count a client that was turned away once, whichever log line tells of it first."""
    if pid in domain.turned_away:
        return
    latest = (*domain.turned_away, pid)[-TURNED_AWAY_KEPT:]
    draft.put_domain(replace(domain, refused=domain.refused + 1, turned_away=latest))
    draft.count("clients_refused")


def on_attached(draft: Draft, event: ev.ClientAttached) -> None:
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
    _proof_came(draft, attached)
    members.refresh(draft, event.process)


def on_lease_stored(draft: Draft, event: ev.LeaseStored) -> None:
    client = draft.state.clients.get(event.client)
    if client is not None and client.unstored:
        draft.put_client(replace(client, unstored=False))


def on_attach_failed(draft: Draft, event: ev.AttachFailed) -> None:
    client = draft.state.clients.get(ClientId(event.domain, event.process, event.space))
    if client is None or not allows(client.state, ClientTrigger.ATTACH_FAILED):
        return
    draft.put_client(replace(client, state=ClientState.UNPROTECTED, problem=event.reason))
    draft.count("attach_failures")
    draft.publish(
        "client-unprotected",
        client.facts.uid,
        domain=event.domain,
        pid=event.process.pid,
        reason=event.reason,
    )
    members.refresh(draft, event.process)


def on_lease_restored(draft: Draft, event: ev.LeaseRestored) -> None:
    """A client that died while no daemon was there: its lease goes on, its work is watched."""
    domain = draft.state.domains.get(event.domain)
    for space in event.spaces:
        client_id = ClientId(event.domain, event.facts.instance, space)
        if domain is None:
            draft.emit(ReleaseLease(client_id, event.facts.uid))
            continue
        restored = Client(client_id, event.facts, ClientState.ATTACHED, draft.now, leased=True)
        # One that is known already (a repeated event) keeps its state, and its eviction its answer.
        draft.put_client(draft.state.clients.get(client_id, restored))
    if domain is not None:
        _end(draft, event.facts.instance, "the process has gone")


def on_died(draft: Draft, event: ev.ClientDied) -> None:
    _end(draft, event.process, "the process has gone")


def on_left(draft: Draft, event: ev.ClientLeft) -> None:
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
    """A process is no client any more: forget it, or keep its lease until its work has ended."""
    spaces = [c for c in draft.state.spaces_of(process) if c.living]
    idle = {c.id for c in spaces if not draft.state.at_home(c)}
    member = draft.state.members.get(process)
    hitrecords.ended(draft, process)
    members.ended(draft, process, execed=execed)
    answer_gone(draft, process, how)
    for client in spaces:
        domain = draft.state.domains[client.id.domain]
        client = draft.put_client(replace(client, waited=client.id in idle))
        if not client.leased:
            draft.drop_client(client)
        elif domain.state in _WORK_IS_LOST or not members.has_begun(client, member):
            leases.release(draft, client)
        else:
            lingering = replace(client, state=ClientState.LINGERING, died=draft.now)
            # What is seen to run is the whole process's: a hang of it is none of a context in waiting.
            lingering = replace(lingering, blind=lingering.blind or client.id in idle)
            draft.put_client(replace(lingering, eviction=None, frozen=None))
            linger = draft.state.policy.linger_limit_s
            draft.emit(ProbeWork(client.id), ArmTimer("linger", str(client.id.process), linger))
        draft.publish("client-ended", client.facts.uid, domain=client.id.domain, pid=process.pid)
        # The others in a shared domain hear that one has ended, and not which.
        neighbours = draft.users_of(client.id.domain) - {client.facts.uid}
        if neighbours:
            draft.publish("neighbour-ended", None, neighbours, domain=client.id.domain)
    leases.forget_if_done(draft, process)
    for name in {c.id.domain for c in spaces}:
        slots.touch(draft, name)
        leases.release_blind(draft, name)
        domains.settle(draft, name)


def on_work_not_visible(draft: Draft, event: ev.WorkNotVisible) -> None:
    """Its lease stays while others could be harmed; nothing is said against it, for nothing is known."""
    client = draft.state.clients.get(event.client)
    if client is not None and not client.living:
        draft.put_client(replace(client, blind=True))
        leases.release_blind(draft, client.id.domain)
    draft.count("work_not_visible")


def on_work_ended(draft: Draft, event: ev.WorkEnded) -> None:
    """Of this life alone: after an exec another one of the same process may have work of its own."""
    client = draft.state.clients.get(event.client)
    if client is None or client.living:
        return
    leases.release(draft, client)
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
    """Nothing is said against it before a new look: this daemon, or the machine, may have stood still."""
    for client in tuple(draft.state.clients.values()):
        if str(client.id.process) == subject and _is_awaited(client):
            draft.emit(ConfirmWork(client.id))


def endless(draft: Draft, found: Sequence[ClientId]) -> list[Client]:
    """Those of them whose work should have ended by now, and were not known for that: HELD from here on."""
    clients = [c for name in found if (c := draft.state.clients.get(name)) is not None and _is_awaited(c)]
    return [draft.put_client(replace(c, state=ClientState.HELD)) for c in clients]


def _is_awaited(client: Client) -> bool:
    return client.state is ClientState.LINGERING and not client.blind


def on_evict(draft: Draft, event: ev.EvictRequested) -> None:
    targets = [c for c in draft.state.spaces_of(event.process) if c.living]
    if not targets:
        _reject(draft, event, "not-found", f"process {event.process} is not a client")
        return
    if awaited(draft, event.process) is not None:
        _reject(draft, event, "busy", f"process {event.process} is being evicted already")
        return
    believed = [c for c in targets if proof.proven(draft.state.domains[c.id.domain], c, asked=True)]
    if not believed:
        draft.count("evictions_unproven")
        _reject(draft, event, "unproven", f"only a line in a log says that {event.process} is a client")
        return
    asked = Eviction(event.request, event.reason, draft.now, owner=event.owner)
    if any(c.state is ClientState.TERMINATING for c in targets):
        # By policy, which waits for nobody: whoever asks now is answered by the same end, and has no more
        # killed than he may.
        for client in targets:
            begun = client.eviction or asked
            taken = replace(begun, requester=event.request, owner=event.owner)
            draft.put_client(replace(client, eviction=taken))
        return
    begin_eviction(draft, believed, asked, event.liveness)


def begin_eviction(
    draft: Draft, believed: list[Client], eviction: Eviction, liveness: Liveness, *, idle: bool = False
) -> None:
    """Put a process out. `believed`: those of its clients that are proven, one at least. `idle`: nothing of
    it is said to run on the GPU."""
    draft.count("evictions")
    process = believed[0].id.process
    targets = [c for c in draft.state.spaces_of(process) if c.living]
    announce(draft, targets, eviction.reason)
    obstacle = _obstacle(draft, targets, believed, liveness)
    if not obstacle and idle and all(c.state is ClientState.ATTACHED for c in targets):
        # terminate_client makes all others wait for milliseconds. Were it not true, the lease would hold it.
        obstacle = "nothing of the client runs, by its ledger: SIGKILL under the lease makes nobody wait"
    if obstacle:
        kill(draft, believed[0], replace(eviction, steps=(obstacle,)))
        return
    for client in targets:
        state = next_client_state(client.state, ClientTrigger.EVICT)
        assert state is not None
        draft.put_client(replace(client, state=state, eviction=eviction))
    draft.emit(*_terminations(draft, process, believed))


def _obstacle(draft: Draft, targets: list[Client], believed: list[Client], liveness: Liveness) -> str:
    """Why none of these clients may be asked; empty when all may."""
    if any(c.state is ClientState.KILLING for c in targets):
        return "SIGKILL was sent before: once more"
    if any(c.frozen is not None for c in targets):
        # Whatever was read of it: the signal may be on its way.
        return "mpsd has stopped the client, terminate_client would stall the others: SIGKILL under the lease"
    routes = (_route(draft.state.domains[c.id.domain], liveness) for c in believed)
    return next((text for text in routes if text), "")


def _route(domain: Domain, liveness: Liveness) -> str:
    """Why terminate_client must not be asked for; empty when it may. Wrongly asked, it stalls everybody."""
    instead = "SIGKILL under the lease"
    if domain.state not in _ASKABLE:
        return f"domain {domain.id} is {domain.state.value}, terminate_client would block: {instead}"
    if domain.server is None:
        return f"domain {domain.id} has no server: {instead}"
    if liveness is not Liveness.RUNNING:
        return f"the client is {liveness.value}, terminate_client would stall the others: {instead}"
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
    waiting = [c for c in draft.state.spaces_of(event.process) if c.state is ClientState.TERMINATING]
    eviction = next((c.eviction for c in waiting if c.eviction is not None), None)
    if eviction is not None:
        believed = proof.grounds(draft.state, event.process, asked=eviction.requester != POLICY)
        assert believed is not None, "proof of a living client does not go away"
        kill(draft, believed, replace(eviction, steps=(*eviction.steps, event.text, "SIGKILL")))
    if not event.done:
        draft.count("terminate_failures")
