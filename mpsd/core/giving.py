"""Memory that is there for a fail-over alone goes to a program whose allocation would fail.

First its own, which it sees to by itself. Then that of others on its GPUs, one after the other: the room that
each has for copies of what it writes, which it takes again when it writes on; then their standby contexts,
which they make again later where memory is left by then. Only of those of the same slot, who share a domain,
or of the same user: a word of somebody else's takes nothing from anybody.

For one allocation nobody is asked twice for the same: so one that can never succeed ends, although others may
take again meanwhile what they have given.

Who cannot ask somebody (a stranger, or a program without mpsd's libcuda or without fail-over) is to find
memory free: where a GPU is seen to be nearly full, the standbys there of whom somebody there cannot ask go,
until it is no more.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import events as ev
from mpsd.core import failover
from mpsd.core import memberevents as mev
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, GiveMemory, HaveMemory
from mpsd.core.standby import Member, Short, Standing, Turn
from mpsd.core.state import State
from mpsd.model import ProcessInstance, Spared

ASK_S = 1.0
"""How long one is waited for: who makes a standby hears nothing for that long, and is passed over."""
MOST_S = 3.0
"""After that no other one is asked: the program waits for an answer for 4 s."""
SHORTS_KEPT = 8
"""As many allocations of one program are told from one another: of threads that ask in turns."""
BACK_S = 30.0
"""After that a standby whose memory was given is offered again: the program looks whether there is enough."""

WAIT, BACK = "failover-give", "failover-back"


def on_short(draft: Draft, event: mev.MemberShort) -> None:
    """An allocation of its would fail. It waits for an answer."""
    asker = draft.state.members.get(event.process)
    if asker is None:
        draft.count("failover_words_ignored")
        draft.emit(HaveMemory(event.process, 0, event.number))
        return
    before = next((s for s in asker.shorts if s.number == event.number), None)
    asked = before.asked if before is not None else frozenset()
    _ask_next(draft, asker, Short(event.number, event.wanted, event.free, draft.now, asked))


def _remember(draft: Draft, asker: Member, short: Short) -> None:
    others = tuple(s for s in asker.shorts if s.number != short.number)
    draft.put_member(replace(asker, shorts=(*others, short)[-SHORTS_KEPT:]))


def _ask_next(draft: Draft, asker: Member, short: Short) -> None:
    found = _next(draft.state, asker, short) if draft.now - short.since < MOST_S else None
    if found is None:
        _answer(draft, asker, short, 0)
        return
    process, spared = found
    _remember(draft, asker, replace(short, of=found, asked=short.asked | {found}))
    draft.emit(GiveMemory(process, spared))
    draft.emit(ArmTimer(WAIT, _subject(asker.process, short.number, found), ASK_S))


def _answer(draft: Draft, asker: Member, short: Short, given: int) -> None:
    _remember(draft, asker, replace(short, of=None))
    draft.emit(HaveMemory(asker.process, given, short.number))


def _next(state: State, asker: Member, short: Short) -> tuple[ProcessInstance, Spared] | None:
    """Who is asked now, and for what."""
    gpus = gpus_of(state, asker)
    others = [m for m in _givers(state) if m.process != asker.process and gpus_of(state, m) & gpus]
    near = [m for m in others if _is_near(state, asker, m)]
    rooms = [m for m in near if (m.process, Spared.ROOM) not in short.asked]
    if rooms:
        return _largest(rooms).process, Spared.ROOM
    ready = [m for m in near if m.standing is Standing.READY]
    ready = [m for m in ready if (m.process, Spared.STANDBY) not in short.asked]
    return (_largest(ready).process, Spared.STANDBY) if ready and _would_do(ready, short) else None


def _givers(state: State) -> list[Member]:
    """Who can be asked for something now."""
    able = (m for m in state.members.values() if m.gives and m.connected)
    return [m for m in able if m.standing is not Standing.MOVING and m.turn is Turn.NONE]


def _largest(members: list[Member]) -> Member:
    return max(members, key=lambda m: (m.bytes, m.process.pid))


def gpus_of(state: State, member: Member) -> frozenset[str]:
    home = state.domains.get(member.home or "")
    return frozenset(home.gpus if home is not None else ())


def _would_do(left: list[Member], short: Short) -> bool:
    """Whether all standbys together make the allocation fit: for one that fails all the same nobody goes
    without. Where one does not say what it takes, nobody knows."""
    return not all(m.bytes for m in left) or short.free + sum(m.bytes for m in left) >= short.wanted


def _is_near(state: State, asker: Member, other: Member) -> bool:
    """Of its slot or its user."""
    here, there = state.domains[asker.home or ""], state.domains[other.home or ""]
    return here.slot == there.slot or asker.uid == other.uid


def on_gave(draft: Draft, event: mev.MemberGave) -> None:
    """It has given what it was asked for; 0 bytes: it had nothing of the kind, or could not."""
    if event.bytes:
        draft.count("failover_memory_given")
    for asker in _asking(draft.state, event.process, event.spared):
        if event.bytes:
            _answer(draft, asker, asker.shorts[-1], event.bytes)
        else:
            _ask_next(draft, asker, asker.shorts[-1])


def on_wait(draft: Draft, subject: str) -> None:
    """No answer in time: the next one is asked. `subject`: as of _subject()."""
    for asker in tuple(draft.state.members.values()):
        short = asker.shorts[-1] if asker.shorts else None
        if short is None or short.of is None:
            continue
        if subject == _subject(asker.process, short.number, short.of):
            _ask_next(draft, asker, short)


def gone(draft: Draft, process: ProcessInstance) -> None:
    """It has nothing more to give, or to be told."""
    for spared in Spared:
        for asker in _asking(draft.state, process, spared):
            _ask_next(draft, asker, asker.shorts[-1])


def _asking(state: State, process: ProcessInstance, spared: Spared) -> list[Member]:
    """Who waits for what this one was asked for."""
    return [m for m in state.members.values() if m.shorts and m.shorts[-1].of == (process, spared)]


def without(draft: Draft, member: Member) -> None:
    """Its standby has gone for the memory that it took, or there was too little for one: later it is asked
    whether there is enough."""
    draft.emit(ArmTimer(BACK, f"{member.process} {member.generation}", BACK_S))


def on_back(draft: Draft, subject: str) -> None:
    """`subject`: the process, and the generation of the standby that it had."""
    for member in tuple(draft.state.members.values()):
        known = member.standing is Standing.UNREADY and not member.opaque
        if known and subject == f"{member.process} {member.generation}":
            draft.put_member(replace(member, standing=Standing.WAITING, generation=0))
            failover.refresh(draft, member.process)


def _subject(asker: ProcessInstance, number: int, asked: tuple[ProcessInstance, Spared]) -> str:
    return f"{asker} {number} {asked[0]} {asked[1].value}"


def watched(state: State, now: float) -> frozenset[str]:
    """The GPUs with a standby that would go for somebody there who cannot ask for it."""
    gpus = {gpu for member in _givers(state) for gpu in gpus_of(state, member)}
    return frozenset(gpu for gpu in gpus if _standbys_on(state, gpu, now))


def _needy(state: State, gpu: str) -> frozenset[tuple[str, int] | None]:
    """Of whoever works on this GPU: slot and user of those who can ask; None for those who cannot."""
    domains = {d.id: d for d in state.domains.values() if gpu in d.gpus}
    here = [c for c in state.clients.values() if c.id.domain in domains and c.living and state.at_home(c)]
    able = {m.process: m.uid for m in state.members.values() if m.gives and m.connected}
    slots = ((domains[c.id.domain].slot, able.get(c.id.process)) for c in here)
    return frozenset(None if uid is None else (slot, uid) for slot, uid in slots)


def _cannot_ask(needy: frozenset[tuple[str, int] | None], slot: str, uid: int) -> bool:
    return any(one is None or (one[0] != slot and one[1] != uid) for one in needy)


def _standbys_on(state: State, gpu: str, now: float) -> list[Member]:
    """Whose standby on this GPU may go; not of who was asked and has not given it."""
    ready = [m for m in _givers(state) if m.standing is Standing.READY and gpu in gpus_of(state, m)]
    ready = [m for m in ready if m.yields is None or now - m.yields >= BACK_S]
    needy = _needy(state, gpu) if ready else frozenset()
    return [m for m in ready if _cannot_ask(needy, state.domains[m.home or ""].slot, m.uid)]


def on_full(draft: Draft, event: ev.GpuFull) -> None:
    """One at a time: what the last one gave may do."""
    if event.gpu not in watched(draft.state, draft.now):
        return
    asked = (m for m in draft.state.members.values() if m.standing is Standing.READY and m.yields is not None)
    due = [m for m in asked if event.gpu in gpus_of(draft.state, m) and draft.now - (m.yields or 0.0) < ASK_S]
    if due:
        return
    member = _largest(_standbys_on(draft.state, event.gpu, draft.now))
    draft.put_member(replace(member, yields=draft.now))
    draft.count("failover_standbys_yielded")
    draft.emit(GiveMemory(member.process, Spared.STANDBY))
