"""Programs that keep to the protocol of fail-over, and a daemon's mind, in a time of their own.

Each program has one truth: where it lives, and in which domains it has contexts. What it says is that, a
little later; what it does with what it is told is what clients/libcuda does. Faults, deaths, drains,
connections that end and restarts of the daemon come at random, by a seed. When all has come to rest the mind
has to agree with the truth, nobody may still wait for anything, and no domain may be left over.

Long because programs, daemon and chance share one time and one truth.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core import memberevents as mev
from mpsd.core.events import DomainRole
from mpsd.core.standby import Standing, Turn
from mpsd.core.state import DomainState, Policy, State
from mpsd.model import Again, FailoverMode, Liveness, ProcessInstance, ServerState, Spared, Whose
from tests.support.core import GPU, OUT_OF_RANGE, SLOT, UID, World, facts, kernel_xid, process, server_of

LASTS_S, RESTS_S = 20.0, 70.0
IN_USE = (DomainState.ACTIVE, DomainState.WARM)
NO_SERVER = (DomainState.STARTING, DomainState.STOPPING, DomainState.FAILED)
GIVES_UP_S = 11.0
REMEMBERED_S = 30.0
Word = fx.OfferStandby | fx.StandDown | fx.Move | fx.HaveTurn | fx.GiveMemory
WORDS = (fx.OfferStandby, fx.StandDown, fx.Move, fx.HaveTurn, fx.GiveMemory)


@dataclass(eq=False)
class Program:
    """`lives`: the domain of its work. `offered`: the generation that it was told of last. `makes`: so many
    times what it does again faults again. `waits`: for its turn."""

    process: ProcessInstance
    mode: FailoverMode
    lives: str
    contexts: set[str] = field(default_factory=set)
    alive: bool = True
    connected: bool = False
    offered: int = 0
    ready: bool = False
    waits: bool = False
    works: bool = False
    makes: int = 0

    @property
    def generation(self) -> int:
        """As HELLO has it: 0 in its first context."""
        return int(self.lives[1:]) if self.lives != self.first else 0

    def __post_init__(self) -> None:
        self.first = self.lives
        self.contexts.add(self.lives)


class Play:
    """`restarts`: the daemon does, too, and knows then what was written down up to 0.3 s before. `apart`: no
    fault comes while what was in flight at the one before is done again, so that nobody else may be named."""

    def __init__(self, seed: int, *, restarts: bool = False, apart: bool = False) -> None:
        self.random = chance = random.Random(seed)
        self.restarts, self.apart = restarts, apart
        self.makers: dict[ProcessInstance, float] = {}
        policy = Policy(
            failover=FailoverMode.EXACT,
            spare=chance.random() < 0.7,
            moves_per_minute=chance.choice([2, 6, 100]),
            evict_offender=chance.random() < 0.8,
        )
        self.world = World(policy)
        self.programs: dict[ProcessInstance, Program] = {}
        self.lost: set[str] = set()
        self.wrong: list[str] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._past: list[tuple[float, State]] = []

    # Time

    def after(self, seconds: float, act: Callable[[], None], *, exact: bool = False) -> None:
        self._number += 1
        due = self.world.now + seconds * (1.0 if exact else self.random.uniform(0.5, 1.5))
        heapq.heappush(self._queue, (due, self._number, act))

    def do(self, event: ev.Event) -> None:
        self._past = [*self._past[-40:], (self.world.now, self.world.state)]
        for effect in self.world.do(event):
            self._perform(effect)

    def run(self) -> list[str]:
        """What is wrong when all has come to rest."""
        self.do(ev.SlotWanted(SLOT, (GPU,), UID))
        self.do(ev.CopiesSeen(""))
        until = self.world.now + LASTS_S
        self.after(0.5, lambda: self._chance(until))
        while self._queue and self._queue[0][0] < until + RESTS_S:
            due, _, act = heapq.heappop(self._queue)
            self.world.now = max(due, self.world.now)
            act()
        return [*self.wrong, *self._is_wrong_at_rest()]

    # The daemon's hands

    def _perform(self, effect: fx.Effect) -> None:
        match effect:
            case fx.ArmTimer(kind, subject, delay_s):
                self.after(delay_s, lambda: self.do(ev.TimerFired(kind, subject)), exact=True)
            case fx.StartDomain(domain):
                self.after(self.random.choice([0.05, 0.5]), lambda: self._start(domain))
            case fx.StopDomain(domain):
                self.after(0.1, lambda: self._stopped(domain))
            case fx.Attach():
                self.after(0.01, lambda: self._attached(effect))
            case fx.Kill(client):
                self.after(0.01, lambda: self._die(self.programs[client.process]))
            case fx.Terminate():
                self.after(0.01, lambda: self.do(ev.TerminateFinished(effect.process, True, "done")))
            case fx.AskServer(domain):
                self.after(0.05, lambda: self._answer(domain))
            case fx.ConfirmWork(client) | fx.ProbeWork(client):
                self.after(0.05, lambda: self.do(ev.WorkEnded(client, "gone")))
            case fx.Record(record) if self.apart and record.offender is not None:
                self._is_named(record.offender.id.process)
            case _ if isinstance(effect, WORDS):
                self.after(0.001, lambda: self._hear(effect))

    def _start(self, domain: str) -> None:
        if domain not in self.world.state.domains:
            return
        if self.random.random() < 0.08:
            self.do(ev.DomainStartFailed(domain, "no memory"))
            return
        self.world.started(domain)
        for effect in self.world.last:
            self._perform(effect)

    def _stopped(self, domain: str) -> None:
        self.lost.add(domain)
        self.do(ev.DomainStopped(domain))

    def _attached(self, effect: fx.Attach) -> None:
        where, who, space = effect.domain, effect.process, effect.space
        if self.programs[who].alive:
            self.do(ev.ClientAttached(where, who, 1, tracked=True, space=space, apart=True))
        else:
            self.do(ev.AttachFailed(where, who, "gone", space))

    def _answer(self, domain: str) -> None:
        if domain in self.world.state.domains:
            state = ServerState.FAULT if domain in self.lost else ServerState.ACTIVE
            self.do(ev.ServerStateSeen(domain, state))

    # Programs

    def _hear(self, word: Word) -> None:
        program = self.programs[word.process]
        if not (program.alive and program.connected):
            return
        match word:
            case fx.OfferStandby(_, generation):
                program.offered, program.ready = generation, False
                self.after(self.random.choice([0.05, 0.3]), lambda: self._make(program, generation))
            case fx.StandDown(_, generation) if generation == program.offered:
                program.offered, program.ready = 0, False
            case fx.Move(_, generation) if generation == program.offered and program.ready:
                program.ready = False
                self.after(self.random.choice([0.005, 0.1]), lambda: self._move(program, word))
            case fx.Move(_, generation):
                stayed = mev.MemberStayed(program.process, generation, "no standby")
                self.after(0.001, lambda: self._say(program, stayed))
            case fx.HaveTurn(_, generation) if program.waits:
                program.waits = False
                self.after(self.random.choice([0.005, 0.2]), lambda: self._do_again(program, generation))
            case fx.GiveMemory(_, spared):
                self._give(program, spared)

    def _say(self, program: Program, event: ev.Event) -> None:
        if program.alive and program.connected:
            self.do(event)

    def _give(self, program: Program, spared: Spared) -> None:
        gives = self.random.random() < 0.6
        if gives and spared is Spared.STANDBY and program.ready:
            program.ready = False
            needed = mev.MemberUnready(program.process, program.offered, "its memory was needed", True)
            self.after(0.001, lambda: self._say(program, needed))
        gave = mev.MemberGave(program.process, 1 << 20 if gives else 0, spared)
        self.after(0.002, lambda: self._say(program, gave))

    def _make(self, program: Program, generation: int) -> None:
        where = f"d{generation}"
        if not program.alive or program.offered != generation:
            return
        if where in self.lost or where not in self.world.state.domains or self.random.random() < 0.1:
            self._say(program, mev.MemberUnready(program.process, generation, "no", where not in self.lost))
            return
        program.contexts.add(where)
        self.do(ev.ClientNoticed(where, facts(program.process.pid)))
        self.after(0.03, lambda: self._is_made(program, generation))

    def _is_made(self, program: Program, generation: int) -> None:
        if program.alive and program.connected and program.offered == generation:
            program.ready = True
            self.do(mev.MemberReady(program.process, generation, 5_000_000, 1 << 20))

    def _move(self, program: Program, word: fx.Move) -> None:
        if not program.alive:
            return
        program.lives, program.offered = f"d{word.generation}", 0
        in_flight = program.works or program.makes > 0
        program.waits = word.again in (Again.IN_TURN, Again.AT_ONCE) and in_flight and program.connected
        waits = program.waits
        if word.again is Again.IN_TURN and self.random.random() < 0.6:
            whose = Whose.OWN if program.makes else self.random.choice(list(Whose)[:1] + [Whose.OTHERS] * 2)
            self._say(program, mev.MemberLooked(program.process, word.generation, whose))
        if waits:
            self.after(GIVES_UP_S, lambda: self._give_up(program, word.generation), exact=True)
        moved = mev.MemberMoved(program.process, word.generation, 1, 2, 3, replayed=100, waits=waits)
        self._say(program, moved)
        if waits and word.again is Again.AT_ONCE:
            program.waits = False
            self.after(0.02, lambda: self._do_again(program, word.generation))

    def _give_up(self, program: Program, generation: int) -> None:
        if program.alive and program.waits and program.lives == f"d{generation}":
            if program.lives not in self.lost:
                self.wrong.append(f"{program.process} had no turn in {program.lives}")
            program.waits = False
            done = mev.MemberDone(program.process, generation, missing="nobody said anything")
            self._say(program, done)

    def _do_again(self, program: Program, generation: int) -> None:
        where = f"d{generation}"
        if not program.alive or program.lives != where or where in self.lost:
            return
        if program.makes:
            program.makes -= 1
            self.makers[program.process] = self.world.now
            self._lose(where)
        elif self.random.random() < 0.2:
            runs_on = mev.MemberDone(program.process, generation, 5, 6, runs_on=True)
            self._say(program, runs_on)
            self.after(self.random.choice([0.2, 3.0]), lambda: self._end(program, generation))
        else:
            self._end(program, generation)

    def _end(self, program: Program, generation: int) -> None:
        if program.lives == f"d{generation}" and program.lives not in self.lost:
            self._say(program, mev.MemberDone(program.process, generation, 5, 6))

    # What comes between

    def _lose(self, domain: str, *, dies: bool = False) -> None:
        """`dies`: its server, where nobody works."""
        there = self.world.state.domains.get(domain)
        if domain in self.lost or there is None or there.state in NO_SERVER:
            return
        self.lost.add(domain)
        if dies or self.random.random() < 0.3:
            self.do(ev.ServerDied(domain, server_of(domain)))
            return
        self.after(0.3, lambda: self._answer(domain))
        self.do(kernel_xid(13, OUT_OF_RANGE, None, "", GPU))
        pid = server_of(domain).pid
        self.after(0.02, lambda: self.do(kernel_xid(43, "channel 0x1", pid, "nvidia-cuda-mps", GPU)))

    def _come(self) -> None:
        slot = self.world.state.slots[SLOT]
        if not slot.active or slot.active in self.lost:
            return
        if self.world.state.domains[slot.active].state is not DomainState.ACTIVE:
            return
        mode = self.random.choice([FailoverMode.EXACT] * 4 + [FailoverMode.KEEP])
        program = Program(process(1000 + len(self.programs)), mode, slot.active)
        self.programs[program.process] = program
        self.do(ev.ClientNoticed(slot.active, facts(program.process.pid)))
        self.after(self.random.choice([0.001, 0.5]), lambda: self._connect(program))

    def _connect(self, program: Program) -> None:
        if program.alive and not program.connected:
            program.connected, program.offered, program.ready = True, 0, False
            words = (program.process, UID, program.mode, program.generation, True, True)
            self.do(mev.MemberCame(*words))

    def _cut(self, program: Program, seconds: float = 0.3) -> None:
        if program.alive and program.connected:
            program.connected = program.waits = False
            self.do(mev.MemberLeft(program.process))
            self.after(seconds, lambda: self._connect(program))

    def _die(self, program: Program) -> None:
        if program.alive:
            program.alive = False
            self.do(ev.ClientDied(program.process))
            if program.connected:
                program.connected = False
                self.do(mev.MemberLeft(program.process))

    def _restart(self) -> None:
        """Of the domains it knows all, of the programs what was written down."""
        old, known = self.world.state, self.world.now - self.random.choice([0.0, 0.1, 0.3])
        written = next((state for at, state in reversed(self._past) if at <= known), old)
        slot = old.slots[SLOT]
        self._queue = [one for one in self._queue if "_perform" not in one[2].__qualname__]
        heapq.heapify(self._queue)
        self.world.state = State(policy=old.policy)
        for program in self.programs.values():
            if program.connected:
                program.connected = program.waits = program.ready = False
                program.offered = 0
                self.after(self.random.choice([0.1, 2.0]), lambda who=program: self._connect(who))  # type: ignore[misc]
        self.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
        for d in [
            d for d in old.domains.values() if d.control is not None and d.id not in self._stopping(old)
        ]:
            role = {slot.active: DomainRole.ACTIVE, slot.spare: DomainRole.SPARE}.get(d.id, DomainRole.OLD)
            at = ServerState.FAULT if d.state is DomainState.FAULTED else ServerState.ACTIVE
            here = at if d.server else ServerState.GONE
            self.do(ev.DomainAdopted(d.id, SLOT, role, d.state, d.control, d.server, here, d.bereft))
        for member in written.members.values():
            if self.programs[member.process].alive and member.home:
                left = member.reason if member.standing is Standing.LEFT_BEHIND else ""
                self.do(mev.MemberRestored(member.process, UID, member.mode, member.home, left))
        for client in sorted(old.clients.values(), key=lambda c: c.noticed):
            known_there = client.living and client.id.domain in self.world.state.domains
            if known_there and self.programs[client.id.process].alive:
                self.do(ev.ClientNoticed(client.id.domain, facts(client.id.process.pid)))
        self.do(ev.AdoptionDone())
        self.do(ev.CopiesSeen(""))
        for domain in [name for name in self.world.state.domains if name in self.lost]:
            self.after(0.3, lambda name=domain: self._answer(name))  # type: ignore[misc]

    def _stopping(self, state: State) -> set[str]:
        """Those that end with the daemon's helper, whether or not there is a daemon."""
        ending = {d.id for d in state.domains.values() if d.state in NO_SERVER}
        self.lost |= ending
        return ending

    def _chance(self, until: float) -> None:
        living = [p for p in self.programs.values() if p.alive]
        if self.restarts and self.random.random() < 0.12:
            self._restart()
        what = self.random.random()
        if what < 0.35 or len(living) < 3:
            self._come()
        elif what < 0.42:
            self._die(self.random.choice(living))
        elif what < 0.52:
            self._cut(self.random.choice(living))
        elif what < 0.8:
            self._fault(self.random.choice(living), living)
        elif what < 0.87:
            self.do(ev.DrainRequested((), True))
            self.do(ev.DrainRequested((), False))
        elif what < 0.92:
            self._lose(self.world.state.slots[SLOT].spare or "", dies=True)
        elif what < 0.96:
            short = self.random.choice(living)
            self._number += 1
            self._say(short, mev.MemberShort(short.process, 1 << 30, 0, self._number))
        else:
            self._number += 1
            who = self.random.choice(living).process
            self.do(ev.EvictRequested(who, Liveness.RUNNING, f"r{self._number}", "asked"))
        if self.world.now < until:
            self.after(self.random.choice([0.02, 0.3, 2.0]), lambda: self._chance(until))

    def _is_named(self, who: ProcessInstance) -> None:
        made_it = self.world.now - self.makers.get(who, 0.0) < REMEMBERED_S
        if self.programs[who].alive and not made_it:
            self.wrong.append(f"{who} is named, who made no fault")

    def _is_late(self) -> bool:
        """Whether somebody is still taken to have made what comes."""
        state, now = self.world.state, self.world.now
        return any(now < one.named for domain in state.domains.values() for one in domain.unproven)

    def _fault(self, offender: Program, living: list[Program]) -> None:
        members = self.world.state.members.values()
        moving = any(m.turn is not Turn.NONE or m.standing is Standing.MOVING for m in members)
        if self.apart and (moving or self._is_late()):
            return
        self.makers[offender.process] = self.world.now
        offender.makes = self.random.choice([0, 1, 1, 3])
        for program in living:
            program.works = self.random.random() < 0.6
        self._lose(offender.lives)

    # At the end

    def _is_wrong_at_rest(self) -> list[str]:
        state, found = self.world.state, []
        for member in state.members.values():
            program = self.programs[member.process]
            if member.turn is not Turn.NONE or member.standing is Standing.MOVING:
                found.append(f"{member.process} still {member.turn or member.standing}")
            here = program.lives == member.home or program.lives in self.lost
            if program.alive and program.connected and not here:
                found.append(f"{member.process} is taken to live in {member.home}, not {program.lives}")
            given_up = member.standing in (Standing.LEFT_BEHIND, Standing.UNREADY)
            if program.alive and program.connected and program.lives in self.lost and not given_up:
                found.append(f"{member.process} stays in {program.lives}, which was lost: {member.standing}")
        active = state.domains.get(state.slots[SLOT].active or "")
        if active is None or active.state is not DomainState.ACTIVE:
            found.append("no domain is in use")
        homes = {p.lives for p in self.programs.values() if p.alive}
        for domain in state.domains.values():
            if domain.state not in IN_USE and domain.id not in homes and not self._waits_there(domain.id):
                found.append(f"{domain.id} is left over, {domain.state}")
        return found

    def _waits_there(self, domain: str) -> bool:
        """Who lives nowhere any more, and was not ready when there was a place, is taken to be there."""
        return any(member.home == domain for member in self.world.state.members.values())
