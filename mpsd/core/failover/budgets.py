"""Budgets of mode exact: memory of snapshot buffers, and the number of standby contexts.

Memory. The snapshot buffers of all participants on a GPU share a pool, an eighth of the GPU's memory. Each
participant has a limit. Its first limit is a sixteenth of the pool. A participant that wants more gets it
from the rest of the pool, then from participants of its account that hold less than their limits. An account
that is alone leaves a sixteenth for its next participant: one that needs little would find nothing else.

Accounts. What a program says that it holds is a claim, so it counts only within its account's share: the pool
divided by the accounts with a limit on that GPU. An account alone has the whole pool. Beside others no limit
is raised beyond the share, and what an account has beyond it, from a time alone, goes to accounts that want
more. Their programs release it when their epochs end.

Invariants: the limits on a GPU never exceed its pool. No limit is lowered below what its participant holds,
as it said, for a participant of its own account. No account is lowered below its share on a GPU, nor below a
first limit, for another account's wish on that GPU. The limit of a participant that has ended, or has left
fail-over and released its buffers, is free again. A GPU of which the memory is not known has no pool, and its
participants have no limit.

Standby contexts. The GPU stands still at an SM exception for longer the more contexts it has, so their number
has a limit. A participant beyond it waits until another one's standby context ends. While an account with
less than an equal share waits, one that has its share gets no further place. A standby context is never ended
for that: its memory would come back only with its program. A participant that has made none within PLACE_S
loses its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from mpsd.base.model import FailoverMode, ProcessInstance
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, LimitSnapshots
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Participant, SnapshotLimit, Standing
from mpsd.core.state import State

POOL_SHARE = 8
"""Divisor of a GPU's memory that gives its pool."""
FIRST_SHARE = 16
"""Divisor of the pool that gives a first limit."""

SETTLE, SETTLE_S = "failover-buffers", 10.0
"""Timer [s]: a participant that has connected again and has not said what it holds by then holds nothing."""

PLACE, PLACE_S = "failover-place", 60.0
"""Timer [s]: a participant that was offered a standby domain and has no context there by then loses its
place, until it is ready after all."""


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


def account_of(state: State, participant: Participant) -> int:
    """Return the user that answers for a participant."""
    home = state.domains.get(participant.home or "")
    slot = state.slots.get(home.slot) if home is not None else None
    found = slot.accountable if slot is not None else None
    return participant.uid if found is None else found


def grant_first(draft: Draft, process: ProcessInstance) -> None:
    """Give a participant its first limit as soon as its GPUs are known."""
    participant = draft.state.members[process]
    gpus = gpus_of(draft.state, participant)
    known = participant.limit is not None and participant.limit.gpus == gpus
    if known or not gpus or not has_limit(participant):
        return
    if not all(pool(draft.state, gpu) for gpu in gpus):
        draft.put_participant(replace(participant, limit=None))
        return
    participant = draft.put_participant(replace(participant, limit=SnapshotLimit(0, gpus)))
    _raise(draft, participant, min(pool(draft.state, gpu) for gpu in gpus) // FIRST_SHARE)


def repeat(draft: Draft, process: ProcessInstance) -> None:
    """Tell a participant on a new connection the limit that it has."""
    participant = draft.state.members[process]
    if participant.held is None:
        draft.emit(ArmTimer(SETTLE, str(process), SETTLE_S))
    if participant.limit is not None and has_limit(participant):
        draft.emit(LimitSnapshots(process, participant.limit.bytes))


def restored(state: State, limit: SnapshotLimit | None) -> SnapshotLimit | None:
    """Return the limit of an earlier daemon, as far as the pools still permit it."""
    if limit is None or not all(pool(state, gpu) for gpu in limit.gpus):
        return None
    return replace(limit, bytes=min(limit.bytes, _free_on(state, limit.gpus)))


def on_holds(draft: Draft, event: mev.MemberHolds) -> None:
    """Note what a participant holds, and raise its limit if it wants more.

    Each wish has an answer, also one that a raised limit has met meanwhile. A participant that holds more
    than its limit, which a lowered limit can cross, is told the limit again and releases the rest by itself.
    The rest does not count as held.
    """
    participant = draft.state.members.get(event.process)
    if participant is None or not participant.budgets:
        draft.count("failover_words_ignored")
        return
    held = event.held if participant.limit is None else min(event.held, participant.limit.bytes)
    participant = draft.put_participant(replace(participant, held=held))
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


def _raise(draft: Draft, participant: Participant, wanted: int, wish: int = 0) -> None:
    """Raise a limit to `wanted`, or as far as pools and shares allow, and tell it in answer to `wish`."""
    limit = participant.limit
    if limit is None:
        return
    most = min(_most_more(draft.state, participant, gpu) for gpu in limit.gpus)
    more = max(0, min(wanted - limit.bytes, most))
    for gpu in sorted(limit.gpus):
        _make_room(draft, participant, gpu, more)
    more = min(more, *(_room(draft.state, participant, gpu) for gpu in limit.gpus))
    _set(draft, participant, replace(limit, bytes=limit.bytes + more), wish)


def _most_more(state: State, participant: Participant, gpu: str) -> int:
    """Return by how much a limit may be raised on a GPU.

    Beyond a first limit, a raise for the only account there leaves room for its next participant. Another
    account's participant gets a limit from its share in any case.
    """
    most, first = _to_be_had(state, participant, gpu), pool(state, gpu) // FIRST_SHARE
    if len(_sums(state, gpu)) > 1:
        return most
    return max(most - first, min(most, first - _size(participant)))


def _to_be_had(state: State, participant: Participant, gpu: str) -> int:
    """Return by how much a limit can be raised on a GPU, if other limits are lowered for it."""
    account = account_of(state, participant)
    own = sum(_unused(m) for m in _others_of(state, participant, gpu))
    surplus = sum(_surplus(state, a, gpu) for a in _sums(state, gpu) if a != account)
    below = _share(state, gpu) - _sums(state, gpu).get(account, 0)
    return own + max(0, min(below, free(state, gpu) + surplus))


def _room(state: State, participant: Participant, gpu: str) -> int:
    """Return by how much a limit can be raised on a GPU without lowering another one."""
    used = _sums(state, gpu).get(account_of(state, participant), 0)
    return max(0, min(free(state, gpu), _share(state, gpu) - used))


def _make_room(draft: Draft, participant: Participant, gpu: str, more: int) -> None:
    """Lower limits on a GPU until one can be raised by `more`, those of its own account first."""
    own = _others_of(draft.state, participant, gpu)
    for other in sorted(own, key=lambda m: (-_unused(m), m.process.pid)):
        _lower(draft, other, min(more - _room(draft.state, participant, gpu), _unused(other)))
    account = account_of(draft.state, participant)
    # Unused parts first; then what is held beyond the share, by the largest limit first.
    for part in (_unused, _size):
        if more <= free(draft.state, gpu):
            return
        others = (m for m in _on(draft.state, gpu) if account_of(draft.state, m) != account)
        for other in sorted(others, key=lambda m: (-part(m), m.process.pid)):
            surplus = _surplus(draft.state, account_of(draft.state, other), gpu)
            _lower(draft, other, min(more - free(draft.state, gpu), part(other), surplus))


def _on(state: State, gpu: str) -> list[Participant]:
    return [m for m in state.members.values() if m.limit is not None and gpu in m.limit.gpus]


def _others_of(state: State, participant: Participant, gpu: str) -> list[Participant]:
    """Return the other participants of the same account with a limit on this GPU."""
    account, here = account_of(state, participant), _on(state, gpu)
    return [m for m in here if m.process != participant.process and account_of(state, m) == account]


def _sums(state: State, gpu: str) -> Counter[int]:
    """Return the sum of the limits of each account on a GPU."""
    sums: Counter[int] = Counter()
    for participant in _on(state, gpu):
        sums[account_of(state, participant)] += _size(participant)
    return sums


def lacks_memory(state: State, gpu: str, account: int) -> bool:
    """Return whether one more participant of this account would get a limit of 0 on a GPU."""
    newcomer = Participant(ProcessInstance(0, 0), account, FailoverMode.EXACT)
    newcomer = replace(newcomer, limit=SnapshotLimit(0, frozenset({gpu})))
    with_it = replace(state, members={**state.members, newcomer.process: newcomer})
    return pool(state, gpu) > 0 and _to_be_had(with_it, newcomer, gpu) <= 0


def _share(state: State, gpu: str) -> int:
    """Return the most that an account may have on a GPU beside the other ones."""
    return pool(state, gpu) // max(1, len(_sums(state, gpu)))


def _surplus(state: State, account: int, gpu: str) -> int:
    """Return what an account has on a GPU beyond its share, which other accounts may take."""
    left = max(_share(state, gpu), pool(state, gpu) // FIRST_SHARE)
    return max(0, _sums(state, gpu)[account] - left)


def _lower(draft: Draft, participant: Participant, part: int) -> None:
    if part > 0 and participant.limit is not None:
        limit = replace(participant.limit, bytes=participant.limit.bytes - part)
        _set(draft, participant, limit)


def _unused(participant: Participant) -> int:
    return _size(participant) - _floor(participant)


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
    account = account_of(state, participant)
    for gpu in sorted(gpus_of(state, participant)):
        if len(_before(state, participant, gpu)) >= most:
            return gpu
        has_context = participant.process in _idle_on(state, gpu)
        if not has_context and _has_its_places(state, gpu, account):
            return gpu
    return None


def _places(state: State, gpu: str) -> Counter[int]:
    """Return how many standby contexts each account has on a GPU."""
    return Counter(account_of(state, state.members[p]) for p in standbys_on(state, gpu))


def _waiting(state: State, gpu: str) -> set[int]:
    """Return the accounts with a participant that waits for a standby context on this GPU."""
    waiting = (m for m in state.members.values() if m.capped == gpu and m.connected)
    return {account_of(state, m) for m in waiting if m.standing is Standing.WAITING}


def _has_its_places(state: State, gpu: str, account: int) -> bool:
    """Return whether an account has its share of standby contexts while one with less than that waits."""
    places, waiting = _places(state, gpu), _waiting(state, gpu)
    share = max(1, state.policy.standby_contexts // len({*places, *waiting, account}))
    return places[account] >= share and any(places[a] < share for a in waiting - {account})


def full(state: State) -> str:
    """Return the end of a sentence about a GPU with all its standby contexts."""
    most = state.policy.standby_contexts
    return f"already has its limit of {most} standby context{'' if most == 1 else 's'}"


def obstacle(state: State, gpus: Iterable[str], account: int) -> tuple[str, str]:
    """Return GPU and reason for which one more participant of this account would not fail over now."""
    for gpu in gpus:
        if lacks_place(state, gpu, account):
            return gpu, full(state)
        if lacks_memory(state, gpu, account):
            return gpu, "has no memory left for snapshots"
    return "", ""


def lacks_place(state: State, gpu: str, account: int) -> bool:
    """Return whether one more participant of this account would have to wait for a standby context."""
    is_full = len(standbys_on(state, gpu)) >= state.policy.standby_contexts
    return is_full or _has_its_places(state, gpu, account)


def on_place_due(draft: Draft, subject: str) -> None:
    """Take the place of a participant that has made no standby context. `subject`: as of plan.py."""
    for participant in tuple(draft.state.members.values()):
        due = participant.placed and participant.standing is Standing.OFFERED
        if not due or subject != f"{participant.process} {participant.generation}":
            continue
        if not any(
            participant.process in _idle_on(draft.state, g) for g in gpus_of(draft.state, participant)
        ):
            draft.put_participant(replace(participant, placed=False))


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
