"""Handlers for what programs say of their standby contexts. Each is a claim about itself, and no more."""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import domains, failover, fates, giving, leases, turns, whose
from mpsd.core import events as ev
from mpsd.core import memberevents as mev
from mpsd.core.draft import Draft
from mpsd.core.effects import AskServer, HaveTurn, LeaveOut, StandDown, Welcome
from mpsd.core.lifecycle import DomainTrigger
from mpsd.core.standby import OFFERED, OPAQUE_KEPT, Member, Outcome, Standing, Turn
from mpsd.core.state import SERVING, Client, ClientState, DomainState
from mpsd.model import Again, FailoverMode, ProcessInstance

MISSING = "what was in flight may be missing"
_ORDER = (FailoverMode.OFF, FailoverMode.KEEP, FailoverMode.EXACT)


def on_came(draft: Draft, event: mev.MemberCame) -> None:
    most = draft.state.policy.failover
    mode = min(event.mode, most, key=_ORDER.index)
    draft.emit(Welcome(event.process, mode))
    if mode is FailoverMode.OFF:
        # Told no more, whatever it had said before.
        on_left(draft, mev.MemberLeft(event.process))
        return
    known = draft.state.members.get(event.process)
    home = known.home if known is not None else None
    if event.generation or home is None:
        home = failover.find_home(draft.state, event.process, event.generation) or home
    # Its turn it has given up with its old connection, whose end may not be known.
    turns.cut(draft, event.process)
    # What it had been told before it is told again: it may be another daemon that it tells.
    fresh = Member(event.process, event.uid, mode, home=home, fences=event.fences, gives=event.gives)
    if known is not None:
        fresh = replace(fresh, opaque=known.opaque, unsure=known.unsure, told=known.told)
        fresh = replace(fresh, again=known.again, guessed=known.guessed, owed=known.owed)
        fresh = replace(fresh, slow=known.slow, since=known.since)
    if known is not None and known.standing is Standing.LEFT_BEHIND and known.home == home:
        fresh = replace(fresh, standing=Standing.LEFT_BEHIND, reason=known.reason)
    draft.put_member(fresh)
    contexts = {c.id.domain for c in draft.state.spaces_of(event.process)}
    if event.generation and f"d{event.generation}" not in contexts:
        _lives_nowhere(draft, event, home)
    # It may have moved, or been told to, and could not say so.
    for left in sorted({*contexts, *([f"d{known.generation}"] if known is not None else [])} - {home}):
        _leave(draft, left)
    refresh(draft, event.process)


def _lives_nowhere(draft: Draft, event: mev.MemberCame, home: str | None) -> None:
    """Where it says that it lives it has nothing any more. Was that lost, or has it ended, while the program
    could not be heard, then all that it has elsewhere is idle."""
    there = draft.state.domains.get(f"d{event.generation}")
    here = draft.state.domains.get(home or "")
    ended = there is None or there.is_dead or there.state in (DomainState.STOPPING, DomainState.FAILED)
    if here is not None and ended:
        draft.put_domain(replace(here, bereft=here.bereft | {event.process}))


def refresh(draft: Draft, process: ProcessInstance) -> None:
    """As failover.refresh, and start a standby where there is none yet."""
    failover.refresh(draft, process)
    member = draft.state.members.get(process)
    home = draft.state.domains.get((member.home if member is not None else None) or "")
    if home is not None and home.state in SERVING:
        domains.ensure(draft, home.slot)


def on_restored(draft: Draft, event: mev.MemberRestored) -> None:
    if draft.state.policy.failover is FailoverMode.OFF or event.process in draft.state.members:
        return
    member = Member(event.process, event.uid, event.mode, connected=False, home=event.home)
    if event.left_behind:
        member = replace(member, standing=Standing.LEFT_BEHIND, reason=event.left_behind)
    draft.put_member(member)


def on_left(draft: Draft, event: mev.MemberLeft) -> None:
    """It may come again. Where its work runs is remembered for as long as it is a client."""
    member = draft.state.members.get(event.process)
    if member is None:
        return
    turns.cut(draft, event.process)
    member = draft.state.members[event.process]
    if not any(c.living for c in draft.state.spaces_of(event.process)):
        ended(draft, event.process)
        return
    gone = replace(member, connected=False)
    if member.standing in OFFERED:
        gone = replace(gone, standing=Standing.WAITING, generation=0)
    draft.put_member(gone)
    _waited_for_no_longer(draft, member)
    _nobody_left(draft, member)


def has_begun(client: Client, member: Member | None) -> bool:
    """Whether it may have launched anything where it is a client: not who has moved there from a domain that
    was lost, has held its calls since, and is ended for having made that fault. (What it had in flight before
    looks as if it did not end.)"""
    is_here = member is not None and member.named and member.home == client.id.domain
    return not is_here or client.state is not ClientState.KILLING


def _waited_for_no_longer(draft: Draft, member: Member) -> None:
    """Neither where it is, nor where it was told to move, nor for what it was asked for."""
    giving.gone(draft, member.process)
    turns.go_on(draft, member.home)
    if member.standing is Standing.MOVING:
        turns.go_on(draft, f"d{member.generation}")


def ended(draft: Draft, process: ProcessInstance, *, execed: bool = False) -> None:
    """The process has ended, or is no client any more. `execed`: it goes on with another program, which may
    have come already."""
    member = draft.state.members.get(process)
    if member is None:
        return
    turns.gone(draft, process)
    record = fates.latest_of(draft.state, process)
    if record is not None and any(
        f.process == process and f.outcome is not Outcome.NOT_TOLD for f in record.fates
    ):
        fates.revise(draft, record, process, outcome=Outcome.ENDED)
    draft.drop_member(process)
    if execed and member.connected:
        fresh = Member(process, member.uid, member.mode, opaque=member.opaque)
        draft.put_member(replace(fresh, fences=member.fences, gives=member.gives))
    _waited_for_no_longer(draft, member)
    _nobody_left(draft, member)


def _nobody_left(draft: Draft, member: Member) -> None:
    home = draft.state.domains.get(member.home or "")
    if home is not None:
        failover.linger(draft, home.slot)


def on_linger(draft: Draft, name: str) -> None:
    """Nobody has wanted the standby for a while. A spare that is kept in any case stays one."""
    slot = draft.state.slots.get(name)
    if slot is None or slot.spare is None or draft.state.policy.spare:
        return
    active = draft.state.domains.get(slot.active or "")
    if failover.willing(draft.state, slot) or active is None or active.state not in SERVING:
        return
    draft.put_slot(replace(slot, spare=None))
    domains.move(draft, slot.spare, DomainTrigger.RETIRE)
    failover.refresh_all(draft, name)
    domains.settle(draft, slot.spare)


def _told(draft: Draft, process: ProcessInstance, generation: int) -> Member | None:
    """The member, if it speaks of the standby that it was last told of."""
    member = draft.state.members.get(process)
    if member is None or member.generation != generation or not generation:
        draft.count("failover_words_ignored")
        return None
    return member


def on_ready(draft: Draft, event: mev.MemberReady) -> None:
    member = _told(draft, event.process, event.generation)
    if member is None or member.standing not in OFFERED:
        return
    # It may be asked for this one, whatever became of the one before.
    yields = member.yields if member.standing is Standing.READY else None
    ready = replace(member, standing=Standing.READY, reason="", bytes=event.bytes, yields=yields)
    draft.put_member(replace(ready, ready_ms=round(event.after_ns / 1e6, 3)))
    refresh(draft, event.process)
    turns.go_on(draft, member.home)


def on_unready(draft: Draft, event: mev.MemberUnready) -> None:
    member = _told(draft, event.process, event.generation)
    if member is not None and member.standing is Standing.MOVING:
        _was_not_ready(draft, member, event.reason)
    elif member is not None and member.standing in OFFERED:
        draft.put_member(replace(member, standing=Standing.UNREADY, reason=event.reason, bytes=0))
        turns.go_on(draft, member.home)
        if event.for_memory:
            giving.without(draft, member)


def _was_not_ready(draft: Draft, member: Member, reason: str) -> None:
    """It said so before it heard that it is to move: as who was not ready in time it is offered the next."""
    record = fates.latest_of(draft.state, member.process)
    if record is not None:
        fates.revise(draft, record, member.process, outcome=Outcome.STAYED, why=f"it was not ready: {reason}")
    # Nor has it stayed: it may be told the same again.
    waits = replace(member, standing=Standing.WAITING, generation=0, reason=reason, bytes=0, asked=None)
    draft.put_member(waits)
    _waited_for_no_longer(draft, member)
    _leave(draft, f"d{member.generation}")
    refresh(draft, member.process)


def on_opaque(draft: Draft, event: mev.MemberOpaque) -> None:
    member = draft.state.members.get(event.process)
    if member is None or event.name in member.opaque or len(member.opaque) >= OPAQUE_KEPT:
        return
    member = replace(member, opaque=(*member.opaque, event.name))
    if member.standing in OFFERED:
        member = replace(member, standing=Standing.UNREADY, reason=f"it uses {event.name}")
    draft.put_member(member)
    turns.go_on(draft, member.home)


def on_unsure(draft: Draft, event: mev.MemberUnsure) -> None:
    member = draft.state.members.get(event.process)
    if member is not None and event.name not in member.unsure and len(member.unsure) < OPAQUE_KEPT:
        draft.put_member(replace(member, unsure=(*member.unsure, event.name)))


def on_error(draft: Draft, event: mev.MemberError) -> None:
    """A claim. All it does is that the server is asked at once how it stands."""
    member = draft.state.members.get(event.process)
    home = draft.state.domains.get((member.home if member is not None else None) or "")
    draft.count("failover_own_errors")
    if home is not None and home.server is not None and home.state in SERVING:
        draft.emit(AskServer(home.id))


def on_moved(draft: Draft, event: mev.MemberMoved) -> None:
    member = draft.state.members.get(event.process)
    name = f"d{event.generation}"
    there = {c.id.domain for c in draft.state.spaces_of(event.process) if c.living}
    told = member is not None and member.standing is Standing.MOVING and member.generation == event.generation
    there_is_none = name not in draft.state.domains or (
        draft.state.domains[name].is_dead and name not in there
    )
    if member is not None and told and there_is_none:
        _moved_too_late(draft, member)
        return
    if member is None or name not in draft.state.domains or not (told or name in there):
        draft.count("failover_words_ignored")
        return
    old = member.home
    owed = event.waits and member.owed
    moved = replace(member, home=name, standing=Standing.WAITING, generation=0, reason="", turn=Turn.NONE)
    moved = draft.put_member(replace(moved, owed=False))
    at_once = told and event.waits and member.again is Again.AT_ONCE
    record = fates.latest_of(draft.state, event.process)
    if record is not None:
        fates.revise(
            draft,
            record,
            event.process,
            outcome=Outcome.MOVED,
            why=f"{MISSING}: {event.missing}" if event.missing else "",
            held_ms=round(event.held_ns / 1e6, 3),
            fence_ms=round(event.fence_ns / 1e6, 3),
            first_ms=round(event.first_ns / 1e6, 3),
            turn_ms=round(event.first_ns / 1e6, 3) if at_once else None,
            restored_bytes=event.restored,
            replayed=0 if event.waits else event.replayed,
        )
    if at_once:
        turns.begin(draft, moved)
    elif owed:
        draft.put_member(replace(moved, new_s=event.new_s, turn=Turn.WAITS))
        whose.settle(draft, event.process)
        moved = draft.state.members[event.process]
        if moved.turn is Turn.WAITS:
            turns.wait(draft, moved, event.replayed, event.takes_ns / 1e9)
    else:
        whose.settle(draft, event.process)
        if event.waits:
            # It has said so before: nobody waits for it a second time.
            draft.emit(HaveTurn(event.process, event.generation))
        turns.go_on(draft, name)
    draft.publish("failover-moved", member.uid, pid=event.process.pid, domain=name)
    # Where it was told to go since then, it has not gone.
    for left in (old, f"d{member.generation}"):
        if left != name:
            turns.proven(draft, event.process, left)
            _leave(draft, left)
    refresh(draft, event.process)


def _moved_too_late(draft: Draft, member: Member) -> None:
    """Where it went nothing is any more, as where it was: it is for the next standby."""
    record = fates.latest_of(draft.state, member.process)
    if record is not None:
        fates.revise(draft, record, member.process, why="it came when that domain had ended")
    draft.put_member(replace(member, standing=Standing.WAITING, generation=0, reason="", turn=Turn.NONE))
    refresh(draft, member.process)


def _leave(draft: Draft, name: str | None) -> None:
    """Nothing of it runs there any more, or will: the domain may end over it."""
    domain = draft.state.domains.get(name or "")
    if domain is not None and domain.state is DomainState.FAULTED:
        leases.release_dead(draft, domain.id)
    if domain is not None:
        domains.settle(draft, domain.id)


def on_done(draft: Draft, event: mev.MemberDone) -> None:
    member = draft.state.members.get(event.process)
    if member is not None and member.named:
        # It was not ended, and goes on after all.
        draft.put_member(replace(member, named=False))
    home = draft.state.domains.get(f"d{event.generation}")
    open_still = home is not None and turns.is_open(home, event.process)
    has_had_it = member is not None and (member.turn is not Turn.NONE or open_still)
    if member is None or home is None or not has_had_it or member.home != home.id:
        draft.count("failover_words_ignored")
        return
    if event.runs_on:
        return
    why = f"{MISSING}: {event.missing}" if event.missing else ""
    again = {"restored_bytes": event.restored, "replayed": event.replayed}
    fates.timed(draft, event.process, "done_ms", why=why, **again)
    turns.over(draft, event.process)
    refresh(draft, event.process)


def on_turn_timer(draft: Draft, subject: str) -> None:
    turns.on_timer(draft, subject)
    failover.refresh_all(draft)


def on_late_timer(draft: Draft, subject: str) -> None:
    """It may be offered a standby again, whether its work has ended or not."""
    failover.refresh_all(draft)


def on_stayed(draft: Draft, event: mev.MemberStayed) -> None:
    member = _told(draft, event.process, event.generation)
    if member is None or member.standing is not Standing.MOVING:
        return
    record = fates.latest_of(draft.state, event.process)
    if record is not None:
        fates.revise(draft, record, event.process, outcome=Outcome.STAYED, why=event.reason)
    draft.publish("failover-stayed", member.uid, pid=event.process.pid, reason=event.reason)
    lost = draft.state.has_lost(member)
    home = draft.state.domains.get(member.home or "")
    if home is not None and (not lost or (record is not None and record.planned)):
        # A planned move: it lives on where it is, and may be ready for the next one.
        draft.emit(StandDown(event.process, event.generation, "it stayed"))
        draft.put_member(replace(member, standing=Standing.WAITING, generation=0, reason=event.reason))
        if lost or home.state is DomainState.POISONED:
            # By a fault meanwhile: what it has done since is to be done again elsewhere. Or one may come.
            failover.refresh(draft, event.process)
    else:
        failover.leave_behind(draft, member, f"it stayed: {event.reason}")
        _waited_for_no_longer(draft, member)
    _leave(draft, f"d{event.generation}")


def on_wait(draft: Draft, subject: str) -> None:
    """Who was told has had its time: whoever says nothing is recorded as silent, and may still speak."""
    record = next((r for r in draft.state.failovers if str(r.id) == subject), None)
    for fate in record.fates if record is not None else ():
        current = next((r for r in draft.state.failovers if str(r.id) == subject), None)
        if current is not None and fate.outcome is Outcome.TOLD:
            limit = draft.state.policy.move_wait_s
            why = f"no word within {limit:g} s"
            fates.revise(draft, current, fate.process, outcome=Outcome.SILENT, why=why)
            turns.go_on(draft, current.to)
            member = draft.state.members.get(fate.process)
            if member is not None and member.standing is Standing.MOVING:
                _leave(draft, f"d{member.generation}")


def on_drain(draft: Draft, event: ev.DrainRequested) -> None:
    """Programs that are ready are moved live: a fail-over without a fault, which names nobody."""
    domains.on_drain(draft, event)
    for domain in tuple(draft.state.domains.values()) if event.on else ():
        here = not event.gpus or set(event.gpus) & set(domain.gpus)
        ready = [
            m
            for m in draft.state.members.values()
            if m.home == domain.id and not failover.why_not(draft, m, failover.target_of(draft.state, m))
        ]
        if not here or not ready or domain.is_dead:
            continue
        if draft.state.slots[domain.slot].active == domain.id:
            domains.leave(draft, domain.id, DomainTrigger.RETIRE, planned=True)
        else:
            failover.domain_left(draft, domain.id, "drain", planned=True)


def on_copies(draft: Draft, event: ev.CopiesSeen) -> None:
    if draft.state.copies_problem != event.problem:
        draft.state = replace(draft.state, copies_problem=event.problem)
        failover.refresh_all(draft)
        for home in tuple(draft.state.domains):
            turns.go_on(draft, home)


def on_pages(draft: Draft, event: mev.MemberPages) -> None:
    """Kernels that were lost with its old context say there for good that they run. A claim about itself,
    maybe its last one: who wants to be taken for ended can wipe what they say as well."""
    draft.emit(LeaveOut(event.process, event.anew, event.start, event.end))
