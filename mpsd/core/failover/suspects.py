"""Suspects: which participants may not replay beside other clients, and what names one of them.

A fault that comes while a program replays beside other clients is no evidence: it may be the fault of any of
them. So a suspect does not replay beside them, but alone in a trial domain (trial.py). A participant is a
suspect if
  - it found the fault in its own code, or had its error as only the author of a trap has it;
  - or a fault came while it replayed beside other clients. A denial of that fault clears it, once;
  - or it was a suspect before and has not replayed since.
A clean replay clears a suspect.

Invariant: a participant is named by its replay only if no other client's work can have run in that domain.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import ExceptionOwner, ProcessInstance
from mpsd.core.draft import Draft
from mpsd.core.failover.participants import Participant, Turn
from mpsd.core.state import Domain, DomainState, State

DENIALS = frozenset({ExceptionOwner.OTHERS, ExceptionOwner.NO_SIGN})
"""Findings of a participant that say that the fault is not its own."""
CLAIMS = frozenset({ExceptionOwner.OWN, ExceptionOwner.FIRST})
DOUBTED_MOST = 4
"""If more participants than this replayed beside each other when a fault came, it says too little about each
of them."""
TRIAL_MOVE, JOIN_MOVE = "trial", "trial over"
"""Triggers of the moves into a trial domain and out of it."""
JOIN, JOIN_S = "failover-join", 5.0
"""Name of the timer that brings a cleared suspect back to the others, and its delay [s]. Its former context
there, which has the same name, has been unloaded by then."""
TRIALS_MOST = 4
"""Trial domains of one slot at a time. Each takes the GPU memory of a server."""


def denies(participant: Participant) -> bool:
    """Return whether the participant found that the fault is not its own, and is no suspect otherwise."""
    return participant.whose in DENIALS and not is_suspect(participant)


def is_suspect(participant: Participant) -> bool:
    doubts = participant.doubts - (participant.whose in DENIALS)
    return participant.suspected or participant.whose in CLAIMS or doubts > 0


def trial_of(state: State, process: ProcessInstance) -> Domain | None:
    """Return the trial domain of this participant, as long as it can replay there."""
    return next((d for d in state.domains.values() if d.trial == process and is_trial(d)), None)


def is_trial(domain: Domain) -> bool:
    """Return whether a suspect replays in this domain alone, or will, or has and joins the others next."""
    return domain.trial is not None and domain.state is DomainState.RETIRED and domain.server is not None


def waits_for_trial(state: State, participant: Participant) -> bool:
    """Return whether the participant holds its calls until it can replay in a trial domain."""
    home = state.domains.get(participant.home or "")
    if home is None or home.trial == participant.process:
        return False
    waits = participant.turn is Turn.WAITS and participant.connected
    return waits and is_suspect(participant) and not participant.untried


def processes_with_work(state: State, domain: Domain, now: float) -> set[ProcessInstance]:
    """Return the processes that have work in this domain, or had until the evidence window began."""
    here = (c for c in state.clients_of(domain.id) if not (c.waited or state.is_standby_context(c)))
    since = now - state.policy.evidence_window_s
    exited = (d for d in state.departed if d.id.domain == domain.id and d.at >= since and not d.waited)
    return {c.id.process for c in here} | {d.id.process for d in exited}


def may_lack_work(state: State, domain: Domain) -> bool:
    """Return whether work may run in this domain of which mpsd does not know.

    After its start mpsd may know an earlier home of a program that has not said HELLO yet.
    """
    clients = (state.members.get(c.id.process) for c in state.clients_of(domain.id))
    return domain.may_lack_clients or any(m is not None and not m.heard for m in clients)


def named_by_trial(state: State, domain: Domain, now: float, first: float) -> list[ProcessInstance]:
    """Return the participant that the present fault of its trial domain names; empty if it names none.

    `first`: when the first sign of the fault came [monotonic s]; a replay that began later did not cause it.
    """
    participant = state.members.get(domain.trial) if domain.trial is not None else None
    if participant is None or participant.home != domain.id or participant.turn is not Turn.HAS:
        return []
    alone = processes_with_work(state, domain, now) <= {participant.process}
    alone = alone and not may_lack_work(state, domain)
    # Which contexts are idle is a claim of their programs, and another user's claim counts for nothing here.
    here = {c.facts.uid for c in state.clients_of(domain.id) if c.id.process != participant.process}
    alone = alone and here <= {participant.uid}
    return [participant.process] if alone and participant.since <= first else []


def note_fault(draft: Draft, domain: Domain) -> None:
    """Note which participants replayed beside other clients when this domain faulted."""
    here = [m for m in draft.state.members.values() if m.home == domain.id]
    replayed = [m for m in here if (m.turn is Turn.HAS or m.runs_on) and domain.trial != m.process]
    for participant in replayed if len(replayed) <= DOUBTED_MOST else ():
        draft.put_participant(replace(participant, doubts=participant.doubts + 1))


def clear(draft: Draft, process: ProcessInstance) -> None:
    """Note the clean end of a replay."""
    participant = draft.state.members[process]
    draft.put_participant(replace(participant, suspected=False, doubts=0, untried=False, runs_on=False))


def without_trial(state: State, slot: str) -> list[Participant]:
    """Return the suspects in a slot that may have a trial domain and have none yet."""
    trials = [d for d in state.domains.values() if d.slot == slot and d.trial is not None and is_trial(d)]
    suspects = [state.members.get(d.trial) for d in trials if d.trial is not None]
    under_way = [m for m in suspects if m is not None and m.turn is not Turn.NONE]
    if len(under_way) >= TRIALS_MOST:
        return []
    waiting = [m for m in state.members.values() if waits_for_trial(state, m)]
    here = [m for m in waiting if state.domains[m.home or ""].slot == slot]
    return [m for m in here if trial_of(state, m.process) is None and not state.copies_problem]


def is_reserved(state: State, slot: str) -> bool:
    """Return whether the slot's next standby domain is to become a trial domain, and can."""
    return bool(without_trial(state, slot)) and not is_occupied(state, state.slots[slot].spare)


def is_occupied(state: State, name: str | None) -> bool:
    """Return whether a standby domain cannot become a trial domain: programs moved there without mpsd."""
    domain = state.domains.get(name or "")
    if domain is None:
        return False
    return may_lack_work(state, domain) or any(
        not (c.waited or state.is_standby_context(c)) for c in state.clients_of(domain.id)
    )


def may_join(state: State, participant: Participant, now: float) -> bool:
    """Return whether the participant has replayed in its trial domain and can join the others now."""
    home = state.domains.get(participant.home or "")
    if home is None or home.trial != participant.process or participant.turn is not Turn.NONE:
        return False
    return is_trial(home) and now >= participant.since + JOIN_S
