"""Budgets of mode exact: memory of snapshot buffers, and the number of standby contexts.

Memory. The snapshot buffers of all participants on a GPU share a pool, an eighth of the GPU's memory. Each
participant has a limit. Its first limit is a sixteenth of the pool. A participant that wants more gets it
from the rest of the pool, then from participants that hold less than their limits.

Invariants: the limits on a GPU never exceed its pool. No limit is lowered below what its participant holds,
as it said. The limit of a participant that has ended, or has left fail-over and released its buffers, is free
again.

Standby contexts. The GPU stands still at an SM exception for longer the more contexts it has, so their number
has a limit. A participant beyond it waits until another one's standby context ends.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import FailoverMode, ProcessInstance
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, LimitSnapshots
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Participant, SnapshotLimit
from mpsd.core.state import State

POOL_SHARE = 8
"""Divisor of a GPU's memory that gives its pool."""
FIRST_SHARE = 16
"""Divisor of the pool that gives a first limit."""
TIME_BUDGET = 30
"""Thousandths of an epoch that saving may add. A program that exceeds them leaves by itself."""

SETTLE, SETTLE_S = "failover-buffers", 10.0
"""Timer [s]: a participant that has connected again and has not said what it holds by then holds nothing."""


def gpus_of(state: State, participant: Participant) -> frozenset[str]:
    home = state.domains.get(participant.home or "")
    return frozenset(home.gpus if home is not None else ())


# -- memory ----------------------------------------------------------------------------------------------


def pool(state: State, gpu: str) -> int:
    """Return how many bytes all snapshot buffers on a GPU may take; 0 for a GPU that is not known."""
    return state.policy.gpu_memory.get(gpu, 0) // POOL_SHARE


def free(state: State, gpu: str) -> int:
    """Return the bytes of the pool that no limit has."""
    limits = (m.limit for m in state.members.values() if m.limit is not None)
    return pool(state, gpu) - sum(limit.bytes for limit in limits if gpu in limit.gpus)


def _free_on(state: State, gpus: frozenset[str]) -> int:
    return max(0, min((free(state, gpu) for gpu in gpus), default=0))


def has_limit(participant: Participant) -> bool:
    """Return whether this participant must keep a limit."""
    exact = participant.mode is FailoverMode.EXACT
    return participant.budgets and exact and participant.excess is None


def grant_first(draft: Draft, process: ProcessInstance) -> None:
    """Give a participant its first limit as soon as its GPUs are known."""
    participant = draft.state.members[process]
    gpus = gpus_of(draft.state, participant)
    known = participant.limit is not None and participant.limit.gpus == gpus
    if known or not gpus or not has_limit(participant):
        return
    participant = draft.put_participant(replace(participant, limit=None))
    first = min(pool(draft.state, gpu) for gpu in gpus) // FIRST_SHARE
    size = min(max(first, participant.held or 0), _free_on(draft.state, gpus))
    _set(draft, participant, SnapshotLimit(size, gpus))


def repeat(draft: Draft, process: ProcessInstance) -> None:
    """Tell a participant on a new connection the limit that it has."""
    participant = draft.state.members[process]
    if participant.held is None:
        draft.emit(ArmTimer(SETTLE, str(process), SETTLE_S))
    if participant.limit is not None and has_limit(participant):
        draft.emit(LimitSnapshots(process, participant.limit.bytes))


def restored(state: State, limit: SnapshotLimit | None) -> SnapshotLimit | None:
    """Return the limit of an earlier daemon, as far as the pools still permit it."""
    return limit and replace(limit, bytes=min(limit.bytes, _free_on(state, limit.gpus)))


def on_holds(draft: Draft, event: mev.MemberHolds) -> None:
    """Note what a participant holds, and raise its limit if it wants more.

    Each wish has an answer, also one that a raised limit has met meanwhile. A participant that holds more
    than its limit, which a lowered limit can cross, is told the limit again and releases the rest by itself.
    """
    participant = draft.state.members.get(event.process)
    if participant is None or not participant.budgets:
        draft.count("failover_words_ignored")
        return
    participant = draft.put_participant(replace(participant, held=event.held))
    if participant.limit is None:
        return
    if not has_limit(participant):
        shrink(draft, event.process)
    elif event.wants or event.held > participant.limit.bytes:
        _raise(draft, participant, max(event.held, event.wants), event.wants)


def on_settle(draft: Draft, subject: str) -> None:
    """Take the buffers of a participant that has said nothing of them for empty."""
    for participant in tuple(draft.state.members.values()):
        silent = participant.held is None and participant.connected
        if silent and str(participant.process) == subject:
            on_holds(draft, mev.MemberHolds(participant.process, 0))


def shrink(draft: Draft, process: ProcessInstance) -> None:
    """Take back the limit of a participant that has left fail-over, down to what it has not released yet."""
    participant = draft.state.members[process]
    if participant.limit is not None:
        limit = replace(participant.limit, bytes=_floor(participant))
        draft.put_participant(replace(participant, limit=limit if limit.bytes else None))


def _raise(draft: Draft, participant: Participant, wanted: int, wish: int) -> None:
    """Raise a limit to `wanted`, or as far as the pools allow, and tell it in answer to `wish`."""
    limit = participant.limit
    if limit is None:
        return
    most = min(_to_be_had(draft.state, participant, gpu) for gpu in limit.gpus)
    more = max(0, min(wanted - limit.bytes, most))
    for gpu in sorted(limit.gpus):
        _lower_others(draft, participant, gpu, more)
    _set(draft, participant, replace(limit, bytes=limit.bytes + more), wish)


def _others_on(state: State, participant: Participant, gpu: str) -> list[Participant]:
    here = (m for m in state.members.values() if m.limit is not None and gpu in m.limit.gpus)
    return [m for m in here if m.process != participant.process]


def _to_be_had(state: State, participant: Participant, gpu: str) -> int:
    """Return how many bytes on a GPU have no limit, or are not held by other participants."""
    return free(state, gpu) + sum(_size(m) - _floor(m) for m in _others_on(state, participant, gpu))


def _lower_others(draft: Draft, participant: Participant, gpu: str, more: int) -> None:
    """Lower limits on a GPU until `more` bytes are free, largest unused part first."""
    others = _others_on(draft.state, participant, gpu)
    for other in sorted(others, key=lambda m: (_floor(m) - _size(m), m.process.pid)):
        part = min(more - free(draft.state, gpu), _size(other) - _floor(other))
        if part > 0 and other.limit is not None:
            _set(draft, other, replace(other.limit, bytes=other.limit.bytes - part))


def _size(participant: Participant) -> int:
    return participant.limit.bytes if participant.limit is not None else 0


def _floor(participant: Participant) -> int:
    """Return what a participant's limit must leave it: its buffers.

    All of it while the buffers are not known: it may fill them while it is not connected.
    """
    if participant.held is None or not participant.connected:
        return _size(participant)
    return min(_size(participant), participant.held)


def _set(draft: Draft, participant: Participant, limit: SnapshotLimit, answers: int = 0) -> None:
    draft.put_participant(replace(participant, limit=limit))
    if has_limit(participant):
        draft.emit(LimitSnapshots(participant.process, limit.bytes, answers))


# -- standby contexts ------------------------------------------------------------------------------------


def full_gpu(state: State, participant: Participant) -> str | None:
    """Return a GPU on which this participant would have one standby context too many.

    Participants that have a context already, of an earlier daemon's offer, come in their order. None for a
    participant that has lost its first context: the other one replaces it.
    """
    if participant.placed or state.has_lost(participant):
        return None
    most = state.policy.standby_contexts
    gpus = sorted(gpus_of(state, participant))
    return next((gpu for gpu in gpus if len(_before(state, participant, gpu)) >= most), None)


def _before(state: State, participant: Participant, gpu: str) -> set[ProcessInstance]:
    """Return the processes with a standby context on this GPU that come before this participant."""
    idle = _idle_on(state, gpu)
    if participant.process in idle:
        order = list(state.members)
        idle = {p for p in idle if p in order and order.index(p) < order.index(participant.process)}
    return (_placed_on(state, gpu) | idle) - {participant.process}


def standbys_on(state: State, gpu: str) -> set[ProcessInstance]:
    """Return the processes that have a standby context on this GPU, or get their next one."""
    return _placed_on(state, gpu) | _idle_on(state, gpu)


def _placed_on(state: State, gpu: str) -> set[ProcessInstance]:
    return {m.process for m in state.members.values() if m.placed and gpu in gpus_of(state, m)}


def _idle_on(state: State, gpu: str) -> set[ProcessInstance]:
    """Return the processes with a context on this GPU outside their home, in a domain that is not dead."""
    here = {d.id for d in state.domains.values() if gpu in d.gpus and not d.is_dead}
    contexts = {(c.id.process, c.id.domain) for c in state.clients.values() if c.living}
    known = state.members.values()
    homes = {m.process: m.home for m in known if m.home is not None and (m.process, m.home) in contexts}
    return {p for p, domain in contexts if domain in here and homes.get(p, domain) != domain}


def contexts_on(state: State, gpu: str) -> tuple[int, int]:
    """Return the number of clients' contexts on this GPU, and of standby contexts."""
    here = {d.id for d in state.domains.values() if gpu in d.gpus and not d.is_dead}
    clients = [c for c in state.clients.values() if c.living and c.id.domain in here]
    standbys = sum(1 for c in clients if state.is_standby_context(c))
    return len(clients) - standbys, standbys
