"""Handlers for the end and the recovery of control daemons and servers.

The death of an idle server of an open domain costs nothing: its control daemon may start another one. Any
other such death takes the domain out of service (mpsd.core.domains.leave).
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import ServerState
from mpsd.core import domains, lists, slots
from mpsd.core import events as ev
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, AskServer
from mpsd.core.failover import plan
from mpsd.core.faults import poisoned as endings
from mpsd.core.lifecycle import DomainTrigger
from mpsd.core.state import HOSTING, Client, Domain, DomainState
from mpsd.core.victims import kill_frozen

SUCCESSOR, SUCCESSOR_S = "successor", 0.5
"""Name of the timer that waits for the next server of an idle open domain, and its delay [s]."""
_OCCUPIED = "its server runs for user"
_WAIT = (
    "programs of the domain's user wait until the programs of that user have ended; "
    "set [domains] private = true to keep other users out"
)


def on_control_died(draft: Draft, event: ev.ControlDied) -> bool:
    """Return True if this death must be recorded: the control daemon of a domain in use."""
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.control != event.process:
        return False
    used = domain.state not in (DomainState.STOPPING, DomainState.STARTING, DomainState.FAILED)
    return used and domains.leave(draft, domain.id, DomainTrigger.CONTROL_DIED)


def on_server_seen(draft: Draft, event: ev.ServerSeen) -> None:
    domain = draft.state.domains.get(event.domain)
    if domain is None:
        return
    if domain.server != event.server:
        domain = replace(domain, server=event.server, former_server=domain.server, server_lost=None)
    foreign = event.uid is not None and domain.uid is not None and event.uid != domain.uid
    problem = f"{_OCCUPIED} {event.uid}: {_WAIT}" if foreign and not domain.private else domain.problem
    if not foreign and problem.startswith(_OCCUPIED):
        problem = ""
    if replace(domain, problem=problem) != draft.state.domains[domain.id]:
        draft.put_domain(replace(domain, problem=problem))


def on_start_failed(draft: Draft, event: ev.ServerStartFailed) -> None:
    """Replace a domain with a server that failed for its first client.

    The next domain starts together with its server, so mpsd learns of a further failure without a client.
    """
    domain = draft.state.domains.get(event.domain)
    if domain is None or (event.server is not None and domain.server not in (None, event.server)):
        return
    # Such a report says nothing about a server that is ACTIVE.
    unseen = event.server is None and domain.server is not None
    if (unseen or event.late) and domain.server_state is ServerState.ACTIVE:
        return
    if not event.late:
        former = event.server or domain.server or domain.former_server
        gone = replace(domain, server=None, former_server=former, server_state=ServerState.GONE)
        draft.put_domain(gone)
    elif domain.server is None:
        draft.put_domain(replace(domain, server=event.server, server_state=ServerState.INITIALIZING))
    if domain.state not in HOSTING:
        domains.settle(draft, domain.id)
        return
    slot = draft.state.slots[domain.slot]
    if slot.second != domain.id:
        draft.put_slot(replace(slot, failures=slot.failures + 1))
    draft.count("server_starts_failed")
    draft.publish("server-start-failed", domain.uid, domain=domain.id, reason=event.reason)
    # A client that no list names may still wait for this server, or for its control daemon's next one.
    slots.hand_over(draft, domain.id)
    domains.leave(draft, domain.id, DomainTrigger.SERVER_DIED)
    if event.late:
        lists.await_later_list(draft, draft.state.domains[domain.id])


def on_server_died(draft: Draft, event: ev.ServerDied) -> bool:
    """Return True if this death must be recorded: the server of a domain in service."""
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.server != event.server:
        return False
    if _may_have_successor(draft, domain):
        # A program that waits for the next server is in no list yet, and loses nothing.
        lost = {c.id.process for c in draft.state.clients_of(domain.id) if c.living and c.listed}
        gone = replace(domain, server=None, former_server=event.server, server_state=ServerState.GONE)
        draft.put_domain(replace(gone, server_lost=draft.now, bereft=domain.bereft | lost))
        draft.emit(ArmTimer(SUCCESSOR, domain.id, SUCCESSOR_S))
        return False
    if endings.clients_with_work(draft.state, domain):
        endings.begin(draft, domain)
        endings.server_gone(draft, domain.id)
    # While adopting, a listed client belongs to the next server: the list was read after this death.
    here = [
        c for c in draft.state.clients_of(domain.id) if c.living and not (draft.state.adopting and c.listed)
    ]
    bereft = domain.bereft | {c.id.process for c in here}
    without_server = replace(
        domain, server=None, former_server=event.server, server_state=ServerState.GONE, bereft=bereft
    )
    draft.put_domain(without_server)
    used = domain.state in (*HOSTING, DomainState.POISONED)
    # Participants without a ready standby context are still in a retired domain.
    if domain.state is DomainState.RETIRED:
        plan.domain_left(draft, domain.id, DomainTrigger.SERVER_DIED.value)
        kill_frozen(draft, domain.id)
    return domains.leave(draft, domain.id, DomainTrigger.SERVER_DIED) and used


def _may_have_successor(draft: Draft, domain: Domain) -> bool:
    """Return whether the server may have ended only to make way for a program of another user.

    The stock control daemon ends an idle server for that. It must not cost the domain's user a domain.
    """
    is_open = domain.uid is not None and not domain.private and domain.control is not None
    used = any(
        c.living and domain.owns(c.facts) and (draft.state.is_member(c) or _may_have_work(draft, c))
        for c in draft.state.clients_of(domain.id)
    )
    serves = domain.state in (DomainState.ACTIVE, DomainState.WARM)
    return is_open and serves and not used and not draft.state.adopting and not draft.state.stopping


def _may_have_work(draft: Draft, client: Client) -> bool:
    """Return whether a client that no list names yet may have work in its domain.

    Its lease proves an address space. A log line may name a client that another server lists.
    """
    spaces = draft.state.spaces_of(client.id.process)
    return client.leased and not any(c.listed and c.id.domain != client.id.domain for c in spaces)


def on_successor(draft: Draft, name: str) -> None:
    """Ask for the server of a domain whose idle server has ended. The answer decides: see no_successor."""
    domain = draft.state.domains[name]
    if domain.server is None and domain.server_lost is not None:
        draft.emit(AskServer(name))


def no_successor(draft: Draft, domain: Domain) -> None:
    """Retire a domain without a server whose control daemon has started no other one in time."""
    lost = domain.server_lost if domain.server is None else None
    if lost is not None and draft.now - lost >= SUCCESSOR_S * 0.9:
        domains.leave(draft, domain.id, DomainTrigger.SERVER_DIED)


def became_active(draft: Draft, domain: Domain) -> None:
    """Start the standby domain of a slot that has its first client, and watch for the slot's idleness."""
    slot = draft.state.slots[domain.slot]
    if draft.state.policy.on_demand and slot.active == domain.id and not draft.state.adopting:
        domains.ensure(draft, slot.id)
        slots.watch_idle(draft, slot.id)


def recovered(draft: Draft, domain: Domain) -> None:
    """Reuse a faulted domain with an ACTIVE server, if its slot still leads to it and it has no client."""
    slot = draft.state.slots[domain.slot]
    here = (c for c in draft.state.clients_of(domain.id) if not draft.state.is_standby_context(c))
    idle = not draft.state.adopting and not any(client.living for client in here)
    if idle and slot.active == domain.id:
        domains.move(draft, domain.id, DomainTrigger.RECOVERED)
        draft.publish("domain-active", domain.uid, domain=domain.id, slot=slot.id)
        domains.ensure(draft, slot.id)
