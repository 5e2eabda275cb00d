"""`decide(state, event, now)`: the one place where the daemon's mind is made up. Pure.

Events are looked up in a table of handlers; a handler changes a Draft. Before a decision leaves here,
the invariants of the new state and of the effects are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpsd.core import (
    attribution,
    clients,
    domains,
    failover,
    faults,
    giving,
    hitrecords,
    hits,
    killing,
    members,
    proof,
    sinks,
    strays,
    turns,
    victims,
    whose,
)
from mpsd.core import events as ev
from mpsd.core import memberevents as mev
from mpsd.core.draft import Draft
from mpsd.core.effects import Effect, Freeze, Kill, ReleaseLease, Terminate, Word
from mpsd.core.state import (
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


def _on_timer(draft: Draft, event: ev.TimerFired) -> None:
    handler = _TIMERS.get(event.kind)
    if handler is None:
        draft.count("unknown_timers")
    else:
        handler(draft, event.subject)


def _for_slot(draft: Draft, subject: str) -> None:
    if subject in draft.state.slots:
        domains.ensure(draft, subject)


def _for_domain(handler: Callable[[Draft, str], None]) -> Callable[[Draft, str], None]:
    def run(draft: Draft, subject: str) -> None:
        if subject in draft.state.domains:
            handler(draft, subject)

    return run


_TIMERS: Mapping[str, Callable[[Draft, str], None]] = {
    "ensure": _for_slot,
    "ask": _for_domain(domains.settle),
    "laggards": _for_domain(victims.on_laggards),
    "kill-victims": _for_domain(victims.on_kill_victims),
    "linger": clients.on_linger,
    "kill-wait": killing.on_kill_wait,
    "strays": strays.on_strays,
    "hits": hits.on_tell,
    "thaw": hits.on_thaw_timer,
    "failover-wait": members.on_wait,
    "failover-turn": members.on_turn_timer,
    "failover-late": members.on_late_timer,
    failover.PUT_OUT: failover.on_put_out,
    "failover-gather": turns.on_gathered,
    "failover-last": turns.on_last,
    "standby-linger": members.on_linger,
    giving.WAIT: giving.on_wait,
    giving.BACK: giving.on_back,
}

# The key of each entry is the type of the handler's second argument; Any stands for that pairing.
_HANDLERS: Mapping[type, Callable[[Draft, Any], None]] = {
    ev.SlotWanted: domains.on_slot_wanted,
    ev.DomainAdopted: domains.on_adopted,
    ev.LeaseRestored: clients.on_lease_restored,
    ev.AdoptionDone: domains.on_adoption_done,
    ev.DomainStarted: domains.on_started,
    ev.DomainStartFailed: domains.on_start_failed,
    ev.DomainStopped: domains.on_stopped,
    ev.ControlDied: faults.on_control_died,
    ev.ServerSeen: domains.on_server_seen,
    ev.ServerDied: faults.on_server_died,
    ev.ServerStateSeen: faults.on_server_state,
    ev.ServerAtFault: faults.on_server_at_fault,
    ev.ServerFatalLogged: faults.on_server_fatal,
    ev.ClientRefused: clients.on_refused,
    ev.ClientNoticed: clients.on_noticed,
    ev.ClientAttached: clients.on_attached,
    ev.LeaseStored: clients.on_lease_stored,
    ev.AttachFailed: clients.on_attach_failed,
    ev.ClientDied: clients.on_died,
    ev.ClientLeft: clients.on_left,
    ev.WorkEnded: clients.on_work_ended,
    ev.WorkRuns: faults.on_work_runs,
    ev.WorkNotVisible: clients.on_work_not_visible,
    ev.UvmFatal: faults.on_uvm_fatal,
    ev.Inspected: faults.on_inspected,
    ev.GuardHit: hits.on_guard_hit,
    ev.KernelFaultSeen: sinks.on_kernel_fault,
    ev.HitDescribed: hits.on_described,
    ev.ZonePolicySet: hits.on_policy_set,
    ev.FreezeRestored: hits.on_freeze_restored,
    ev.FreezeRefused: hits.on_freeze_refused,
    ev.LivenessSeen: hits.on_liveness_seen,
    ev.NvmlXidSeen: faults.on_nvml_xid,
    ev.KernelXidSeen: faults.on_kernel_xid,
    ev.EvictRequested: clients.on_evict,
    ev.TerminateFinished: clients.on_terminate_finished,
    ev.KillRefused: sinks.on_kill_refused,
    ev.DrainRequested: members.on_drain,
    ev.StopRequested: domains.on_stop,
    ev.ModeSeen: domains.on_mode_seen,
    ev.GpuFull: giving.on_full,
    mev.MemberCame: members.on_came,
    mev.MemberRestored: members.on_restored,
    mev.MemberLeft: members.on_left,
    mev.MemberReady: members.on_ready,
    mev.MemberUnready: members.on_unready,
    mev.MemberOpaque: members.on_opaque,
    mev.MemberError: members.on_error,
    mev.MemberMoved: members.on_moved,
    mev.MemberUnsure: members.on_unsure,
    mev.MemberStayed: members.on_stayed,
    mev.MemberDone: members.on_done,
    mev.MemberShort: giving.on_short,
    mev.MemberGave: giving.on_gave,
    mev.MemberLooked: whose.on_looked,
    mev.MemberPages: members.on_pages,
    ev.CopiesSeen: members.on_copies,
    ev.Counted: _on_counted,
    ev.TimerFired: _on_timer,
}


def decide(state: State, event: ev.Event, now: float) -> Decision:
    """The state after this event and what to do about it, in order. `now`: monotonic seconds.

    Raises InvariantViolation when a handler contradicts itself; the caller keeps the old state.
    """
    draft = Draft(state, now)
    _HANDLERS[type(event)](draft, event)
    _close_old_faults(draft)
    check_invariants(draft.state)
    _check_effects(state, event, draft)
    return Decision(draft.state, _words_first(draft.effects))


def _words_first(effects: list[Effect]) -> tuple[Effect, ...]:
    """What programs are told: they stand still until then, and need nothing of what else is done."""
    return tuple(sorted(effects, key=lambda effect: not isinstance(effect, Word)))


def _close_old_faults(draft: Draft) -> None:
    kept = tuple(r for r in draft.state.open_faults if attribution.is_open(draft.state, r, draft.now))
    if len(kept) != len(draft.state.open_faults):
        draft.state = replace(draft.state, open_faults=kept)
    hitrecords.forget_old(draft)


def _check_effects(before: State, event: ev.Event, draft: Draft) -> None:
    """What no decision may ever do to a client, whatever the event was."""
    for effect in draft.effects:
        if isinstance(effect, Terminate):
            domain = draft.state.domains[effect.domain]
            if domain.state is DomainState.FAULTED:
                raise InvariantViolation(f"terminate_client sent to faulted domain {domain.id}")
            proof.check_terminate(draft.state, effect)
        elif isinstance(effect, Kill):
            proof.check_kill(draft.state, effect)
        elif isinstance(effect, Freeze):
            proof.check_freeze(draft.state, effect)
        elif isinstance(effect, ReleaseLease):
            _check_release(before, event, draft, effect)


def _check_release(before: State, event: ev.Event, draft: Draft, effect: ReleaseLease) -> None:
    """A lease ends when the work has, when the server lost it or none had begun there, or when nobody is left
    to be harmed."""
    client = before.clients.get(effect.client)
    if client is None:
        return
    if effect.client in draft.state.clients:
        raise InvariantViolation(f"lease of {effect.client} is given up while it is kept")
    if isinstance(event, ev.DomainStopped):
        return
    if isinstance(event, ev.WorkEnded) and event.client == effect.client:
        return
    ended = isinstance(event, ev.ClientDied | ev.ClientLeft) and event.process == client.id.process
    if ended and not members.has_begun(client, before.members.get(client.id.process)):
        return
    domain = draft.state.domains.get(effect.client.domain)
    lost = domain is None or domain.state in (DomainState.FAULTED, DomainState.STOPPING)
    if not lost and any(draft.state.living_of(effect.client.domain)):
        raise InvariantViolation(f"work of {effect.client} is let loose on the living")
