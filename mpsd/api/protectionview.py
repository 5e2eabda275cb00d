"""The protection of each client, for `status`: its level now, and why that is not the node's. Pure functions.

A client's level is what it has now, never what it was promised. The daemon's own state decides. How the
program was started is a claim of its environment, and only words the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpsd.api.failoverview import EXCLUSIVE
from mpsd.base.model import FailoverMode, ProcessInstance
from mpsd.base.protection import Protection, ProtectionLevel
from mpsd.clients.starts import Start
from mpsd.core.failover import budgets, plan
from mpsd.core.failover.participants import Participant, Standing
from mpsd.core.state import Client, ClientState, DomainState, State
from mpsd.core.victims import work_is_lost

NONE = "none"
LOST_PROXY = "lost the proxy on the way (DT_RPATH, or LD_LIBRARY_PATH set anew)"
PLAIN = "started without mpsd-run"
READS = "a list of read-only parameters may bring it back: MPSD_FAILOVER_READS (mpsd help failover)"
_NOT_HELD: Mapping[ClientState, str] = {
    ClientState.NOTICED: "mpsd does not hold its GPU memory yet",
    ClientState.UNPROTECTED: "mpsd could not hold its GPU memory",
    ClientState.TERMINATING: "mpsd evicts it",
    ClientState.KILLING: "mpsd evicts it",
}


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Facts about one client's process. `node`: the level of its user on its GPUs. `in_vault`: its libcuda is
    connected to the vault. `zones`: its guard zones, None without a ledger. `start`: None if not known.
    `gpus`: the indices of GPUs, by UUID."""

    node: Protection
    in_vault: bool
    zones: Mapping[str, Any] | None
    start: Start | None
    gpus: Mapping[str, int] = field(default_factory=dict)


def client_view(state: State, client: Client, known: Knowledge, now: float) -> dict[str, Any]:
    """Return the level of a client, why it has no more, the remedy, and what protection costs it.

    `why` and `remedy` are empty if it has the node's level. `cost_share`: the time that protection adds, as a
    share of the time without it; None if it is not known.
    """
    participant = state.members.get(client.id.process)
    level, why = _level(state, client, participant, known, now)
    if level is not None and level.rank >= known.node.level.rank:
        level, why = known.node.level, ""
    excess = participant.excess if participant is not None else None
    cost = participant.cost if participant is not None else None
    return {
        "level": NONE if level is None else level.value,
        "why": why,
        "remedy": READS if excess is not None and excess.listable and why == excess.why else "",
        "cost_bytes": _cost_bytes(participant),
        "cost_share": cost.share if cost is not None else None,
    }


def _cost_bytes(participant: Participant | None) -> int | None:
    """Return the GPU memory that protection costs; None if the client cannot say at the moment."""
    if participant is None:
        return 0
    return participant.bytes + (participant.held or 0) if participant.connected else None


def _level(
    state: State, client: Client, participant: Participant | None, known: Knowledge, now: float
) -> tuple[ProtectionLevel | None, str]:
    """Return the level, None for no protection at all, and what keeps it from the next one."""
    home = _home_of(state, client, participant)
    if why := _why_none(state, home, participant):
        return None, why
    if not known.in_vault and participant is None:
        return ProtectionLevel.OBSERVE, _why_no_proxy(known.start)
    no_failover = _why_no_failover(state, participant, known, now)
    if not no_failover:
        return ProtectionLevel.FAILOVER, ""
    if known.in_vault and not _has_zones(known.zones):
        return ProtectionLevel.OBSERVE, "its guard zones are not laid"
    return ProtectionLevel.GUARD, no_failover


def _home_of(state: State, client: Client, participant: Participant | None) -> Client:
    """Return the context in which the client's work runs: a standby context is as protected as that one."""
    if participant is None or state.at_home(client):
        return client
    here = (c for c in state.spaces_of(client.id.process) if c.living and c.id.domain == participant.home)
    return next(here, client)


def _why_none(state: State, client: Client, participant: Participant | None) -> str:
    domain = state.domains[client.id.domain]
    moving = participant is not None and participant.standing is Standing.MOVING
    if (work_is_lost(domain) or client.id.process in domain.bereft) and not moving:
        return "its GPU work is lost with its domain; restart it"
    return _NOT_HELD.get(client.state, "")


def _why_no_proxy(start: Start | None) -> str:
    if start is None:
        return "mpsd's libcuda is not connected"
    if start.proxy:
        return "mpsd's libcuda has not connected yet"
    if start.level is None:
        return PLAIN
    return "started at level observe" if start.level is ProtectionLevel.OBSERVE else LOST_PROXY


def _has_zones(zones: Mapping[str, Any] | None) -> bool:
    """Return whether the process has a ledger, and not one in which no zone could be laid."""
    return zones is not None and not (zones["uncovered"] and not zones["managed"] and not zones["sparse"])


def _why_no_failover(state: State, participant: Participant | None, known: Knowledge, now: float) -> str:
    """Return why a fault of its domain would end the client's work; empty if it would fail over."""
    if participant is None:
        start = known.start
        lowered = start is not None and start.level is ProtectionLevel.GUARD
        return "started at level guard" if lowered else "it takes no part in fail-over"
    if participant.excess is not None:
        return participant.excess.why
    if not participant.connected:
        return "its connection for fail-over has ended"
    if participant.mode is not FailoverMode.EXACT:
        return f"its fail-over mode is {participant.mode.value}, which loses work in flight"
    match participant.standing:
        case Standing.LEFT_BEHIND | Standing.UNREADY:
            return participant.reason or participant.standing.value
        case Standing.MOVING:
            return "it is moving to another domain"
        case Standing.WAITING if participant.capped is not None:
            gpu = known.gpus.get(participant.capped, participant.capped)
            return f"GPU {gpu} {budgets.full(state)}"
    target = plan.target_of(state, participant)
    if target is None:
        return _why_no_target(state, participant)
    if participant.standing is not Standing.READY or participant.generation != target.generation:
        return participant.reason or state.copies_problem or "its standby context is in preparation"
    if participant.exposed is not None:
        return f"its work in flight cannot be rolled back: {participant.exposed}"
    recent = sum(now - t < plan.MINUTE_S for t in participant.told)
    if recent >= state.policy.moves_per_minute:
        return f"it moved {recent} times within a minute"
    return ""


def _why_no_target(state: State, participant: Participant) -> str:
    home = state.domains.get(participant.home or "")
    slot = state.slots.get(home.slot) if home is not None else None
    if slot is not None and slot.exclusive:
        return EXCLUSIVE
    found = state.domains.get((slot.spare if slot is not None else None) or "")
    starting = found is not None and found.state is DomainState.STARTING
    return "its standby domain is starting" if starting else "there is no standby domain"


def knowledge(
    process: ProcessInstance,
    node: Protection,
    vault: Mapping[ProcessInstance, int],
    zones: Mapping[ProcessInstance, Mapping[str, Any]],
    starts: Mapping[ProcessInstance, Start],
    gpus: Mapping[str, int],
) -> Knowledge:
    return Knowledge(node, process in vault, zones.get(process), starts.get(process), gpus)
