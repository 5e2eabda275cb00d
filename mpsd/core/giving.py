"""Memory that is there for a fail-over alone goes to a program whose allocation would fail.

First its own, which it sees to by itself. Then that of others on its GPUs, one after the other: the room that
each has for copies of what it writes, which it takes again when it writes on; then their standby contexts,
which they make again later where memory is left by then. Only of those of the same slot, who share a domain,
or of the same user: a word of somebody else's takes nothing from anybody.

For one allocation nobody is asked twice for the same: so one that can never succeed ends, although others may
take again meanwhile what they have given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mpsd.core import events as ev
from mpsd.core import failover
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, GiveMemory, HaveMemory
from mpsd.core.standby import Member, Short, Standing, Turn
from mpsd.core.state import State
from mpsd.model import ProcessInstance, Spared

ASK_S = 1.0
"""How long one is waited for: who makes a standby hears nothing for that long, and is passed over."""
BACK_S = 30.0
"""After that a standby whose memory was given is offered again: the program looks whether there is enough."""

WAIT, BACK = "failover-give", "failover-back"


def on_short(draft: Draft, event: ev.MemberShort) -> None:
    """An allocation of its would fail. It waits for an answer."""
    asker = draft.state.members.get(event.process)
    if asker is None:
        draft.count("failover_words_ignored")
        return
    is_known = asker.short is not None and asker.short.number == event.number
    asked = asker.short.asked if asker.short is not None and is_known else frozenset()
    _ask_next(draft, asker, Short(event.number, event.wanted, event.free, asked))


def _ask_next(draft: Draft, asker: Member, short: Short) -> None:
    found = _next(draft.state, asker, short)
    if found is None:
        _answer(draft, asker, short, 0)
        return
    process, spared = found
    short = replace(short, of=process, asked=short.asked | {found})
    draft.put_member(replace(asker, short=short))
    draft.emit(GiveMemory(process, spared))
    draft.emit(ArmTimer(WAIT, _subject(asker.process, process), ASK_S))


def _answer(draft: Draft, asker: Member, short: Short, given: int) -> None:
    draft.put_member(replace(asker, short=replace(short, of=None)))
    draft.emit(HaveMemory(asker.process, given))


def _next(state: State, asker: Member, short: Short) -> tuple[ProcessInstance, Spared] | None:
    """Who is asked now, and for what."""
    near = [m for m in state.members.values() if m.gives and m.connected and _is_near(state, asker, m)]
    near = [m for m in near if m.standing is not Standing.MOVING and m.turn is Turn.NONE]
    kinds: tuple[tuple[Spared, Callable[[Member], bool]], ...] = (
        (Spared.ROOM, lambda m: True),
        (Spared.STANDBY, lambda m: m.standing is Standing.READY),
    )
    for spared, has in kinds:
        left = [m for m in near if has(m) and (m.process, spared) not in short.asked]
        if spared is Spared.STANDBY and not _would_do(left, short):
            return None
        if left:
            return max(left, key=lambda m: (m.bytes, m.process.pid)).process, spared
    return None


def _would_do(left: list[Member], short: Short) -> bool:
    """Whether all standbys together make the allocation fit: for one that fails all the same nobody goes
    without. Where one does not say what it takes, nobody knows."""
    return not all(m.bytes for m in left) or short.free + sum(m.bytes for m in left) >= short.wanted


def _is_near(state: State, asker: Member, other: Member) -> bool:
    """On one of its GPUs, and of its slot or its user."""
    if other.process == asker.process:
        return False
    here, there = state.domains.get(asker.home or ""), state.domains.get(other.home or "")
    if here is None or there is None or not set(here.gpus) & set(there.gpus):
        return False
    return here.slot == there.slot or asker.uid == other.uid


def on_gave(draft: Draft, event: ev.MemberGave) -> None:
    """It has given what it was asked for; 0 bytes: it had nothing of the kind, or could not."""
    if event.bytes:
        draft.count("failover_memory_given")
    for asker in _asking(draft.state, event.process):
        if asker.short is None:
            continue
        if event.bytes:
            _answer(draft, asker, asker.short, event.bytes)
        else:
            _ask_next(draft, asker, asker.short)


def on_wait(draft: Draft, subject: str) -> None:
    """No answer in time: the next one is asked. `subject`: who asks, and who was asked."""
    for asker in tuple(draft.state.members.values()):
        short = asker.short
        if short is not None and short.of is not None and subject == _subject(asker.process, short.of):
            _ask_next(draft, asker, short)


def gone(draft: Draft, process: ProcessInstance) -> None:
    """It has nothing more to give, or to be told."""
    for asker in _asking(draft.state, process):
        if asker.short is not None:
            _ask_next(draft, asker, asker.short)


def _asking(state: State, process: ProcessInstance) -> list[Member]:
    """Who waits for what this one was asked for."""
    return [m for m in state.members.values() if m.short is not None and m.short.of == process]


def without(draft: Draft, member: Member) -> None:
    """Its standby has gone for the memory that it took, or there was too little for one: later it is asked
    whether there is enough."""
    draft.emit(ArmTimer(BACK, f"{member.process} {member.generation}", BACK_S))


def on_back(draft: Draft, subject: str) -> None:
    """`subject`: the process, and the generation of the standby that it had."""
    for member in tuple(draft.state.members.values()):
        if member.standing is Standing.UNREADY and subject == f"{member.process} {member.generation}":
            draft.put_member(replace(member, standing=Standing.WAITING, generation=0))
            failover.refresh(draft, member.process)


def _subject(asker: ProcessInstance, asked: ProcessInstance) -> str:
    return f"{asker} {asked}"
