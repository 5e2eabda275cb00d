"""Release of leases, and of the pins of processes that are no clients any more.

A participant is a client of several domains, and its work runs in its home alone. When it exits, its other
contexts are idle, and no sign of their own may ever come: a domain that it left can outlive it. So their
leases follow the lease of its home, if the end of its work was seen there: that is the end of the process's
work. They do not follow if the home's domain alone has ended, for the home is the program's own claim.
"""

from __future__ import annotations

from mpsd.base.model import ProcessInstance
from mpsd.core.draft import Draft
from mpsd.core.effects import Forget, ReleaseLease
from mpsd.core.failover import outcomes
from mpsd.core.failover.participants import Participant, Standing
from mpsd.core.state import Client, State


def release(draft: Draft, client: Client, *, work_ended: bool = False) -> None:
    """Release the lease of an exited client and forget it, and the leases that follow it.

    `work_ended`: the end of its work was seen. Its pin is released with its last address space.
    """
    draft.emit(ReleaseLease(client.id, client.facts.uid))
    draft.drop_client(client)
    forget_if_done(draft, client.id.process)
    if work_ended and client.died is not None and not client.follows:
        release_followers(draft, client.id.process, client.died)


def follows(state: State, client: Client, participant: Participant | None) -> bool:
    """Return whether the lease of this living client will follow that of its process's home.

    Not if the work may run here: the process was told to move here, or its home is known from an earlier
    mpsd only.
    """
    if participant is None or not participant.heard or state.at_home(client):
        return False
    moves_here = client.id.domain == f"d{participant.generation}"
    return not (participant.standing is Standing.MOVING and moves_here)


def release_followers(draft: Draft, process: ProcessInstance, died: float) -> None:
    """Release the leases of a process that follow, once none is left that they follow.

    After an exec the same process may end once more, so `died` [monotonic s] tells its ends apart.
    """
    ended = [c for c in draft.state.spaces_of(process) if c.died == died]
    if all(client.follows for client in ended):
        for client in ended:
            release(draft, client)


def release_exited(draft: Draft, domain: str) -> None:
    """Release every exited client of a domain in which its work can harm no client any more.

    Living processes with only an idle context there are released too.
    """
    for client in tuple(draft.state.clients_of(domain)):
        if not client.living:
            release(draft, client)
    release_idle(draft, domain)


def release_idle(draft: Draft, domain: str) -> None:
    """Release the idle contexts of participants in the domain.

    Exception: a participant that may be failing over to it right now.
    """
    for client in tuple(draft.state.clients_of(domain)):
        idle = client.eviction is None and draft.state.is_standby_context(client)
        if idle and not outcomes.is_coming(draft.state, client):
            release(draft, client)


def release_unused(draft: Draft, domain: str) -> None:
    """Release the living clients of a domain that is about to be stopped: they have launched nothing."""
    for client in tuple(draft.state.clients_of(domain)):
        if client.eviction is None and draft.state.is_unused(client):
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
