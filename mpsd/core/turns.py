"""Turns: where nobody knows whose work was at fault, programs do again what they had in flight one at a time.

The one that has the turn when the domain is lost once more is taken for the offender: what it did again has
faulted again. Programs that had nothing in flight work on meanwhile. Who has least to do is first, so a long
training step holds up nobody who has a copy to do again; for that those who are still coming are waited for a
little.

Where every client of the lost domain was told to move, the offender is among them. Then the program that was
started last comes last, for what has run for long is less likely at fault; and when the work of all others
has ended well it must be the one that is left. It is given its turn all the same, but not before the others
can go on elsewhere: they have one more short stop then, and need not wait until a next standby is made.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, HaveTurn
from mpsd.core.fates import timed
from mpsd.core.standby import Member, Standing, Turn
from mpsd.core.state import State
from mpsd.model import FailoverMode, ProcessInstance

TURN_S = 1.5
"""Longer than a program looks for the end of what it did again."""
GATHER_S = 0.02
LAST_S = 3.0
"""How long the last one waits for the others, at most: less than a program holds its calls."""
_COMING = frozenset({Standing.WAITING, Standing.OFFERED, Standing.MOVING})


def holders(state: State, domain: str) -> list[ProcessInstance]:
    """Who does its work again there now: one, or nobody."""
    return [m.process for m in state.members.values() if m.home == domain and m.turn is Turn.HAS]


def wait(draft: Draft, member: Member, operations: int) -> None:
    """It has moved, and holds its calls until it has done so many again."""
    assert member.home is not None
    first = not any(m.home == member.home and m.turn is not Turn.NONE for m in draft.state.members.values())
    draft.put_member(replace(member, turn=Turn.WAITS, ahead=operations))
    gather(draft, member.home)
    if first and not holders(draft.state, member.home):
        draft.emit(ArmTimer("failover-gather", member.home, GATHER_S))
    if member.among:
        draft.emit(ArmTimer("failover-last", _subject(member), LAST_S))


def gather(draft: Draft, home: str) -> None:
    """One more has come to this domain: when they all have, the turns begin."""
    generation = draft.state.domains[home].generation
    coming = (m for m in draft.state.members.values() if m.generation == generation and m.connected)
    if not any(m.standing is Standing.MOVING and m.mode is FailoverMode.EXACT for m in coming):
        _next(draft, home)


def on_gathered(draft: Draft, subject: str) -> None:
    """Who has not come by now is waited for no longer. `subject`: the domain."""
    _next(draft, subject)


def over(draft: Draft, process: ProcessInstance) -> None:
    """It is done, gives up, or is gone."""
    member = draft.state.members.get(process)
    if member is None or member.turn is Turn.NONE:
        return
    member = draft.put_member(replace(member, turn=Turn.NONE, among=False))
    _next(draft, member.home)


def on_timer(draft: Draft, subject: str) -> None:
    """No word of its end: the others do not wait for it any longer. `subject`: pid, start time and domain."""
    for member in tuple(draft.state.members.values()):
        if member.turn is Turn.HAS and subject == _subject(member):
            over(draft, member.process)


def on_last(draft: Draft, subject: str) -> None:
    """It waits for the others no longer. `subject`: as of on_timer()."""
    for member in tuple(draft.state.members.values()):
        if member.turn is Turn.WAITS and subject == _subject(member):
            draft.put_member(replace(member, among=False))
            go_on(draft, member.home)


def go_on(draft: Draft, home: str | None) -> None:
    """One of this domain can go on elsewhere, never will, or has gone: the last one may wait for no other."""
    waiting = _waiting(draft.state, home)
    if len(waiting) == 1:
        _next(draft, home)


def _waiting(state: State, home: str | None) -> list[Member]:
    """In order."""
    found = [m for m in state.members.values() if m.home == home and m.turn is Turn.WAITS]
    last = max((_age(m) for m in found if m.among), default=None)
    return sorted(found, key=lambda m: (_age(m) == last, m.ahead, _age(m)))


def _age(member: Member) -> tuple[int, int]:
    return member.process.start_ticks, member.process.pid


def _others_come(state: State, member: Member) -> bool:
    """Whether one of its domain that can be told something is not ready yet to leave it."""
    others = (m for m in state.members.values() if m.home == member.home and m.process != member.process)
    return any(m.connected and m.standing in _COMING for m in others) and not state.copies_problem


def _subject(member: Member) -> str:
    return f"{member.process.pid} {member.process.start_ticks} {member.home}"


def _next(draft: Draft, home: str | None) -> None:
    domain = draft.state.domains.get(home or "")
    if domain is None or domain.is_dead or holders(draft.state, domain.id):
        return
    waiting = _waiting(draft.state, domain.id)
    for member in waiting:
        if not member.connected:
            # It has given up by itself.
            draft.put_member(replace(member, turn=Turn.NONE, among=False))
            continue
        if member.among and member is waiting[-1] and _others_come(draft.state, member):
            return
        draft.emit(HaveTurn(member.process, domain.generation))
        timed(draft, member.process, "turn_ms")
        member = draft.put_member(replace(member, turn=Turn.HAS))
        draft.emit(ArmTimer("failover-turn", _subject(member), TURN_S))
        return
