"""SM queries: the driver of a lost client asks the SMs for the error again and again.

That concerns clients that take no part in the fail-over, for instance because they have no proxy:
  - An SM query denies a trap: the driver of a trap's author makes none (programcounter.py).
  - Each query takes a lock of the driver, which participants need to move and a suspect for its context. So
    mpsd holds these threads until all participants have moved, for half a second at most
    (mpsd/gpu/nvidia/smqueries.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mpsd.base.model import FailoverMode, ProcessInstance
from mpsd.core import proof
from mpsd.core.draft import Draft
from mpsd.core.effects import HoldQueries, ReleaseQueries
from mpsd.core.failover import outcomes, suspects
from mpsd.core.failover.participants import Participant, Standing
from mpsd.core.state import Domain, State

WATCHED_MOST = 8
"""Most clients of a domain that mpsd watches. It watches none if there are more: a look at one client with 10
threads takes 0.25 ms, which delays the commands to participants."""


def note_others(
    draft: Draft, domain: Domain, here: Iterable[ProcessInstance], told: Iterable[ProcessInstance]
) -> None:
    """Note which clients of this faulted domain take no part, and hold their queries.

    `here`: the processes that had work in the domain. `told`: the participants that were told to move.
    """
    moving = [draft.state.members[process] for process in told]
    others = frozenset(here) - {m.process for m in moving if m.mode is FailoverMode.EXACT}
    draft.put_domain(replace(draft.state.domains[domain.id], without_denial=others))
    held = frozenset(process for process in others if may_be_watched(draft.state, domain, process))
    if moving and 0 < len(held) <= WATCHED_MOST:
        draft.count("failover_queries_held")
        draft.emit(HoldQueries(domain.id, held))


def may_be_watched(state: State, domain: Domain, process: ProcessInstance) -> bool:
    """Return whether the queries of this process concern this faulted domain alone, and mpsd may hold them.

    The proxy of a participant makes queries of its own, which say nothing about the driver.
    """
    clients = [c for c in state.spaces_of(process) if c.living]
    here = [c for c in clients if c.id.domain == domain.id and state.is_member(c)]
    known = bool(here) and len(here) == len(clients) and process not in state.members
    return known and all(proof.may_be_held(domain, client) for client in here)


def follow(draft: Draft, before: State) -> None:
    """Release the queries of a domain whose participants have moved. Called at the end of every decision."""
    if draft.state.members is before.members:
        return
    for domain in draft.state.domains.values():
        if domain.without_denial is not None and _delay(before, domain) and not _delay(draft.state, domain):
            draft.emit(ReleaseQueries(domain.id))


def _delay(state: State, domain: Domain) -> bool:
    """Return whether a participant of this domain moves, or waits for its trial domain."""
    return any(
        (m.standing is Standing.MOVING and m.home == domain.id) or _waits_after(state, m, domain)
        for m in state.members.values()
    )


def _waits_after(state: State, participant: Participant, domain: Domain) -> bool:
    """Return whether a suspect waits for its trial domain after the fault of this domain."""
    if participant.standing is Standing.MOVING or not suspects.waits_for_trial(state, participant):
        return False
    record = outcomes.last_of(state, participant.process)
    return record is not None and record.domain == domain.id
