"""Giving up leases, and the pins of processes that are no clients any more."""

from __future__ import annotations

from mpsd.core import fates
from mpsd.core.draft import Draft
from mpsd.core.effects import Forget, ReleaseLease
from mpsd.core.state import Client
from mpsd.model import ProcessInstance


def release(draft: Draft, client: Client) -> None:
    """Give up the lease of a dead client and forget it; its pin goes with its last address space."""
    draft.emit(ReleaseLease(client.id, client.facts.uid))
    draft.drop_client(client)
    forget_if_done(draft, client.id.process)


def release_dead(draft: Draft, domain: str) -> None:
    """Release every dead client of a domain in which nothing it left can harm anybody any more; so too who
    lives, and has nothing but an idle context there."""
    for client in tuple(draft.state.clients_of(domain)):
        if not client.living:
            release(draft, client)
    release_idle(draft, domain)


def release_idle(draft: Draft, domain: str) -> None:
    """Release who lives, and has nothing but an idle context there: but for one that may have just come."""
    for client in tuple(draft.state.clients_of(domain)):
        if draft.state.is_idle(client) and not fates.comes(draft.state, client):
            release(draft, client)


def release_blind(draft: Draft, domain: str) -> None:
    """Release the dead whose work cannot be seen, once nobody is left whom it could harm."""
    if any(draft.state.living_of(domain)):
        return
    for client in tuple(draft.state.clients_of(domain)):
        if client.blind:
            release(draft, client)


def forget_if_done(draft: Draft, process: ProcessInstance) -> None:
    if not any(draft.state.spaces_of(process)):
        draft.emit(Forget(process))
