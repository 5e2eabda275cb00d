"""Serial replay: find the offender of an SM exception by replaying suspects one at a time.

The driver does not say which client raised an SM exception. Every participant with work in flight is a
suspect. Each suspect in turn replays its epoch in the standby domain. If that domain faults during a turn,
the suspect holding the turn is the offender.

Exceptions to that rule:
  - An earlier turn ended on its time limit, or because its program exited, not on completion. Its work may
    still run, so the fault may belong to it: no suspect is named. A slow suspect replays last next time, and
    its end is waited for. Of several slow suspects the first of this time is the last of the next time, so
    that the work of one suspect does not run beside all other turns.
  - A participant without work in flight does not take a turn and runs on. So does a participant after its
    turn. A fault of such a participant is attributed to the holder of the turn.

Order of turns: shortest expected replay first, so that a long training step does not delay a client with one
copy to replay. The expectation is the time that the work took before. A long replay first waits a little for
participants that are still moving; a short one starts at once.

The offender must be among the participants if the fault is a kernel's exception and every client of the
faulted domain was told to move in mode exact. Then the most likely offender replays last (see _likelihood()).
In ascending order of likelihood:
  - a program that found that the exception was in another program's code (programcounter.py),
  - a program that found nothing; among equals, one that has just launched a kernel for the first time
    (a kernel that ran a thousand times is less likely at fault); then the program that was started last,
  - a program that got its error as only the program that raised a trap does,
  - a program that found the exception in its own code.
Once the replays of all other suspects have ended well, the last one must be the offender. It gets its turn
all the same, but only when the other participants are ready for the next standby domain. They then pause once
more, briefly, instead of waiting for a new standby.

Replay side by side: if the client that was started last replays nothing (it has no proxy, has exited, or is
in mode keep), it is taken for the offender. Participants that are ready replay at once, in parallel, as soon
as they have moved; those that become ready later take turns. That is a guess. If the next domain faults, the
guess was wrong: no participant is named by that fault, and all move once more and replay one at a time.

Invariant: a participant is named only if no other suspect's replay can still run during its turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from mpsd.base.model import ExceptionOwner, FailoverMode, ProcessInstance, ReplayMode
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, GrantTurn
from mpsd.core.failover.outcomes import last_of, set_time
from mpsd.core.failover.participants import Outcome, Participant, Standing, Turn
from mpsd.core.state import Domain, State, Unproven

TURN_S = 1.5
"""Time limit [s] of a turn. Longer than a program waits for the end of its replay before it says that it
runs on."""
SLOW_TURN_S = 6.0
"""Time limit [s] of a turn whose participant exceeded TURN_S last time. TURN_S is subtracted for each
further slow participant that waits, so that the last of five still starts before its calls time out (11
s). Only the first of them can be named by its turn: its work may run during the next turns. A fault within
this time of its start is still attributed to it if all other replays are done."""
SHORT_REPLAY_S = 0.01
"""Expected replay time [s] up to which a suspect starts at once, before participants that are still
moving: it delays no other participant noticeably. (An operation takes 10 to 300 us on an H200; a suspect
may resume 100 ms after the GPU does.)"""
GATHER_S = 0.02
"""Longest time [s] that a long replay waits for shorter ones; never more than the long replay would delay
them."""
OPERATION_S = 30e-6
"""Assumed replay time [s] of one operation of a program that does not state its time."""
LAST_S = 3.0
"""Longest time [s] that the most likely offender waits for the other participants. Less than a program
holds its calls."""
GUESS_S = 2.0
"""Time [s] after a replay on a guess during which a fault of the next domain refutes the guess; turns
follow. Longer than TURN_S, and than the sign of a fault takes to arrive."""
NEW_S = 0.5
"""Age [s] of a first launch from which a kernel counts as proven. (A launch waits for earlier work on the
GPU, and the sign of a fault arrives 5 to 300 ms after it.)"""
_COMING = frozenset({Standing.WAITING, Standing.OFFERED})


def holders(state: State, domain: str) -> list[Participant]:
    """Return the participants of this domain that replay in their turn now."""
    return [m for m in state.members.values() if m.home == domain and m.turn is Turn.HAS]


def processes_with_work(draft: Draft, domain: Domain) -> set[ProcessInstance]:
    """Return the processes that have work in this domain, or had until the evidence window began."""
    state = draft.state
    here = (c for c in state.clients_of(domain.id) if not (c.waited or state.is_standby_context(c)))
    since = draft.now - state.policy.evidence_window_s
    end_turn_of_exited = (
        d for d in state.departed if d.id.domain == domain.id and d.at >= since and not d.waited
    )
    return {c.id.process for c in here} | {d.id.process for d in end_turn_of_exited}


def note_among(draft: Draft, here: set[ProcessInstance], told: list[ProcessInstance]) -> None:
    """Mark the participants told to move as certain to include the offender.

    This holds if all clients of the domain (`here`) are among them, in mode exact, so that all of them
    replay.
    """
    members = map(draft.state.members.get, told)
    moving = [m for m in members if m is not None and m.mode is FailoverMode.EXACT]
    for participant in moving if here <= {m.process for m in moving} else ():
        draft.put_participant(replace(participant, among=True))


def _has_open_guess(state: State, domain: Domain, now: float) -> bool:
    """Return whether a replay on a guess in this domain, or on its way there, is not confirmed or refuted
    yet."""
    return any(
        participant.again is ReplayMode.AT_ONCE
        and (participant.turn is Turn.HAS or now - participant.guessed < GUESS_S)
        and (participant.home == domain.id or _is_moving_to(participant, domain))
        for participant in state.members.values()
    )


def _is_moving_to(participant: Participant, domain: Domain) -> bool:
    return participant.standing is Standing.MOVING and participant.generation == domain.generation


def named_by_replay(state: State, domain: Domain, now: float, first: float) -> list[ProcessInstance]:
    """Return the participant that the present fault of this domain names; empty if it names none.

    That is the holder of a turn, or the slow participant whose turn has ended and whose work may still run,
    if all other replays have ended. Beside an open guess no participant is named. `first`: when the first
    sign of the fault came [monotonic s]; a replay that began later did not cause it.
    """
    if domain.may_lack_clients or _has_open_guess(state, domain, now):
        return []
    mine = [m.process for m in holders(state, domain.id) if m.since <= first]
    others = [u for u in domain.unproven if now < u.until and u.process not in mine]
    if not others:
        return mine
    # An exited process is no participant and cannot be named.
    (late, *more) = others
    is_named = not (mine or more) and first < late.named and late.process in state.members
    return [late.process] if is_named else []


def may_replay_together(state: State, domain: Domain, here: Iterable[ProcessInstance], now: float) -> bool:
    """Return whether the offender is likely to replay nothing, so that suspects may replay side by side.

    `here`: the processes that had work in the domain when it faulted.
    """
    youngest = max(here, key=_age, default=None)
    if youngest is None or _has_open_guess(state, domain, now):
        return False
    participant = state.members.get(youngest)
    return participant is None or not (
        participant.home == domain.id
        and participant.connected
        and participant.mode is FailoverMode.EXACT
        and participant.standing is not Standing.LEFT_BEHIND
        and participant.excess is None
    )


def begin(draft: Draft, participant: Participant) -> None:
    """Start the turn of this participant; do nothing if its domain has faulted."""
    if draft.state.has_lost(participant):
        return
    participant = replace(participant, named=False)
    guessed = draft.now if participant.again is ReplayMode.AT_ONCE else participant.guessed
    participant = draft.put_participant(replace(participant, turn=Turn.HAS, since=draft.now, guessed=guessed))
    draft.emit(ArmTimer("failover-turn", _subject(participant), _time_limit(draft.state, participant)))


def _time_limit(state: State, participant: Participant) -> float:
    """Return the time limit of this participant's turn [s]."""
    if not participant.slow:
        return TURN_S
    waiting = [
        m for m in state.members.values() if m.home == participant.home and m.turn is Turn.WAITS and m.slow
    ]
    return max(TURN_S, SLOW_TURN_S - TURN_S * len(waiting))


def end_all_turns(draft: Draft, domain: Domain) -> None:
    """End the turns in a domain that has faulted again."""
    for participant in holders(draft.state, domain.id):
        draft.put_participant(replace(participant, turn=Turn.NONE, among=False))
    # A participant that hears of this fault later is judged by what was known at the fault: all turns ended.
    draft.put_domain(replace(draft.state.domains[domain.id], unproven=()))


def work_ended(draft: Draft, process: ProcessInstance, name: str | None) -> None:
    """Record that the work of this process in domain `name` has ended, or that the process has left the
    domain."""
    domain = draft.state.domains.get(name or "")
    if domain is not None and is_open(domain, process):
        draft.put_domain(replace(domain, unproven=_without(domain, process)))


def is_open(domain: Domain, process: ProcessInstance) -> bool:
    """Return whether the turn of this process in the domain is over while its work may still run."""
    return any(one.process == process for one in domain.unproven)


def is_late(domain: Domain, process: ProcessInstance, now: float) -> bool:
    """Return whether a fault is still attributed to this process after its turn, if all other replays are
    done."""
    return any(one.process == process and now < one.named for one in domain.unproven)


def wait(draft: Draft, participant: Participant, operations: int, takes_s: float) -> None:
    """Queue this participant, which has moved and holds its calls, for its turn.

    `operations`: how many it has to replay. `takes_s`: how long these took before [s]; 0 if the program does
    not state it.
    """
    takes_s = max(takes_s or operations * OPERATION_S, TURN_S * participant.slow)
    gathers = takes_s > SHORT_REPLAY_S
    draft.put_participant(replace(participant, turn=Turn.WAITS, takes_s=takes_s, gathers=gathers))
    if gathers:
        draft.emit(ArmTimer("failover-gather", _subject(participant), min(GATHER_S, takes_s)))
    start_next_turn(draft, participant.home)
    if _may_be_offender(participant):
        draft.emit(ArmTimer("failover-last", _subject(participant), LAST_S))


def _movers(state: State, home: str) -> list[Participant]:
    """Return the participants that are still moving to `home` and may have work to replay."""
    generation = state.domains[home].generation
    coming = (m for m in state.members.values() if m.generation == generation and m.connected)
    return [m for m in coming if m.standing is Standing.MOVING and m.mode is FailoverMode.EXACT]


def on_gathered(draft: Draft, subject: str) -> None:
    """Stop waiting for participants that have not arrived by now. `subject`: as for on_timer()."""
    for participant in _with_timer(draft.state, subject, Turn.WAITS):
        draft.put_participant(replace(participant, gathers=False))
        start_next_turn(draft, participant.home)


def end_turn(draft: Draft, process: ProcessInstance) -> None:
    """End the turn of this participant: its replay is done, or it is known to be the offender."""
    participant = draft.state.members.get(process)
    if participant is None:
        return
    work_ended(draft, process, participant.home)
    if participant.turn is Turn.HAS:
        # Completed within the limit, so it is slow no more.
        participant = draft.put_participant(replace(participant, slow=False))
    if participant.turn is not Turn.NONE:
        participant = draft.put_participant(replace(participant, turn=Turn.NONE, among=False))
        start_next_turn(draft, participant.home)


def end_turn_of_exited(draft: Draft, process: ProcessInstance) -> None:
    """End the turn of a process that has exited. The sign of a fault of its work may still arrive within
    GUESS_S."""
    _end_unproven(draft, process, draft.now + GUESS_S, named=-math.inf)


def end_turn_of_disconnected(draft: Draft, process: ProcessInstance) -> None:
    """End the turn of a participant that has disconnected. Its work may continue, and it no longer reports
    its end."""
    _end_unproven(draft, process, math.inf, named=-math.inf)


def on_timer(draft: Draft, subject: str) -> None:
    """End a turn that exceeded its time limit. `subject`: pid, start time and domain."""
    for participant in _with_timer(draft.state, subject, Turn.HAS):
        draft.put_participant(replace(participant, slow=True))
        late = participant.since + SLOW_TURN_S
        _end_unproven(draft, participant.process, math.inf, named=late)
        if late > draft.now:
            draft.emit(ArmTimer("failover-late", subject, late - draft.now))


def _end_unproven(draft: Draft, process: ProcessInstance, until: float, *, named: float) -> None:
    participant = draft.state.members.get(process)
    if participant is None:
        return
    domain = draft.state.domains.get(participant.home or "")
    if domain is not None and (participant.turn is Turn.HAS or is_open(domain, process)):
        if participant.turn is not Turn.HAS:
            until = min(until, *(one.until for one in domain.unproven if one.process == process))
        open_still = tuple(one for one in _without(domain, process) if draft.now < one.until)
        draft.put_domain(replace(domain, unproven=(*open_still, Unproven(process, until, named))))
    if participant.turn is not Turn.NONE:
        draft.put_participant(replace(participant, turn=Turn.NONE, among=False))
        start_next_turn(draft, participant.home)


def _without(domain: Domain, process: ProcessInstance) -> tuple[Unproven, ...]:
    return tuple(one for one in domain.unproven if one.process != process)


def on_last(draft: Draft, subject: str) -> None:
    """Let the most likely offender stop waiting for the other participants. `subject`: as for on_timer()."""
    for participant in _with_timer(draft.state, subject, Turn.WAITS):
        draft.put_participant(replace(participant, among=False, whose=ExceptionOwner.UNKNOWN))
        start_next_turn(draft, participant.home)


def _age(process: ProcessInstance) -> tuple[int, int]:
    return process.start_ticks, process.pid


_RANKS = (ExceptionOwner.OTHERS, ExceptionOwner.UNKNOWN, ExceptionOwner.FIRST, ExceptionOwner.OWN)


def _likelihood(participant: Participant) -> tuple[int, bool, int, int]:
    """Return a sort key: the participant with the greatest key is the most likely offender.

    Programs report their findings and new kernels when they have moved. Which of two launches was later says
    nothing, because the fault may have come between them.
    """
    is_new = participant.turn is Turn.WAITS and participant.new_s is not None and participant.new_s < NEW_S
    return (_RANKS.index(participant.whose), is_new, *_age(participant.process))


def _may_be_offender(participant: Participant) -> bool:
    return participant.among or participant.whose in (ExceptionOwner.FIRST, ExceptionOwner.OWN)


def _is_to_be_judged(state: State, participant: Participant) -> bool:
    """Return whether this participant claims the exception while reports of other participants are
    outstanding."""
    record = last_of(state, participant.process)
    mine = (f for f in record.fates if f.process == participant.process) if record is not None else iter(())
    claims = any(f.whose is ExceptionOwner.OWN for f in mine)
    return claims and record is not None and any(f.outcome is Outcome.TOLD for f in record.fates)


def _others_come(state: State, participant: Participant, movers: list[Participant]) -> bool:
    """Return whether another connected participant is still on its way here, or not ready yet to leave."""
    others = (
        m for m in state.members.values() if m.home == participant.home and m.process != participant.process
    )
    coming = bool(movers) or any(m.connected and m.standing in _COMING for m in others)
    return coming and not state.copies_problem


def _subject(participant: Participant) -> str:
    return f"{participant.process.pid} {participant.process.start_ticks} {participant.home}"


def _with_timer(state: State, subject: str, turn: Turn) -> list[Participant]:
    return [m for m in state.members.values() if m.turn is turn and subject == _subject(m)]


def _give_turn(draft: Draft, domain: Domain, participant: Participant) -> None:
    """Tell this participant that its turn begins."""
    draft.emit(GrantTurn(participant.process, domain.generation))
    set_time(draft, participant.process, "turn_ms")
    begin(draft, participant)


def replay_together(draft: Draft, home: str | None) -> None:
    """Let all participants that wait in this domain replay now: the offender is known, and is none of them.

    As with a guess, a fault of the domain during these replays names no participant.
    """
    domain = draft.state.domains.get(home or "")
    if domain is None or domain.is_dead:
        return
    for participant in holders(draft.state, domain.id):
        draft.put_participant(replace(participant, again=ReplayMode.AT_ONCE, guessed=draft.now))
    for participant in [m for m in draft.state.members.values() if m.home == home and m.turn is Turn.WAITS]:
        if participant.connected and not draft.state.has_lost(participant):
            _give_turn(draft, domain, replace(participant, again=ReplayMode.AT_ONCE, gathers=False))


def _order(participant: Participant, *, is_last: bool) -> tuple[bool, float, bool, float, tuple[int, int]]:
    """Return a sort key: the participant with the smallest key takes the next turn."""
    late = -participant.since if participant.slow else 0.0
    return participant.slow, late, is_last, participant.takes_s, _age(participant.process)


def start_next_turn(draft: Draft, home: str | None) -> None:
    """Start the next turn in this domain if no turn is running.

    Called when a participant has arrived, will not arrive, is ready to move, can no longer move, or has
    exited.
    """
    domain = draft.state.domains.get(home or "")
    if domain is None or domain.is_dead or holders(draft.state, domain.id):
        return
    waiting = [m for m in draft.state.members.values() if m.home == home and m.turn is Turn.WAITS]
    # A participant whose contexts died with an earlier server has no context here to replay in.
    waiting = [m for m in waiting if not draft.state.has_lost(m)]
    movers = _movers(draft.state, domain.id)
    last = max((_likelihood(m) for m in (*waiting, *movers) if _may_be_offender(m)), default=None)
    waiting = [m for m in waiting if not _is_to_be_judged(draft.state, m)]
    candidates = [m for m in waiting if _likelihood(m) != last or not _others_come(draft.state, m, movers)]
    if movers and all(m.gathers for m in candidates):
        return
    for participant in sorted(candidates, key=lambda m: _order(m, is_last=_likelihood(m) == last)):
        if not participant.connected:
            # A disconnected program has stopped waiting for its turn on its own.
            draft.put_participant(replace(participant, turn=Turn.NONE, among=False))
            continue
        _give_turn(draft, domain, participant)
        return
