"""SIGKILL with the lease held: one process, all its clients, one answer to the requester."""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import ProcessInstance
from mpsd.core import events as ev
from mpsd.core.draft import Draft
from mpsd.core.effects import Answer, ArmTimer, AuditEviction, Grounds, Kill
from mpsd.core.lifecycle import ClientTrigger, allows
from mpsd.core.proof import owner_of_kill, proofs, proven
from mpsd.core.state import POLICY, Client, ClientState, Eviction

KILL_WAIT_S = 5.0


def pending_eviction(draft: Draft, process: ProcessInstance) -> Eviction | None:
    """Return the pending eviction of this process that has a requester, if there is one."""
    evictions = (c.eviction for c in _living(draft, process) if c.eviction is not None)
    return next((e for e in evictions if e.requester != POLICY), None)


def kill(draft: Draft, grounds: Client, eviction: Eviction) -> None:
    """Kill the process of a proven client. All clients of the process share this eviction."""
    eviction, process = replace(eviction, killed=draft.now), grounds.id.process
    for client in _living(draft, process):
        draft.put_client(replace(client, state=ClientState.KILLING, eviction=eviction))
    owner = owner_of_kill(draft.state.domains[grounds.id.domain], grounds, eviction)
    evidence = grounds_of(draft, grounds, eviction)
    draft.emit(
        Kill(grounds.id, eviction.reason, owner, evidence), ArmTimer("kill-wait", str(process), KILL_WAIT_S)
    )


def grounds_of(draft: Draft, client: Client, eviction: Eviction) -> Grounds:
    """Return the grounds of an eviction for the audit log. `client`: its proven client."""
    return Grounds(
        client.facts.uid,
        eviction.reason,
        tuple(sorted(proofs(draft.state.domains[client.id.domain], client))),
        eviction.peer,
        eviction.fault,
        eviction.fault_class,
        eviction.steps,
    )


def announce(draft: Draft, believed: Client, clients: list[Client], eviction: Eviction) -> None:
    """Announce an eviction to the clients' user before it begins. `believed`: its proven client."""
    draft.emit(AuditEviction(believed.id, "begun", grounds_of(draft, believed, eviction)))
    why = eviction.reason
    for client in clients:
        pid, domain = client.id.process.pid, client.id.domain
        draft.publish("client-evicting", client.facts.uid, domain=domain, pid=pid, reason=why)


def kill_by_policy(draft: Draft, client: Client, why: str, *, fault: bool = False) -> bool:
    """Kill a living client on behalf of policy, once. A pending requester still gets its answer.

    `fault`: the kill answers a fault, of this client or else the last one of its domain. Return False if no
    proof makes it a client of its domain; it is not killed then. A line in a log that every user can write
    is no proof.
    """
    domain = draft.state.domains[client.id.domain]
    if not draft.state.is_member(client) or not proven(domain, client, asked=False):
        return False
    living = _living(draft, client.id.process)
    if any(allows(c.state, ClientTrigger.KILL) for c in living):
        begun = next((c.eviction for c in living if c.eviction is not None), None)
        if begun is None:
            begun = Eviction(POLICY, why, draft.now)
            if fault:
                number, fault_class = _fault_of(draft, client)
                begun = replace(begun, fault=number, fault_class=fault_class)
            announce(draft, client, living, begun)
        kill(draft, client, begun)
    return True


def _fault_of(draft: Draft, client: Client) -> tuple[int | None, str]:
    """Return the number and class of the newest fault that names this client, or of its domain's last one."""
    records = sorted((*draft.state.open_faults, *draft.state.hits), key=lambda r: r.id, reverse=True)
    named = (r for r in records if r.offender is not None and r.offender.id.process == client.id.process)
    last = draft.state.domains[client.id.domain].last_fault
    found = next(named, None) or next((r for r in records if r.id == last), None)
    return (last, "") if found is None else (found.id, found.fault_class)


def answer_evicted(draft: Draft, process: ProcessInstance, how: str) -> None:
    """Answer the requester of an eviction that has just completed.

    `evict_ms` ends when the client can do nothing more: at SIGKILL, which follows terminate_client if that
    could be sent. `gone_ms` ends when the kernel has torn down the process.
    """
    eviction = pending_eviction(draft, process)
    if eviction is not None:
        killed = eviction.killed if eviction.killed is not None else draft.now
        data = {
            "outcome": "evicted",
            "steps": [*eviction.steps, how],
            "evict_ms": round((killed - eviction.began) * 1e3, 3),
            "gone_ms": round((draft.now - eviction.began) * 1e3, 3),
        }
        draft.emit(Answer(eviction.requester, True, data))


def on_kill_wait(draft: Draft, subject: str) -> None:
    """Report a process that SIGKILL has not ended, and allow another request."""
    stuck = [
        c
        for c in draft.state.clients.values()
        if str(c.id.process) == subject and c.eviction is not None and c.eviction.killed is not None
    ]
    if not stuck:
        return
    process = stuck[0].id.process
    message = (
        f"process {subject} has not ended {KILL_WAIT_S:.0f} s after SIGKILL: "
        "see its state in ps (D: it waits in the kernel)"
    )
    draft.publish("kill-stuck", stuck[0].facts.uid, pid=process.pid, text=message)
    _answer_unkilled(draft, process, "deadline", message)


def on_kill_refused(draft: Draft, event: ev.KillRefused) -> None:
    """Keep a process that was not killed, because another user may own it.

    The domain still counts it as living. Another request can kill it if a lease or the server's list proves
    it a client.
    """
    sent = [c for c in _living(draft, event.process) if c.state is ClientState.KILLING]
    if not sent:
        return
    participant = draft.state.members.get(event.process)
    if participant is not None:
        # It is not evicted, so it may fail over after all.
        draft.put_participant(replace(participant, named=False))
    message = f"process {event.process} is not killed: {event.reason}"
    for client in sent:
        facts = replace(client.facts, borrowed=True)
        eviction = replace(client.eviction, killed=None) if client.eviction else None
        draft.put_client(replace(client, facts=facts, problem=message, eviction=eviction))
    draft.count("kills_refused")
    draft.publish("kill-refused", sent[0].facts.uid, pid=event.process.pid, text=message)
    _answer_unkilled(draft, event.process, "unproven", message)


def _answer_unkilled(draft: Draft, process: ProcessInstance, code: str, message: str) -> None:
    """Answer the requester with an error, once. Policy owns the eviction from then on."""
    eviction = pending_eviction(draft, process)
    if eviction is not None:
        data = {"code": code, "message": message, "steps": list(eviction.steps)}
        draft.emit(Answer(eviction.requester, False, data))
    for client in _living(draft, process):
        if client.state is ClientState.KILLING and client.eviction is not None:
            draft.put_client(replace(client, eviction=replace(client.eviction, requester=POLICY)))


def _living(draft: Draft, process: ProcessInstance) -> list[Client]:
    return [c for c in draft.state.spaces_of(process) if c.living]
