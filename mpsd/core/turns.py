"""Turns: where nobody knows whose work was at fault, programs do again what they had in flight one at a time.

The one that has the turn when the domain is lost once more is taken for the offender: what it did again
has faulted again. Nobody is where the turn of another one had ended before its work had, or may have: it
took longer, or its program went a moment before, and the fault may be of that. Who took longer comes last
the next time, and is waited for; of several such the one that was first is the last now, so that it is
not the work of the same one that runs beside all the others' turns. Programs that had nothing in flight
work on meanwhile, and so does who has had its turn: a fault of theirs then is blamed on whose turn it is.
Who needs least time is first, by what its work took before, so a long training step holds up nobody who
has a copy to do again: for that it waits a little for those who are still coming, and who needs little
time waits for nobody.

Where a kernel's exception is known, and every client of the lost domain was told to move in mode exact, the
offender is among them. Then of those who have work to do again the likeliest one comes last: the program
that has just launched a kernel for the first time, for what has run a thousand times is less likely at
fault; where none has, the one that was started last. What programs have found themselves goes before that:
one in whose own code the exception was, or whose error came as that of who made a trap does, is the last,
and before it who has not found that it was somebody else's (whose.py). When the work of all others has ended
well it must be the one that is left. It is given its turn all the same, but not before the others can go on
elsewhere: they have one more short stop then, and need not wait until a next standby is made.

Where the client that was started last will do nothing again (it has no proxy, or has ended, or is in mode
keep), it is taken to have made the fault: those who are ready do their work again as soon as they have moved
and side by side; who becomes ready later takes turns. That is a guess. Where it was wrong, and the next
domain is lost over it, nobody is named by that, and they move once more, one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, HaveTurn
from mpsd.core.fates import last_of, timed
from mpsd.core.standby import Member, Outcome, Standing, Turn
from mpsd.core.state import Domain, State, Unproven
from mpsd.model import Again, FailoverMode, ProcessInstance, Whose

TURN_S = 1.5
"""Longer than a program looks for the end of what it did again, before it says that it runs on."""
SLOW_TURN_S = 6.0
"""Of who took longer than that the last time; less for each one more that did and waits: the last of five has
its turn before it gives up (11 s). The first of them alone can be named by its turn: beside the next ones its
own work may run. As long after it began a fault is taken for its own, if all the others are done."""
SOON_S = 0.01
"""Who expects to need no more than that goes at once, before whoever may still come: it holds up nobody for
long. (10 to 300 us an operation on an H200; a suspect may resume 100 ms after the GPU does.)"""
GATHER_S = 0.02
"""How long others wait for those at most, and no longer than they would hold them up."""
EACH_S = 30e-6
"""What an operation takes of who does not say."""
LAST_S = 3.0
"""How long the last one waits for the others, at most: less than a program holds its calls."""
GUESS_S = 2.0
"""Who loses its next domain within that, after it began to do its work again on a guess, takes turns: longer
than TURN_S, and than it takes to hear of a fault."""
NEW_S = 0.5
"""A kernel that was launched for the first time before that is as good as any other. (What is launched waits
for what the GPU has before it, and the word of a fault comes 5 to 300 ms after it.)"""
_COMING = frozenset({Standing.WAITING, Standing.OFFERED})


def holders(state: State, domain: str) -> list[Member]:
    """Who does its work again there now."""
    return [m for m in state.members.values() if m.home == domain and m.turn is Turn.HAS]


def at_work(draft: Draft, domain: Domain) -> set[ProcessInstance]:
    """Who has work there, or had until lately."""
    state = draft.state
    here = (c for c in state.clients_of(domain.id) if not (c.waited or state.is_in_waiting(c)))
    since = draft.now - state.policy.evidence_window_s
    gone = (d for d in state.departed if d.id.domain == domain.id and d.at >= since and not d.waited)
    return {c.id.process for c in here} | {d.id.process for d in gone}


def note_among(draft: Draft, here: set[ProcessInstance], told: list[ProcessInstance]) -> None:
    """Whether who made the fault is among these: all clients of the domain, who do again what they did."""
    members = map(draft.state.members.get, told)
    moving = [m for m in members if m is not None and m.mode is FailoverMode.EXACT]
    for member in moving if here <= {m.process for m in moving} else ():
        draft.put_member(replace(member, among=True))


def _is_open(state: State, domain: Domain, now: float) -> bool:
    """Whether somebody who lives there, or is on its way there, does its work again on a guess of which it is
    not known yet that it was right."""
    return any(
        member.again is Again.AT_ONCE
        and (member.turn is Turn.HAS or now - member.guessed < GUESS_S)
        and (member.home == domain.id or _comes_to(member, domain))
        for member in state.members.values()
    )


def _comes_to(member: Member, domain: Domain) -> bool:
    return member.standing is Standing.MOVING and member.generation == domain.generation


def repeaters(state: State, domain: Domain, now: float, first: float) -> list[ProcessInstance]:
    """Whose work is at fault if this domain is lost now: one who has a turn of its own, or of all who had one
    has lately not come to the end of it; nobody, beside an open guess. `first`: when the first sign of that
    came; who has begun since did not make it."""
    if _is_open(state, domain, now):
        return []
    mine = [m.process for m in holders(state, domain.id) if m.since <= first]
    others = [u for u in domain.unproven if now < u.until and u.process not in mine]
    if not others:
        return mine
    # One that has gone is nobody who could be told.
    (late, *more) = others
    is_named = not (mine or more) and first < late.named and late.process in state.members
    return [late.process] if is_named else []


def may_be_at_once(state: State, domain: Domain, here: Iterable[ProcessInstance], now: float) -> bool:
    """Whether the offender is likely to do nothing again. `here`: who had work there when it was lost."""
    youngest = max(here, key=_age, default=None)
    if youngest is None or _is_open(state, domain, now):
        return False
    member = state.members.get(youngest)
    return member is None or not (
        member.home == domain.id
        and member.connected
        and member.mode is FailoverMode.EXACT
        and member.standing is not Standing.LEFT_BEHIND
    )


def begin(draft: Draft, member: Member) -> None:
    """It does its work again now; in vain where the domain is lost."""
    if draft.state.has_lost(member):
        return
    member = replace(member, named=False)
    guessed = draft.now if member.again is Again.AT_ONCE else member.guessed
    member = draft.put_member(replace(member, turn=Turn.HAS, since=draft.now, guessed=guessed))
    draft.emit(ArmTimer("failover-turn", _subject(member), _lasts(draft.state, member)))


def _lasts(state: State, member: Member) -> float:
    """Seconds until the others wait for it no longer."""
    if not member.slow:
        return TURN_S
    waiting = [m for m in state.members.values() if m.home == member.home and m.turn is Turn.WAITS and m.slow]
    return max(TURN_S, SLOW_TURN_S - TURN_S * len(waiting))


def lost(draft: Draft, domain: Domain) -> None:
    """Whoever does its work again there has lost it once more: its turn has ended."""
    for member in holders(draft.state, domain.id):
        draft.put_member(replace(member, turn=Turn.NONE, among=False))
    # Who is told of this loss later on is told by what was known when it came: all of these have ended.
    draft.put_domain(replace(draft.state.domains[domain.id], unproven=()))


def proven(draft: Draft, process: ProcessInstance, name: str | None) -> None:
    """Its work in this domain has ended; or it has moved out of it, with that, or behind its end."""
    domain = draft.state.domains.get(name or "")
    if domain is not None and is_open(domain, process):
        draft.put_domain(replace(domain, unproven=_without(domain, process)))


def is_open(domain: Domain, process: ProcessInstance) -> bool:
    """Whether its turn there is over, and its work may run."""
    return any(one.process == process for one in domain.unproven)


def is_late(domain: Domain, process: ProcessInstance, now: float) -> bool:
    """Whether it is still the one that a fault is taken to be of, if the others are done."""
    return any(one.process == process and now < one.named for one in domain.unproven)


def wait(draft: Draft, member: Member, operations: int, takes_s: float) -> None:
    """It has moved, and holds its calls until it has done so many again. `takes_s`: what that took before; 0:
    it does not say."""
    takes_s = max(takes_s or operations * EACH_S, TURN_S * member.slow)
    gathers = takes_s > SOON_S
    draft.put_member(replace(member, turn=Turn.WAITS, takes_s=takes_s, gathers=gathers))
    if gathers:
        draft.emit(ArmTimer("failover-gather", _subject(member), min(GATHER_S, takes_s)))
    go_on(draft, member.home)
    if _may_have_made_it(member):
        draft.emit(ArmTimer("failover-last", _subject(member), LAST_S))


def _movers(state: State, home: str) -> list[Member]:
    """Who may still come there with work to do again."""
    generation = state.domains[home].generation
    coming = (m for m in state.members.values() if m.generation == generation and m.connected)
    return [m for m in coming if m.standing is Standing.MOVING and m.mode is FailoverMode.EXACT]


def on_gathered(draft: Draft, subject: str) -> None:
    """It waits no longer for who has not come by now. `subject`: as of on_timer()."""
    for member in _named(draft.state, subject, Turn.WAITS):
        draft.put_member(replace(member, gathers=False))
        go_on(draft, member.home)


def over(draft: Draft, process: ProcessInstance) -> None:
    """It is done, or is known to have made the fault."""
    member = draft.state.members.get(process)
    if member is None:
        return
    proven(draft, process, member.home)
    if member.turn is Turn.HAS:
        # In time.
        member = draft.put_member(replace(member, slow=False))
    if member.turn is not Turn.NONE:
        member = draft.put_member(replace(member, turn=Turn.NONE, among=False))
        go_on(draft, member.home)


def gone(draft: Draft, process: ProcessInstance) -> None:
    """It has ended: a fault of its work may be heard of a little later."""
    _end_unproven(draft, process, draft.now + GUESS_S, named=-math.inf)


def cut(draft: Draft, process: ProcessInstance) -> None:
    """Its connection has ended. Its work may run on, and it says no more of that."""
    _end_unproven(draft, process, math.inf, named=-math.inf)


def on_timer(draft: Draft, subject: str) -> None:
    """No word of its end: the others do not wait for it any longer. `subject`: pid, start time and domain."""
    for member in _named(draft.state, subject, Turn.HAS):
        draft.put_member(replace(member, slow=True))
        late = member.since + SLOW_TURN_S
        _end_unproven(draft, member.process, math.inf, named=late)
        if late > draft.now:
            draft.emit(ArmTimer("failover-late", subject, late - draft.now))


def _end_unproven(draft: Draft, process: ProcessInstance, until: float, *, named: float) -> None:
    member = draft.state.members.get(process)
    if member is None:
        return
    domain = draft.state.domains.get(member.home or "")
    if domain is not None and (member.turn is Turn.HAS or is_open(domain, process)):
        if member.turn is not Turn.HAS:
            until = min(until, *(one.until for one in domain.unproven if one.process == process))
        open_still = tuple(one for one in _without(domain, process) if draft.now < one.until)
        draft.put_domain(replace(domain, unproven=(*open_still, Unproven(process, until, named))))
    if member.turn is not Turn.NONE:
        draft.put_member(replace(member, turn=Turn.NONE, among=False))
        go_on(draft, member.home)


def _without(domain: Domain, process: ProcessInstance) -> tuple[Unproven, ...]:
    return tuple(one for one in domain.unproven if one.process != process)


def on_last(draft: Draft, subject: str) -> None:
    """It waits for the others no longer. `subject`: as of on_timer()."""
    for member in _named(draft.state, subject, Turn.WAITS):
        draft.put_member(replace(member, among=False, whose=Whose.UNKNOWN))
        go_on(draft, member.home)


def _age(process: ProcessInstance) -> tuple[int, int]:
    return process.start_ticks, process.pid


_RANKS = (Whose.OTHERS, Whose.UNKNOWN, Whose.FIRST, Whose.OWN)


def _likelihood(member: Member) -> tuple[int, bool, int, int]:
    """Who has most of it is the likeliest. What a program has found, and launched, it says when it has moved;
    which of two launches was later says nothing, for the fault may have come between."""
    is_new = member.turn is Turn.WAITS and member.new_s is not None and member.new_s < NEW_S
    return (_RANKS.index(member.whose), is_new, *_age(member.process))


def _may_have_made_it(member: Member) -> bool:
    return member.among or member.whose in (Whose.FIRST, Whose.OWN)


def _is_to_be_judged(state: State, member: Member) -> bool:
    """Whether it says that the exception was in its own code, and others are still to be heard."""
    record = last_of(state, member.process)
    mine = (f for f in record.fates if f.process == member.process) if record is not None else iter(())
    claims = any(f.whose is Whose.OWN for f in mine)
    return claims and record is not None and any(f.outcome is Outcome.TOLD for f in record.fates)


def _others_come(state: State, member: Member, movers: list[Member]) -> bool:
    """Whether one that can be told something is still to come to its domain, or not ready yet to leave it."""
    others = (m for m in state.members.values() if m.home == member.home and m.process != member.process)
    coming = bool(movers) or any(m.connected and m.standing in _COMING for m in others)
    return coming and not state.copies_problem


def _subject(member: Member) -> str:
    return f"{member.process.pid} {member.process.start_ticks} {member.home}"


def _named(state: State, subject: str, turn: Turn) -> list[Member]:
    return [m for m in state.members.values() if m.turn is turn and subject == _subject(m)]


def _give(draft: Draft, domain: Domain, member: Member) -> None:
    """It is told that it has its turn."""
    draft.emit(HaveTurn(member.process, domain.generation))
    timed(draft, member.process, "turn_ms")
    begin(draft, member)


def all_at_once(draft: Draft, home: str | None) -> None:
    """It is known who made the fault, and none of those who wait there for their turns: each has its own now.
    As with a guess, nobody is named by it if that domain is lost over it."""
    domain = draft.state.domains.get(home or "")
    if domain is None or domain.is_dead:
        return
    for member in holders(draft.state, domain.id):
        draft.put_member(replace(member, again=Again.AT_ONCE, guessed=draft.now))
    for member in [m for m in draft.state.members.values() if m.home == home and m.turn is Turn.WAITS]:
        if member.connected and not draft.state.has_lost(member):
            _give(draft, domain, replace(member, again=Again.AT_ONCE, gathers=False))


def _order(member: Member, *, is_last: bool) -> tuple[bool, float, bool, float, tuple[int, int]]:
    """Who has least of it is the first."""
    late = -member.since if member.slow else 0.0
    return member.slow, late, is_last, member.takes_s, _age(member.process)


def go_on(draft: Draft, home: str | None) -> None:
    """Somebody has come to this domain, or will not, can go on elsewhere, never will, or has gone: whoever
    may do its work again now does, if nobody has the turn."""
    domain = draft.state.domains.get(home or "")
    if domain is None or domain.is_dead or holders(draft.state, domain.id):
        return
    waiting = [m for m in draft.state.members.values() if m.home == home and m.turn is Turn.WAITS]
    # Whose contexts died with a server before this one has nothing here to do its work in.
    waiting = [m for m in waiting if not draft.state.has_lost(m)]
    movers = _movers(draft.state, domain.id)
    last = max((_likelihood(m) for m in (*waiting, *movers) if _may_have_made_it(m)), default=None)
    waiting = [m for m in waiting if not _is_to_be_judged(draft.state, m)]
    may = [m for m in waiting if _likelihood(m) != last or not _others_come(draft.state, m, movers)]
    if movers and all(m.gathers for m in may):
        return
    for member in sorted(may, key=lambda m: _order(m, is_last=_likelihood(m) == last)):
        if not member.connected:
            # It has given up by itself.
            draft.put_member(replace(member, turn=Turn.NONE, among=False))
            continue
        _give(draft, domain, member)
        return
