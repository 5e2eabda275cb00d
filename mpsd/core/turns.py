"""Turns: where nobody knows whose work was at fault, programs do again what they had in flight one at a time.

The one that has the turn when the domain is lost once more is taken for the offender: what it did again has
faulted again. Programs that had nothing in flight work on meanwhile. Who has least to do is first, so a long
training step holds up nobody who has a copy to do again; for that those who are still coming are waited for a
little.
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
    member = draft.put_member(replace(member, turn=Turn.NONE))
    _next(draft, member.home)


def on_timer(draft: Draft, subject: str) -> None:
    """No word of its end: the others do not wait for it any longer. `subject`: pid, start time and domain."""
    for member in tuple(draft.state.members.values()):
        if member.turn is Turn.HAS and subject == _subject(member):
            over(draft, member.process)


def _subject(member: Member) -> str:
    return f"{member.process.pid} {member.process.start_ticks} {member.home}"


def _next(draft: Draft, home: str | None) -> None:
    domain = draft.state.domains.get(home or "")
    if domain is None or domain.is_dead or holders(draft.state, domain.id):
        return
    waiting = [m for m in draft.state.members.values() if m.home == domain.id and m.turn is Turn.WAITS]
    for member in sorted(waiting, key=lambda m: (m.ahead, m.process.pid, m.process.start_ticks)):
        if not member.connected:
            # It has given up by itself.
            draft.put_member(replace(member, turn=Turn.NONE))
            continue
        draft.emit(HaveTurn(member.process, domain.generation))
        timed(draft, member.process, "turn_ms")
        member = draft.put_member(replace(member, turn=Turn.HAS))
        draft.emit(ArmTimer("failover-turn", _subject(member), TURN_S))
        return
