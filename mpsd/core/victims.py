"""Living clients of a domain with dead contexts (victims). mpsd kills no victim unless policy says so."""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import events as ev
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, AskServer, ProbeUse
from mpsd.core.failover import outcomes
from mpsd.core.failover.participants import OFFERED
from mpsd.core.killing import kill_by_policy
from mpsd.core.state import Client, ClientState, Domain, DomainState, State

PROOF_WAIT_S = 10.0
USE, USE_S = "use", 3.0
"""Name and delay [s] of the timer that looks for clients of a faulted domain that have launched nothing. The
participants have moved by then."""

_RUNS = (ClientState.NOTICED, ClientState.ATTACHED, ClientState.UNPROTECTED)


def work_is_lost(domain: Domain) -> bool:
    """Return whether living clients of this domain are victims: it faulted, or its last server is gone."""
    served_out = domain.state is DomainState.RETIRED and domain.server is None
    return domain.state is DomainState.FAULTED or served_out


def victims_of(state: State, name: str) -> list[Client]:
    """Return the living clients there with dead contexts, of this server or an earlier one."""
    domain, here = state.domains[name], state.living_of(name)
    return [c for c in here if work_is_lost(domain) or c.id.process in domain.bereft]


def lost_clients(state: State, name: str) -> list[Client]:
    """Return the victims there that do not fail over: their GPU work is lost."""
    return [c for c in victims_of(state, name) if not outcomes.is_moving(state, c.id.process)]


def kill_frozen(draft: Draft, name: str) -> None:
    """Kill victims that mpsd has stopped: they can neither notice the fault nor exit."""
    for client in victims_of(draft.state, name):
        if client.frozen is not None:
            kill_by_policy(draft, client, "mpsd had frozen the client, and its domain faulted", fault=True)


def arm_drain(draft: Draft, domain: Domain) -> None:
    """Arm the timers of a faulted domain's victims: their report, and their kill if policy wants it."""
    if domain.state is not DomainState.FAULTED:
        return
    draft.emit(ArmTimer("laggards", domain.id, draft.state.policy.laggard_report_s))
    draft.emit(ArmTimer(USE, domain.id, USE_S))
    limit = _limit_s(draft.state, domain)
    if limit > 0:
        draft.emit(ArmTimer("kill-victims", domain.id, limit))


def _limit_s(state: State, domain: Domain) -> float:
    """Return how long [s] victims may live; 0: no limit.

    In exclusive mode the next domain cannot start before they have ended, so a separate limit applies.
    """
    slot, policy = state.slots[domain.slot], state.policy
    in_place = slot.exclusive and slot.active == domain.id
    return policy.exclusive_drain_s if in_place else policy.kill_victims_after_s


def probe_use(draft: Draft, domain: str) -> None:
    """Look for victims that have launched nothing. Nothing can be launched there any more."""
    if draft.state.domains[domain].state is DomainState.FAULTED:
        known = (c for c in victims_of(draft.state, domain) if not c.unused)
        draft.emit(*(ProbeUse(c.id) for c in known if c.state in _RUNS))


def on_never_launched(draft: Draft, event: ev.NeverLaunched) -> None:
    """Note a client without work: it does not keep its faulted domain."""
    client = draft.state.clients.get(event.client)
    if client is None or client.state not in _RUNS:
        return
    if draft.state.domains[client.id.domain].state is DomainState.FAULTED:
        draft.put_client(replace(client, unused=True))
        draft.count("victims_without_work")


def on_laggards(draft: Draft, domain: str) -> None:
    late = lost_clients(draft.state, domain)
    if len(late) < len(victims_of(draft.state, domain)):
        # The others may still fail to move.
        draft.emit(ArmTimer("laggards", domain, draft.state.policy.move_wait_s))
    elif late:
        draft.publish(
            "victims-stay",
            None,
            domain=domain,
            pids=sorted({c.id.process.pid for c in late}),
            text="these clients of a faulted domain still run without their GPU work: restart them",
        )


def on_kill_victims(draft: Draft, domain: str) -> None:
    """Kill victims at their time limit, except participants that fail over or prepare to."""
    here = victims_of(draft.state, domain)
    why = "its domain faulted, and the client did not exit within the time limit"
    going = [c for c in here if outcomes.is_moving(draft.state, c.id.process) or _prepares(draft, c)]
    killed = [kill_by_policy(draft, c, why, fault=True) for c in here if c not in going]
    if going:
        draft.emit(ArmTimer("kill-victims", domain, draft.state.policy.move_wait_s))
    elif not all(killed):
        # Proof that they are clients may still arrive.
        ask = AskServer(domain, clients=True, patient=True)
        draft.emit(ask, ArmTimer("kill-victims", domain, PROOF_WAIT_S))


def _prepares(draft: Draft, client: Client) -> bool:
    """Return whether the client is preparing a standby context to fail over to, within its time limit."""
    participant, domain = draft.state.members.get(client.id.process), draft.state.domains[client.id.domain]
    time_s = _limit_s(draft.state, domain) + draft.state.policy.move_wait_s
    offered = participant is not None and participant.home == domain.id and participant.standing in OFFERED
    return offered and draft.now - domain.since < time_s
