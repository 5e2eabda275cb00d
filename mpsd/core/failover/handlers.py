"""Handlers of what participants report. Each report is a program's claim about itself, and affects only
that program."""

from __future__ import annotations

from dataclasses import replace

from mpsd.base.model import FailoverMode, ProcessInstance
from mpsd.core import domains, leases, slots
from mpsd.core import events as ev
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, AskServer, ExcludeWork, GrantTurn, StandDown, SwitchOff, Welcome
from mpsd.core.failover import (
    budgets,
    memory,
    outcomes,
    plan,
    programcounter,
    restart,
    serialreplay,
    suspects,
    trial,
)
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import (
    OFFERED,
    OPAQUE_KEPT,
    SWITCHED_OFF,
    Excess,
    Outcome,
    Participant,
    Standing,
    Turn,
)
from mpsd.core.lifecycle import DomainTrigger
from mpsd.core.state import HOSTING, SERVING, Client, ClientState, DomainState

MISSING = "work in flight may be missing"
_ORDER = (FailoverMode.OFF, FailoverMode.KEEP, FailoverMode.EXACT)


def on_came(draft: Draft, event: mev.MemberCame) -> None:
    """Register a participant that said HELLO; its earlier state is kept as far as it still holds."""
    most = _most(draft, event.process, event.uid)
    mode = min(event.mode, most, key=_ORDER.index)
    keeps = event.budgets and mode is FailoverMode.EXACT
    budget = draft.state.policy.time_budget if keeps else None
    draft.emit(Welcome(event.process, mode, budget, event.switches))
    if mode is FailoverMode.OFF:
        # Mode off: the program is no participant, whatever it said before.
        on_left(draft, mev.MemberLeft(event.process))
        return
    known = draft.state.members.get(event.process)
    home = known.home if known is not None else None
    if event.generation or home is None:
        home = plan.find_home(draft.state, event.process, event.generation) or home
    # Its turn ended with its old connection; the end of that may not have been seen.
    serialreplay.leave_turn(draft, event.process)
    # Repeat earlier offers: the program may have connected to a new daemon.
    fresh = Participant(event.process, event.uid, mode, home=home, fences=event.fences, gives=event.gives)
    fresh = replace(fresh, budgets=event.budgets, switches=event.switches)
    if known is not None:
        fresh = replace(fresh, opaque=known.opaque, unsure=known.unsure, told=known.told)
        fresh = replace(fresh, again=known.again, guessed=known.guessed, owed=known.owed)
        fresh = replace(fresh, suspected=known.suspected, doubts=known.doubts, since=known.since)
        fresh = replace(fresh, held=None, limit=known.limit, cost=known.cost, excess=known.excess)
        fresh = replace(fresh, placed=known.placed)
    if known is not None and known.standing is Standing.LEFT_BEHIND and known.home == home:
        fresh = replace(fresh, standing=Standing.LEFT_BEHIND, reason=known.reason)
    draft.put_participant(fresh)
    if fresh.excess == SWITCHED_OFF and fresh.switches:
        # The program may not have received it.
        draft.emit(SwitchOff(event.process))
    budgets.repeat(draft, event.process)
    contexts = {c.id.domain for c in draft.state.spaces_of(event.process)}
    if event.generation and f"d{event.generation}" not in contexts:
        _mark_contexts_idle(draft, event, home)
    restart.note_arrival(draft, event, known)
    # The participant may have moved, or been told to, while it was not connected.
    for left in sorted({*contexts, *([f"d{known.generation}"] if known is not None else [])} - {home}):
        _leave(draft, left)
    refresh(draft, event.process)


def _most(draft: Draft, process: ProcessInstance, uid: int) -> FailoverMode:
    """Return the highest mode of a program of this user, on the GPUs that it is known to use."""
    policy, domains_of = draft.state.policy, {c.id.domain for c in draft.state.spaces_of(process)}
    gpus = {gpu for name in domains_of for gpu in draft.state.domains[name].gpus}
    lowered = uid in policy.users_without_failover or gpus & policy.gpus_without_failover
    return FailoverMode.OFF if lowered else policy.failover


def _mark_contexts_idle(draft: Draft, event: mev.MemberCame, home: str | None) -> None:
    """Treat all contexts of a participant as idle if the domain in which it claims to live has none of them.

    That domain faulted or ended while the program was not connected.
    """
    there = draft.state.domains.get(f"d{event.generation}")
    here = draft.state.domains.get(home or "")
    ended = there is None or there.is_dead or there.state in (DomainState.STOPPING, DomainState.FAILED)
    if here is not None and ended:
        draft.put_domain(replace(here, bereft=here.bereft | {event.process}))


def refresh(draft: Draft, process: ProcessInstance) -> None:
    """Refresh offers as plan.refresh() does, and start a standby domain if there is none yet."""
    plan.refresh(draft, process)
    participant = draft.state.members.get(process)
    home = draft.state.domains.get((participant.home if participant is not None else None) or "")
    if home is not None and home.state in HOSTING:
        domains.ensure(draft, home.slot)


def on_restored(draft: Draft, event: mev.MemberRestored) -> None:
    if _most(draft, event.process, event.uid) is FailoverMode.OFF or event.process in draft.state.members:
        return
    known = Participant(event.process, event.uid, event.mode, connected=False, heard=False)
    participant = replace(known, home=event.home)
    if event.left_behind:
        participant = replace(participant, standing=Standing.LEFT_BEHIND, reason=event.left_behind)
    limit = budgets.restored(draft.state, event.limit)
    draft.put_participant(replace(participant, held=None, limit=limit, excess=event.excess))


def on_left(draft: Draft, event: mev.MemberLeft) -> None:
    """Handle a lost connection. The participant may connect again; its home is kept while it is a client."""
    participant = draft.state.members.get(event.process)
    if participant is None:
        return
    serialreplay.leave_turn(draft, event.process)
    participant = draft.state.members[event.process]
    if not any(c.living for c in draft.state.spaces_of(event.process)):
        ended(draft, event.process)
        return
    # Its standby context counts for as long as it is a client.
    disconnected = replace(participant, connected=False, placed=False)
    if participant.standing in OFFERED:
        disconnected = replace(disconnected, standing=Standing.WAITING, generation=0)
    draft.put_participant(disconnected)
    _release_waiters(draft, participant)
    _expire_standby(draft, participant)


def may_have_launched(client: Client, participant: Participant | None) -> bool:
    """Return whether this client may have launched work in this domain.

    False for an offender that moved here from a faulted domain, has held its calls since, and is being
    killed. Its old work in flight would look like work that does not end.
    """
    is_here = participant is not None and participant.named and participant.home == client.id.domain
    return not is_here or client.state is not ClientState.KILLING


def _release_waiters(draft: Draft, participant: Participant) -> None:
    """Release all that waits for this participant: memory requests, and turns in its domain and in the
    next one."""
    memory.drop_requests_to(draft, participant.process)
    serialreplay.start_next_turn(draft, participant.home)
    if participant.standing is Standing.MOVING:
        serialreplay.start_next_turn(draft, f"d{participant.generation}")


def ended(draft: Draft, process: ProcessInstance, *, execed: bool = False) -> None:
    """Handle the exit of a process, or the end of its last client.

    `execed`: the process continues with another program, which may have connected already.
    """
    participant = draft.state.members.get(process)
    if participant is None:
        return
    serialreplay.leave_turn(draft, process)
    record = outcomes.latest_of(draft.state, process)
    if record is not None and any(
        f.process == process and f.outcome is not Outcome.NOT_TOLD for f in record.fates
    ):
        outcomes.revise(draft, record, process, outcome=Outcome.ENDED)
    draft.drop_participant(process)
    if execed and participant.connected:
        fresh = Participant(process, participant.uid, participant.mode, opaque=participant.opaque)
        fresh = replace(fresh, fences=participant.fences, gives=participant.gives)
        draft.put_participant(replace(fresh, budgets=participant.budgets, switches=participant.switches))
    _release_waiters(draft, participant)
    _expire_standby(draft, participant)


def _expire_standby(draft: Draft, participant: Participant) -> None:
    """Let the standby domain expire if no participant is left."""
    home = draft.state.domains.get(participant.home or "")
    if home is not None:
        plan.linger(draft, home.slot)


def on_linger(draft: Draft, name: str) -> None:
    """Retire a standby domain that no participant has used for a while, unless the policy always keeps
    one."""
    slot = draft.state.slots.get(name)
    if slot is None or slot.spare is None or draft.state.policy.spare:
        return
    active = draft.state.domains.get(slot.active or "")
    if plan.participants_of(draft.state, slot) or active is None or active.state not in SERVING:
        return
    draft.put_slot(replace(slot, spare=None))
    domains.move(draft, slot.spare, DomainTrigger.RETIRE)
    plan.refresh_all(draft, name)
    domains.settle(draft, slot.spare)


def _reporter(draft: Draft, process: ProcessInstance, generation: int) -> Participant | None:
    """Return the participant if it reports on the standby domain that it was last told of."""
    participant = draft.state.members.get(process)
    if participant is None or participant.generation != generation or not generation:
        draft.count("failover_words_ignored")
        return None
    return participant


def on_ready(draft: Draft, event: mev.MemberReady) -> None:
    participant = _reporter(draft, event.process, event.generation)
    if participant is None or participant.standing not in OFFERED:
        return
    to = draft.state.domains.get(f"d{event.generation}")
    is_new = participant.standing is not Standing.READY and (to is None or to.trial is None)
    if is_new and budgets.full_gpu(draft.state, participant):
        # Another participant's standby context has taken its place.
        plan.withdraw_offer(draft, participant, "too many standby contexts")
        refresh(draft, event.process)
        return
    # A new standby context may be asked for, whatever became of the former one.
    yields = participant.yields if participant.standing is Standing.READY else None
    ready = replace(participant, standing=Standing.READY, reason="", bytes=event.bytes, yields=yields)
    placed = participant.placed or (is_new and not draft.state.has_lost(participant))
    draft.put_participant(replace(ready, ready_ms=round(event.after_ns / 1e6, 3), placed=placed))
    refresh(draft, event.process)
    serialreplay.start_next_turn(draft, participant.home)


def on_unready(draft: Draft, event: mev.MemberUnready) -> None:
    participant = _reporter(draft, event.process, event.generation)
    if participant is not None and participant.standing is Standing.MOVING:
        _was_not_ready(draft, participant, event.reason)
    elif participant is not None and participant.standing in OFFERED:
        unready = replace(participant, standing=Standing.UNREADY, reason=event.reason, bytes=0)
        draft.put_participant(replace(unready, placed=False))
        trial.refused(draft, event.process)
        serialreplay.start_next_turn(draft, participant.home)
        if suspects.waits_for_trial(draft.state, draft.state.members[event.process]):
            memory.offer_again_later(draft, participant, trial.RETRY_S)
        elif event.for_memory:
            memory.offer_again_later(draft, participant)


def _was_not_ready(draft: Draft, participant: Participant, reason: str) -> None:
    """Handle a participant that reported "not ready" before it received its move. It is offered the next
    standby."""
    record = outcomes.latest_of(draft.state, participant.process)
    if record is not None:
        outcomes.revise(
            draft,
            record,
            participant.process,
            outcome=Outcome.STAYED,
            why=f"the standby context was not ready: {reason}",
        )
    # It has not stayed: clear `asked`, so that it may be told to leave that domain again.
    waits = replace(participant, standing=Standing.WAITING, generation=0, reason=reason, bytes=0, asked=None)
    draft.put_participant(waits)
    _release_waiters(draft, participant)
    _leave(draft, f"d{participant.generation}")
    refresh(draft, participant.process)


def on_opaque(draft: Draft, event: mev.MemberOpaque) -> None:
    participant = draft.state.members.get(event.process)
    if participant is None or event.name in participant.opaque or len(participant.opaque) >= OPAQUE_KEPT:
        return
    participant = replace(participant, opaque=(*participant.opaque, event.name))
    if participant.standing in OFFERED:
        unready = replace(participant, standing=Standing.UNREADY, reason=f"the client uses {event.name}")
        participant = replace(unready, placed=False)
    draft.put_participant(participant)
    serialreplay.start_next_turn(draft, participant.home)


def on_unsure(draft: Draft, event: mev.MemberUnsure) -> None:
    participant = draft.state.members.get(event.process)
    if (
        participant is not None
        and event.name not in participant.unsure
        and len(participant.unsure) < OPAQUE_KEPT
    ):
        draft.put_participant(replace(participant, unsure=(*participant.unsure, event.name)))


def on_cost(draft: Draft, event: mev.MemberCost) -> None:
    participant = draft.state.members.get(event.process)
    if participant is not None and budgets.has_limit(participant):
        draft.put_participant(replace(participant, cost=event.cost))


def on_exposed(draft: Draft, event: mev.MemberExposed) -> None:
    participant = draft.state.members.get(event.process)
    if participant is not None:
        draft.put_participant(replace(participant, exposed=event.why))


def on_exceeds(draft: Draft, event: mev.MemberExceeds) -> None:
    """Let a participant leave fail-over for good. A program repeats this on each connection."""
    participant, by_hand = draft.state.members.get(event.process), event.excess == SWITCHED_OFF
    if participant is None or not (participant.switches if by_hand else participant.budgets):
        draft.count("failover_words_ignored")
    elif not by_hand and participant.excess == SWITCHED_OFF:
        # It exceeded a budget before it received the order: the order stays the reason.
        draft.count("failover_words_ignored")
    else:
        _leave_for_good(draft, participant, event.excess)


def on_switched_off(draft: Draft, event: mev.MemberSwitchedOff) -> None:
    """Let a participant leave fail-over for good, because a user said so. It does not move from now on."""
    participant = draft.state.members.get(event.process)
    if participant is None or not participant.switches or participant.excess is not None:
        draft.count("failover_switches_ignored")
        return
    draft.emit(SwitchOff(event.process))
    _leave_for_good(draft, participant, SWITCHED_OFF)


def _leave_for_good(draft: Draft, participant: Participant, excess: Excess) -> None:
    process = participant.process
    if participant.excess is None:
        draft.count("failover_switched_off" if excess == SWITCHED_OFF else "failover_budgets_exceeded")
        draft.publish("failover-left", participant.uid, pid=process.pid, reason=excess.why)
    left = replace(participant, excess=excess, cost=None, capped=None, placed=False, bytes=0)
    draft.put_participant(left)
    budgets.shrink(draft, process)
    if participant.standing in OFFERED:
        plan.withdraw_offer(draft, draft.state.members[process], excess.why)
    _release_waiters(draft, participant)
    _expire_standby(draft, participant)


def on_error(draft: Draft, event: mev.MemberError) -> None:
    """Ask the server for its state at once, because a participant reports an error. The report itself is a
    claim."""
    participant = draft.state.members.get(event.process)
    home = draft.state.domains.get((participant.home if participant is not None else None) or "")
    draft.count("failover_own_errors")
    if home is not None and home.server is not None and home.state in HOSTING:
        draft.emit(AskServer(home.id))


def on_moved(draft: Draft, event: mev.MemberMoved) -> None:
    participant = draft.state.members.get(event.process)
    name = f"d{event.generation}"
    there = {c.id.domain for c in draft.state.spaces_of(event.process) if c.living}
    told = (
        participant is not None
        and participant.standing is Standing.MOVING
        and participant.generation == event.generation
    )
    has_no_target = name not in draft.state.domains or (
        draft.state.domains[name].is_dead and name not in there
    )
    if participant is not None and told and has_no_target:
        _moved_too_late(draft, participant)
        return
    if participant is None or name not in draft.state.domains or not (told or name in there):
        draft.count("failover_words_ignored")
        return
    _has_context(draft, name, event.process)
    old = participant.home
    owed = event.waits and participant.owed
    if owed and not told:
        # It moved without mpsd, or waited for its turn when its connection ended. It does not deny the fault.
        participant = draft.put_participant(replace(participant, suspected=True))
    moved = replace(
        participant, home=name, standing=Standing.WAITING, generation=0, reason="", turn=Turn.NONE
    )
    moved = draft.put_participant(replace(moved, owed=False))
    if told and not event.waits:
        # It has nothing to replay any more.
        suspects.clear(draft, event.process)
        moved = draft.state.members[event.process]
    record = outcomes.unreported_of(draft.state, event.process)
    if record is not None:
        outcomes.revise(
            draft,
            record,
            event.process,
            outcome=Outcome.MOVED,
            why=f"{MISSING}: {event.missing}" if event.missing else "",
            held_ms=round(event.held_ns / 1e6, 3),
            fence_ms=round(event.fence_ns / 1e6, 3),
            first_ms=round(event.first_ns / 1e6, 3),
            restored_bytes=event.restored,
            replayed=0 if event.waits else event.replayed,
        )
    if owed:
        draft.put_participant(replace(moved, new_s=event.new_s, turn=Turn.WAITS))
        programcounter.settle(draft, event.process)
        moved = draft.state.members[event.process]
        if moved.turn is Turn.WAITS:
            serialreplay.wait(draft, moved, event.replayed, event.takes_ns / 1e9)
    else:
        programcounter.settle(draft, event.process)
        if event.waits:
            # A repeated report: give the turn at once, no participant waits for it again.
            draft.emit(GrantTurn(event.process, event.generation))
        serialreplay.start_next_turn(draft, name)
    draft.publish("failover-moved", participant.uid, pid=event.process.pid, domain=name)
    # The participant has not moved to a domain that it was told of since then.
    for former in (old, f"d{participant.generation}"):
        if former != name:
            _leave(draft, former)
    refresh(draft, event.process)


def _has_context(draft: Draft, name: str, process: ProcessInstance) -> None:
    """Note that the process has a new context in a domain where it had lost an earlier one."""
    domain = draft.state.domains[name]
    if process in domain.bereft:
        draft.put_domain(replace(domain, bereft=domain.bereft - {process}))


def _moved_too_late(draft: Draft, participant: Participant) -> None:
    """Keep a participant for the next standby: its old domain and the one it moved to have both ended."""
    record = outcomes.latest_of(draft.state, participant.process)
    if record is not None:
        outcomes.revise(
            draft, record, participant.process, why="the client arrived after the standby domain had ended"
        )
    draft.put_participant(
        replace(participant, standing=Standing.WAITING, generation=0, reason="", turn=Turn.NONE)
    )
    refresh(draft, participant.process)


def _leave(draft: Draft, name: str | None) -> None:
    """Let a domain end that this participant no longer uses."""
    domain = draft.state.domains.get(name or "")
    if domain is not None and domain.state is DomainState.FAULTED:
        leases.release_exited(draft, domain.id)
    if domain is not None:
        domains.settle(draft, domain.id)


def on_done(draft: Draft, event: mev.MemberDone) -> None:
    participant = draft.state.members.get(event.process)
    if participant is not None and participant.named:
        # The named offender was not killed and continues.
        draft.put_participant(replace(participant, named=False))
    home = draft.state.domains.get(f"d{event.generation}")
    has_had_turn = participant is not None and (participant.turn is not Turn.NONE or participant.runs_on)
    if participant is None or home is None or not has_had_turn or participant.home != home.id:
        draft.count("failover_words_ignored")
        return
    if event.runs_on:
        return
    why = f"{MISSING}: {event.missing}" if event.missing else ""
    again = {"restored_bytes": event.restored, "replayed": event.replayed}
    outcomes.set_time(draft, event.process, "done_ms", why=why, **again)
    serialreplay.end_turn(draft, event.process)
    if home.trial == event.process:
        draft.emit(ArmTimer(suspects.JOIN, str(event.process), suspects.JOIN_S))
    refresh(draft, event.process)


def on_turn_timer(draft: Draft, subject: str) -> None:
    serialreplay.on_timer(draft, subject)
    plan.refresh_all(draft)


def on_stayed(draft: Draft, event: mev.MemberStayed) -> None:
    participant = _reporter(draft, event.process, event.generation)
    if participant is None or participant.standing is not Standing.MOVING:
        return
    record = outcomes.latest_of(draft.state, event.process)
    if record is not None:
        outcomes.revise(draft, record, event.process, outcome=Outcome.STAYED, why=event.reason)
    draft.publish("failover-stayed", participant.uid, pid=event.process.pid, reason=event.reason)
    lost = draft.state.has_lost(participant)
    home = draft.state.domains.get(participant.home or "")
    if home is not None and (not lost or (record is not None and record.planned)):
        # A planned move: the client keeps its context and may be ready for the next move.
        draft.emit(StandDown(event.process, event.generation, "the client stayed"))
        draft.put_participant(
            replace(participant, standing=Standing.WAITING, generation=0, reason=event.reason)
        )
        if lost or home.state is DomainState.POISONED:
            # A fault came meanwhile, or may come: its later work has to be replayed in the next domain.
            plan.refresh(draft, event.process)
    else:
        plan.leave_behind(draft, participant, f"the client stayed: {event.reason}")
        _release_waiters(draft, participant)
    _leave(draft, f"d{event.generation}")


def on_wait(draft: Draft, subject: str) -> None:
    """Record participants that did not answer in time as silent. They may still answer later."""
    record = next((r for r in draft.state.failovers if str(r.id) == subject), None)
    for entry in record.fates if record is not None else ():
        current = next((r for r in draft.state.failovers if str(r.id) == subject), None)
        if current is not None and entry.outcome is Outcome.TOLD:
            limit = draft.state.policy.move_wait_s
            why = f"no answer within {limit:g} s"
            outcomes.revise(draft, current, entry.process, outcome=Outcome.SILENT, why=why)
            serialreplay.start_next_turn(draft, current.to)
            participant = draft.state.members.get(entry.process)
            if participant is not None and participant.standing is Standing.MOVING:
                _leave(draft, f"d{participant.generation}")


def on_drain(draft: Draft, event: ev.DrainRequested) -> None:
    """Move ready participants out of drained domains: a planned fail-over without a fault, which names no
    offender."""
    slots.on_drain(draft, event)
    for domain in tuple(draft.state.domains.values()) if event.on else ():
        here = not event.gpus or set(event.gpus) & set(domain.gpus)
        ready = [
            m
            for m in draft.state.members.values()
            if m.home == domain.id and not plan.reason_not_to_move(draft, m, plan.target_of(draft.state, m))
        ]
        if not here or not ready or domain.is_dead:
            continue
        if draft.state.slots[domain.slot].active == domain.id or domain.state is DomainState.FULL:
            domains.leave(draft, domain.id, DomainTrigger.RETIRE, planned=True)
        else:
            plan.domain_left(draft, domain.id, "drain", planned=True)


def on_copies(draft: Draft, event: ev.DriverFilesSeen) -> None:
    if draft.state.copies_problem != event.problem:
        draft.state = replace(draft.state, copies_problem=event.problem)
        plan.refresh_all(draft)
        for home in tuple(draft.state.domains):
            serialreplay.start_next_turn(draft, home)


def on_pages(draft: Draft, event: mev.MemberPages) -> None:
    """Leave out pages in which kernels of an abandoned context are marked as running for good.

    A program's claim about itself, possibly its last. It gains nothing: a program that wants its work to look
    ended can also overwrite those pages.
    """
    draft.emit(ExcludeWork(event.process, event.anew, event.start, event.end))
