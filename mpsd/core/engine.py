"""`decide(state, event, now)`: the pure decision function of the daemon.

A table maps each type of event to its handler. A handler changes a Draft. Before a decision is returned, the
invariants of the new state and of the effects are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpsd.core import clients, domains, killing, leases, lists, proof, slots, victims
from mpsd.core import events as ev
from mpsd.core.draft import Draft
from mpsd.core.effects import Effect, Freeze, HoldQueries, Kill, ProgramCommand, ReleaseLease, Terminate
from mpsd.core.failover import (
    budgets,
    handlers,
    memory,
    plan,
    programcounter,
    queries,
    restart,
    secondstandby,
    serialreplay,
    suspects,
    trial,
)
from mpsd.core.failover import reports as mev
from mpsd.core.faults import absorbed, hitrecords, hits, outside, recording, servers, signs
from mpsd.core.state import (
    Client,
    DomainState,
    InvariantViolation,
    State,
    check_invariants,
)


@dataclass(frozen=True, slots=True)
class Decision:
    state: State
    effects: tuple[Effect, ...]


def _on_counted(draft: Draft, event: ev.Counted) -> None:
    for name, by in event.counters.items():
        draft.count(name, by)


def _on_started(draft: Draft, event: ev.DomainStarted) -> None:
    domains.on_started(draft, event)
    if event.domain in draft.state.domains and draft.state.domains[event.domain].private:
        clients.on_private(draft, event.domain)


def _on_noticed(draft: Draft, event: ev.ClientNoticed) -> None:
    clients.on_noticed(draft, event)
    if event.listed:
        signs.on_confirmed(draft, event.domain, event.facts.instance)


def _on_clients_listed(draft: Draft, event: ev.ClientsListed) -> None:
    domains.on_clients_listed(draft, event)
    clients.on_listed(draft, event)


def _on_timer(draft: Draft, event: ev.TimerFired) -> None:
    handler = _TIMERS.get(event.kind)
    if handler is None:
        draft.count("unknown_timers")
    else:
        handler(draft, event.subject)


def _for_slot(draft: Draft, subject: str) -> None:
    if subject in draft.state.slots:
        draft.put_slot(replace(draft.state.slots[subject], paused=False))
        domains.ensure(draft, subject)


def _for_domain(handler: Callable[[Draft, str], None]) -> Callable[[Draft, str], None]:
    def run(draft: Draft, subject: str) -> None:
        if subject in draft.state.domains:
            handler(draft, subject)

    return run


_TIMERS: Mapping[str, Callable[[Draft, str], None]] = {
    "ensure": _for_slot,
    "ask": _for_domain(domains.settle),
    slots.IDLE: slots.on_idle,
    lists.UNSURE: _for_domain(domains.on_unsure),
    lists.QUIET_LOG: _for_domain(domains.settle),
    servers.SUCCESSOR: _for_domain(servers.on_successor),
    "laggards": _for_domain(victims.on_laggards),
    "kill-victims": _for_domain(victims.on_kill_victims),
    victims.USE: _for_domain(victims.probe_use),
    "linger": clients.on_linger,
    "kill-wait": killing.on_kill_wait,
    "strays": outside.on_unattributed,
    recording.REVISION: recording.on_revision,
    signs.SUSPECTED: _for_domain(signs.on_suspected),
    clients.UNLISTED: _for_domain(clients.on_unlisted),
    "hits": hits.on_tell,
    "thaw": hits.on_thaw_timer,
    "failover-wait": handlers.on_wait,
    "failover-turn": handlers.on_turn_timer,
    plan.EVICT_OFFENDER: plan.on_evict_offender,
    "failover-gather": serialreplay.on_gathered,
    serialreplay.TRIAL: serialreplay.on_trial_timer,
    suspects.JOIN: trial.on_join,
    "standby-linger": handlers.on_linger,
    slots.STANDBYS: secondstandby.on_timer,
    budgets.SETTLE: budgets.on_settle,
    budgets.PLACE: budgets.on_place_due,
    memory.WAIT: memory.on_wait,
    memory.BACK: memory.on_reoffer,
}

# The key of each entry is the type of the handler's second argument; Any stands for that pairing.
_HANDLERS: Mapping[type, Callable[[Draft, Any], None]] = {
    ev.SlotWanted: domains.on_slot_wanted,
    ev.DomainAdopted: domains.on_adopted,
    ev.LeaseRestored: clients.on_lease_restored,
    ev.AdoptionDone: domains.on_adoption_done,
    ev.DomainStarted: _on_started,
    ev.DomainStartFailed: domains.on_start_failed,
    ev.DomainUnreachable: domains.on_unreachable,
    ev.DomainStopped: domains.on_stopped,
    ev.ControlDied: signs.on_control_died,
    ev.ServerSeen: servers.on_server_seen,
    ev.ServerStartFailed: servers.on_start_failed,
    ev.ServerDied: signs.on_server_died,
    ev.ServerStateSeen: signs.on_server_state,
    ev.ServerAtFault: signs.on_server_at_fault,
    ev.LogStateSeen: domains.on_log_state,
    ev.ClientsUnpinned: clients.on_clients_unpinned,
    ev.ServerFatalLogged: signs.on_server_fatal,
    ev.ClientRefused: clients.on_refused,
    ev.ClientNoticed: _on_noticed,
    ev.ForeignNoticed: clients.on_foreign,
    ev.ClientsListed: _on_clients_listed,
    ev.ClientAttached: clients.on_attached,
    ev.LeaseStored: clients.on_lease_stored,
    ev.AttachFailed: clients.on_attach_failed,
    ev.ClientDied: clients.on_died,
    ev.ClientLeft: clients.on_left,
    ev.WorkEnded: clients.on_work_ended,
    ev.WorkRuns: signs.on_work_runs,
    ev.WorkNotVisible: clients.on_work_not_visible,
    ev.NeverLaunched: victims.on_never_launched,
    ev.UvmFatal: signs.on_uvm_fatal,
    ev.Inspected: signs.on_inspected,
    ev.GuardHit: hits.on_guard_hit,
    ev.KernelFaultSeen: absorbed.on_kernel_fault,
    ev.HitDescribed: hits.on_described,
    ev.ZonePolicySet: hits.on_policy_set,
    ev.FreezeRestored: hits.on_freeze_restored,
    ev.FreezeRefused: hits.on_freeze_refused,
    ev.LivenessSeen: hits.on_liveness_seen,
    ev.NvmlXidSeen: signs.on_nvml_xid,
    ev.KernelXidSeen: signs.on_kernel_xid,
    mev.KernelLogFollowed: signs.on_kernel_log,
    ev.ProcessIdentified: outside.on_identified,
    ev.EvictRequested: clients.on_evict,
    ev.TerminateFinished: clients.on_terminate_finished,
    ev.KillRefused: absorbed.on_kill_refused,
    ev.DrainRequested: handlers.on_drain,
    ev.GpuLost: signs.on_gpu_lost,
    ev.StopRequested: domains.on_stop,
    ev.ModeSeen: slots.on_mode_seen,
    ev.GpuFull: memory.on_full,
    mev.MemberCame: handlers.on_came,
    mev.MemberRestored: handlers.on_restored,
    mev.FailoverRestored: restart.on_restored,
    mev.MemberLeft: handlers.on_left,
    mev.MemberReady: handlers.on_ready,
    mev.MemberUnready: handlers.on_unready,
    mev.MemberOpaque: handlers.on_opaque,
    mev.MemberHolds: budgets.on_holds,
    mev.MemberCost: handlers.on_cost,
    mev.MemberExposed: handlers.on_exposed,
    mev.MemberExceeds: handlers.on_exceeds,
    mev.MemberSwitchedOff: handlers.on_switched_off,
    mev.MemberError: handlers.on_error,
    mev.MemberMoved: handlers.on_moved,
    mev.MemberUnsure: handlers.on_unsure,
    mev.MemberStayed: handlers.on_stayed,
    mev.MemberDone: handlers.on_done,
    mev.MemberWantsMemory: memory.on_shortage,
    mev.MemberReleasedMemory: memory.on_released,
    mev.MemberFoundCode: programcounter.on_found_code,
    mev.ClientQueried: programcounter.on_queried,
    mev.MemberPages: handlers.on_pages,
    ev.DriverFilesSeen: handlers.on_copies,
    ev.Counted: _on_counted,
    ev.TimerFired: _on_timer,
}


def decide(state: State, event: ev.Event, now: float) -> Decision:
    """Return the new state and the effects of this event, in order. `now`: monotonic seconds.

    Raises InvariantViolation if a handler breaks an invariant; the caller keeps the old state.
    """
    draft = Draft(state, now)
    _HANDLERS[type(event)](draft, event)
    trial.follow(draft, state)
    queries.follow(draft, state)
    secondstandby.follow(draft, state)
    domains.settle_unused(draft, state)
    plan.offer_free_places(draft, state)
    recording.follow_moves(draft, state)
    _close_old_faults(draft)
    check_invariants(draft.state)
    _check_effects(state, event, draft)
    return Decision(draft.state, _commands_first(draft.effects))


def _commands_first(effects: list[Effect]) -> tuple[Effect, ...]:
    """Put commands to programs first: programs pause until they receive them, and need no other effect."""
    return tuple(sorted(effects, key=lambda effect: not isinstance(effect, ProgramCommand)))


def _close_old_faults(draft: Draft) -> None:
    retained = tuple(r for r in draft.state.open_faults if recording.may_change(draft.state, r, draft.now))
    if len(retained) != len(draft.state.open_faults):
        draft.state = replace(draft.state, open_faults=retained)
    hitrecords.forget_old(draft)


def _check_effects(before: State, event: ev.Event, draft: Draft) -> None:
    """Raise InvariantViolation for an effect that no decision may have on a client, whatever the event."""
    if isinstance(event, proof.LogEvent) and not getattr(event, "listed", False):
        proof.check_log(draft.state, event, draft.effects)
    for effect in draft.effects:
        if isinstance(effect, Terminate):
            domain = draft.state.domains[effect.domain]
            if domain.state is DomainState.FAULTED:
                raise InvariantViolation(f"terminate_client sent to faulted domain {domain.id}")
            proof.check_terminate(draft.state, effect)
        elif isinstance(effect, Kill):
            proof.check_kill(draft.state, effect)
            proof.check_victim(draft.state, event, effect)
        elif isinstance(effect, Freeze):
            proof.check_freeze(draft.state, effect)
        elif isinstance(effect, HoldQueries):
            proof.check_hold(draft.state, effect)
        elif isinstance(effect, ReleaseLease):
            _check_release(before, event, draft, effect)


def _has_followed(before: State, draft: Draft, client: Client) -> bool:
    """Return whether this lease follows others of its process (mpsd.core.leases), of which none is left."""
    process, participant = client.id.process, before.members.get(client.id.process)
    follows = client.follows or leases.follows(before, client, participant)
    died = draft.now if client.died is None else client.died
    left = (c for c in draft.state.spaces_of(process) if c.living or c.died == died)
    return follows and all(c.follows for c in left)


_NEVER_LISTED = ev.ClientsListed | ev.ServerStateSeen | ev.DomainStarted
"""Events that show that a process which only log lines name is no client."""


def _check_release(before: State, event: ev.Event, draft: Draft, effect: ReleaseLease) -> None:
    """Check that a lease is released for a valid reason.

    Valid: the work has ended, the server lost it, none had begun in that domain, no client there could be
    harmed, or the process is no client of that domain.
    """
    client = before.clients.get(effect.client)
    if client is None:
        return
    if effect.client in draft.state.clients:
        raise InvariantViolation(f"lease of {effect.client} is released while its client is kept")
    if isinstance(event, ev.DomainStopped):
        return
    if isinstance(event, ev.WorkEnded) and (
        event.client == effect.client or _has_followed(before, draft, client)
    ):
        return
    if isinstance(event, _NEVER_LISTED) and event.domain == client.id.domain:
        participant = before.members.get(client.id.process)
        at_home = participant is not None and participant.home == event.domain
        if client.living and not (client.listed or at_home or draft.state.is_member(client)):
            # No work of a process that is no client belongs to this server.
            return
    ended = isinstance(event, ev.ClientDied | ev.ClientLeft) and event.process == client.id.process
    if ended and not handlers.may_have_launched(client, before.members.get(client.id.process)):
        return
    domain = draft.state.domains.get(effect.client.domain)
    lost = domain is None or domain.state in (DomainState.FAULTED, DomainState.STOPPING)
    if not lost and any(draft.state.living_of(effect.client.domain)):
        raise InvariantViolation(f"lease of {effect.client} is released while other clients live there")
