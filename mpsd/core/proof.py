"""Proof that a process is a client of its domain, and whether the proof suffices to kill it.

A log line names a pid, which is only a claim. In a domain of one user the server runs as that user. The user
can make the server log, and list, any pid. In such a domain mpsd therefore kills only processes of that user
by its own decision, which the user could kill anyway. Every local user can write to the log of a domain that
is not private, so there the server must list a victim as well (State.is_member). A process that its own
tracker names needs a lease or a list in a shared domain. A requester that names one process has inspected it:
then a lease or a list suffices in every domain. A log line alone never suffices.

The owner of a process can change after the check, by setuid(2) or by the exec of a setuid program. If a kill
relies on the owner, the performer checks it again right before the signal (`Kill.owner`).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from mpsd.base.model import ClientId, ProcessInstance
from mpsd.core import events as ev
from mpsd.core.effects import (
    ArmTimer,
    AskServer,
    Attach,
    Effect,
    Forget,
    Freeze,
    HoldQueries,
    Kill,
    Move,
    Record,
    StartDomain,
    StopDomain,
    SwitchPath,
    Terminate,
)
from mpsd.core.faults.records import FaultRecord
from mpsd.core.state import POLICY, Client, ClientState, Domain, Eviction, InvariantViolation, State


class Proof(StrEnum):
    """Kind of proof beyond a log line.

    OWN: the process belongs to the domain's user, so that user may signal it anyway. LISTED: the server named
    it when asked. LEASED: it holds a GPU address space that mpsd holds as well.
    """

    OWN = "own"
    LISTED = "listed"
    LEASED = "leased"


def may_be_client(domain: Domain, uid: int, own: int) -> bool:
    """Return whether a log line is believable that names a process of this user as a client of the domain.

    `own`: the daemon's user. The log of a private domain speaks for its user alone. Root can be there too,
    and a process in a user namespace has another uid: the server's list shows that they are clients.
    """
    return uid == domain.uid or domain.uid is None or (not domain.private and uid in (0, own))


LogEvent = ev.ServerFatalLogged | ev.ClientRefused | ev.ClientNoticed
"""Events that the text of a domain's log causes; a client that the server lists is none of them."""


_BY_EVIDENCE = (ev.GuardHit, ev.KernelFaultSeen, ev.TerminateFinished)
"""Events with evidence against the very process that is killed."""


def proofs(domain: Domain, client: Client) -> frozenset[Proof]:
    """Return the proofs beyond a log line. Usually there are none right after the client was noticed."""
    found = {
        Proof.OWN: domain.owns(client.facts),
        Proof.LISTED: client.listed,
        Proof.LEASED: client.leased,
    }
    return frozenset(proof for proof, there in found.items() if there)


def proven(domain: Domain, client: Client, *, asked: bool) -> bool:
    """Return whether the client may be killed as one of this domain.

    `asked`: a requester named this very process.
    """
    found = proofs(domain, client)
    return Proof.OWN in found or (bool(found) and (asked or domain.uid is None))


def owner_needed(domain: Domain, client: Client, *, asked: bool) -> int | None:
    """Return the user that must own the process at the kill; None if its owner does not matter."""
    others = proofs(domain, client) - {Proof.OWN}
    return None if others and (asked or domain.uid is None) else domain.uid


def owner_of_kill(domain: Domain, client: Client, eviction: Eviction) -> int | None:
    """Return the user that must own the process at this eviction's kill.

    A user can have only own processes killed, whatever the proof.
    """
    if eviction.owner is not None:
        return eviction.owner
    return owner_needed(domain, client, asked=eviction.requester != POLICY)


def grounds(state: State, process: ProcessInstance, *, asked: bool) -> Client | None:
    """Return the living client that justifies killing this process; None if there is no proof."""
    for client in state.spaces_of(process):
        if client.living and proven(state.domains[client.id.domain], client, asked=asked):
            return client
    return None


def check_kill(state: State, effect: Kill) -> None:
    """Raise InvariantViolation for a SIGKILL without an eviction or without proof."""
    process = effect.client.process
    spaces = tuple(state.spaces_of(process))
    if not spaces or any(c.eviction is None for c in spaces if c.living):
        raise InvariantViolation(f"{process} is killed without an eviction")
    eviction = state.clients[effect.client].eviction if effect.client in state.clients else None
    asked = eviction is not None and eviction.requester != POLICY
    client = _check_proof(state, effect.client, asked=asked)
    domain = state.domains[effect.client.domain]
    if eviction is None or effect.owner != owner_of_kill(domain, client, eviction):
        raise InvariantViolation(f"{effect.client} is killed without a check of its owner")


def check_victim(state: State, event: ev.Event, effect: Kill) -> None:
    """Raise InvariantViolation if policy kills a process that only a log of every user calls a client."""
    client = state.clients[effect.client]
    by_policy = client.eviction is not None and client.eviction.requester == POLICY
    if by_policy and not isinstance(event, _BY_EVIDENCE) and not state.is_member(client):
        raise InvariantViolation(f"{effect.client} is killed on the word of a log that every user can write")


def check_log(state: State, event: LogEvent, effects: Iterable[Effect]) -> None:
    """Raise InvariantViolation for an effect of log text that reaches further than its domain's user.

    In a domain that is not private, log text asks and attaches. In a private one it may decide about that
    domain, its slot and processes of its user.
    """
    domain = state.domains.get(event.domain)
    for effect in effects:
        if isinstance(effect, AskServer | Attach | Forget | ArmTimer):
            continue
        if domain is None or not domain.private or _reaches_out(state, domain, effect):
            raise InvariantViolation(f"log text of domain {event.domain} has the effect {effect}")


def _reaches_out(state: State, domain: Domain, effect: Effect) -> bool:
    """Return whether an effect leaves the slot of this private domain, or harms another user's process."""
    match effect:
        case Kill(client=client, owner=owner):
            return client.domain != domain.id or owner != domain.uid
        case Terminate(domain=name) | Record(record=FaultRecord(domain=str(name))):
            return name != domain.id
        case Move(process=process):
            participant = state.members.get(process)
            home = state.domains.get((participant.home if participant is not None else None) or "")
            return home is None or home.slot != domain.slot
        case SwitchPath(slot=slot):
            return slot != domain.slot
        case StartDomain(domain=name) | StopDomain(domain=name):
            return name in state.domains and state.domains[name].slot != domain.slot
        case _:
            return isinstance(effect, Freeze)


def check_terminate(state: State, effect: Terminate) -> None:
    """Raise InvariantViolation for a terminate_client that would end in an unjustified SIGKILL."""
    if any(c.frozen is not None for c in state.spaces_of(effect.process)):
        raise InvariantViolation(f"terminate_client for {effect.process}, which mpsd has stopped")
    here = [c.id for c in state.spaces_of(effect.process) if c.id.domain == effect.domain and c.living]
    _check_proof(state, here[0] if here else ClientId(effect.domain, effect.process), asked=True)


def check_freeze(state: State, effect: Freeze) -> None:
    """Raise InvariantViolation for an unjustified SIGSTOP, or one that overlaps with a terminate_client."""
    spaces = state.spaces_of(effect.client.process)
    if any(c.state in (ClientState.TERMINATING, ClientState.KILLING) for c in spaces):
        raise InvariantViolation(f"{effect.client} is stopped while it is evicted")
    client = _check_proof(state, effect.client, asked=False)
    if effect.owner != owner_needed(state.domains[effect.client.domain], client, asked=False):
        raise InvariantViolation(f"{effect.client} is stopped without a check of its owner")


def may_be_held(domain: Domain, client: Client) -> bool:
    """Return whether mpsd may stop threads of this client for a moment. One that is evicted ends faster if it
    runs."""
    runs = client.frozen is None and client.state not in (ClientState.TERMINATING, ClientState.KILLING)
    return runs and proven(domain, client, asked=False)


def check_hold(state: State, effect: HoldQueries) -> None:
    """Raise InvariantViolation if threads of a process are stopped that may not be."""
    domain = state.domains[effect.domain]
    for process in effect.clients:
        living = [c for c in state.spaces_of(process) if c.living]
        if not domain.is_dead or not living or not all(may_be_held(domain, c) for c in living):
            raise InvariantViolation(f"{process} is stopped without proof that it is a lost client")


def _check_proof(state: State, client_id: ClientId, *, asked: bool) -> Client:
    client = state.clients.get(client_id)
    if (
        client is None
        or not client.living
        or not proven(state.domains[client_id.domain], client, asked=asked)
    ):
        raise InvariantViolation(f"{client_id} is killed without proof that it is a client there")
    return client
