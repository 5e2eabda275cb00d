"""The second standby domain: a warm domain behind the standby domain, so that no suspect waits for a start.

After a fault a suspect needs a trial domain (trial.py). A domain that starts only then takes longer than
everything else in a trial, because the driver is busy with the fault. So a slot with participants in mode
exact keeps a second standby domain. After a fault
  - it becomes the trial domain of the first suspect;
  - else it becomes the standby domain once the participants have moved.

Until the participants have moved, at most SETTLE_S, nothing starts for the slot: starts and contexts in the
making delay them.

It ends with the last participant that would replay. If its start fails, the GPU may have no memory for it.
No other one starts until a domain has come up again: suspects then wait for a start, or replay last.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import domains, slots
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer
from mpsd.core.failover import suspects
from mpsd.core.failover.participants import Standing
from mpsd.core.state import SERVING, Domain, DomainState, Slot, State

SETTLE, SETTLE_S = "failover-settle", 1.0
"""Name of a slot's timer, and the longest time [s] after an order to move in which nothing starts for it."""


def settles_in(state: State, slot: str, now: float) -> float:
    """Return how long the slot waits for participants that are moving [s]; 0 if none is."""
    moving = (m for m in state.members.values() if m.standing is Standing.MOVING and m.connected and m.told)
    here = [m for m in moving if (home := state.domains.get(m.home or "")) and home.slot == slot]
    return max((SETTLE_S - (now - m.told[-1]) for m in here), default=0.0)


def follow(draft: Draft, before: State) -> None:
    """End second standby domains without a use. Let others take the place of standby domains that serve now.

    Called at the end of every decision.
    """
    state = draft.state
    same = state.members is before.members and state.slots is before.slots and not before.adopting
    if state.adopting or state.stopping or same:
        return
    for name in [s.id for s in state.slots.values() if s.second is not None]:
        if slots.replays_in(state, name):
            take(draft, name)
        else:
            slots.drop_second(draft, name)


def take(draft: Draft, name: str) -> None:
    """Make the second standby domain of a slot its standby domain, once its participants have moved."""
    slot = draft.state.slots[name]
    active = draft.state.domains.get(slot.active or "")
    if slot.second is None or slot.spare is not None or active is None or active.state not in SERVING:
        return
    second = draft.state.domains[slot.second]
    wait = settles_in(draft.state, name, draft.now) if second.state is DomainState.WARM else 0.0
    if wait > 0:
        draft.emit(ArmTimer(SETTLE, name, wait))
        return
    draft.put_slot(replace(slot, spare=second.id, second=None))
    if second.state is DomainState.WARM:
        domains.stand_by(draft, second)


def start_later(draft: Draft, name: str) -> None:
    """Start a domain for a slot whose second standby domain has become a trial domain, once its participants
    have moved."""
    wait = settles_in(draft.state, name, draft.now)
    if wait > 0:
        draft.emit(ArmTimer(SETTLE, name, wait))
    else:
        domains.ensure(draft, name)


def on_settled(draft: Draft, name: str) -> None:
    """Give the slot its standby domain now: its participants have had time to move."""
    if name in draft.state.slots:
        take(draft, name)
        domains.ensure(draft, name)


def for_trial(state: State, slot: Slot, now: float) -> Domain | None:
    """Return the domain that can become a suspect's trial domain, the second standby domain before the first.

    Programs that moved without mpsd may have work in a standby domain.
    """
    standbys = [state.domains[name] for name in (slot.second, slot.spare) if name is not None]
    warm = (d for d in standbys if d.state is DomainState.WARM and d.server is not None)
    sure = (d for d in warm if not (d.may_lack_clients or suspects.processes_with_work(state, d, now)))
    return next(sure, None)
