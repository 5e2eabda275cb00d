"""The second standby domain: a warm domain behind the standby domain, so that no suspect waits for a start.

After a fault a suspect needs a trial domain (trial.py). A domain that starts only then takes longer than
everything else in a trial, because the driver is busy with the fault. So a slot with participants in mode
exact keeps a second standby domain (slots.second_standby_in). After a fault
  - it becomes the trial domain of the first suspect;
  - else it becomes the standby domain once the participants have moved (slots.settles_in).

It ends with the last participant that would replay, and where its memory is needed. If it fails, no client
waits for it: the next one starts later, and suspects meanwhile wait for a start, or replay last.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import domains, slots
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer
from mpsd.core.failover import suspects
from mpsd.core.state import SERVING, Domain, DomainState, Slot, State


def follow(draft: Draft, before: State) -> None:
    """Let each slot with participants that would replay have a second standby domain, and no other slot.

    It takes the place of a standby domain that serves now. Called at the end of every decision.
    """
    state = draft.state
    same = state.members is before.members and state.slots is before.slots and not before.adopting
    if state.adopting or state.stopping or same:
        return
    for slot in tuple(state.slots.values()):
        replays = slots.would_replay(state, slot.id)
        if replays != (slot.second_from is not None):
            draft.put_slot(replace(slot, second_from=draft.now + slots.SECOND_AFTER_S if replays else None))
            domains.ensure(draft, slot.id)
        if draft.state.slots[slot.id].second is not None:
            _settle(draft, slot.id)


def _settle(draft: Draft, name: str) -> None:
    """Let the second standby domain take the place of the first, if that serves now, or end without a use."""
    slot = draft.state.slots[name]
    active = draft.state.domains.get(slot.active or "")
    serves = active is not None and active.state in SERVING
    if (
        active is not None
        and serves
        and slot.spare is None
        and slots.wants_standby(draft.state, slot, active)
    ):
        _take_place(draft, slot)
    elif slot.second_from is None:
        slots.drop_second_standby(draft, name)


def _take_place(draft: Draft, slot: Slot) -> None:
    second = draft.state.domains[slot.second or ""]
    is_warm = second.state is DomainState.WARM
    wait = slots.settles_in(draft.state, slot.id, draft.now) if is_warm else 0.0
    if wait > 0:
        draft.emit(ArmTimer(slots.STANDBYS, slot.id, wait))
        return
    draft.put_slot(slots.without_second_standby(replace(slot, spare=second.id), draft.now))
    if is_warm:
        domains.stand_by(draft, second)


def on_timer(draft: Draft, name: str) -> None:
    """Start what the slot lacks now."""
    slot = draft.state.slots.get(name)
    if slot is None or draft.state.stopping:
        return
    if slot.second is not None:
        _settle(draft, name)
    domains.ensure(draft, name)


def for_trial(state: State, slot: Slot, now: float) -> Domain | None:
    """Return the domain that can become a suspect's trial domain, the second standby domain before the first.

    Programs that moved without mpsd may have work in a standby domain.
    """
    standbys = [state.domains[name] for name in (slot.second, slot.spare) if name is not None]
    warm = (d for d in standbys if d.state is DomainState.WARM and d.server is not None)
    sure = (
        d
        for d in warm
        if not (suspects.may_lack_work(state, d) or suspects.processes_with_work(state, d, now))
    )
    return next(sure, None)
