"""Release of fail-over memory for allocations that would fail.

A program first releases its own fail-over memory. Then mpsd asks other participants on the same GPUs, one
after the other: first for their snapshot buffers, which come back when they write again; then for their
standby contexts, which come back when memory is free. Only participants of the same slot (they share a
domain) or of the same user are asked, so that no program takes memory from another user's domain.

For one allocation no participant is asked twice for the same kind. So the search ends even if the allocation
can never succeed and released memory is taken again meanwhile.

Some clients cannot ask certain participants: clients of another user and slot, clients without the proxy, and
clients without fail-over. These must find memory free. So when a GPU is nearly full, mpsd asks the standby
contexts that such a client cannot ask for, one by one, until enough memory is free.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import ProcessInstance, Reclaimable
from mpsd.core import events as ev
from mpsd.core import slots
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, GrantMemory, RequestMemory
from mpsd.core.failover import plan
from mpsd.core.failover import reports as mev
from mpsd.core.failover.budgets import gpus_of
from mpsd.core.failover.participants import MemoryShortage, Participant, Standing, Turn
from mpsd.core.state import State

ASK_S = 1.0
"""Longest time [s] that one request waits for an answer. A participant that is making a standby context
does not answer for that long and is passed over."""
REQUEST_LIMIT_S = 3.0
"""Time [s] after which no further participant is asked: the program waits 4 s for an answer."""
SHORTAGES_RETAINED = 8
"""Number of allocations of one program that are told apart, for threads that ask in turns."""
REOFFER_S = 30.0
"""Time [s] after which a released standby context is offered again. The program checks whether there is
enough memory."""

WAIT, BACK = "failover-give", "failover-back"


def on_shortage(draft: Draft, event: mev.MemberWantsMemory) -> None:
    """Ask for memory on behalf of a program with an allocation that would fail. The program waits for the
    answer."""
    requester = draft.state.members.get(event.process)
    if requester is None:
        draft.count("failover_words_ignored")
        draft.emit(GrantMemory(event.process, 0, event.number))
        return
    slots.give_up_second_standbys(draft, gpus_of(draft.state, requester))
    before = next((s for s in requester.shorts if s.number == event.number), None)
    asked = before.asked if before is not None else frozenset()
    _ask_next(draft, requester, MemoryShortage(event.number, event.wanted, event.free, draft.now, asked))


def _remember(draft: Draft, requester: Participant, shortage: MemoryShortage) -> None:
    others = tuple(s for s in requester.shorts if s.number != shortage.number)
    draft.put_participant(replace(requester, shorts=(*others, shortage)[-SHORTAGES_RETAINED:]))


def _ask_next(draft: Draft, requester: Participant, shortage: MemoryShortage) -> None:
    found = _next(draft.state, requester, shortage) if draft.now - shortage.since < REQUEST_LIMIT_S else None
    if found is None:
        _answer(draft, requester, shortage, 0)
        return
    process, spared = found
    _remember(draft, requester, replace(shortage, of=found, asked=shortage.asked | {found}))
    draft.emit(RequestMemory(process, spared))
    draft.emit(ArmTimer(WAIT, _subject(requester.process, shortage.number, found), ASK_S))


def _answer(draft: Draft, requester: Participant, shortage: MemoryShortage, released_bytes: int) -> None:
    _remember(draft, requester, replace(shortage, of=None))
    draft.emit(GrantMemory(requester.process, released_bytes, shortage.number))


def _next(
    state: State, requester: Participant, shortage: MemoryShortage
) -> tuple[ProcessInstance, Reclaimable] | None:
    """Return the participant to ask now, and the kind of memory to ask for."""
    gpus = gpus_of(state, requester)
    others = [
        m for m in _able_to_release(state) if m.process != requester.process and gpus_of(state, m) & gpus
    ]
    near = [m for m in others if _shares_slot_or_user(state, requester, m)]
    with_buffers = [m for m in near if (m.process, Reclaimable.ROOM) not in shortage.asked]
    if with_buffers:
        return _largest(with_buffers).process, Reclaimable.ROOM
    ready = [m for m in near if m.standing is Standing.READY]
    ready = [m for m in ready if (m.process, Reclaimable.STANDBY) not in shortage.asked]
    return (
        (_largest(ready).process, Reclaimable.STANDBY) if ready and _would_suffice(ready, shortage) else None
    )


def _able_to_release(state: State) -> list[Participant]:
    """Return the participants that can be asked for memory now."""
    able = (m for m in state.members.values() if m.gives and m.connected)
    return [m for m in able if m.standing is not Standing.MOVING and m.turn is Turn.NONE]


def _largest(members: list[Participant]) -> Participant:
    return max(members, key=lambda m: (m.bytes, m.process.pid))


def _would_suffice(ready: list[Participant], shortage: MemoryShortage) -> bool:
    """Return whether all remaining standby contexts together make the allocation fit.

    Otherwise none is released for an allocation that fails anyway. Also true if one does not report its size.
    """
    return not all(m.bytes for m in ready) or shortage.free + sum(m.bytes for m in ready) >= shortage.wanted


def _shares_slot_or_user(state: State, requester: Participant, other: Participant) -> bool:
    """Return whether the participant is of the asker's slot or user."""
    here, there = state.domains[requester.home or ""], state.domains[other.home or ""]
    return here.slot == there.slot or requester.uid == other.uid


def on_released(draft: Draft, event: mev.MemberReleasedMemory) -> None:
    """Handle a released amount; 0 bytes: the participant had no memory of that kind, or could not release
    it."""
    if event.bytes:
        draft.count("failover_memory_given")
    for requester in _asking(draft.state, event.process, event.spared):
        if event.bytes:
            _answer(draft, requester, requester.shorts[-1], event.bytes)
        else:
            _ask_next(draft, requester, requester.shorts[-1])


def on_wait(draft: Draft, subject: str) -> None:
    """Ask the next participant: the last one did not answer in time. `subject`: as from _subject()."""
    for requester in tuple(draft.state.members.values()):
        shortage = requester.shorts[-1] if requester.shorts else None
        if shortage is None or shortage.of is None:
            continue
        if subject == _subject(requester.process, shortage.number, shortage.of):
            _ask_next(draft, requester, shortage)


def drop_requests_to(draft: Draft, process: ProcessInstance) -> None:
    """Answer the requests that wait for a participant that can release no more memory."""
    for spared in Reclaimable:
        for requester in _asking(draft.state, process, spared):
            _ask_next(draft, requester, requester.shorts[-1])


def _asking(state: State, process: ProcessInstance, spared: Reclaimable) -> list[Participant]:
    """Return the participants that wait for this request to `process`."""
    return [m for m in state.members.values() if m.shorts and m.shorts[-1].of == (process, spared)]


def offer_again_later(draft: Draft, participant: Participant, after_s: float = REOFFER_S) -> None:
    """Offer a standby context again later: this one was released for its memory, or there was too little
    for it."""
    draft.emit(ArmTimer(BACK, f"{participant.process} {participant.generation}", after_s))


def on_reoffer(draft: Draft, subject: str) -> None:
    """Offer a standby context again. `subject`: the process and the generation of its former standby."""
    for participant in tuple(draft.state.members.values()):
        known = participant.standing is Standing.UNREADY and not participant.opaque
        if known and subject == f"{participant.process} {participant.generation}":
            draft.put_participant(replace(participant, standing=Standing.WAITING, generation=0))
            plan.refresh(draft, participant.process)


def _subject(requester: ProcessInstance, number: int, asked: tuple[ProcessInstance, Reclaimable]) -> str:
    return f"{requester} {number} {asked[0]} {asked[1].value}"


def watched_gpus(state: State, now: float) -> frozenset[str]:
    """Return the GPUs with a standby context that would be released for a client that cannot ask for it."""
    gpus = {gpu for participant in _able_to_release(state) for gpu in gpus_of(state, participant)}
    return frozenset(gpu for gpu in gpus if _standbys_on(state, gpu, now))


def _working_clients(state: State, gpu: str) -> frozenset[tuple[str, int] | None]:
    """Return slot and user of each working client on this GPU that can ask for memory; None for those that
    cannot."""
    domains = {d.id: d for d in state.domains.values() if gpu in d.gpus}
    here = [c for c in state.clients.values() if c.id.domain in domains and c.living and state.at_home(c)]
    able = {m.process: m.uid for m in state.members.values() if m.gives and m.connected}
    slots = ((domains[c.id.domain].slot, able.get(c.id.process)) for c in here)
    return frozenset(None if uid is None else (slot, uid) for slot, uid in slots)


def _cannot_ask(needy: frozenset[tuple[str, int] | None], slot: str, uid: int) -> bool:
    return any(one is None or (one[0] != slot and one[1] != uid) for one in needy)


def _standbys_on(state: State, gpu: str, now: float) -> list[Participant]:
    """Return the participants of which the standby context on this GPU may be released.

    Excludes participants that were asked within BACK_S and have not released it.
    """
    ready = [m for m in _able_to_release(state) if m.standing is Standing.READY and gpu in gpus_of(state, m)]
    ready = [m for m in ready if m.yields is None or now - m.yields >= REOFFER_S]
    needy = _working_clients(state, gpu) if ready else frozenset()
    return [m for m in ready if _cannot_ask(needy, state.domains[m.home or ""].slot, m.uid)]


def on_full(draft: Draft, event: ev.GpuFull) -> None:
    """Ask one participant for its standby context: the memory of the last one may be enough."""
    if event.gpu not in watched_gpus(draft.state, draft.now):
        return
    asked = (m for m in draft.state.members.values() if m.standing is Standing.READY and m.yields is not None)
    due = [m for m in asked if event.gpu in gpus_of(draft.state, m) and draft.now - (m.yields or 0.0) < ASK_S]
    if due:
        return
    slots.give_up_second_standbys(draft, {event.gpu})
    participant = _largest(_standbys_on(draft.state, event.gpu, draft.now))
    draft.put_participant(replace(participant, yields=draft.now))
    draft.count("failover_standbys_yielded")
    draft.emit(RequestMemory(participant.process, Reclaimable.STANDBY))
