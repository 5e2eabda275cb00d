"""Turns: in which order participants with work in flight replay it when the offender is not known.

The driver does not say which client raised an SM exception. Every participant with work in flight may have
raised it. Three cases, by what it found itself (programcounter.py):
  - It denies the fault: it replays as soon as it has moved, beside the others. Unless there is a doubt about
    it from before, it does so without asking (Move.may_go_on), because mpsd is busy at that time.
  - It is a suspect (suspects.py): it replays alone in a trial domain (trial.py).
  - Nothing is known: it replays in its turn, one participant after the other.

A fault that comes during a turn names no participant, because other clients work in that domain as well. It
makes the holder of the turn a suspect. All participants then move once more.

Order of turns: shortest expected replay first, so that a long training step does not delay a client with one
copy to replay. The expectation is the time that the work took before. A long replay first waits a little for
participants that are still moving; a short one starts at once.

The offender must be among the participants if the fault is a kernel's exception and every client of the
faulted domain was told to move in mode exact. Then the most likely offender (see _likelihood()) becomes a
suspect once the replays of all others have ended well. Among participants that found nothing that is the one
that has just launched a kernel for the first time; then the program that was started last.

Replay side by side: if the client that was started last replays nothing (it has no proxy, has exited, or is
in mode keep), it is taken for the offender. Participants that are ready and no suspects then replay in
parallel, as soon as they have moved; those that become ready later take turns. That is a guess. If the next
domain faults, the guess was wrong, and all move once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mpsd.base.model import FailoverMode, ProcessInstance, ReplayMode
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, GrantTurn
from mpsd.core.failover import suspects
from mpsd.core.failover.outcomes import last_of, set_time
from mpsd.core.failover.participants import Outcome, Participant, Standing, Turn
from mpsd.core.state import Domain, State

TURN_S = 1.5
"""Time limit [s] of a turn. Longer than a program waits for the end of its replay before it says that it
runs on."""
SHORT_REPLAY_S = 0.01
"""Expected replay time [s] up to which a participant starts at once, before participants that are still
moving: it delays no other participant noticeably. (An operation takes 10 to 300 us on an H200; a program
may resume 100 ms after the GPU does.)"""
GATHER_S = 0.02
"""Longest time [s] that a long replay waits for shorter ones; never more than the long replay would delay
them."""
OPERATION_S = 30e-6
"""Assumed replay time [s] of one operation of a program that does not state its time."""
TRIAL_S = 5.0
"""Longest time [s] that a suspect waits for a trial domain before it replays last, beside the others. Long
enough to start a domain and make a context during a fault; less than a program holds its calls (11 s)."""
TRIAL = "failover-trial"
GUESS_S = 2.0
"""Time [s] after a replay on a guess during which a fault of the next domain refutes the guess; turns
follow. Longer than TURN_S, and than the sign of a fault takes to arrive."""
NEW_S = 0.5
"""Age [s] of a first launch from which a kernel counts as proven. (A launch waits for earlier work on the
GPU, and the sign of a fault arrives 5 to 300 ms after it.)"""


def holders(state: State, domain: str) -> list[Participant]:
    """Return the participants of this domain that replay now."""
    return [m for m in state.members.values() if m.home == domain and m.turn is Turn.HAS]


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


def may_replay_together(state: State, domain: Domain, here: Iterable[ProcessInstance], now: float) -> bool:
    """Return whether the offender is likely to replay nothing, so that participants may replay side by side.

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


def has_youngest_ended(state: State, domain: Domain, here: Iterable[ProcessInstance]) -> bool:
    """Return whether the process of `here` that was started last has exited, or its connection has ended.

    `here`: not empty.
    """
    youngest = max(here, key=_age)
    participant = state.members.get(youngest)
    lives = any(c.id.process == youngest and c.living for c in state.clients_of(domain.id))
    return not lives or (participant is not None and not participant.connected)


def _begin(draft: Draft, participant: Participant) -> None:
    """Start the turn of this participant; do nothing if its domain has faulted."""
    if draft.state.has_lost(participant):
        return
    guessed = draft.now if participant.again is ReplayMode.AT_ONCE else participant.guessed
    started = replace(participant, named=False, goes_on=False, turn=Turn.HAS)
    draft.put_participant(replace(started, since=draft.now, guessed=guessed))
    if draft.state.domains[participant.home or ""].trial != participant.process:
        draft.emit(ArmTimer("failover-turn", subject_of(participant), TURN_S))


def end_all_turns(draft: Draft, domain: Domain) -> None:
    """End the turns in a domain that has faulted again."""
    suspects.note_fault(draft, domain)
    for participant in [m for m in draft.state.members.values() if m.home == domain.id]:
        turn = Turn.NONE if participant.turn is Turn.HAS else participant.turn
        if turn is not participant.turn or participant.runs_on:
            among = participant.among and turn is not Turn.NONE
            draft.put_participant(replace(participant, turn=turn, among=among, runs_on=False))


def wait(draft: Draft, participant: Participant, operations: int, takes_s: float) -> None:
    """Let this participant, which has moved and holds its calls (or replays at once), replay when it may.

    `operations`: how many it has to replay. `takes_s`: how long these took before [s]; 0 if the program does
    not state it.
    """
    if participant.goes_on and draft.state.has_lost(participant):
        # It has replayed there, but its report comes after the fault.
        doubted = replace(participant, turn=Turn.NONE, goes_on=False, doubts=participant.doubts + 1)
        draft.put_participant(doubted)
        return
    takes_s = takes_s or operations * OPERATION_S
    gathers = takes_s > SHORT_REPLAY_S
    participant = replace(participant, turn=Turn.WAITS, takes_s=takes_s, gathers=gathers)
    draft.put_participant(participant)
    domain = draft.state.domains[participant.home or ""]
    guess = participant.again is ReplayMode.AT_ONCE and not suspects.is_suspect(participant)
    if (guess or suspects.denies(participant)) and not draft.state.has_lost(participant):
        _give_turn(draft, domain, replace(participant, again=ReplayMode.AT_ONCE, gathers=False))
        return
    if gathers:
        draft.emit(ArmTimer("failover-gather", subject_of(participant), min(GATHER_S, takes_s)))
    if suspects.is_suspect(participant):
        draft.emit(ArmTimer(TRIAL, subject_of(participant), TRIAL_S))
    start_next_turn(draft, participant.home)


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
    suspects.clear(draft, process)
    leave_turn(draft, process)


def leave_turn(draft: Draft, process: ProcessInstance) -> None:
    """Let the next participant replay: this one has exited, or its connection has ended."""
    participant = draft.state.members.get(process)
    if participant is not None and participant.turn is not Turn.NONE:
        owed = participant.owed or participant.turn is Turn.WAITS
        draft.put_participant(replace(participant, turn=Turn.NONE, among=False, owed=owed))
        start_next_turn(draft, participant.home)


def on_timer(draft: Draft, subject: str) -> None:
    """End a turn that exceeded its time limit. `subject`: pid, start time and domain."""
    for participant in _with_timer(draft.state, subject, Turn.HAS):
        draft.put_participant(replace(participant, runs_on=True))
        leave_turn(draft, participant.process)


def on_trial_timer(draft: Draft, subject: str) -> None:
    """Let a suspect stop waiting for a trial domain. `subject`: as for on_timer()."""
    for participant in _with_timer(draft.state, subject, Turn.WAITS):
        give_up_trial(draft, participant)


def give_up_trial(draft: Draft, participant: Participant) -> None:
    """Let a suspect replay last, beside the others, unless a fault has come during such a replay before."""
    if not participant.doubts and suspects.waits_for_trial(draft.state, participant):
        draft.put_participant(replace(participant, untried=True, gathers=False))
        start_next_turn(draft, participant.home)


def _age(process: ProcessInstance) -> tuple[int, int]:
    return process.start_ticks, process.pid


def _likelihood(participant: Participant) -> tuple[bool, bool, int, int]:
    """Return a sort key: the participant with the greatest key is the most likely offender.

    Programs report their findings and new kernels when they have moved. Which of two launches was later says
    nothing, because the fault may have come between them.
    """
    is_new = participant.turn is Turn.WAITS and participant.new_s is not None and participant.new_s < NEW_S
    return (suspects.is_suspect(participant), is_new, *_age(participant.process))


def is_to_be_judged(state: State, participant: Participant) -> bool:
    """Return whether this participant claims the exception while reports of other participants are
    outstanding."""
    record = last_of(state, participant.process)
    mine = (f for f in record.fates if f.process == participant.process) if record is not None else iter(())
    claims = any(f.whose in suspects.CLAIMS for f in mine)
    return claims and record is not None and any(f.outcome is Outcome.TOLD for f in record.fates)


def subject_of(participant: Participant) -> str:
    return f"{participant.process.pid} {participant.process.start_ticks} {participant.home}"


def _with_timer(state: State, subject: str, turn: Turn) -> list[Participant]:
    return [m for m in state.members.values() if m.turn is turn and subject == subject_of(m)]


def _give_turn(draft: Draft, domain: Domain, participant: Participant) -> None:
    """Tell this participant that its turn begins, unless it goes on without that."""
    if not participant.goes_on:
        draft.emit(GrantTurn(participant.process, domain.generation))
    set_time(draft, participant.process, "turn_ms")
    _begin(draft, participant)


def replay_together(draft: Draft, home: str | None) -> None:
    """Let all that wait in this domain replay now: the offender is known, and is none of them."""
    domain = draft.state.domains.get(home or "")
    if domain is None or domain.is_dead:
        return
    for participant in [m for m in draft.state.members.values() if m.home == home and m.turn is Turn.WAITS]:
        may = participant.connected and not draft.state.has_lost(participant)
        if may and not suspects.is_suspect(participant):
            _give_turn(draft, domain, replace(participant, again=ReplayMode.AT_ONCE, gathers=False))


def _order(participant: Participant) -> tuple[bool, float, tuple[int, int]]:
    """Return a sort key: the participant with the smallest key takes the next turn."""
    return participant.untried, participant.takes_s, _age(participant.process)


def start_next_turn(draft: Draft, home: str | None) -> None:
    """Start the next turn in this domain if no turn is running.

    Called when a participant has arrived, will not arrive, can no longer move, or has exited.
    """
    domain = draft.state.domains.get(home or "")
    if domain is None or domain.is_dead:
        return
    # Participants that replay at once keep no other one from its turn.
    if any(m.again is ReplayMode.IN_TURN for m in holders(draft.state, domain.id)):
        return
    waiting = [m for m in draft.state.members.values() if m.home == home and m.turn is Turn.WAITS]
    # A participant whose contexts died with an earlier server has no context here to replay in.
    waiting = [m for m in waiting if not draft.state.has_lost(m)]
    movers = _movers(draft.state, domain.id)
    candidates = [m for m in waiting if not suspects.waits_for_trial(draft.state, m)]
    candidates = [m for m in candidates if not is_to_be_judged(draft.state, m)]
    last = max((m for m in (*waiting, *movers) if m.among), key=_likelihood, default=None)
    others = [m for m in candidates if m != last]
    if last is not None and last in candidates and last.connected and not last.untried:
        if not (others or movers):
            _suspect(draft, last)
            return
        candidates = others
    if movers and all(m.gathers for m in candidates):
        return
    for participant in sorted(candidates, key=_order):
        if not participant.connected:
            # A disconnected program has stopped waiting for its turn on its own.
            draft.put_participant(replace(participant, turn=Turn.NONE, among=False))
            continue
        _give_turn(draft, domain, participant)
        return


def _suspect(draft: Draft, participant: Participant) -> None:
    """Make the only participant that has not replayed a suspect: the offender is among the participants."""
    draft.put_participant(replace(participant, suspected=True))
    draft.emit(ArmTimer(TRIAL, subject_of(participant), TRIAL_S))
