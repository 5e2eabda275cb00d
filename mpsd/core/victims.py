"""Who lives on in a domain whose contexts are dead. No process is ended for that unless policy says so."""

from __future__ import annotations

from mpsd.core import fates
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer
from mpsd.core.killing import kill_by_policy
from mpsd.core.standby import OFFERED
from mpsd.core.state import Client, Domain, DomainState, State

PROOF_WAIT_S = 10.0


def work_is_lost(domain: Domain) -> bool:
    """Whether whoever lives in this domain is a victim: it faulted, and no later server took clients."""
    served_out = domain.state is DomainState.RETIRED and domain.server is None
    return domain.state is DomainState.FAULTED or served_out


def victims_of(state: State, name: str) -> list[Client]:
    """All who live there, or those who did when an earlier server died."""
    domain, here = state.domains[name], state.living_of(name)
    return [c for c in here if work_is_lost(domain) or c.id.process in domain.bereft]


def kill_frozen(draft: Draft, name: str) -> None:
    """What mpsd has stopped can neither notice that its work is lost nor leave."""
    for client in victims_of(draft.state, name):
        if client.frozen is not None:
            kill_by_policy(draft, client, "mpsd had frozen it, and its domain is lost")


def arm_drain(draft: Draft, domain: Domain) -> None:
    if domain.state is not DomainState.FAULTED:
        return
    draft.emit(ArmTimer("laggards", domain.id, draft.state.policy.laggard_report_s))
    limit = _limit_s(draft.state, domain)
    if limit > 0:
        draft.emit(ArmTimer("kill-victims", domain.id, limit))


def _limit_s(state: State, domain: Domain) -> float:
    """How long victims are let live; 0: for ever. Where no other domain can be, what comes next waits."""
    slot, policy = state.slots[domain.slot], state.policy
    in_place = slot.exclusive and slot.active == domain.id
    return policy.exclusive_drain_s if in_place else policy.kill_victims_after_s


def on_laggards(draft: Draft, domain: str) -> None:
    late = victims_of(draft.state, domain)
    if late:
        draft.publish(
            "victims-stay",
            None,
            domain=domain,
            pids=sorted({c.id.process.pid for c in late}),
            text="these clients of a faulted domain have not ended; their GPU work is lost",
        )


def on_kill_victims(draft: Draft, domain: str) -> None:
    here = victims_of(draft.state, domain)
    why = "victim of a fault that did not leave"
    going = [c for c in here if fates.is_moving(draft.state, c.id.process) or _prepares(draft, c)]
    killed = [kill_by_policy(draft, c, why) for c in here if c not in going]
    if going:
        draft.emit(ArmTimer("kill-victims", domain, draft.state.policy.move_wait_s))
    elif not all(killed):
        # What proves them clients may still come.
        draft.emit(ArmTimer("kill-victims", domain, PROOF_WAIT_S))


def _prepares(draft: Draft, client: Client) -> bool:
    """It makes itself a standby, and goes there when it has; not for ever."""
    member, domain = draft.state.members.get(client.id.process), draft.state.domains[client.id.domain]
    time_s = _limit_s(draft.state, domain) + draft.state.policy.move_wait_s
    offered = member is not None and member.home == domain.id and member.standing in OFFERED
    return offered and draft.now - domain.since < time_s
