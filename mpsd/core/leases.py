"""Release of leases, and of the pins of processes that are no clients any more."""

from __future__ import annotations

from mpsd.base.model import ProcessInstance
from mpsd.core.draft import Draft
from mpsd.core.effects import Forget, ReleaseLease
from mpsd.core.failover import outcomes
from mpsd.core.state import Client


def release(draft: Draft, client: Client) -> None:
    """Release the lease of an exited client and forget it.

    Its pin is released with its last address space.
    """
    draft.emit(ReleaseLease(client.id, client.facts.uid))
    draft.drop_client(client)
    forget_if_done(draft, client.id.process)


def release_exited(draft: Draft, domain: str) -> None:
    """Release every exited client of a domain in which its work can harm no client any more.

    Living processes with only an idle context there are released too.
    """
    for client in tuple(draft.state.clients_of(domain)):
        if not client.living:
            release(draft, client)
    release_idle(draft, domain)


def release_idle(draft: Draft, domain: str) -> None:
    """Release clients with only an idle context in the domain.

    Exception: a participant that may be failing over to it right now.
    """
    for client in tuple(draft.state.clients_of(domain)):
        if draft.state.is_idle(client) and not outcomes.is_coming(draft.state, client):
            release(draft, client)


def release_blind(draft: Draft, domain: str) -> None:
    """Release exited clients with invisible work once the domain has no living client that it could harm."""
    if any(draft.state.living_of(domain)):
        return
    for client in tuple(draft.state.clients_of(domain)):
        if client.blind:
            release(draft, client)


def forget_if_done(draft: Draft, process: ProcessInstance) -> None:
    """Close the pin of a process that has no client left."""
    if not any(draft.state.spaces_of(process)):
        draft.emit(Forget(process))
