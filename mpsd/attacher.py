"""Holding on to clients: pins, leases, trackers. The adapter side of every client in core.

A client is noticed by the control log, tens of milliseconds before it has a context. From then on its
process is pinned, and tried every few milliseconds until it has an address space to be leased. What
looks at the process runs in threads; the lease is in the descriptor store before core hears of it,
unless the store takes longer than a moment (mpsd.shelf): then core is told so, and told again when it is.

Long because a process can die, exec or be forgotten between any two steps, and pin and lease answer together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import structlog

from mpsd import procs
from mpsd.core import events as ev
from mpsd.errors import DeadlineError, GpuError, MpsdError, NotReadyError
from mpsd.gpu.base import Uvm, WorkView
from mpsd.lease import Kept, Lease, adopt, held_before, is_current, kept_apart, take, track
from mpsd.leasestore import LeaseStore
from mpsd.looks import Looks
from mpsd.model import ClientId, ProcessFacts, ProcessInstance
from mpsd.shelf import Shelf
from mpsd.sweeps import Sweep
from mpsd.tasks import Tasks
from mpsd.trackers import Trackers
from mpsd.turns import Turns
from mpsd.workwatch import WorkWatch

log = structlog.get_logger("mpsd.attacher")

Post = Callable[[ev.Event], None]
Knows = Callable[[str, ProcessInstance, bool], bool]
ATTACH_DEADLINE_S = 60.0
FIRST_TRIES_S = 2.0
FAST_STEP_S = 0.002
SLOW_STEP_S = 0.05
# Many programs make their second contexts at a time, one after the other.
SECOND_COPY_S = 20.0
SETTLE_S = 5.0
FACTS_DEADLINE_S = 0.25
# A look at a client takes milliseconds; one that hangs (files on a dead file server) is given up.
LOOK_DEADLINE_S = 10.0


@dataclass(slots=True, eq=False)
class Pin:
    """`gone` is set when the process has ended or is of no interest any more; `introduced` when core
    has heard of it, and so will say when to forget it. `uid`: who is charged for looks at it.

    `introducing`: for which domains that is under way, and whether as one that the server listed. `life`
    counts the programs that it was seen to replace; `attaching` says for which of them each task is.
    """

    process: procs.Pinned
    uid: int
    identity: procs.ExecIdentity | None = None
    comparing: bool = False
    compare_again: bool = False
    introduced: bool = False
    introducing: set[tuple[str, bool]] = field(default_factory=set)
    attaching: dict[asyncio.Task[None], int] = field(default_factory=dict)
    life: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Reached:
    """What was taken of a process: its address spaces, and a look at its work where that is new."""

    leases: list[Lease]
    work: WorkView | None
    problems: Sequence[str]
    kept: bool = False

    def close(self) -> None:
        for lease in self.leases:
            lease.close()
        if self.work is not None:
            self.work.close()


class Attacher:
    """All pins and leases of one daemon. Lives on the event loop; posts events, decides nothing."""

    def __init__(
        self,
        uvm: Uvm,
        work: WorkWatch,
        store: LeaseStore,
        post: Post,
        knows: Knows | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """`knows`: whether core has this process as a client of that domain already, as listed or not."""
        self._trackers = trackers or Trackers(post)
        self._uvm = uvm
        self._work = work
        self._store = store
        self._post = post
        self._pins: dict[ProcessInstance, Pin] = {}
        self._leases: dict[ClientId, Lease] = {}
        self._shelf = Shelf(store, self._leases, work, post)
        self._kept: dict[ClientId, Kept] = {}
        self._tasks = Tasks(post)
        self._noticing: set[asyncio.Task[None]] = set()
        self._knows: Knows = knows or (lambda domain, process, listed: False)
        self._named = Turns[tuple[int, bool]](
            lambda domain, named: self._notice(domain, *named),
            lambda domain, named: self._missed(domain, named[0], "the log names too many"),
        )
        self._left: set[int] = set()
        self._ending: dict[ClientId, int | None] = {}
        self._loop = asyncio.get_running_loop()
        self._looks = Looks("attach")
        self._sweep: Sweep[ProcessInstance, procs.ExecIdentity | None] = Sweep("identity")

    @property
    def leases(self) -> Mapping[ClientId, Lease]:
        return self._leases

    def pinned(self, process: ProcessInstance) -> procs.Pinned | None:
        pin = self._pins.get(process)
        return pin.process if pin else None

    def notice(self, domain: str, pid: int, *, listed: bool = False) -> None:
        """Pin a process that a domain's log or client list names; core hears of it once it is described.

        `listed`: the server named it when it was asked. A log can name any number of them at a time:
        of one domain some are pinned in this turn of the loop and the others in the next.
        """
        self._named.ask(domain, (pid, listed))

    def _notice(self, domain: str, pid: int, listed: bool) -> None:
        try:
            process = procs.Pinned.open(pid)
        except MpsdError as error:
            self._missed(domain, pid, str(error))
            return
        # Not by pid: the pin of a dead client whose lease is held may have had the same number.
        pin = self._pins.get(process.instance)
        if pin is not None:
            process.close()
        else:
            try:
                uid = procs.users(process.instance).real
            except MpsdError as error:
                process.close()
                self._missed(domain, pid, str(error))
                return
            pin = self._pins[process.instance] = Pin(process, uid)
            self._loop.add_reader(process.fileno(), self._died, process.instance)
        under_way = {(domain, True), (domain, listed)} & pin.introducing
        if under_way or self._knows(domain, process.instance, listed):
            return
        pin.introducing.add((domain, listed))
        task = self._tasks.spawn(self._introduce(domain, pin, listed=listed))
        self._noticing.add(task)
        task.add_done_callback(self._noticing.discard)

    def _missed(self, domain: str, pid: int, reason: str) -> None:
        log.info("client missed", domain=domain, pid=pid, reason=reason)
        self._post(ev.Counted({"clients_missed": 1}))

    async def _introduce(self, domain: str, pin: Pin, *, listed: bool) -> None:
        process = pin.process.instance
        try:
            facts = await self._described(pin)
            problem = "it has gone" if pin.gone.is_set() or facts.instance != process else ""
        except MpsdError as error:
            problem = str(error)
        finally:
            pin.introducing.discard((domain, listed))
        if self._pins.get(process) is not pin:
            return
        if problem:
            self._missed(domain, process.pid, problem)
            if not pin.introduced and not pin.introducing:
                # Core, which never heard of it, will not ask for that.
                self.forget(process)
            return
        pin.introduced = True
        self._post(ev.ClientNoticed(domain, facts, listed))
        if pin.identity is None:
            self._compare(process, pin)

    async def _described(self, pin: Pin) -> ProcessFacts:
        """In a thread: to read its command line waits for a process that changes its mappings."""
        pid = pin.process.pid
        try:
            return await self._looks.run(pin.uid, partial(procs.facts, pid), FACTS_DEADLINE_S)
        except DeadlineError:
            return procs.facts(pid, "[not readable in time]")

    async def noticed(self) -> None:
        """Until core has heard of everybody who was noticed, for SETTLE_S at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._named.caught_up()
                while self._noticing:
                    await asyncio.wait(set(self._noticing))

    def _died(self, process: ProcessInstance) -> None:
        pin = self._pins[process]
        self._loop.remove_reader(pin.process.fileno())
        pin.gone.set()
        if pin.attaching:
            self._tasks.spawn(self._tell_death(process, pin))
        else:
            self._post(ev.ClientDied(process))

    async def _tell_death(self, process: ProcessInstance, pin: Pin) -> None:
        """A lease that is just being taken is core's before the death is: nobody else would keep it."""
        if under_way := set(pin.attaching):
            await asyncio.wait(under_way, timeout=SETTLE_S)
        self._post(ev.ClientDied(process))

    def attach(self, domain: str, process: ProcessInstance, space: int) -> None:
        """Start trying to lease and track a pinned process."""
        pin = self._pins.get(process)
        if pin is None:
            self._post(ev.AttachFailed(domain, process, "the process has gone", space))
            return
        kept = {
            c: self._kept.pop(c) for c in sorted(self._kept) if (c.domain, c.process) == (domain, process)
        }
        # One for a program that was replaced has yet to let go of what it took.
        older = [task for task, life in pin.attaching.items() if life != pin.life]
        task = self._tasks.spawn(self._attach(domain, pin, space, kept, older))
        pin.attaching[task] = pin.life
        task.add_done_callback(lambda done: pin.attaching.pop(done, None))

    async def _attach(
        self,
        domain: str,
        pin: Pin,
        space: int,
        kept: Mapping[ClientId, Kept],
        older: Sequence[asyncio.Task[None]],
    ) -> None:
        process = pin.process.instance
        if older:
            await asyncio.wait(older)
        life = pin.life

        def stale() -> bool:
            return self._pins.get(process) is not pin or pin.life != life

        try:
            reached = await self._taken_over(kept, space) or await self._until_reached(domain, pin, life)
        except (MpsdError, OSError) as error:
            if not stale():
                self._post(ev.AttachFailed(domain, process, str(error), space))
            return
        if reached is None:
            return
        if stale():
            # After an exec, say: core has forgotten this life of it.
            await asyncio.to_thread(reached.close)
            for lease in reached.leases:
                self._store.drop(lease.name)
            return
        clients = [ClientId(domain, process, space + n) for n in range(len(reached.leases))]
        # One copy of libcuda has one address space: where there are two, the other is another domain's.
        alone = len(reached.leases) == 1
        apart = alone and kept_apart(reached.leases, self._elsewhere(domain, process))
        self._leases.update(zip(clients, reached.leases, strict=True))
        if reached.work is not None:
            self._work.follow(clients, reached.work)
        late: tuple[int, ...] = ()
        if reached.kept:
            for lease in reached.leases:
                self._store.belongs(lease.name, pin.uid)
            await self._shelf.renew([c for c in clients if not is_current(self._leases[c].name)], pin.uid)
        else:
            late = await self._shelf.put(clients, pin.uid)
        if stale():
            for client in clients:
                self.release(client, uid=pin.uid)
            return
        for client in clients:
            tracker = self._leases[client].tracker
            if tracker is not None:
                self._trackers.add(client, tracker)
        tracked = all(lease.tracker is not None for lease in reached.leases)
        problem = "; ".join(reached.problems)
        self._post(ev.ClientAttached(domain, process, len(clients), tracked, problem, space, late, apart))

    def _elsewhere(self, domain: str, process: ProcessInstance) -> list[Lease]:
        """Its leases as a client of other domains."""
        return [lease for c, lease in self._leases.items() if c.process == process and c.domain != domain]

    async def _until_reached(self, domain: str, pin: Pin, life: int) -> Reached | None:
        """What there is to be leased, once there is; None when the process, or this life of it, has gone.

        Raises MpsdError, OSError when there is nothing more to try, or a look at it hangs.
        """
        process = pin.process.instance
        began = time.monotonic()
        while (tried := time.monotonic()) - began < ATTACH_DEADLINE_S:
            # After an exec: the old lease still goes by the name that the new one will have in the store.
            if not any(c.process == process for c in self._ending):
                try:
                    pidfd = os.dup(pin.process.fileno())
                    reached = await self._looks.run(
                        pin.uid,
                        partial(self._reach, process, pidfd),
                        LOOK_DEADLINE_S,
                        late=Reached.close,
                        unbegun=partial(os.close, pidfd),
                    )
                    if await self._narrowed(reached, domain, process, time.monotonic() - began):
                        return reached
                except NotReadyError:
                    pass
                except (MpsdError, OSError):
                    if pin.gone.is_set():
                        return None
                    raise
            now = time.monotonic()
            hurry = now - began < FIRST_TRIES_S and not self._elsewhere(domain, process)
            # Each look at a process that has an address space already takes hold of that one, too.
            step = FAST_STEP_S if hurry else SLOW_STEP_S
            # Many newcomers at once must not eat the processor, nor one that takes long to look through.
            busy = sum(1 for p in self._pins.values() if p.attaching)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(step, busy * 0.001, 10 * (now - tried))):
                    await pin.gone.wait()
            if pin.gone.is_set() or pin.life != life:
                return None
        raise GpuError(f"no GPU address space within {ATTACH_DEADLINE_S:g} s")

    async def _narrowed(
        self, reached: Reached, domain: str, process: ProcessInstance, after_s: float
    ) -> bool:
        """Leave what is this domain's. False while that is nothing: then all of it is closed."""
        known = held_before(reached.leases, self._elsewhere(domain, process))
        if not known:
            return True
        if len(known) < len(reached.leases):
            reached.leases = [lease for lease in reached.leases if not any(lease is k for k in known)]
            await asyncio.to_thread(_close_all, known)
            return True
        if after_s < SECOND_COPY_S:
            await asyncio.to_thread(reached.close)
            return False
        # Nothing new has come for long: better held twice than not at all.
        return True

    def _reach(self, process: ProcessInstance, pidfd: int) -> Reached:
        """In a thread, which owns `pidfd`."""
        try:
            tracked = [track(lease) for lease in take(self._uvm.open(process, pidfd))]
            problems = [problem for _, problem in tracked if problem]
            work: WorkView | None = None
            try:
                work = self._work.look(process, pidfd)
            except (GpuError, OSError) as error:
                problems.append(f"the end of its work will not be seen: {error}")
            return Reached([lease for lease, _ in tracked], work, problems)
        finally:
            os.close(pidfd)

    async def _taken_over(self, kept: Mapping[ClientId, Kept], space: int) -> Reached | None:
        """The leases that an earlier daemon left of a living client; None when it left none.

        They are numbered anew, from `space`.
        """
        leases: list[Lease] = []
        for client, found in kept.items():
            if lease := self._adopted(client, found, space + len(leases)):
                leases.append(lease)
        tracked = [await self._loop.run_in_executor(None, track, lease) for lease in leases]
        problems = [problem for _, problem in tracked if problem]
        return Reached(leases, None, problems, kept=True) if leases else None

    def inherit(self, kept: Mapping[ClientId, Kept]) -> None:
        """Leases that the descriptor store kept for an earlier daemon; each is used again or discarded."""
        self._kept.update(kept)

    @property
    def kept(self) -> Mapping[ClientId, Kept]:
        """Those of them that nobody has claimed yet."""
        return self._kept

    def restore(self, client: ClientId) -> bool:
        """Take over the kept lease of a client that has died; it needs no tracker any more."""
        kept = self._kept.pop(client, None)
        if kept is None:
            return False
        lease = self._adopted(client, kept, client.space)
        if lease is None:
            return False
        self._leases[client] = lease
        return True

    def is_present(self, client: ClientId) -> bool:
        """Whether a kept lease is of the program that its living process runs now."""
        return self._work.is_present(client.process, self._kept[client].work)

    def _adopted(self, client: ClientId, kept: Kept, space: int) -> Lease | None:
        """None for a set that holds no lease: that is told, and the others go on. `space`: its number now."""
        try:
            lease = adopt(self._uvm, kept)
        except GpuError as error:
            log.error("a stored lease is not usable", client=str(client), reason=str(error))
            self._post(ev.Counted({"leases_malformed": 1}))
            self._store.drop(kept.name)
            return None
        self._work.adopt_or_tell(replace(client, space=space), kept.work)
        return lease

    def discard_kept(self) -> int:
        """Give up kept leases that nobody claimed; how many there were."""
        unclaimed = tuple(self._kept)
        for client in unclaimed:
            kept = self._kept.pop(client)
            kept.close()
            self._store.drop(kept.name)
        return len(unclaimed)

    def release(
        self, client: ClientId, free: Coroutine[Any, Any, None] | None = None, uid: int | None = None
    ) -> None:
        """Close the lease here and in the store. Closing may take long, so a thread does it.

        `free` ends when nobody else uses its descriptors; from now on another life may get the same number.
        `uid`: whose it is; by default its pin's, where it has one.
        """
        self._work.forget(client)
        lease = self._leases.pop(client, None)
        if lease is None:
            if free is not None:
                self._tasks.spawn(free)
            return
        self._trackers.remove(client)
        if uid is None and (pin := self._pins.get(client.process)) is not None:
            uid = pin.uid
        self._ending[client] = uid
        self._tasks.spawn(self._close(client, lease, free))

    async def _close(self, client: ClientId, lease: Lease, free: Coroutine[Any, Any, None] | None) -> None:
        try:
            if free is not None:
                await free
            await asyncio.to_thread(lease.close)
        finally:
            self._store.drop(lease.name)
            self._ending.pop(client, None)

    @property
    def ending(self) -> Mapping[ClientId, int | None]:
        """Whose leases are given up, and not closed yet; with the user, where that is known."""
        return self._ending

    def forget(self, process: ProcessInstance) -> None:
        """Drop the pin of a process that is no client any more."""
        pin = self._pins.pop(process, None)
        if pin is None:
            return
        pin.gone.set()
        if pin.process.alive():
            self._loop.remove_reader(pin.process.fileno())
        else:
            with contextlib.suppress(ValueError):
                self._loop.remove_reader(pin.process.fileno())
        pin.process.close()

    def kill(self, process: ProcessInstance, owner: int | None = None) -> None:
        """SIGKILL by pidfd. `owner`: only if it is this user's own now; core hears when it is not."""
        refused = self._signal(process, signal.SIGKILL, owner)
        if refused:
            self._post(ev.KillRefused(process, refused))

    def freeze(self, process: ProcessInstance, owner: int | None = None) -> None:
        """SIGSTOP by pidfd. `owner`: as for `kill`."""
        refused = self._signal(process, signal.SIGSTOP, owner)
        if refused:
            self._post(ev.FreezeRefused(process, refused))

    def _signal(self, process: ProcessInstance, number: signal.Signals, owner: int | None) -> str:
        """Why it was not sent to a process that lives; empty when it was."""
        pin = self._pins.get(process)
        if pin is None:
            return ""
        if owner is not None:
            try:
                users = procs.users(process)
            except MpsdError:
                # It has ended, which its pidfd tells.
                return ""
            if not users.all_are(owner):
                now = f"real {users.real}, effective {users.effective}, saved {users.saved}"
                reason = f"not uid {owner}'s own ({now})"
                log.warning(f"{number.name} withheld", pid=process.pid, reason=reason)
                return reason
        pin.process.signal(number)
        return ""

    def check_identities(self, pid: int | None = None) -> None:
        """Notice clients that replaced their program: exec ends a client, its pidfd stays silent.

        `pid`: look at that one only.
        """
        if pid is None:
            self._tasks.spawn(self._check_all())
            return
        # A log can say of any number that they left: one look at each, in the next turn of the loop.
        if not self._left:
            self._loop.call_soon(self._check_left)
        self._left.add(pid)

    def _check_left(self) -> None:
        left, self._left = self._left, set()
        for process, pin in self._pins.items():
            if process.pid in left and pin.introduced:
                self._compare(process, pin)

    async def _check_all(self) -> None:
        looks = {p: (pin.uid, partial(_identity, p)) for p, pin in self._pins.items() if pin.introduced}
        for process, now in (await self._sweep.run(looks)).items():
            pin = self._pins.get(process)
            if now is not None and pin is not None and now != pin.identity:
                self._compare(process, pin)

    def _compare(self, process: ProcessInstance, pin: Pin) -> None:
        """Take its identity, or compare it; one look at a time, and one more if it is asked for meanwhile."""
        pin.compare_again = pin.comparing
        if not pin.comparing:
            pin.comparing = True
            self._tasks.spawn(self._compared(process, pin))

    async def _compared(self, process: ProcessInstance, pin: Pin) -> None:
        """In a thread: the program file of a process may lie on a dead file server."""
        try:
            now = await self._looks.run(pin.uid, partial(_identity, process))
        finally:
            pin.comparing = False
        if self._pins.get(process) is not pin:
            return
        if now is not None and now != pin.identity:
            before, pin.identity = pin.identity, now
            if before is not None:
                pin.life += 1
                self._post(ev.ClientLeft(process, "exec"))
        if pin.compare_again:
            self._compare(process, pin)

    async def settled(self) -> None:
        """Until nobody is being attached and all that was given up is closed; SETTLE_S at most."""
        self._named.close()
        for pin in self._pins.values():
            pin.gone.set()
        await self._tasks.ended(SETTLE_S)

    def close(self) -> None:
        """Let go of everything that is this process's own. What the store holds lives on."""
        for process in tuple(self._pins):
            self.forget(process)
        for client, lease in self._leases.items():
            self._trackers.remove(client)
            lease.close()
        self._leases.clear()
        self._looks.close()
        self._sweep.close()


def _close_all(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.close()


def _identity(process: ProcessInstance) -> procs.ExecIdentity | None:
    try:
        return procs.exec_identity(process)
    except MpsdError:
        return None
