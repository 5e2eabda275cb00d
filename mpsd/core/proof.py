"""What shows that a process is a client of its domain, and whether that is enough to kill it.

A line in a log names a pid, which is a claim: in a domain of one user its server runs as that user, who
can make it write, and list, whatever pid he likes. So in such a domain mpsd itself kills nobody but that
user's own processes, which are that user's to lose. The logs and lists of a shared domain are root's:
there a lease or a list is enough, beside the line. Who asks for one process by its number has looked at
it: then a lease or a list is enough everywhere, the line alone never is.

Whose a process is can change after it was looked at, by setuid(2) or the exec of such a program: where a
kill rests on that, it is looked at once more right before (`Kill.owner`).
"""

from __future__ import annotations

from enum import StrEnum

from mpsd.core.effects import Freeze, Kill, Terminate
from mpsd.core.state import POLICY, Client, ClientState, Domain, Eviction, InvariantViolation, State
from mpsd.model import ClientId, ProcessInstance


class Proof(StrEnum):
    """OWN: it is the domain's own user's, who may signal it himself. LISTED: the server named it when
    asked. LEASED: it holds a GPU address space, which we hold as well."""

    OWN = "own"
    LISTED = "listed"
    LEASED = "leased"


def proofs(domain: Domain, client: Client) -> frozenset[Proof]:
    """What there is besides a line in a log; nothing, as a rule, for a moment after it was noticed."""
    found = {
        Proof.OWN: domain.uid is not None and client.facts.uid == domain.uid and not client.facts.borrowed,
        Proof.LISTED: client.listed,
        Proof.LEASED: client.leased,
    }
    return frozenset(proof for proof, there in found.items() if there)


def proven(domain: Domain, client: Client, *, asked: bool) -> bool:
    """Whether it may be killed as a client of this domain. `asked`: somebody named this very process."""
    found = proofs(domain, client)
    return Proof.OWN in found or (bool(found) and (asked or domain.uid is None))


def owner_needed(domain: Domain, client: Client, *, asked: bool) -> int | None:
    """The user whose own it has to be for that; None where it may be killed whosoever's it is."""
    others = proofs(domain, client) - {Proof.OWN}
    return None if others and (asked or domain.uid is None) else domain.uid


def owner_of_kill(domain: Domain, client: Client, eviction: Eviction) -> int | None:
    """The same for an eviction: a user has only his own processes killed, whatever proves them."""
    if eviction.owner is not None:
        return eviction.owner
    return owner_needed(domain, client, asked=eviction.requester != POLICY)


def grounds(state: State, process: ProcessInstance, *, asked: bool) -> Client | None:
    """The living client for which this process may be killed; None: for nothing that is known."""
    for client in state.spaces_of(process):
        if client.living and proven(state.domains[client.id.domain], client, asked=asked):
            return client
    return None


def check_kill(state: State, effect: Kill) -> None:
    """Raise InvariantViolation for a SIGKILL that nobody asked for, or that nothing justifies."""
    process = effect.client.process
    spaces = tuple(state.spaces_of(process))
    if not spaces or any(c.eviction is None for c in spaces if c.living):
        raise InvariantViolation(f"{process} is killed though nobody asked")
    eviction = state.clients[effect.client].eviction if effect.client in state.clients else None
    asked = eviction is not None and eviction.requester != POLICY
    client = _check_proof(state, effect.client, asked=asked)
    domain = state.domains[effect.client.domain]
    if eviction is None or effect.owner != owner_of_kill(domain, client, eviction):
        raise InvariantViolation(f"{effect.client} is killed whosoever's it is by then")


def check_terminate(state: State, effect: Terminate) -> None:
    """Raise InvariantViolation for a terminate_client that ends in a SIGKILL which nothing justifies."""
    if any(c.frozen is not None for c in state.spaces_of(effect.process)):
        raise InvariantViolation(f"terminate_client for {effect.process}, which mpsd has stopped")
    here = [c.id for c in state.spaces_of(effect.process) if c.id.domain == effect.domain and c.living]
    _check_proof(state, here[0] if here else ClientId(effect.domain, effect.process), asked=True)


def check_freeze(state: State, effect: Freeze) -> None:
    """Raise InvariantViolation for a SIGSTOP that nothing justifies, or that meets a terminate_client."""
    spaces = state.spaces_of(effect.client.process)
    if any(c.state in (ClientState.TERMINATING, ClientState.KILLING) for c in spaces):
        raise InvariantViolation(f"{effect.client} is stopped while it is put out")
    client = _check_proof(state, effect.client, asked=False)
    if effect.owner != owner_needed(state.domains[effect.client.domain], client, asked=False):
        raise InvariantViolation(f"{effect.client} is stopped whosoever's it is by then")


def _check_proof(state: State, client_id: ClientId, *, asked: bool) -> Client:
    client = state.clients.get(client_id)
    if (
        client is None
        or not client.living
        or not proven(state.domains[client_id.domain], client, asked=asked)
    ):
        raise InvariantViolation(f"{client_id} is killed without proof that it is a client there")
    return client
