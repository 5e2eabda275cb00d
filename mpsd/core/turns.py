"""Turns: where nobody knows whose work was at fault, programs do again what they had in flight one at a time.

The one that has the turn when the domain is lost once more is taken for the offender: what it did again has
faulted again. Programs that had nothing in flight work on meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, HaveTurn
from mpsd.core.fates import timed
from mpsd.core.standby import Member, Turn
from mpsd.core.state import State
from mpsd.model import ProcessInstance

TURN_S = 1.5
"""Longer than a program looks for the end of what it did again."""


def holders(state: State, domain: str) -> list[ProcessInstance]:
    """Who does its work again there now: one, or nobody."""
    return [m.process for m in state.members.values() if m.home == domain and m.turn is Turn.HAS]


def wait(draft: Draft, member: Member) -> None:
    """It has moved, and holds its calls."""
    draft.put_member(replace(member, turn=Turn.WAITS))
    _next(draft, member.home)


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
    if domain is None or holders(draft.state, domain.id):
        return
    waiting = [m for m in draft.state.members.values() if m.home == domain.id and m.turn is Turn.WAITS]
    for member in sorted(waiting, key=lambda m: (m.process.pid, m.process.start_ticks)):
        if not member.connected:
            # It has given up by itself.
            draft.put_member(replace(member, turn=Turn.NONE))
            continue
        draft.emit(HaveTurn(member.process, domain.generation))
        timed(draft, member.process, "turn_ms")
        member = draft.put_member(replace(member, turn=Turn.HAS))
        draft.emit(ArmTimer("failover-turn", _subject(member), TURN_S))
        return
