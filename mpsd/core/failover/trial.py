"""Trial domains: a suspect replays where no other client works, so that a fault there is its own.

The slot's second standby domain (secondstandby.py), or else its next one, becomes the trial domain of a
suspect (suspects.py). It leaves the slot, no other client comes there, and the slot starts a further domain.
The suspect holds its calls until it has a context in the trial domain, moves there and replays.
  - If the trial domain faults during that replay, the suspect is the offender.
  - If the replay ends, the suspect is cleared. It works on and joins the slot's active domain JOIN_S later,
    by a planned move. Then the trial domain ends.

If no trial domain can be had (no memory, no driver files, a GPU for one server), the suspect replays beside
the other clients after all, last (serialreplay.py). If a fault comes then, it does not replay beside them
again: it waits for a trial domain until it gives up by itself, with one error.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import ProcessInstance
from mpsd.core import domains, slots
from mpsd.core.draft import Draft
from mpsd.core.failover import plan, secondstandby, serialreplay, suspects
from mpsd.core.failover.participants import Participant, Standing, Turn
from mpsd.core.lifecycle import DomainTrigger
from mpsd.core.state import Domain, DomainState, State

RETRY_S = 2.0
"""Time [s] after which a suspect is offered a context in its trial domain again. Memory that programs left
behind at the fault is released meanwhile."""


def follow(draft: Draft, before: State) -> None:
    """Give trial domains to suspects, let them move, and end trial domains that no suspect needs any more.

    Called at the end of every decision.
    """
    state = draft.state
    if state.adopting or (state.members is before.members and state.domains is before.domains):
        return
    for domain in [d for d in state.domains.values() if d.trial is not None]:
        if not _is_needed(draft.state, domain):
            draft.put_domain(replace(draft.state.domains[domain.id], trial=None))
            domains.settle(draft, domain.id)
    for slot in _slots_of_waiting(state):
        _assign(draft, slot)
    for participant in tuple(draft.state.members.values()):
        _move(draft, participant)
    for slot in [name for name in _slots_of_waiting(before) if suspects.is_reserved(before, name)]:
        if slot in draft.state.slots and not suspects.is_reserved(draft.state, slot):
            plan.refresh_all(draft, slot)


def _slots_of_waiting(state: State) -> list[str]:
    """Return the slots with suspects that wait for a trial domain."""
    waiting = (m for m in state.members.values() if suspects.waits_for_trial(state, m))
    return sorted({state.domains[m.home].slot for m in waiting if m.home is not None})


def _is_needed(state: State, domain: Domain) -> bool:
    participant = state.members.get(domain.trial) if domain.trial is not None else None
    if participant is None or domain.state is not DomainState.RETIRED:
        return False
    if not participant.connected:
        # It may work there, and says so when it has connected again.
        return any(c.living and c.id.domain == domain.id for c in state.spaces_of(participant.process))
    is_coming = participant.standing is Standing.MOVING and participant.generation == domain.generation
    if participant.home == domain.id and participant.turn is Turn.NONE and participant.excess is not None:
        # It has replayed, and moves no more: it works here until it ends.
        return False
    return participant.home == domain.id or is_coming or suspects.waits_for_trial(state, participant)


def _assign(draft: Draft, name: str) -> None:
    """Make a standby domain of the slot the trial domain of the next suspect that has none."""
    slot = draft.state.slots[name]
    waiting = suspects.without_trial(draft.state, name)
    found = secondstandby.for_trial(draft.state, slot, draft.now)
    if found is None or not waiting or draft.state.stopping:
        return
    first = min(waiting, key=lambda m: (m.takes_s, m.process.start_ticks, m.process.pid))
    draft.count("failover_trials")
    is_second = found.id == slot.second
    draft.put_slot(slots.without_second_standby(slot, draft.now) if is_second else replace(slot, spare=None))
    draft.put_domain(replace(found, trial=first.process))
    domains.move(draft, found.id, DomainTrigger.RETIRE)
    domains.ensure(draft, name)
    # The others' standby contexts go; theirs is the next standby domain.
    plan.refresh_all(draft, name)


def _move(draft: Draft, participant: Participant) -> None:
    """Move a suspect into its trial domain, or out of it after a clean replay."""
    state = draft.state
    home = state.domains.get(participant.home or "")
    if home is None or participant.standing is not Standing.READY or state.has_lost(participant):
        return
    if participant.turn is not Turn.WAITS and home.trial != participant.process:
        return
    target = plan.target_of(state, participant)
    if target is None or participant.generation != target.generation:
        return
    if suspects.waits_for_trial(state, participant) and target.trial == participant.process:
        if not serialreplay.is_to_be_judged(state, participant):
            plan.move_for_trial(draft, participant, target)
    elif suspects.may_join(state, participant, draft.now) and participant.asked != home.id:
        plan.join_others(draft, participant, target)


def refused(draft: Draft, process: ProcessInstance) -> None:
    """Let a suspect replay after all that cannot make a context in its trial domain."""
    participant = draft.state.members[process]
    if participant.turn is Turn.WAITS and suspects.trial_of(draft.state, process) is not None:
        serialreplay.give_up_trial(draft, participant)


def on_join(draft: Draft, subject: str) -> None:
    """Offer a cleared suspect a context in the active domain. `subject`: the process."""
    for process in tuple(draft.state.members):
        if str(process) == subject:
            plan.refresh(draft, process)
