"""Programs that keep to the fail-over protocol, and a daemon's state, in simulated time.

Each program has one truth: the domain of its work, and the domains of its contexts. Its messages report that
truth a little later; it follows orders as clients/libcuda does. Faults, exits, drains, closed connections and
restarts of the daemon come at random, from a seed. At rest, the state must agree with the truth, no program
may still wait, and no domain may be left over.

Long because a history has one state: programs, orders and the daemon's answers.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from mpsd.base.model import (
    ClientId,
    ExceptionOwner,
    FailoverMode,
    Liveness,
    ProcessInstance,
    Reclaimable,
    ReplayMode,
    ServerState,
)
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core import slots
from mpsd.core.events import DomainRole
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import Outcome, Standing, Turn
from mpsd.core.failover.suspects import DENIALS
from mpsd.core.state import Domain, DomainState, Policy, State
from tests.support.core import GPU, OUT_OF_RANGE, SLOT, UID, World, facts, kernel_xid, process, server_of

LASTS_S, RESTS_S = 20.0, 120.0
IN_USE = (DomainState.ACTIVE, DomainState.WARM)
NO_SERVER = (DomainState.STARTING, DomainState.STOPPING, DomainState.FAILED)
GIVES_UP_S = 11.0
Word = fx.OfferStandby | fx.StandDown | fx.Move | fx.GrantTurn | fx.RequestMemory
WORDS = (fx.OfferStandby, fx.StandDown, fx.Move, fx.GrantTurn, fx.RequestMemory)


@dataclass(eq=False)
class Program:
    """A simulated program. `lives`: the domain of its work.

    `offered`: the generation last offered. `makes`: so many of its replays fault again. `waits`: for its
    turn. `idles`: it launches nothing and takes no part in fail-over.
    `last`: the generation to which it was last told to move. `making`: number of the standby context that it
    makes now.
    """

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
    idles: bool = False
    last: int = 0
    making: int = 0
    moves: bool = False

    @property
    def generation(self) -> int:
        """The generation in HELLO: 0 in the first context."""
        return int(self.lives[1:]) if self.lives != self.first else 0

    def __post_init__(self) -> None:
        self.first = self.lives
        self.contexts.add(self.lives)


class Play:
    """A random history of one slot. No program may be named for a fault in a domain where it made none.

    `restarts`: the daemon restarts, too, and knows then what was written down up to 0.3 s before.
    `on_demand`: servers come with clients; all programs end at times, and a program takes a while from the
    path to its domain. `bursts`: most events are faults, and some programs have no proxy. `dies_before`: the
    daemon dies before that effect after a fault, and restarts. `ends`: the end of an exited program's work
    shows only where it ran; some programs launch nothing.
    """

    def __init__(
        self,
        seed: int,
        *,
        restarts: bool = False,
        on_demand: bool = False,
        bursts: bool = False,
        dies_before: int | None = None,
        ends: bool = False,
    ) -> None:
        self.random = chance = random.Random(seed)
        self.seed = seed
        self.restarts, self.on_demand, self.bursts, self.ends = restarts, on_demand, bursts, ends
        self.faulters: dict[str, set[ProcessInstance]] = defaultdict(set)
        policy = Policy(
            failover=FailoverMode.EXACT,
            spare=chance.random() < 0.7,
            moves_per_minute=chance.choice([2, 6, 100]),
            evict_offender=chance.random() < 0.8,
            # A full domain ends without regard to programs on their way to it.
            clients_per_domain=48 if on_demand else random.Random(f"full-{seed}").choice([2, 3, 48, 48]),
            on_demand=on_demand,
            idle_s=random.Random(f"idle-{seed}").choice([0.2, 1.0, 4.0]),
        )
        self.world = World(policy)
        self.programs: dict[ProcessInstance, Program] = {}
        self.lost: set[str] = set()
        self.wrong: list[str] = []
        self.named: set[tuple[str | None, ProcessInstance]] = set()
        self.trials = 0
        self.dies_before, self._effects_left, self.deaths = dies_before, math.inf, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._restarting = False
        self._coming: list[Program] = []
        self._past: list[tuple[float, State]] = []

    # Time

    def after(self, seconds: float, act: Callable[[], None], *, exact: bool = False) -> None:
        self._number += 1
        due = self.world.now + seconds * (1.0 if exact else self.random.uniform(0.5, 1.5))
        heapq.heappush(self._queue, (due, self._number, act))

    def do(self, event: ev.Event) -> None:
        self._past = [*self._past[-40:], (self.world.now, self.world.state)]
        for effect in self.world.do(event):
            if self._effects_left <= 0:
                self._effects_left = math.inf
                self.deaths += 1
                self._restart()
                return
            self._effects_left -= 1
            self._perform(effect)
        led = self.world.state.domains.get(self.world.path() or "")
        if (
            self.world.path() is not None
            and not self._restarting
            and (led is None or led.state is DomainState.STOPPING)
        ):
            self.wrong.append(f"the path leads to {self.world.path()} at {self.world.now}")

    def run(self) -> list[str]:
        """Run the history. Return what is wrong when all programs are at rest."""
        self.do(ev.SlotWanted(SLOT, (GPU,), UID))
        self.do(ev.DriverFilesSeen(""))
        until = self.world.now + LASTS_S
        self.after(0.5, lambda: self._chance(until))
        while self._queue and self._queue[0][0] < until + RESTS_S:
            due, _, act = heapq.heappop(self._queue)
            self.world.now = max(due, self.world.now)
            act()
        return [*self.wrong, *self._is_wrong_at_rest()]

    # The daemon's adapters

    def _perform(self, effect: fx.Effect) -> None:
        match effect:
            case fx.ArmTimer(kind, subject, delay_s):
                self.after(delay_s, lambda: self.do(ev.TimerFired(kind, subject)), exact=True)
            case fx.StartDomain(domain, server=server):
                self.after(self.random.choice([0.05, 0.5]), lambda: self._start(domain, server))
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
            case fx.ProbeUse(client) if self.ends:
                self.after(0.05, lambda: self._look_for_launches(client))
            case fx.ProbeWork(client) if self.ends and not self._shows_end(client):
                self.after(0.05, lambda: self.do(ev.WorkNotVisible(client)))
            case fx.ConfirmWork(client) | fx.ProbeWork(client):
                self.after(0.05, lambda: self.do(ev.WorkEnded(client, "gone")))
            case fx.HoldQueries(domain, clients):
                self._perform_hold(domain, clients)
            case fx.Record(record) if record.offender is not None:
                self._is_named(record.offender.id.process, record.domain)
            case _ if isinstance(effect, WORDS):
                # A connection keeps the order of its messages.
                self.after(0.001, lambda: self._hear(effect), exact=True)

    def _perform_hold(self, domain: str, clients: frozenset[ProcessInstance]) -> None:
        """Let most clients query the SMs, but no author of a trap."""
        querying = clients - self.faulters[domain] if self._is_trap(domain) else clients
        for client in sorted(querying):

            def tell(client: ProcessInstance = client) -> None:
                self.do(mev.ClientQueried(domain, client))

            if self.programs[client].alive and self.random.random() < 0.8:
                self.after(self.random.choice([0.01, 0.2]), tell)

    def _look_for_launches(self, client: ClientId) -> None:
        program = self.programs[client.process]
        if program.alive and program.idles:
            self.do(ev.NeverLaunched(client))

    def _shows_end(self, client: ClientId) -> bool:
        """Return whether the end of this process's work shows here: where it ran, or was to go on."""
        program = self.programs[client.process]
        return client.domain in (program.lives, f"d{program.last}")

    def _start(self, domain: str, server: bool) -> None:
        if domain not in self.world.state.domains:
            return
        if self.random.random() < 0.08:
            self.do(ev.DomainStartFailed(domain, "no memory"))
            return
        self.world.started(domain, server=server)
        for effect in self.world.last:
            self._perform(effect)

    def _stopped(self, domain: str) -> None:
        there = [p.process for p in self.programs.values() if p.alive and p.lives == domain]
        if there and domain not in self.lost:
            self.wrong.append(f"{domain} ended under {there}")
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
            if self.world.state.domains[domain].server is None and self.on_demand:
                state = ServerState.GONE
            self.do(ev.ServerStateSeen(domain, state))

    def _notice(self, domain: str, program: Program) -> None:
        """Let the log name a client. Its control daemon starts a server, if it has none."""
        self.do(ev.ClientNoticed(domain, facts(program.process.pid)))
        found = self.world.state.domains.get(domain)
        if found is not None and found.server is None and domain not in self.lost:
            self.after(self.random.choice([0.05, 0.5]), lambda: self._serve(domain))

    def _serve(self, domain: str) -> None:
        found = self.world.state.domains.get(domain)
        if found is not None and found.server is None and domain not in self.lost:
            self.do(ev.ServerSeen(domain, server_of(domain), UID))
            self.do(ev.ServerStateSeen(domain, ServerState.ACTIVE))

    # Programs

    def _hear(self, word: Word) -> None:
        program = self.programs[word.process]
        if not (program.alive and program.connected):
            return
        match word:
            case fx.OfferStandby(_, generation) if generation == program.offered and program.ready:
                ready = mev.MemberReady(program.process, generation, 0, 1 << 20)
                self.after(0.001, lambda: self._say(program, ready))
            case fx.OfferStandby(_, generation) if generation == program.offered and program.making:
                # It makes one context for all offers of a generation.
                pass
            case fx.OfferStandby(_, generation):
                program.offered, program.ready = generation, False
                program.making = making = self._number + 1
                self.after(self.random.choice([0.05, 0.3]), lambda: self._make(program, generation, making))
            case fx.StandDown(_, generation) if generation == program.offered:
                program.offered, program.ready, program.making = 0, False, 0
            case fx.Move(_, generation) if generation == program.offered and program.ready:
                program.last = generation
                program.ready, program.moves = False, True
                self.after(self.random.choice([0.005, 0.1]), lambda: self._move(program, word))
            case fx.Move(_, generation):
                stayed = mev.MemberStayed(program.process, generation, "no standby")
                self.after(0.001, lambda: self._say(program, stayed))
            case fx.GrantTurn(_, generation) if program.waits:
                program.waits = False
                self.after(self.random.choice([0.005, 0.2]), lambda: self._do_again(program, generation))
            case fx.RequestMemory(_, spared):
                self._give(program, spared)

    def _say(self, program: Program, event: ev.Event) -> None:
        if program.alive and program.connected:
            self.do(event)

    def _give(self, program: Program, spared: Reclaimable) -> None:
        gives = self.random.random() < 0.6
        if gives and spared is Reclaimable.STANDBY and program.ready:
            program.ready = False
            needed = mev.MemberUnready(program.process, program.offered, "its memory was needed", True)
            self.after(0.001, lambda: self._say(program, needed))
        gave = mev.MemberReleasedMemory(program.process, 1 << 20 if gives else 0, spared)
        self.after(0.002, lambda: self._say(program, gave))

    def _make(self, program: Program, generation: int, making: int) -> None:
        where = f"d{generation}"
        if not program.alive or program.making != making:
            return
        if where in self.lost or where not in self.world.state.domains or self.random.random() < 0.1:
            program.making = 0
            self._say(program, mev.MemberUnready(program.process, generation, "no", where not in self.lost))
            return
        program.contexts.add(where)
        self._notice(where, program)
        self.after(0.03, lambda: self._is_made(program, generation, making))

    def _is_made(self, program: Program, generation: int, making: int) -> None:
        if program.alive and program.connected and program.making == making:
            program.ready, program.making = True, 0
            self.do(mev.MemberReady(program.process, generation, 5_000_000, 1 << 20))

    def _move(self, program: Program, word: fx.Move) -> None:
        program.moves = False
        if not program.alive:
            return
        left, program.lives, program.offered, program.making = program.lives, f"d{word.generation}", 0, 0
        in_flight = program.works or program.makes > 0
        program.waits = word.again is ReplayMode.IN_TURN and in_flight and program.connected
        waits = program.waits
        to = self.world.state.domains.get(program.lives)
        self.trials += to is not None and to.trial == program.process
        if word.again is ReplayMode.IN_TURN and left in self.lost:
            whose = self._find(program, left)
            goes_on = word.may_go_on and whose in DENIALS and waits
            self._say(program, mev.MemberFoundCode(program.process, word.generation, whose, goes_on))
            program.waits = waits = program.waits or (whose is ExceptionOwner.OWN and program.connected)
            if goes_on:
                program.waits = False
                self.after(self.random.choice([0.001, 0.2]), lambda: self._do_again(program, word.generation))
        if program.waits:
            self.after(GIVES_UP_S, lambda: self._give_up(program, word.generation), exact=True)
        moved = mev.MemberMoved(program.process, word.generation, 1, 2, 3, replayed=100, waits=waits)
        self._say(program, moved)

    def _find(self, program: Program, left: str) -> ExceptionOwner:
        """Return what the program finds about the fault of the domain that it has left.

        A trap leaves no address, and two programs may have their code at one address. No program denies a
        fault of its own, except a trap if it looks too late. An author without the proxy may clear the
        address first; then another program's error can look like that of a trap's author.
        """
        is_trap, is_shared = self._is_trap(left), random.Random(f"shared-{self.seed}-{left}").random() < 0.2
        made_it = program.process in self.faulters[left]
        is_cleared = not is_trap and not any(self.programs[p].connected for p in self.faulters[left])
        if is_cleared and self.random.random() < 0.15:
            return ExceptionOwner.FIRST
        if self.random.random() < 0.25 or (made_it and len(self.faulters[left]) > 1):
            return ExceptionOwner.UNKNOWN
        if is_trap:
            return ExceptionOwner.FIRST if made_it and self.random.random() < 0.8 else ExceptionOwner.NO_SIGN
        if made_it or (is_shared and self.random.random() < 0.5):
            return ExceptionOwner.OWN
        return ExceptionOwner.OTHERS

    def _is_trap(self, domain: str) -> bool:
        return random.Random(f"trap-{self.seed}-{domain}").random() < 0.4

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
            self.faulters[where].add(program.process)
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

    # Events

    def _lose(self, domain: str, *, dies: bool = False) -> None:
        """Fault a domain. `dies`: its server exits, in a domain without work."""
        there = self.world.state.domains.get(domain)
        if domain in self.lost or there is None or there.state in NO_SERVER or there.server is None:
            return
        self.lost.add(domain)
        if dies or self.random.random() < 0.3:
            self.do(ev.ServerDied(domain, server_of(domain)))
            return
        self.after(0.3, lambda: self._answer(domain))
        if not self._is_trap(domain):
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
        if self.on_demand:
            # Up to HANDOVER_S pass between a look at the path and the client's line in the log.
            self._coming.append(program)
            self.after(self.random.choice([0.001, 0.1, 1.2]), lambda: self._arrive(program))
            return
        self._notice(slot.active, program)
        program.idles = self.ends and self.random.random() < 0.3
        has_proxy = not (self.bursts and self.random.random() < 0.25)
        if has_proxy and not program.idles:
            self.after(self.random.choice([0.001, 0.5]), lambda: self._connect(program))

    def _arrive(self, program: Program) -> None:
        if program in self._coming:
            self._coming.remove(program)
            found = self.world.state.domains.get(program.lives)
            if program.lives not in self.lost and (found is None or found.state is DomainState.STOPPING):
                self.wrong.append(f"{program.process} finds {program.lives} ended")
            if not program.alive or program.lives in self.lost or found is None:
                program.alive = False
                return
            self._notice(program.lives, program)
        if self.random.random() < 0.7:
            self.after(self.random.choice([0.001, 0.5]), lambda: self._connect(program))

    def _connect(self, program: Program) -> None:
        if program.moves:
            # One thread moves and connects.
            self.after(0.05, lambda: self._connect(program))
            return
        if program.alive and not program.connected:
            program.connected, program.offered, program.ready, program.making = True, 0, False, 0
            words = (program.process, UID, program.mode, program.generation, True, True)
            self.do(mev.MemberCame(*words))
            if program.waits:
                self.do(mev.MemberMoved(program.process, program.generation, replayed=100, waits=True))

    def _cut(self, program: Program, seconds: float = 0.3) -> None:
        if program.alive and program.connected:
            program.connected = False
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
        """Restart the daemon. It knows all domains, but of the programs only what was written down."""
        old, known = self.world.state, self.world.now - self.random.choice([0.0, 0.1, 0.3])
        written = next((state for at, state in reversed(self._past) if at <= known), old)
        slot = old.slots[SLOT]
        self._queue = [one for one in self._queue if "_perform" not in one[2].__qualname__]
        heapq.heapify(self._queue)
        # The numbers of domains are on disk.
        fresh = State(policy=old.policy, log_read_since=self.world.now, next_domain=old.next_domain)
        self.world.state, self._restarting = fresh, True
        if self.random.random() < 0.5:
            self._fault_without_daemon(old.domains.get(slot.active or ""))
        for program in self.programs.values():
            if program.connected:
                program.connected = program.ready = False
                program.offered = program.making = 0
                self.after(self.random.choice([0.1, 2.0]), lambda who=program: self._connect(who))  # type: ignore[misc]
        self.do(ev.SlotWanted(SLOT, (GPU,), UID, start=False))
        roles = {slot.active: DomainRole.ACTIVE, slot.spare: DomainRole.SPARE, slot.second: DomainRole.SECOND}
        for d in [
            d for d in old.domains.values() if d.control is not None and d.id not in self._stopping(old)
        ]:
            role = roles.get(d.id, DomainRole.OLD)
            at = ServerState.FAULT if d.state is DomainState.FAULTED else ServerState.ACTIVE
            here = at if d.server else ServerState.GONE
            found = (d.control, d.server, here, d.bereft, d.private, d.trial)
            self.do(ev.DomainAdopted(d.id, SLOT, role, d.state, *found))
        for record in written.failovers:
            gone = frozenset(f.process for f in record.fates if not self.programs[f.process].alive)
            self.do(mev.FailoverRestored(record, gone))
        for participant in written.members.values():
            if self.programs[participant.process].alive and participant.home:
                left = participant.reason if participant.standing is Standing.LEFT_BEHIND else ""
                self.do(
                    mev.MemberRestored(participant.process, UID, participant.mode, participant.home, left)
                )
        for client in sorted(old.clients.values(), key=lambda c: c.noticed):
            known_there = client.living and client.id.domain in self.world.state.domains
            if known_there and self.programs[client.id.process].alive:
                self.do(ev.ClientNoticed(client.id.domain, facts(client.id.process.pid)))
        # A start of the daemon takes longer than the start of a client.
        coming, self._coming = self._coming, []
        for program in coming:
            # As in _arrive().
            program.alive = program.alive and program.lives not in self.lost
            if program.alive and program.lives in self.world.state.domains:
                self._notice(program.lives, program)
        self.do(ev.AdoptionDone())
        self._restarting = False
        self.do(ev.DriverFilesSeen(""))
        for domain in [name for name in self.world.state.domains if name in self.lost]:
            self.after(0.3, lambda name=domain: self._answer(name))  # type: ignore[misc]

    def _fault_without_daemon(self, there: Domain | None) -> None:
        """Fault a domain while no daemon runs. Its programs move by themselves, as clients/libcuda does."""
        if there is None or there.state in NO_SERVER or there.server is None:
            return
        domain = there.id
        here = [p for p in self.programs.values() if p.alive and p.lives == domain and not p.waits]
        here = [p for p in here if p not in self._coming]
        if not here or domain in self.lost:
            return
        offender = self.random.choice(here)
        self.faulters[domain].add(offender.process)
        self.lost.add(domain)
        offender.makes = self.random.choice([0, 1, 1, 3])
        for program in here:
            program.works = self.random.random() < 0.6
            to = f"d{program.offered}"
            if not (program.connected and program.ready) or to in self.lost:
                continue
            program.lives = to
            denies = self._find(program, domain) in (ExceptionOwner.OTHERS, ExceptionOwner.NO_SIGN)
            in_flight = program.works or program.makes > 0
            program.waits = program.mode is FailoverMode.EXACT and in_flight and not denies
            if program.waits:
                generation = program.generation
                give_up = lambda who=program, at=generation: self._give_up(who, at)  # noqa: E731
                self.after(GIVES_UP_S, give_up, exact=True)
            elif in_flight:
                self._do_again(program, program.generation)

    def _stopping(self, state: State) -> set[str]:
        """Return the domains that end with the daemon's process, whether or not a daemon runs."""
        ending = {d.id for d in state.domains.values() if d.state in NO_SERVER}
        self.lost |= ending
        return ending

    def _chance(self, until: float) -> None:
        living = [p for p in self.programs.values() if p.alive and not p.idles]
        if self.restarts and self.random.random() < 0.12:
            self._restart()
        if self.on_demand and self.random.random() < 0.1:
            for program in living:
                self._die(program)
            self.after(self.random.choice([0.3, 3.0, 6.0]), lambda: self._chance(until))
            return
        what = self.random.random()
        if self.bursts and len(living) > 3 and what < 0.6:
            what = 0.6
        if what < 0.35 or len(living) < 3:
            self._come()
        elif what < 0.42:
            self._die(self.random.choice(living))
        elif what < 0.52:
            self._cut(self.random.choice(living))
        elif what < 0.8:
            self._fault(self.random.choice(living), living)
        elif what < 0.87 and not self.on_demand:
            self.do(ev.DrainRequested((), True))
            self.do(ev.DrainRequested((), False))
        elif what < 0.92:
            slot = self.world.state.slots[SLOT]
            self._lose((self._number % 3 == 0 and slot.second) or slot.spare or "", dies=True)
        elif what < 0.96:
            short = self.random.choice(living)
            self._number += 1
            self._say(short, mev.MemberWantsMemory(short.process, 1 << 30, 0, self._number))
        else:
            self._number += 1
            who = self.random.choice(living).process
            self.do(ev.EvictRequested(who, Liveness.RUNNING, f"r{self._number}", "asked"))
        if self.world.now < until:
            self.after(self.random.choice([0.02, 0.3, 2.0]), lambda: self._chance(until))

    def _is_named(self, who: ProcessInstance, domain: str | None) -> None:
        # Later revisions repeat the name.
        if (domain, who) not in self.named and who not in self.faulters[domain or ""]:
            self.wrong.append(f"{who} is named for {domain}, where it made no fault, at {self.world.now}")
        self.named.add((domain, who))

    def _fault(self, offender: Program, living: list[Program]) -> None:
        if offender.waits or offender in self._coming:
            # Its calls are held, or it has no context yet.
            return
        self.faulters[offender.lives].add(offender.process)
        if self.dies_before is not None and not self.deaths and len(living) > 2:
            self._effects_left = min(self._effects_left, self.dies_before)
        offender.makes = self.random.choice([0, 1, 1, 3])
        for program in living:
            program.works = self.random.random() < 0.6
        self._lose(offender.lives)

    # At the end

    def _is_wrong_at_rest(self) -> list[str]:
        state, found = self.world.state, []
        slot = state.slots[SLOT]
        roles = {slot.active, slot.spare, slot.second}
        for domain in state.domains.values():
            if domain.state in (DomainState.STARTING, DomainState.WARM) and domain.id not in roles:
                found.append(f"{domain.id} is {domain.state} and serves nothing")
        if slot.second is not None and not slots.would_replay(state, SLOT):
            found.append(f"nobody needs the second standby domain {slot.second}")
        if slots.second_standby_in(state, slot, self.world.now) == 0.0:
            found.append("the slot lacks its second standby domain")
        for participant in state.members.values():
            program = self.programs[participant.process]
            if participant.turn is not Turn.NONE or participant.standing is Standing.MOVING:
                found.append(f"{participant.process} still {participant.turn or participant.standing}")
            here = program.lives == participant.home or program.lives in self.lost
            if program.alive and program.connected and not here:
                found.append(
                    f"{participant.process} is taken to live in {participant.home}, not {program.lives}"
                )
            given_up = participant.standing in (Standing.LEFT_BEHIND, Standing.UNREADY)
            if program.alive and program.connected and program.lives in self.lost and not given_up:
                found.append(
                    f"{participant.process} stays in {program.lives}, which was lost: {participant.standing}"
                )
        for record in state.failovers:
            told = [str(f.process) for f in record.fates if f.outcome is Outcome.TOLD]
            found += [f"fail-over {record.id} waits for {', '.join(told)}"] if told else []
        active = state.domains.get(state.slots[SLOT].active or "")
        if active is None or active.state is not DomainState.ACTIVE:
            found.append("no domain is in use")
        elif self.on_demand:
            found += self._is_wrong_on_demand(active)
        faulted = {d.id for d in state.domains.values() if d.state is DomainState.FAULTED}
        living = (p for p in self.programs.values() if p.alive)
        homes = {p.lives for p in living if not (p.idles and p.lives in faulted)}
        if self.ends:
            # Where the home was lost, the other leases stay until their domains have no living client.
            ended = (c for c in state.clients.values() if not c.living)
            alone = (c for c in ended if not any(state.living_of(c.id.domain)))
            found += [f"the lease of {c.id} is left over" for c in alone]
        for domain in state.domains.values():
            is_used = domain.state in IN_USE or domain.id in (roles | homes)
            if not is_used and not self._waits_there(domain.id):
                found.append(f"{domain.id} is left over, {domain.state}")
        return found

    def _is_wrong_on_demand(self, active: Domain) -> list[str]:
        """Return what a slot at rest lacks, or has although it has no client."""
        state = self.world.state
        slot = state.slots[SLOT]
        if not state.clients:
            kept = [name for name in (active.server and active.id, slot.spare) if name]
            return [f"the idle slot keeps {kept}"] if kept else []
        lacks = active.server is not None and state.policy.spare and slot.spare is None
        return ["the slot in use has no standby domain"] if lacks and not slot.failures else []

    def _waits_there(self, domain: str) -> bool:
        """Return whether the state takes a program to be in this domain.

        A program that lost its domain, and was not ready for the next one, stays recorded there.
        """
        return any(participant.home == domain for participant in self.world.state.members.values())
